"""Which backend runs, what falls back and what does not, torch.compile, and the kernels inside `generate`."""

import logging
import subprocess
import sys

import kernel_kit
import pytest
import torch
from kernel_kit import random_arguments, tiled
from kit import PatternDrafter, assert_not_vacuous, plain_greedy, prompt_of, scripted, tiny_drafter, tiny_target

from hf_dflow import DFlowDecoder, DFlowGenerationConfig
from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.kernels import backends, compact_rows, verification, verify_block
from hf_dflow.kernels import torch_ops as reference

pytestmark = kernel_kit.pytestmark_interpreter


@pytest.fixture
def fresh(monkeypatch):
    """A process that has told nothing and knows of no broken kernel."""
    for name in ("_broken", "_told"):
        monkeypatch.setattr(backends, name, set())


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The CPU counts as a CUDA device, so that "auto" takes the (interpreted) kernels."""
    monkeypatch.setattr(backends, "is_gpu", lambda device: True)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    names = []
    run = verification.Launch.run
    monkeypatch.setattr(
        verification.Launch, "run", lambda launch: (names.append(launch.kernel.fn.__name__), run(launch))[1]
    )
    return names


def small(rule: str = "block", **overrides) -> dict:
    return {**random_arguments(0, batch=3, num_drafts=2, vocab=20, rule=rule), **overrides}


HIDDEN = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, {tests!r})
import torch
import hf_dflow
from kit import dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from hf_dflow.kernels import verify_block
target, prompt = tiny_target(), prompt_of(9)
drafter = tiny_drafter(target)
out = dflow_greedy(target, drafter, prompt, max_new_tokens=8)
assert torch.equal(out.sequences, plain_greedy(target, prompt, 8))
target.generate(prompt, assistant_model=drafter, speculation_type="dflow", do_sample=True, max_new_tokens=8)
arguments = dict(draft_ids=torch.zeros(1, 0, dtype=torch.long), draft_logits=None, uniforms=None, rule="greedy")
try:
    verify_block(**arguments, target_logits=torch.zeros(1, 1, 4), backend="triton")
except ValueError as error:
    assert "Triton is not installed; pip install" in str(error)
else:
    raise SystemExit("no error")
assert not any(name.startswith("triton.") for name in sys.modules)
"""


def test_scenario_f7_without_triton():
    """Bug (F7): the package cannot be imported, or CPU decoding fails, where Triton is missing; forcing it says why."""
    code = HIDDEN.format(tests=str(kernel_kit.__file__).rsplit("/", 1)[0])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_scenario_f7_triton_without_a_gpu(fresh, monkeypatch, caplog, launched):
    """Bug (F7): "auto" launches kernels without a device, or says on every step that it does not."""
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)
    caplog.set_level(logging.INFO, logger="hf_dflow")
    for _ in range(3):
        verify_block(**small())
    assert launched == []
    (record,) = caplog.records
    assert "runs in torch" in record.getMessage() and "'cpu'" in record.getMessage()
    with pytest.raises(ValueError, match="needs a CUDA device, but the tensors are on 'cpu'"):
        verify_block(**small(), backend="triton")


def _fails_to_compile(**arguments):
    raise RuntimeError("PTXAS error: Internal Triton PTX codegen error")


def test_scenario_f7_a_compile_error_falls_back_with_one_warning(fresh, pretend_gpu, monkeypatch, caplog):
    """Bug (F7): a kernel that does not compile on this GPU ends generation, or is compiled again at every step."""
    calls = []
    monkeypatch.setattr(verification, "plan_verification", lambda **a: (calls.append(1), _fails_to_compile())[1])
    for _ in range(3):
        decision = verify_block(**small())
    assert len(calls) == 1
    assert torch.equal(decision.bonus_ids, reference.verify_block(**small()).bonus_ids)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "torch takes over" in record.getMessage() and "PTXAS error" in record.getMessage()


def test_asking_for_triton_never_falls_back(fresh, monkeypatch):
    """Bug: a benchmark of "triton" that in truth timed torch."""
    monkeypatch.setattr(verification, "plan_verification", _fails_to_compile)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="PTXAS"):
            verify_block(**small(), backend="triton")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: illegal access")])
def test_a_device_fault_is_not_hidden(fresh, pretend_gpu, monkeypatch, error):
    """Bug: an out-of-memory or a faulted device is taken for a compile failure, and decoding goes on in a ruin."""

    def fail(**arguments):
        raise error

    monkeypatch.setattr(verification, "plan_verification", fail)
    with pytest.raises(type(error)):
        verify_block(**small())


def test_a_gpu_without_triton_is_worth_a_warning(fresh, pretend_gpu, monkeypatch, caplog):
    """Bug: someone with a GPU runs the slow path for months without a word."""
    monkeypatch.setattr(backends, "_has_triton", [False])
    for _ in range(2):
        verify_block(**small())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Triton is not installed" in record.getMessage()


def test_auto_on_a_gpu_takes_the_kernels(fresh, pretend_gpu, launched):
    """Bug: "auto" that never chooses Triton."""
    verify_block(**small())
    assert launched == ["_partials_kernel", "_weights_kernel", "_residual_kernel", "_bonus_kernel"]


