"""Which backend runs, what falls back and what does not, and what a compiled caller gets."""

import logging
import subprocess
import sys
from pathlib import Path

import kernel_kit
import pytest
import torch
from kernel_kit import BACKENDS, random_inputs

from hf_dflow.kernels import backends, torch_ops, verify_block

pytest.importorskip("triton")
from hf_dflow.kernels import triton_tiles, triton_verify

pytestmark = kernel_kit.ignore_numpy_warnings

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, {tests!r})
import torch
import hf_dflow
from kit import dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from kernel_kit import no_drafts, verify_block
target, prompt = tiny_target(), prompt_of(9)
drafter = tiny_drafter(target)
out = dflow_greedy(target, drafter, prompt, max_new_tokens=8)
assert torch.equal(out.sequences, plain_greedy(target, prompt, 8))
target.generate(prompt, assistant_model=drafter, speculation_type="dflow", do_sample=True, max_new_tokens=8)
try:
    verify_block(no_drafts(torch.zeros(1, 1, 4), None, "greedy"), "triton")
except ValueError as error:
    assert "Triton is not installed; pip install" in str(error)
else:
    raise SystemExit("no error")
assert not any(name.startswith("triton.") for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has logged nothing and knows of no broken kernel."""
    for name in ("_broken_ops", "_logged_reasons"):
        monkeypatch.setattr(backends, name, set())


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The CPU counts as a CUDA device, so that "auto" takes the (interpreted) kernels."""
    monkeypatch.setattr(backends, "is_gpu", lambda device: True)


def small(rule: str = "block"):
    return random_inputs(0, batch=3, num_drafts=2, vocab=20, rule=rule)


def test_scenario_f7_without_triton():
    """Bug (F7): the package cannot be imported, or CPU decoding fails, where Triton is missing; forcing it says why."""
    code = WITHOUT_TRITON.format(tests=str(Path(kernel_kit.__file__).parent))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_scenario_f7_triton_without_a_gpu(monkeypatch, caplog, launched_kernels):
    """Bug (F7): "auto" launches kernels without a device, or logs on every step that it does not."""
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)
    caplog.set_level(logging.INFO, logger="hf_dflow")
    for _ in range(3):
        verify_block(small())
    assert launched_kernels == []
    (record,) = caplog.records
    assert "runs in torch" in record.getMessage() and "'cpu'" in record.getMessage()
    with pytest.raises(ValueError, match="needs a CUDA device, but the tensors are on 'cpu'"):
        verify_block(small(), "triton")


def test_scenario_f7_a_compile_error_falls_back_with_one_warning(pretend_gpu, monkeypatch, caplog):
    """Bug (F7): a kernel that does not compile on this GPU ends generation, or is compiled again at every step."""
    calls = fail_with(monkeypatch, RuntimeError("PTXAS error: Internal Triton PTX codegen error"))
    for _ in range(3):
        decision = verify_block(small())
    assert len(calls) == 1
    assert torch.equal(decision.bonus_ids, torch_ops.verify_block(small()).bonus_ids)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "torch takes over" in record.getMessage() and "PTXAS error" in record.getMessage()


def fail_with(monkeypatch, error: Exception) -> list:
    """Every verification in Triton raises `error`; returns the inputs of those that were tried."""
    calls = []

    def fail(inputs):
        calls.append(inputs)
        raise error

    monkeypatch.setattr(triton_verify, "plan_verification", fail)
    return calls


def test_asking_for_triton_never_falls_back(monkeypatch):
    """Bug: a benchmark of "triton" that in truth timed torch."""
    fail_with(monkeypatch, RuntimeError("PTXAS error: Internal Triton PTX codegen error"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="PTXAS"):
            verify_block(small(), "triton")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: illegal access")])
def test_a_device_fault_is_not_hidden(pretend_gpu, monkeypatch, error):
    """Bug: an out-of-memory or a faulted device is taken for a compile failure, and decoding goes on in a ruin."""
    fail_with(monkeypatch, error)
    with pytest.raises(type(error)):
        verify_block(small())


def test_a_gpu_without_triton_is_worth_a_warning(pretend_gpu, monkeypatch, caplog):
    """Bug: someone with a GPU runs the slow path for months without a word."""
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    for _ in range(2):
        verify_block(small())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Triton is not installed" in record.getMessage()


@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_auto_on_a_gpu_takes_the_kernels(pretend_gpu, launched_kernels, rule):
    """Bug: "auto" that never chooses Triton."""
    verify_block(small(rule))
    sampled = ["_partials_kernel", "_weights_kernel", "_residual_kernel", "_bonus_kernel"]
    assert launched_kernels == (["_argmax_kernel", "_match_kernel"] if rule == "greedy" else sampled)


def test_unknown_backend():
    """Bug: a misspelt backend means another."""
    with pytest.raises(ValueError, match="'auto', 'torch', 'triton'"):
        verify_block(small(), "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_caller_gets_the_same_decision(backend):
    """Bug: torch.compile traces into a kernel's launch or a log message instead of breaking its graph there."""

    @torch.compile(backend="aot_eager")
    def step(inputs):
        decision = verify_block(inputs, backend)
        return decision.accepted_length + 1, decision.bonus_ids

    tokens, bonus_ids = step(small())
    expected = torch_ops.verify_block(small())
    assert torch.equal(tokens, expected.accepted_length + 1) and torch.equal(bonus_ids, expected.bonus_ids)


def test_a_kernel_runs_where_its_tensors_lie(monkeypatch):
    """Bug: with tensors on the second GPU, Triton launches on the current one, which is the first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    events = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            events.append(self.device)

        def __exit__(self, *_):
            events.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    with FakeTensorMode():
        states = torch.empty(2, device="cuda:1")
    kernel = {(1,): lambda states, width: events.append("launched")}
    triton_tiles.Launch(kernel, (1,), {"width": 3, "states": states}).run()
    assert events == [torch.device("cuda:1"), "launched", "left"]
