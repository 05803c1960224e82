"""`compact_rows`: kept positions of a cache move together, in place, the same in torch and in Triton."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import BACKENDS
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dflow.kernels import compact_rows, torch_ops


def naive(states: torch.Tensor, keep: torch.Tensor) -> list[torch.Tensor]:
    """Of each row the kept positions `[H, kept, D]`, read aloud."""
    return [row[:, kept] for row, kept in zip(states, keep, strict=True)]


def assert_compacts(states: list[torch.Tensor], keep: torch.Tensor, backend: str) -> None:
    expected = [naive(tensor.clone(), keep) for tensor in states]
    counts = compact_rows(states, keep, backend=backend)
    assert torch.equal(counts, keep.sum(-1))
    for tensor, expected_rows in zip(states, expected, strict=True):
        for row, expected_row in zip(tensor, expected_rows, strict=True):
            assert torch.equal(row[:, : expected_row.shape[1]], expected_row)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    heads=st.integers(1, 2),
    length=st.integers(1, 150),
    width=st.sampled_from([1, 5, 16]),
    share=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    backend=st.sampled_from(BACKENDS),
)
def test_any_holes(seed, batch, heads, length, width, share, backend):
    """Bug: a tile that overwrites what a later one reads; a row with no hole or nothing but holes."""
    torch.manual_seed(seed)
    keep = torch.rand(batch, length) < share
    states = [torch.randn(batch, heads, length, width) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "POSITIONS_AT_ONCE", 64)  # as many as the kernel's tile: most lengths have several
        assert_compacts(states, keep, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_of_a_larger_buffer(backend, dtype):
    """Bug: a cache that is a slice of a growing buffer is taken for contiguous, or the buffer's rest is written to."""
    buffer = torch.randn(2, 3, 200, 24).to(dtype)
    view = buffer[:, :, 10:140, :16]
    rest = buffer.clone()
    keep = torch.rand(2, 130, generator=torch.Generator().manual_seed(0)) < 0.8
    assert_compacts([view], keep, backend)
    rest[:, :, 10:140, :16] = view
    assert torch.equal(buffer, rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_hole_does_not_spread(backend):
    """Bug: a rejected position's garbage is added or multiplied instead of left behind."""
    states = torch.randn(1, 1, 70, 4)
    keep = torch.ones(1, 70, dtype=torch.bool)
    keep[0, 3:9] = False
    states[:, :, 3:9] = math.nan
    assert_compacts([states], keep, backend)


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that any op returned, the cache's own left out."""

    def __init__(self, cache: torch.Tensor):
        self.cache, self.largest = cache.untyped_storage().data_ptr(), 0
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.cache:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_copy_of_the_cache(backend, monkeypatch):
    """Bug: a gather of everything, which needs the cache's memory twice at the moment it is fullest."""
    monkeypatch.setattr(torch_ops, "POSITIONS_AT_ONCE", 64)
    states = torch.randn(1, 2, 1000, 8)
    keep = torch.arange(1000)[None] % 9 != 4
    with Allocations(states) as allocations:
        compact_rows([states], keep, backend=backend)
    assert 0 < allocations.largest <= 8 * 1000 < states.nbytes / 4  # no more than an index for each position


def test_the_kernel_moves_only_what_must_move(monkeypatch):
    """Bug: every call rewrites the whole cache, although holes are near its end."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    stores = []
    store = interpreter.interpreter_builder.create_masked_store
    monkeypatch.setattr(
        interpreter.interpreter_builder, "create_masked_store", lambda *args: (stores.append(1), store(*args))[1]
    )
    states = torch.randn(1, 1, 256, 4)
    keep = torch.ones(1, 256, dtype=torch.bool)
    keep[0, 200] = False  # in the last of four tiles
    assert_compacts([states], keep, "triton")
    assert len(stores) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_shapes_are_named(backend):
    """Bug: a mask of another length silently keeps the wrong positions."""
    with pytest.raises(ValueError, match=r"got \(1, 2, 8, 4\) and \(1, 7\)"):
        compact_rows([torch.randn(1, 2, 8, 4)], torch.ones(1, 7, dtype=torch.bool), backend=backend)


def test_states_that_a_kernel_cannot_take_are_refused_before_any_moves():
    """Bug: the first tensor is moved, the second refused, and another backend moves the first once more."""
    pytest.importorskip("triton")
    good = torch.arange(2 * 1 * 6 * 4.0).view(2, 1, 6, 4)
    odd = torch.randn(2, 1, 4, 6).transpose(2, 3)
    keep = torch.tensor([[0, 1, 1, 0, 1, 1]] * 2, dtype=torch.bool)
    before = good.clone()
    with pytest.raises(ValueError, match="neighbours"):
        compact_rows([good, odd], keep, backend="triton")
    assert torch.equal(good, before)