def test_unknown_backend():
    """Bug: a misspelt backend means another."""
    with pytest.raises(ValueError, match="'auto', 'torch', 'triton'"):
        verify_block(**small(), backend="cuda")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_shapes_are_named_by_every_backend(backend):
    """Bug: a shape that the reference refuses makes a kernel read past a tensor."""
    for changes, message in (
        ({"uniforms": torch.rand(3, 2)}, "`uniforms` has shape"),
        ({"temperature": torch.ones(2)}, "`temperature` has shape"),
        ({"draft_logits": torch.randn(3, 2, 19)}, "`draft_logits` has shape"),
        ({"rule": "typical"}, "'greedy', 'token', 'block'"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_block(**small(**changes), backend=backend)


def test_tensors_on_two_devices_are_refused():
    """Bug: a kernel is handed an address of another device."""
    with pytest.raises(ValueError, match="`uniforms` is on meta"):
        verify_block(**small(uniforms=torch.rand(3, 3, device="meta")), backend="triton")


@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
def test_compiled_without_a_graph_break(rule):
    """Bug: torch.compile breaks the graph at the op, or traces wrong shapes and dtypes through it."""
    arguments = small(rule)
    lengths = arguments.pop("lengths")
    del arguments["point_mass"]

    def step(target_logits, draft_logits, draft_ids, uniforms, lengths):
        decision = verify_block(
            target_logits=target_logits * 1.0,
            draft_logits=draft_logits,
            draft_ids=draft_ids,
            uniforms=uniforms,
            lengths=lengths,
            rule=rule,
            return_residual=True,
            backend="triton",
        )
        return decision.accepted_length + 1, decision.bonus_ids, decision.acceptance_probs, decision.residual_probs

    del arguments["rule"]
    traced = torch.compile(step, backend="aot_eager", fullgraph=True)(**arguments, lengths=lengths)
    expected = reference.verify_block(**arguments, rule=rule, lengths=lengths, return_residual=True)
    assert torch.equal(traced[0], expected.accepted_length + 1) and torch.equal(traced[1], expected.bonus_ids)
    torch.testing.assert_close(traced[2], expected.acceptance_probs)
    torch.testing.assert_close(traced[3], expected.residual_probs)


def test_the_op_keeps_torchs_rules():
    """Bug: a fake implementation whose shapes, strides or dtypes differ from the real one's."""
    for rule, return_residual in (("greedy", True), ("block", False)):
        a = small(rule)
        given = (a["draft_ids"], a["draft_logits"], None, a["target_logits"], a["uniforms"], rule, a["lengths"])
        torch.library.opcheck(
            verification.verify_block_op,
            (*given, None, None, None, return_residual),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_compaction_compiles_too():
    """Bug: a traced in-place move that is optimised away because nothing seems to depend on it."""
    keep = torch.tensor([[True, False, True, True]])
    states = torch.arange(4.0).view(1, 1, 4, 1)

    def step(states):
        counts = compact_rows([states], keep, backend="triton")
        return states * 2, counts

    doubled, counts = torch.compile(step, backend="aot_eager", fullgraph=True)(states)
    assert counts.tolist() == [3] and doubled.flatten().tolist()[:3] == [0.0, 4.0, 6.0]


@pytest.mark.parametrize("chosen", ["auto", "triton"])
@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
def test_generate_takes_the_kernel_path(fresh, monkeypatch, launched, chosen, rule):
    """Bug: `generate` on CUDA verifies in torch although kernels are there, or the option does not arrive."""
    if chosen == "auto":
        monkeypatch.setattr(backends, "is_gpu", lambda device: True)
    target, prompt = tiny_target(), prompt_of(9)
    drafter = scripted(PatternDrafter, target, prompt, 24, pattern=[4, 0, 2])
    options = {} if chosen == "auto" else {"kernel_backend": "triton"}
    if rule != "greedy":
        options["verification"] = rule
    config = DFlowGenerationConfig(
        max_new_tokens=24, do_sample=rule != "greedy", top_k=1, return_dict_in_generate=True, pad_token_id=0, **options
    )
    with tiled(rows=4):
        out = target.generate(prompt, assistant_model=drafter, generation_config=config)
    assert torch.equal(out.sequences, plain_greedy(target, prompt, 24))  # top_k = 1 leaves the greedy token
    last = "_match_kernel" if rule == "greedy" else "_bonus_kernel"
    assert launched.count(last) == out.statistics.num_target_forwards
    assert_not_vacuous(out.statistics)


def test_generate_takes_torch_when_told_to(fresh, pretend_gpu, launched):
    """Bug: kernel_backend="torch" does not switch the kernels off."""
    target, prompt = tiny_target(), prompt_of(9)
    target.generate(
        prompt, custom_generate=DFlowDecoder(tiny_drafter(target), kernel_backend="torch"), max_new_tokens=8
    )
    assert launched == []


def test_generate_refuses_a_backend_that_cannot_run(monkeypatch):
    """Bug: the error comes after the prefill, or a misspelt name decodes anyway."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = tiny_drafter(target)
    monkeypatch.setattr(type(target), "forward", lambda *arguments, **kwargs: pytest.fail("a forward ran"))
    monkeypatch.setattr(backends, "is_interpreted", lambda: False)
    for backend, message in (("triton", "needs a CUDA device"), ("cuda", "use one of auto, torch, triton")):
        config = DFlowGenerationConfig(max_new_tokens=4, kernel_backend=backend)
        with pytest.raises(UnsupportedGenerationError, match=message):
            target.generate(prompt, assistant_model=drafter, generation_config=config)


def test_a_kernel_runs_where_its_tensors_lie(monkeypatch):
    """Bug: with tensors on the second GPU, Triton launches on the current one, which is the first."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    entered = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    with FakeTensorMode():
        states = torch.empty(2, device="cuda:1")
    kernel = {(1,): lambda states, width: entered.append("launched")}
    verification.Launch(kernel, (1,), {"width": 3, "states": states}).run()
    assert entered == [torch.device("cuda:1"), "launched", "left"]
