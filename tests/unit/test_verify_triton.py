"""The Triton kernels decide as torch does on the same uniforms: any shape, format and stride, at memory's edges."""

import ctypes
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kernel_kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import assert_agrees, each_tensor, random_inputs

from hf_dflow.kernels import RULES

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = kernel_kit.ignore_numpy_warnings

PAGE = mmap.PAGESIZE
CONFIGS = [(rule, law) for rule in ("token", "block") for law in ("dense", "point mass", "mixed")] + [
    ("greedy", "dense")
]
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 9),
    num_drafts=st.integers(0, 17),
    vocab=st.integers(1, 140),
    config=st.sampled_from(CONFIGS),
    dtype=st.sampled_from(FORMATS),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    block=st.sampled_from([16, 64]),
    programs=st.sampled_from([1, 10**6]),
)
def test_any_shape_and_law(seed, batch, num_drafts, vocab, config, dtype, spread, block, programs):
    """Bug: a shape or a law that nobody thought of: V = 1, flat or one-hot laws, a split of several tiles."""
    rule, law = config
    sizes = {"batch": batch, "num_drafts": num_drafts, "vocab": vocab}
    inputs = random_inputs(seed, **sizes, rule=rule, law=law, dtype=dtype, spread=spread)
    assert_agrees(inputs, block=block, rows=8, programs=programs)


@pytest.mark.parametrize("rule", RULES)
def test_lengths_from_one_to_sixteen(rule):
    """Bug: N = 15 and 16 lie on either side of a power of two, N = 1 has no inner slot."""
    for num_drafts in (1, 2, 15, 16):
        inputs = random_inputs(num_drafts, batch=16, num_drafts=num_drafts, vocab=33, rule=rule)
        assert_agrees(inputs)
        assert_agrees(replace(inputs, lengths=None))


@pytest.mark.parametrize(("rule", "law"), CONFIGS)
def test_one_row_in_a_program_as_on_a_gpu(rule, law):
    """Bug: what only shows without rows side by side in one program, which is how a GPU runs."""
    assert_agrees(random_inputs(7, batch=3, num_drafts=3, vocab=70, rule=rule, law=law), block=32, rows=1)


@pytest.mark.parametrize("target_dtype", FORMATS)
@pytest.mark.parametrize("draft_dtype", FORMATS)
def test_scenario_e4_every_pair_of_number_formats(target_dtype, draft_dtype):
    """Bug (E4): target and draft logits of different formats are read as one format."""
    inputs = random_inputs(1, batch=16, num_drafts=3, vocab=40, rule="block")
    mixed = replace(
        inputs,
        target_logits=inputs.target_logits.to(target_dtype),
        draft_logits=inputs.draft_logits.to(draft_dtype),
    )
    assert assert_agrees(mixed).acceptance_probs.dtype == torch.float32


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_given_acceptance_probs(rule):
    """Bug: lossy acceptance that the kernels ignore, or that also changes the residual."""
    inputs = random_inputs(4, batch=32, num_drafts=3, vocab=20, rule=rule)
    accept = (torch.rand(32, 3, generator=torch.Generator().manual_seed(0)) < 0.7).float()
    decision = assert_agrees(replace(inputs, acceptance_probs=accept))
    assert decision.accepted_length.max() >= 2 and decision.accepted_length.min() == 0


@pytest.mark.parametrize("vocab", [151_669, 49_153])
def test_scenario_e3_odd_vocabularies(vocab):
    """Bug (E3): a vocabulary that is no multiple of anything: the last tile reads the next row's first logits."""
    assert_agrees(random_inputs(0, batch=2, num_drafts=1, vocab=vocab, rule="block", spread=6.0), block=4096, rows=2)


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
    near = random_inputs(1, batch=4, num_drafts=1, vocab=vocab, rule=rule)
    far = storage.as_strided((4, 2, vocab), (stride, vocab, 1)).copy_(near.target_logits)
    decision = kernel_kit.verify(replace(near, target_logits=far), "triton", rows=1)
    expected = kernel_kit.verify(replace(near, target_logits=far.clone()), "torch")
    kernel_kit.assert_same(decision, expected, tolerance=5e-6)


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
    for rule, law in (("greedy", "dense"), ("token", "mixed"), ("block", "dense"), ("block", "mixed")):
        for at_end in (False, True):
            inputs = random_inputs(1, batch=3, num_drafts=3, vocab=41, rule=rule, law=law)
            inputs = replace(inputs, lengths=torch.tensor([3, 0, 2]))
            assert_agrees(each_tensor(inputs, lambda tensor: _guarded(tensor, at_end)), rows=1)  # noqa: B023


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux system calls")
def test_scenario_e3_nothing_is_read_outside_the_inputs():
    """Bug (E3): row 0 reads the element before its buffer, or a masked-off load is done after all: a fault."""
    paths = [str(Path(__file__).parent), str(Path(kernel_kit.__file__).parent)]
    code = f"import sys; sys.path[:0] = {paths!r}; import test_verify_triton as t; t._read_between_guard_pages()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_control_a_wrong_decision_is_seen():
    """Control: the comparison above fails where a decision differs."""
    inputs = random_inputs(3, batch=64, num_drafts=3, vocab=20, rule="block")
    decision = kernel_kit.verify(replace(inputs, uniforms=inputs.uniforms.roll(1, 0)), "triton", rows=64)
    with pytest.raises(AssertionError):
        kernel_kit.assert_same(decision, kernel_kit.verify(inputs, "torch"), tolerance=5e-6)
