"""What the Triton kernels share: launches, how a vocabulary is cut into tiles, and what is computed from one tile."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # entries of a tile
TILES_PER_SPLIT = 4  # the draw reads one split serially, which must stay short beside the pass over a whole row
PROGRAMS = 512  # about four on each multiprocessor of a large GPU: enough to hide latency
ROWS = 1  # rows that a program takes together; more of them spare an interpreter time, and a GPU none


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything that it takes, so that it can be run here or compiled for another device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch where the tensors lie: Triton takes the current device, which theirs need not be."""
        device = next(value.device for value in self.arguments.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True)
class Tiling:
    """How V entries of a row are spread over programs: `num_splits` programs take `split` entries each, tile by tile.

    Args:
        block (`int`): Entries of a tile, a power of two.
        split (`int`): Entries of a program, a multiple of `block`.
        num_splits (`int`): Programs per row.
        max_splits (`int`): A power of two that depends on V alone, so that other batches need no other kernel.
        num_warps (`int`): Warps of a program.
    """

    block: int
    split: int
    num_splits: int
    max_splits: int
    num_warps: int


def tile_vocabulary(vocab: int, num_rows: int) -> Tiling:
    """Cut a vocabulary so that `num_rows` rows keep a GPU busy, at batch 1 as well."""
    block = min(BLOCK, triton.next_power_of_2(max(vocab, 16)))
    tiles = triton.cdiv(vocab, block)
    per_split = max(1, min(TILES_PER_SPLIT, tiles * num_rows // PROGRAMS))
    return Tiling(
        block=block,
        split=per_split * block,
        num_splits=triton.cdiv(tiles, per_split),
        max_splits=triton.next_power_of_2(tiles),
        num_warps=8 if block >= 4096 else 4,
    )


@triton.jit
def divide(numerator, denominator):
    # Triton's own float32 division is approximate, and x / x must be 1.
    if numerator.dtype == tl.float32:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator / denominator


@triton.jit
def capped_ratio(numerator, denominator):
    """`min(1, numerator / denominator)`, where 0/0 is 0; NaN stays NaN, which no uniform is below."""
    ratio = divide(numerator, tl.where(denominator > 0, denominator, 1.0).to(numerator.dtype))
    ratio = tl.where(denominator > 0, ratio, tl.where(numerator > 0, 1.0, 0.0).to(numerator.dtype))
    return tl.where(ratio > 1, 1.0, ratio).to(numerator.dtype)


@triton.jit
def verified_lengths(lengths_ptr, batch, mask, num_drafts):
    """How many drafts `[R]` of the entries `batch` `[R]` to verify: those of `lengths`, clamped."""
    lengths = tl.where(mask, num_drafts, 0).to(tl.int32)
    if lengths_ptr is not None:
        given = tl.load(lengths_ptr + batch, mask=mask, other=0)
        lengths = tl.minimum(tl.maximum(given, 0), num_drafts).to(tl.int32)
    return lengths


@triton.jit
def load_logits(ptrs, mask, ACC: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=float("-inf")).to(ACC)


@triton.jit
def softmax_partials(row_ptrs, is_row, first, end, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """Maximum and sum of exponentials `[R]` of the logits [first, end) of rows `[R]`.

    The sum is NaN where an entry is no logit.
    """
    top = tl.where(is_row, float("-inf"), float("-inf")).to(ACC)
    sums = tl.zeros([row_ptrs.shape[0], BLOCK], ACC)
    end = tl.where(tl.max(is_row.to(tl.int32), 0) > 0, end, first)  # a program without rows reads nothing
    for start in range(first, end, BLOCK):
        offsets = (start + tl.arange(0, BLOCK))[None, :]
        logits = load_logits(row_ptrs[:, None] + offsets, is_row[:, None] & (offsets < end), ACC)
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
        sums = sums * tl.exp(top - base)[:, None] + tl.exp(logits - base[:, None])
        top = higher
    return top, tl.sum(sums, 1)


@triton.jit
def combine_partials(partials_ptrs, mask):
    """Maximum and sum of exponentials of whole rows `[R, I]` from those of their splits `[R, I, S]`, side by side."""
    tops = tl.load(partials_ptrs, mask=mask, other=float("-inf"))
    sums = tl.load(partials_ptrs + 1, mask=mask, other=0.0)
    top = tl.max(tops, 2)
    top = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp(tops - top[:, :, None]), 2)
