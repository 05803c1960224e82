"""The Triton kernels inside `generate`: that they run, that the text stays, and the output law."""

import kernel_kit
import law
import pytest
import torch
from kernel_kit import tiled
from kit import PatternDrafter, assert_not_vacuous, plain_greedy, prompt_of, scripted, tiny_drafter

from hf_dflow import DFlowDecoder, DFlowGenerationConfig
from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.kernels import backends

pytest.importorskip("triton")
pytestmark = kernel_kit.ignore_numpy_warnings


@pytest.mark.parametrize(("chosen", "rule"), [("auto", "block"), ("triton", "greedy"), ("triton", "token")])
def test_generate_takes_the_kernel_path(monkeypatch, target, launched_kernels, chosen, rule):
    """Bug: `generate` on CUDA verifies in torch although kernels are there, or the option does not arrive."""
    options = {} if rule == "greedy" else {"do_sample": True, "top_k": 1, "verification": rule}
    if chosen == "auto":
        monkeypatch.setattr(backends, "is_gpu", lambda device: True)
    else:
        options["kernel_backend"] = chosen
    prompt = prompt_of(9)
    drafter = scripted(PatternDrafter, target, prompt, 16, pattern=[4, 0, 2])
    config = DFlowGenerationConfig(max_new_tokens=16, return_dict_in_generate=True, pad_token_id=0, **options)
    with tiled(rows=4):
        out = target.generate(prompt, assistant_model=drafter, generation_config=config)
    assert torch.equal(out.sequences, plain_greedy(target, prompt, 16))  # top_k = 1 leaves the greedy token
    last_kernel = "_match_kernel" if rule == "greedy" else "_bonus_kernel"
    assert launched_kernels.count(last_kernel) == out.statistics.num_target_forwards
    assert_not_vacuous(out.statistics)


def test_generate_takes_torch_when_told_to(monkeypatch, target, launched_kernels):
    """Bug: kernel_backend="torch" does not switch the kernels off."""
    monkeypatch.setattr(backends, "is_gpu", lambda device: True)
    decoder = DFlowDecoder(tiny_drafter(target), kernel_backend="torch")
    target.generate(prompt_of(9), custom_generate=decoder, max_new_tokens=8)
    assert launched_kernels == []


def test_generate_refuses_a_backend_that_cannot_run(monkeypatch, target):
    """Bug: the error comes after the prefill, or a misspelt name decodes anyway."""
    drafter = tiny_drafter(target)
    monkeypatch.setattr(type(target), "forward", lambda *arguments, **kwargs: pytest.fail("a forward ran"))
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)
    for backend, message in (("triton", "needs a CUDA device"), ("cuda", "use one of auto, torch, triton")):
        config = DFlowGenerationConfig(max_new_tokens=4, kernel_backend=backend)
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(prompt_of(9), assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_output_law_of_generate(monkeypatch, rule):
    """Bug: logits, uniforms or drafts handed to the kernels in another order than the loop's."""
    rules = []

    def in_triton(inputs, backend="auto"):
        rules.append(inputs.rule)
        return kernel_kit.verify(inputs, "triton")

    monkeypatch.setattr(law, "verify_block", in_triton)
    three_tokens = law.three_token_target()
    loop = law.Loop(monkeypatch, three_tokens, law.three_token_drafter(three_tokens), verification=rule)
    assert law.law_error(loop, 1) < 1e-9
    assert set(rules) == {rule}
