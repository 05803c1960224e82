"""What tests/pretended_device.py must refuse and allow; tests/test_pretended_device.py runs it in its own process."""

import pytest
import torch
from kit import NudgedDrafter, dflow_greedy, scripted, tiny_target
from pretended_device import NAME

from hf_dflow import DFlowDrafter

HERE, THERE = torch.ones(3, device=NAME), torch.ones(3, device=f"{NAME}:1")
REFUSED = {
    "operands of two devices": lambda: HERE + torch.ones(3),
    "operands of the device and another of its kind": lambda: HERE + THERE,
    "an index into a CPU tensor": lambda: torch.ones(3)[HERE.long()],
    "an index from another device of its kind": lambda: HERE[THERE.long()],
    "parts to join": lambda: torch.cat([HERE, torch.ones(3)]),
    "a mask": lambda: torch.where(torch.ones(3) > 0, HERE, HERE),
    "embedding rows": lambda: torch.nn.functional.embedding(HERE.long(), torch.ones(4, 2)),
    "a generator of the CPU": lambda: torch.rand(3, device=NAME, generator=torch.Generator()),
    "a generator of the device": lambda: torch.rand(3, generator=torch.Generator(NAME)),
    "a look at its memory": lambda: HERE.numpy(),
}
ALLOWED = {
    "a scalar of the CPU": lambda: HERE + torch.tensor(2.0),
    "a number": lambda: HERE * 2,
    "an index of the CPU": lambda: HERE[torch.tensor([0, 2])],
    "a copy": lambda: HERE.cpu() + torch.ones(3),
    "a copy into it": lambda: HERE.clone().copy_(torch.ones(3)),
    "a generator": lambda: torch.rand(3, device=NAME, generator=torch.Generator(NAME).manual_seed(0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    ALLOWED[name]()


def test_views_and_writes_in_place_share_memory():
    """Bug: a copy where CUDA has a view, so that what is written is lost."""
    whole = torch.zeros(2, 3, device=NAME)
    whole[0].add_(1)
    whole[:, 1:][1, 0] = 5
    assert whole.tolist() == [[1, 1, 1], [0, 5, 0]] and whole.device == torch.device(NAME, 0)


def test_a_fault_of_the_package_shows(monkeypatch):
    """Bug: decoding that never meets two devices."""
    embed = DFlowDrafter.embed
    target = tiny_target("llama", attention="sdpa")
    prompt = torch.tensor([[5, 9, 2]])
    drafter = scripted(NudgedDrafter, target, prompt, 12).to(NAME)
    monkeypatch.setattr(DFlowDrafter, "embed", lambda *arguments: embed(*arguments).cpu())
    with pytest.raises(RuntimeError, match="same device"):
        dflow_greedy(target.to(NAME), drafter, prompt.to(NAME), max_new_tokens=12)
