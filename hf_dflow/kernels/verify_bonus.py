"""The last launch of sampled verification: the decision of "block", and the bonus token by inverse CDF."""

import triton
import triton.language as tl

from hf_dflow.kernels.tiles import divide
from hf_dflow.kernels.verify_sampled import (
    ACCEPTED,
    CELL,
    COUNTS,
    IS_RESIDUAL,
    LENGTH,
    ROW,
    TARGET,
    WEIGHT,
    law_tile,
)


@triton.jit
def accept_prefixes(
    uniforms_ptr,
    rows_ptr,
    masses_ptr,
    probs_ptr,
    batch,
    is_entry,
    length,
    num_drafts,
    num_splits,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Block rule: the longest prefix `[R]` whose uniform lies below its probability, which is stored."""
    prefixes = tl.arange(0, SLOTS)[None, :]  # i drafts accepted, i = 0 … N
    length = length[:, None]
    first_rows = batch[:, None] * (num_drafts + 1)
    splits = tl.arange(0, SPLITS)[None, None, :]
    mask = (is_entry[:, None] & (prefixes < length))[:, :, None] & (splits < num_splits)
    mass_ptrs = masses_ptr + (first_rows + prefixes)[:, :, None] * num_splits + splits
    surplus = tl.sum(tl.load(mass_ptrs, mask=mask, other=0.0), 2).to(ACC)
    is_prefix = is_entry[:, None] & (prefixes > 0) & (prefixes <= length)
    weights = tl.load(rows_ptr + (first_rows + prefixes) * ROW + WEIGHT, mask=is_prefix, other=0.0)
    total = surplus + (1.0 - weights)
    probs = divide(surplus, tl.where(total == 0, 1.0, total).to(ACC))
    probs = tl.where(prefixes == length, weights, tl.where(total == 0, 1.0, probs))
    is_slot = is_entry[:, None] & (prefixes > 0) & (prefixes <= num_drafts)
    uniforms = tl.load(uniforms_ptr + first_rows + prefixes - 1, mask=is_slot, other=0.0).to(tl.float64)
    place_ptrs = probs_ptr + batch[:, None] * num_drafts + prefixes - 1
    tl.store(place_ptrs, tl.where(is_prefix, probs, 0.0), mask=is_slot)
    return tl.max(tl.where(is_prefix & (uniforms < probs.to(tl.float64)), prefixes, 0), 1)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_listed", "num_splits"])
def _bonus_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    listed_ids_ptr,
    point_mass_ptr,
    uniforms_ptr,
    cells_ptr,
    rows_ptr,
    counts_ptr,
    masses_ptr,
    totals_ptr,
    probs_ptr,
    accepted_ptr,
    bonus_ptr,
    num_batch,
    num_drafts,
    vocab,
    num_listed,
    num_splits,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    IS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAW: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (batch entries): accepted length, then the split, the tile and the token that the last uniform meets."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    length = tl.load(counts_ptr + batch * COUNTS + LENGTH, mask=is_entry, other=0)
    if IS_BLOCK:
        accepted = accept_prefixes(
            uniforms_ptr,
            rows_ptr,
            masses_ptr,
            probs_ptr,
            batch,
            is_entry,
            length,
            num_drafts,
            num_splits,
            SLOTS,
            SPLITS,
            ACC,
        )
    else:
        accepted = tl.load(counts_ptr + batch * COUNTS + ACCEPTED, mask=is_entry, other=0)
    slots = accepted.to(tl.int64)
    tl.store(accepted_ptr + batch, slots, mask=is_entry)

    splits = tl.arange(0, SPLITS)[None, :]
    rows = (batch * (num_drafts + 1) + slots)[:, None]
    is_rejected = is_entry & (accepted < length)
    in_split = splits < num_splits
    masses = tl.load(masses_ptr + rows * num_splits + splits, mask=is_rejected[:, None] & in_split, other=0.0)
    # A zero residual means that p = q up to rounding, where a rejection has (nearly) no probability.
    is_residual = tl.sum(masses, 1) > 0
    cell_ptrs = cells_ptr + (rows * num_splits + splits) * CELL + TARGET
    top = tl.load(rows_ptr + rows * ROW + TARGET, mask=is_entry[:, None], other=0.0)
    tops = tl.load(cell_ptrs, mask=is_entry[:, None] & in_split, other=float("-inf"))
    sums = tl.load(cell_ptrs + 1, mask=is_entry[:, None] & in_split, other=0.0)
    masses = tl.where(is_residual[:, None], masses, (sums * tl.exp(tops - top)).to(tl.float64))
    below = tl.cumsum(masses, 1)
    total = tl.sum(tl.where(splits == num_splits - 1, below, 0.0), 1)
    tl.store(counts_ptr + batch * COUNTS + IS_RESIDUAL, is_residual.to(tl.int32), mask=is_entry)
    tl.store(totals_ptr + batch, total, mask=is_entry)

    last_uniform_ptrs = uniforms_ptr + batch * (num_drafts + 1) + num_drafts
    threshold = tl.load(last_uniform_ptrs, mask=is_entry, other=0.0).to(tl.float64) * total
    split = tl.min(tl.where((masses > 0) & (below > threshold[:, None]), splits, SPLITS), 1)
    remainder = threshold - tl.sum(tl.where(splits == split[:, None] - 1, below, 0.0), 1)
    # Where the threshold rounds up to the whole sum: the last token that has a probability.
    is_beyond = split == SPLITS
    split = tl.where(is_beyond, tl.max(tl.where(masses > 0, splits, 0), 1), split)
    remainder = tl.where(is_beyond, float("inf"), remainder)

    found = tl.where(is_entry, vocab, 0)
    last = tl.where(is_entry, 0, 0)
    running = tl.zeros([ROWS], tl.float64)
    for start in range(0, SPLIT, BLOCK):
        offsets = (split * SPLIT + start)[:, None] + tl.arange(0, BLOCK)[None, :]
        law = law_tile(
            draft_ids_ptr,
            target_ptr,
            draft_ptr,
            listed_ids_ptr,
            point_mass_ptr,
            rows_ptr,
            batch,
            slots,
            offsets,
            is_entry,
            is_residual,
            num_drafts,
            vocab,
            num_listed,
            target_stride_b,
            target_stride_i,
            draft_stride_b,
            draft_stride_i,
            LAW,
            BLOCK,
            LISTED,
            ACC,
        )
        wide = law.to(tl.float64)
        is_hit = (law > 0) & (running[:, None] + tl.cumsum(wide, 1) > remainder[:, None])
        found = tl.minimum(found, tl.min(tl.where(is_hit, offsets, vocab), 1))
        last = tl.maximum(last, tl.max(tl.where(law > 0, offsets, 0), 1))
        running += tl.sum(wide, 1)
    tl.store(bonus_ptr + batch, tl.minimum(found, last).to(tl.int64), mask=is_entry)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_listed"])
def _law_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    listed_ids_ptr,
    point_mass_ptr,
    rows_ptr,
    counts_ptr,
    totals_ptr,
    accepted_ptr,
    law_ptr,
    num_batch,
    num_drafts,
    vocab,
    num_listed,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAW: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (batch entries, tile): the law that the bonus was drawn from."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    offsets = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    law = law_tile(
        draft_ids_ptr,
        target_ptr,
        draft_ptr,
        listed_ids_ptr,
        point_mass_ptr,
        rows_ptr,
        batch,
        tl.load(accepted_ptr + batch, mask=is_entry, other=0),
        offsets,
        is_entry,
        is_entry & (tl.load(counts_ptr + batch * COUNTS + IS_RESIDUAL, mask=is_entry, other=0) != 0),
        num_drafts,
        vocab,
        num_listed,
        target_stride_b,
        target_stride_i,
        draft_stride_b,
        draft_stride_i,
        LAW,
        BLOCK,
        LISTED,
        ACC,
    )
    totals = tl.load(totals_ptr + batch, mask=is_entry, other=1.0)
    probs = (law.to(tl.float64) / totals[:, None]).to(ACC)
    tl.store(law_ptr + batch[:, None] * vocab + offsets, probs, mask=is_entry[:, None] & (offsets < vocab))
