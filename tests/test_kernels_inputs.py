"""The Triton kernels on strided, padded and huge inputs, at memory's edges, with given acceptance and temperature."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import kernel_kit
import pytest
import torch
import triton.runtime.interpreter as interpreter
from kernel_kit import assert_agrees, poison, random_arguments, tiled  # noqa: F401 - a fixture

from experiments.kernel_agreement import compare_decisions
from hf_dflow.kernels import torch_ops as reference
from hf_dflow.kernels import verify_block

pytestmark = [kernel_kit.pytestmark_interpreter, pytest.mark.usefixtures("poison")]

RULES = ("greedy", "token", "block")
PAGE = mmap.PAGESIZE
CLOSE = 1e-6  # float32 probabilities


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e3_strided_and_padded_inputs(rule):
    """Bug (E3): a view (padded vocabulary, transposed batch, every second entry, expanded draft) read as contiguous,
    or an input overwritten."""
    torch.manual_seed(0)
    views = {
        "draft_ids": torch.randint(37, (3, 3)).T,
        "draft_logits": torch.randn(3, 1, 74)[..., ::2].expand(3, 3, 37),
        "target_logits": torch.randn(4, 3, 64).transpose(0, 1)[..., :37],
        "uniforms": torch.rand(4, 3).T,
        "lengths": torch.tensor([3, 9, 1, 9, 3, 9])[::2],
        "point_mass": torch.tensor([[True, False, False]] * 3).T,
    }
    before = {name: view.clone() for name, view in views.items()}
    assert_agrees(rule=rule, **views)
    assert_agrees(rule=rule, **{**views, "draft_logits": torch.randn(3, 3, 64)[..., :37]})
    assert all(torch.equal(views[name], before[name]) for name in views)


@pytest.mark.parametrize("vocab", [151_669, 49_153])
def test_scenario_e3_odd_vocabularies(vocab):
    """Bug (E3): a vocabulary that is no multiple of anything: the last tile reads the next row's first logits."""
    arguments = random_arguments(0, batch=2, num_drafts=1, vocab=vocab, rule="block", spread=6.0)
    with tiled(block=4096, rows=2):
        decision = verify_block(**arguments, backend="triton")
    assert compare_decisions(decision, arguments).wrong_rows == []


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e3_row_offsets_beyond_32_bits(rule, monkeypatch):
    """Bug (E3): batch times stride overflows 32 bits when rows lie more than 2**31 elements apart."""
    # Only what is touched of this storage is ever backed by memory; the interpreter would copy it onto itself.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    stride, vocab = 2**30, 40
    try:
        storage = torch.empty(3 * stride + 2 * vocab, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not promise memory that it need not give")
    small = random_arguments(1, batch=4, num_drafts=1, vocab=vocab, rule=rule)
    target_logits = storage.as_strided((4, 2, vocab), (stride, vocab, 1))
    target_logits.copy_(small["target_logits"])
    with tiled(block=16):
        far = verify_block(**{**small, "target_logits": target_logits}, backend="triton")
    near = reference.verify_block(**{**small, "target_logits": target_logits.clone()})
    assert far.accepted_length.tolist() == near.accepted_length.tolist()
    assert far.bonus_ids.tolist() == near.bonus_ids.tolist()


def _guarded(array: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy of `array` that begins, or ends, where an unmapped page begins."""
    size = array.numel() * array.element_size()
    pages = -(-size // PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, (pages + 2) * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    for edge in (address, address + (pages + 1) * PAGE):
        assert libc.mprotect(edge, PAGE, 0) == 0
    start = address + PAGE + (pages * PAGE - size if at_end else 0)
    copy = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=array.dtype).view(array.shape)
    return copy.copy_(array)


def _read_between_guard_pages() -> None:
    for rule in RULES:
        for law in ("dense", "sparse", "mixed"):
            for at_end in (False, True):
                arguments = random_arguments(1, batch=3, num_drafts=3, vocab=41, rule=rule, law=law)
                lengths = torch.tensor([3, 0, 2])
                draft = arguments["draft_logits"]
                if law == "sparse":
                    draft = type(draft)(_guarded(draft.ids, at_end), _guarded(draft.logits, at_end))
                else:
                    draft = _guarded(draft, at_end)
                guarded = {
                    "draft_logits": draft,
                    "lengths": _guarded(lengths, at_end),
                    **{name: _guarded(arguments[name], at_end) for name in ("draft_ids", "target_logits", "uniforms")},
                }
                with tiled(block=16):
                    decision = verify_block(**{**arguments, **guarded}, backend="triton")
                assert compare_decisions(decision, {**arguments, "lengths": lengths}).wrong_rows == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux system calls")
def test_scenario_e3_nothing_is_read_outside_the_inputs():
    """Bug (E3): row 0 reads the element before its buffer, or a masked-off load is done after all: a fault."""
    tests = Path(__file__).parent
    call = "import test_kernels_inputs as t; t._read_between_guard_pages()"
    code = f"import sys; sys.path.insert(0, {str(tests)!r}); {call}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_given_acceptance_probs(rule):
    """Bug: lossy acceptance that the kernels ignore, or that also changes the residual."""
    arguments = random_arguments(4, batch=16, num_drafts=3, vocab=20, rule=rule)
    given = (torch.rand(16, 3, generator=torch.Generator().manual_seed(0)) < 0.7).float()
    decision = assert_agrees(**arguments, acceptance_probs=given)
    assert decision.accepted_length.max() >= 2 and decision.accepted_length.min() == 0


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("law", ["dense", "sparse", "point mass"])
def test_temperature_of_each_row(rule, law):
    """Bug: one row's temperature used for all, for one law only, or multiplied instead of divided by."""
    arguments = random_arguments(6, batch=12, num_drafts=3, vocab=30, rule=rule, law=law)
    temperature = torch.tensor([0.3, 1.0, 1.7]).repeat(4)
    decision = assert_agrees(**arguments, temperature=temperature)
    scaled = dict(arguments)
    scaled["target_logits"] = arguments["target_logits"] / temperature[:, None, None]
    draft = arguments["draft_logits"]
    if law == "sparse":
        scaled["draft_logits"] = type(draft)(draft.ids, draft.logits / temperature[:, None, None])
    elif law == "dense":
        scaled["draft_logits"] = draft / temperature[:, None, None]
    expected = reference.verify_block(**scaled)
    assert torch.equal(decision.accepted_length, expected.accepted_length)
    assert torch.equal(decision.bonus_ids, expected.bonus_ids)


@pytest.mark.parametrize("law", ["dense", "sparse", "point mass", "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_the_bonus(rule, law):
    """Bug: a reported law that is not the one drawn from, or is not normalised (the exact-law tests trust it)."""
    arguments = random_arguments(8, batch=16, num_drafts=3, vocab=40, rule=rule, law=law)
    with tiled(block=16, rows=4):
        decision = verify_block(**arguments, return_residual=True, backend="triton")
    expected = reference.verify_block(**arguments, return_residual=True)
    torch.testing.assert_close(decision.residual_probs, expected.residual_probs, rtol=1e-4, atol=CLOSE)


def test_rows_do_not_see_each_other():
    """Bug (B3): a row's decision changes with its neighbours, or with the number of programs that share its row."""
    arguments = random_arguments(9, batch=5, num_drafts=3, vocab=150, rule="block")
    with tiled(block=16, rows=4):
        together = verify_block(**arguments, backend="triton")
    for row in range(5):
        alone = {k: v[row : row + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        with tiled(block=16, programs=1):
            decision = verify_block(**alone, backend="triton")
        assert decision.accepted_length[0] == together.accepted_length[row]
        assert decision.bonus_ids[0] == together.bonus_ids[row]
