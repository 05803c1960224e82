"""`compact_rows` on a GPU: kept rows of a cache move together, in place. The contract is in torch_ops.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_dflow.kernels.torch_ops import kept_positions
from hf_dflow.kernels.triton_tiles import Launch

BLOCK_T = 64  # positions that are moved together
BLOCK_D = 128  # of a head's width


@triton.jit(do_not_specialize=["num_heads"])
def _compact_kernel(
    states_ptr,
    sources_ptr,
    counts_ptr,
    num_heads,
    num_positions,
    width,
    stride_b,
    stride_h,
    stride_t,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (batch and head, slice of the width): walks along the positions and moves what has to move.

    No position's source lies before it, so a tile overwrites nothing that a later tile reads.
    """
    batch = tl.program_id(0).to(tl.int64) // num_heads
    head = tl.program_id(0).to(tl.int64) % num_heads
    columns = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    row_ptr = states_ptr + batch * stride_b + head * stride_h + columns
    count = tl.load(counts_ptr + batch)
    for start in range(0, count.to(tl.int32), BLOCK_T):
        positions = start + tl.arange(0, BLOCK_T)
        sources = tl.load(sources_ptr + batch * num_positions + positions, mask=positions < count, other=0)
        moves = (positions < count) & (sources > positions)
        if tl.max(moves.to(tl.int32), 0) > 0:
            mask = moves[:, None] & (columns < width)
            states = tl.load(row_ptr + sources[:, None].to(tl.int64) * stride_t, mask=mask, other=0.0)
            tl.debug_barrier()  # another warp's store must not overtake this warp's load
            tl.store(row_ptr + positions[:, None].to(tl.int64) * stride_t, states, mask=mask)


def plan_compaction(states: torch.Tensor, sources: torch.Tensor, counts: torch.Tensor) -> Launch:
    """The launch that moves position `sources[b, j]` of `states` `[B, H, T, D]` to `j` for all `j < counts[b]`."""
    batch, heads, length, width = states.shape
    block_d = min(BLOCK_D, triton.next_power_of_2(width))
    arguments = {
        "states_ptr": states,
        "sources_ptr": sources,
        "counts_ptr": counts,
        "num_heads": heads,
        "num_positions": length,
        "width": width,
        "stride_b": states.stride(0),
        "stride_h": states.stride(1),
        "stride_t": states.stride(2),
        "BLOCK_T": BLOCK_T,
        "BLOCK_D": block_d,
    }
    return Launch(_compact_kernel, (batch * heads, triton.cdiv(width, block_d)), arguments, {"num_warps": 4})


@torch.compiler.disable  # a compiled caller breaks its graph here
@torch.no_grad()
def compact_rows(states: Sequence[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
    """The contract of [`~hf_dflow.kernels.torch_ops.compact_rows`], done by the kernel."""
    sources, counts = kept_positions(states, keep)
    for tensor in states:  # before anything moves: what was moved once must not be moved again by another backend
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"`states` has strides {tensor.stride()}; the entries of one position must be neighbours.")
    for tensor in states:
        if tensor.numel():
            plan_compaction(tensor, sources.contiguous(), counts).run()
    return counts
