"""Token and block verification as Triton kernels: normalisers, weights, residual masses. Equations are in MATH.md.

Four launches, none of which the host waits for: partial softmax sums of every row (one read of both logits); the
drafts' probabilities and weights; residual masses per split (the second read: of all drafted rows for "block", of the
rejected one for "token"); and in verify_bonus.py decision and draw, which reads one split. No row of probabilities is
written, unless the law of the bonus is asked for.
"""

import triton
import triton.language as tl

from hf_dflow.kernels.tiles import (
    DENSE,
    POINT_MASS,
    SPARSE,
    capped_ratio,
    combine_partials,
    divide,
    draft_tile,
    inverse_temperatures,
    load_logits,
    softmax_partials,
    verified_lengths,
)

# Scratch: of each split of a row its softmax partials,
CELL_SIZE = 4
TARGET, DRAFT = tl.constexpr(0), tl.constexpr(2)  # a maximum, and the sum of exponentials behind it
# of each row what the second read needs: maximum and inverse sum of both laws, path weight, inverse temperature,
ROW_SIZE = 6
WEIGHT, SCALE = tl.constexpr(4), tl.constexpr(5)
# and of each batch entry how many drafts are verified, how many accepted, and whether the bonus is from the residual.
COUNTS_SIZE = 3
LENGTH, ACCEPTED, IS_RESIDUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CELL, ROW, COUNTS = tl.constexpr(CELL_SIZE), tl.constexpr(ROW_SIZE), tl.constexpr(COUNTS_SIZE)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_listed"])
def _partials_kernel(
    target_ptr,
    draft_ptr,
    lengths_ptr,
    temperature_ptr,
    cells_ptr,
    num_batch,
    num_drafts,
    vocab,
    num_listed,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LAW: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (rows, split): maximum and sum of exponentials of one split, for the target's rows and the draft's."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch, slots = rows // (num_drafts + 1), rows % (num_drafts + 1)
    split = tl.program_id(1)
    lengths = verified_lengths(lengths_ptr, batch, batch < num_batch, num_drafts)
    is_row = (batch < num_batch) & (slots <= lengths)
    scale = inverse_temperatures(temperature_ptr, batch, is_row, ACC)
    cell_ptrs = cells_ptr + (rows * tl.num_programs(1) + split) * CELL
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, vocab)
    row_ptrs = target_ptr + batch * target_stride_b + slots * target_stride_i
    top, total = softmax_partials(row_ptrs, is_row, first, end, scale, BLOCK, ACC)
    tl.store(cell_ptrs + TARGET, top, mask=is_row)
    tl.store(cell_ptrs + TARGET + 1, total, mask=is_row)
    if LAW != POINT_MASS:
        is_row = is_row & (slots < lengths)
        if LAW == SPARSE:  # the first split takes the whole list
            first = 0
            end = tl.where(split == 0, num_listed, 0)
        row_ptrs = draft_ptr + batch * draft_stride_b + slots * draft_stride_i
        top, total = softmax_partials(row_ptrs, is_row, first, end, scale, BLOCK, ACC)
        tl.store(cell_ptrs + DRAFT, top, mask=is_row)
        tl.store(cell_ptrs + DRAFT + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_listed", "num_splits"])
def _weights_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    listed_ids_ptr,
    point_mass_ptr,
    uniforms_ptr,
    given_ptr,
    lengths_ptr,
    temperature_ptr,
    cells_ptr,
    rows_ptr,
    counts_ptr,
    probs_ptr,
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
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAW: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (batch entries): normalisers, path weights, and for "token" the accepted length."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    length = verified_lengths(lengths_ptr, batch, is_entry, num_drafts)
    scale = inverse_temperatures(temperature_ptr, batch, is_entry, ACC)[:, None]
    counts_ptrs = counts_ptr + batch * COUNTS

    slots = tl.arange(0, SLOTS)[None, :]  # from here on [R, SLOTS]
    is_row = is_entry[:, None] & (slots <= length[:, None])
    is_drafted = is_entry[:, None] & (slots < length[:, None])
    rows = batch[:, None] * (num_drafts + 1) + slots
    places = batch[:, None] * num_drafts + slots
    row_ptrs = rows_ptr + rows * ROW
    ids = tl.load(draft_ids_ptr + places, mask=is_drafted, other=0).to(tl.int64)
    is_known = is_drafted & (ids >= 0) & (ids < vocab)
    splits = tl.arange(0, SPLITS)[None, None, :]  # [R, SLOTS, SPLITS]
    cell_ptrs = cells_ptr + (rows[:, :, None] * num_splits + splits) * CELL

    top, total = combine_partials(cell_ptrs + TARGET, is_row[:, :, None] & (splits < num_splits))
    inverse = divide(tl.full([ROWS, SLOTS], 1.0, ACC), total)
    tl.store(row_ptrs + TARGET, top, mask=is_row)
    tl.store(row_ptrs + TARGET + 1, inverse, mask=is_row)
    logits_ptrs = target_ptr + batch[:, None] * target_stride_b + slots.to(tl.int64) * target_stride_i
    target_probs = tl.exp(load_logits(logits_ptrs + ids, is_known, scale, ACC) - top) * inverse
    target_probs = tl.where(is_known, target_probs, 0.0)

    draft_probs = tl.full([ROWS, SLOTS], 1.0, ACC)  # of a point mass
    if LAW != POINT_MASS:
        in_split = splits < (1 if LAW == SPARSE else num_splits)
        top, total = combine_partials(cell_ptrs + DRAFT, is_drafted[:, :, None] & in_split)
        inverse = divide(tl.full([ROWS, SLOTS], 1.0, ACC), total)
        tl.store(row_ptrs + DRAFT, top, mask=is_drafted)
        tl.store(row_ptrs + DRAFT + 1, inverse, mask=is_drafted)
        logits_ptrs = draft_ptr + batch[:, None] * draft_stride_b + slots.to(tl.int64) * draft_stride_i
        if LAW == DENSE:
            draft_probs = tl.exp(load_logits(logits_ptrs + ids, is_known, scale, ACC) - top) * inverse
        else:
            draft_probs = tl.zeros([ROWS, SLOTS], ACC)
            for start in range(0, num_listed, LISTED):
                listed = (start + tl.arange(0, LISTED))[None, None, :]  # [R, SLOTS, LISTED]
                mask = is_known[:, :, None] & (listed < num_listed)
                listed_ids = tl.load(listed_ids_ptr + places[:, :, None] * num_listed + listed, mask=mask, other=-1)
                is_it = mask & (listed_ids == ids[:, :, None])
                logits = load_logits(logits_ptrs[:, :, None] + listed, is_it, scale[:, :, None], ACC)
                draft_probs += tl.sum(tl.exp(logits - top[:, :, None]), 2) * inverse
        is_law = (total > 0) & (total < float("inf"))  # False for NaN
        if point_mass_ptr is not None:
            is_point = tl.load(point_mass_ptr + places, mask=is_drafted, other=0) != 0
            is_law = is_law | is_point
            draft_probs = tl.where(is_point, 1.0, draft_probs)
        length = tl.min(tl.where(is_drafted & (is_law == 0), slots, length[:, None]), 1)
    draft_probs = tl.where(is_known, draft_probs, 0.0).to(ACC)
    tl.store(counts_ptrs + LENGTH, length, mask=is_entry)

    weights = tl.full([ROWS, SLOTS], 1.0, ACC)
    if IS_BLOCK:
        weight = tl.full([ROWS], 1.0, ACC)
        for i in range(tl.max(length, 0)):  # what lies behind an entry's own length is never read
            target_prob = tl.sum(tl.where(slots == i, target_probs, 0.0), 1)
            draft_prob = tl.sum(tl.where(slots == i, draft_probs, 0.0), 1)
            weight = capped_ratio(weight * target_prob, draft_prob)
            weights = tl.where(slots == i + 1, weight[:, None], weights)
    else:
        probs = capped_ratio(target_probs, draft_probs)
        if given_ptr is not None:
            probs = tl.load(given_ptr + places, mask=is_drafted, other=0.0).to(ACC)
        is_slot = is_entry[:, None] & (slots < num_drafts)
        is_judged = slots < length[:, None]
        uniforms = tl.load(uniforms_ptr + rows, mask=is_slot, other=0.0).to(tl.float64)
        is_rejected = (uniforms < probs.to(tl.float64)) == 0
        accepted = tl.min(tl.where(is_judged & is_rejected, slots, length[:, None]), 1)
        tl.store(counts_ptrs + ACCEPTED, accepted, mask=is_entry)
        tl.store(probs_ptr + places, tl.where(is_judged, probs, 0.0), mask=is_slot)
    tl.store(row_ptrs + WEIGHT, weights, mask=is_row)
    tl.store(row_ptrs + SCALE, scale + tl.zeros([ROWS, SLOTS], ACC), mask=is_row)


@triton.jit
def law_tile(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    listed_ids_ptr,
    point_mass_ptr,
    rows_ptr,
    batch,
    slots,
    offsets,
    is_row,
    is_residual,
    num_drafts,
    vocab,
    num_listed,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    LAW: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Unnormalised law `[R, BLOCK]` of the tokens `offsets`, behind `slots` accepted drafts of entries `batch` `[R]`.

    It is `max(w p − q, 0)` where `is_residual`, else the target's exponentials.
    """
    row_ptrs = rows_ptr + (batch * (num_drafts + 1) + slots) * ROW
    places = batch * num_drafts + slots
    scale = tl.load(row_ptrs + SCALE, mask=is_row, other=0.0)
    top = tl.load(row_ptrs + TARGET, mask=is_row, other=0.0)
    inverse = tl.load(row_ptrs + TARGET + 1, mask=is_row, other=0.0)
    weight = tl.load(row_ptrs + WEIGHT, mask=is_row, other=0.0)
    target_ptrs = target_ptr + batch * target_stride_b + slots * target_stride_i
    logits = load_logits(target_ptrs[:, None] + offsets, is_row[:, None] & (offsets < vocab), scale[:, None], ACC)
    exponentials = tl.exp(logits - top[:, None])

    is_dense = is_residual
    if point_mass_ptr is not None:
        is_dense = is_residual & (tl.load(point_mass_ptr + places, mask=is_residual, other=0) == 0)
    draft_ptrs, ids_ptrs = target_ptrs, target_ptrs
    draft_top, draft_inverse = top, inverse
    if LAW != POINT_MASS:
        draft_ptrs = draft_ptr + batch * draft_stride_b + slots * draft_stride_i
        draft_top = tl.load(row_ptrs + DRAFT, mask=is_residual, other=0.0)
        draft_inverse = tl.load(row_ptrs + DRAFT + 1, mask=is_residual, other=0.0)
    if LAW == SPARSE:
        ids_ptrs = listed_ids_ptr + places * num_listed
    draft_probs = draft_tile(
        draft_ptrs,
        ids_ptrs,
        tl.load(draft_ids_ptr + places, mask=is_residual, other=-1),
        is_dense,
        offsets,
        vocab,
        draft_top,
        draft_inverse,
        scale,
        num_listed,
        LAW,
        BLOCK,
        LISTED,
        ACC,
    )
    residual = tl.maximum(weight[:, None] * (exponentials * inverse[:, None]) - draft_probs, 0.0)
    return tl.where(is_residual[:, None], residual, exponentials)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_listed"])
def _residual_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    listed_ids_ptr,
    point_mass_ptr,
    rows_ptr,
    counts_ptr,
    masses_ptr,
    num_batch,
    num_drafts,
    vocab,
    num_listed,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    IS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LAW: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (drafted rows, split) for "block", (batch entries, split) for "token": residual masses of one split."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if IS_BLOCK:
        slots = batch % num_drafts
        batch = batch // num_drafts
        is_entry = batch < num_batch
    else:
        is_entry = batch < num_batch
        slots = tl.load(counts_ptr + batch * COUNTS + ACCEPTED, mask=is_entry, other=0).to(tl.int64)
    is_row = is_entry & (slots < tl.load(counts_ptr + batch * COUNTS + LENGTH, mask=is_entry, other=0))
    begin = tl.program_id(1) * SPLIT
    end = tl.where(tl.max(is_row.to(tl.int32), 0) > 0, tl.minimum(begin + SPLIT, vocab), begin)
    sums = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(begin, end, BLOCK):
        sums += law_tile(
            draft_ids_ptr,
            target_ptr,
            draft_ptr,
            listed_ids_ptr,
            point_mass_ptr,
            rows_ptr,
            batch,
            slots,
            (first + tl.arange(0, BLOCK))[None, :],
            is_row,
            is_row,
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
    cells = (batch * (num_drafts + 1) + slots) * tl.num_programs(1) + tl.program_id(1)
    tl.store(masses_ptr + cells, tl.sum(sums.to(tl.float64), 1), mask=is_row)
