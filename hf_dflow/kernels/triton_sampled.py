"""Token and block verification as Triton kernels. Equations are in MATH.md.

Four launches, none of which the host waits for: partial softmax sums of every row (one read of both logits); the
drafts' probabilities and weights; residual masses per split (the second read: of all drafted rows for "block", of the
rejected one for "token"); and decision and draw, which read one split. No row of probabilities is written.
"""

import triton
import triton.language as tl

from hf_dflow.kernels.triton_tiles import (
    capped_ratio,
    combine_partials,
    divide,
    load_logits,
    softmax_partials,
    verified_lengths,
)

# Scratch: of each split of a row a maximum and the sum of exponentials behind it, for both models;
PARTIALS_SIZE = 4
TARGET, DRAFT = tl.constexpr(0), tl.constexpr(2)
# of each row what the second read needs: maximum and inverse sum for both models, and the path weight;
STATS_SIZE = 5
WEIGHT = tl.constexpr(4)
# of each batch entry how many drafts are verified, and how many "token" accepts.
COUNTS_SIZE = 2
LENGTH, ACCEPTED = tl.constexpr(0), tl.constexpr(1)
PARTIALS, STATS, COUNTS = tl.constexpr(PARTIALS_SIZE), tl.constexpr(STATS_SIZE), tl.constexpr(COUNTS_SIZE)


@triton.jit(do_not_specialize=["num_batch", "num_drafts"])
def _partials_kernel(
    target_ptr,
    draft_ptr,
    lengths_ptr,
    partials_ptr,
    num_batch,
    num_drafts,
    vocab,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (rows, split): maximum and sum of exponentials of one split, for the target's rows and the draft's."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch, slots = rows // (num_drafts + 1), rows % (num_drafts + 1)
    split = tl.program_id(1)
    lengths = verified_lengths(lengths_ptr, batch, batch < num_batch, num_drafts)
    is_row = (batch < num_batch) & (slots <= lengths)
    split_ptrs = partials_ptr + (rows * tl.num_programs(1) + split) * PARTIALS
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, vocab)
    row_ptrs = target_ptr + batch * target_stride_b + slots * target_stride_i
    top, total = softmax_partials(row_ptrs, is_row, first, end, BLOCK, ACC)
    tl.store(split_ptrs + TARGET, top, mask=is_row)
    tl.store(split_ptrs + TARGET + 1, total, mask=is_row)
    if draft_ptr is not None:
        is_row = is_row & (slots < lengths)
        row_ptrs = draft_ptr + batch * draft_stride_b + slots * draft_stride_i
        top, total = softmax_partials(row_ptrs, is_row, first, end, BLOCK, ACC)
        tl.store(split_ptrs + DRAFT, top, mask=is_row)
        tl.store(split_ptrs + DRAFT + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_splits"])
def _weights_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    point_mass_ptr,
    uniforms_ptr,
    given_probs_ptr,
    lengths_ptr,
    partials_ptr,
    stats_ptr,
    counts_ptr,
    probs_ptr,
    num_batch,
    num_drafts,
    vocab,
    num_splits,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    IS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (batch entries): normalisers, path weights, and for "token" the accepted length."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    length = verified_lengths(lengths_ptr, batch, is_entry, num_drafts)
    counts_ptrs = counts_ptr + batch * COUNTS

    slots = tl.arange(0, SLOTS)[None, :]  # from here on [R, SLOTS]
    is_row = is_entry[:, None] & (slots <= length[:, None])
    is_drafted = is_entry[:, None] & (slots < length[:, None])
    rows = batch[:, None] * (num_drafts + 1) + slots
    drafts = batch[:, None] * num_drafts + slots
    stats_ptrs = stats_ptr + rows * STATS
    ids = tl.load(draft_ids_ptr + drafts, mask=is_drafted, other=0).to(tl.int64)
    is_known = is_drafted & (ids >= 0) & (ids < vocab)
    splits = tl.arange(0, SPLITS)[None, None, :]  # [R, SLOTS, SPLITS]
    in_split = splits < num_splits
    partials_ptrs = partials_ptr + (rows[:, :, None] * num_splits + splits) * PARTIALS

    top, total = combine_partials(partials_ptrs + TARGET, is_row[:, :, None] & in_split)
    inverse = divide(tl.full([ROWS, SLOTS], 1.0, ACC), total)
    tl.store(stats_ptrs + TARGET, top, mask=is_row)
    tl.store(stats_ptrs + TARGET + 1, inverse, mask=is_row)
    logits_ptrs = target_ptr + batch[:, None] * target_stride_b + slots.to(tl.int64) * target_stride_i
    target_probs = tl.exp(load_logits(logits_ptrs + ids, is_known, ACC) - top) * inverse
    target_probs = tl.where(is_known, target_probs, 0.0)

    draft_probs = tl.full([ROWS, SLOTS], 1.0, ACC)  # of a point mass
    if draft_ptr is not None:
        top, total = combine_partials(partials_ptrs + DRAFT, is_drafted[:, :, None] & in_split)
        inverse = divide(tl.full([ROWS, SLOTS], 1.0, ACC), total)
        tl.store(stats_ptrs + DRAFT, top, mask=is_drafted)
        tl.store(stats_ptrs + DRAFT + 1, inverse, mask=is_drafted)
        logits_ptrs = draft_ptr + batch[:, None] * draft_stride_b + slots.to(tl.int64) * draft_stride_i
        draft_probs = tl.exp(load_logits(logits_ptrs + ids, is_known, ACC) - top) * inverse
        is_law = (total > 0) & (total < float("inf"))  # False for NaN
        if point_mass_ptr is not None:
            is_point = tl.load(point_mass_ptr + drafts, mask=is_drafted, other=0) != 0
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
        if given_probs_ptr is not None:
            probs = tl.load(given_probs_ptr + drafts, mask=is_drafted, other=0.0).to(ACC)
        is_slot = is_entry[:, None] & (slots < num_drafts)
        is_judged = slots < length[:, None]
        uniforms = tl.load(uniforms_ptr + rows, mask=is_slot, other=0.0).to(tl.float64)
        is_rejected = (uniforms < probs.to(tl.float64)) == 0
        accepted = tl.min(tl.where(is_judged & is_rejected, slots, length[:, None]), 1)
        tl.store(counts_ptrs + ACCEPTED, accepted, mask=is_entry)
        tl.store(probs_ptr + drafts, tl.where(is_judged, probs, 0.0), mask=is_slot)
    tl.store(stats_ptrs + WEIGHT, weights, mask=is_row)


@triton.jit
def bonus_tile(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    point_mass_ptr,
    stats_ptr,
    batch,
    slots,
    offsets,
    is_row,
    is_residual,
    num_drafts,
    vocab,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    ACC: tl.constexpr,
):
    """Unnormalised law `[R, BLOCK]` of a bonus token among `offsets`, behind `slots` accepted drafts of `batch` `[R]`.

    Where `is_residual`, weighted target probabilities less draft probabilities, if positive; else the target's
    exponentials.
    """
    stats_ptrs = stats_ptr + (batch * (num_drafts + 1) + slots) * STATS
    drafts = batch * num_drafts + slots
    top = tl.load(stats_ptrs + TARGET, mask=is_row, other=0.0)
    inverse = tl.load(stats_ptrs + TARGET + 1, mask=is_row, other=0.0)
    weight = tl.load(stats_ptrs + WEIGHT, mask=is_row, other=0.0)
    in_vocab = offsets < vocab
    target_ptrs = target_ptr + batch * target_stride_b + slots * target_stride_i
    logits = load_logits(target_ptrs[:, None] + offsets, is_row[:, None] & in_vocab, ACC)
    exponentials = tl.exp(logits - top[:, None])

    ids = tl.load(draft_ids_ptr + drafts, mask=is_residual, other=-1)
    draft_probs = tl.where(offsets == ids[:, None], 1.0, 0.0).to(ACC)  # of a point mass
    if draft_ptr is not None:
        is_dense = is_residual
        if point_mass_ptr is not None:
            is_dense = is_residual & (tl.load(point_mass_ptr + drafts, mask=is_residual, other=0) == 0)
        top = tl.load(stats_ptrs + DRAFT, mask=is_residual, other=0.0)
        draft_inverse = tl.load(stats_ptrs + DRAFT + 1, mask=is_residual, other=0.0)
        draft_ptrs = draft_ptr + batch * draft_stride_b + slots * draft_stride_i
        logits = load_logits(draft_ptrs[:, None] + offsets, is_dense[:, None] & in_vocab, ACC)
        dense_probs = tl.exp(logits - top[:, None]) * draft_inverse[:, None]
        draft_probs = tl.where(is_dense[:, None], dense_probs, draft_probs)
    residual = tl.maximum(weight[:, None] * (exponentials * inverse[:, None]) - draft_probs, 0.0)
    return tl.where(is_residual[:, None], residual, exponentials)


@triton.jit(do_not_specialize=["num_batch", "num_drafts"])
def _residual_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    point_mass_ptr,
    stats_ptr,
    counts_ptr,
    masses_ptr,
    num_batch,
    num_drafts,
    vocab,
    target_stride_b,
    target_stride_i,
    draft_stride_b,
    draft_stride_i,
    IS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
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
        sums += bonus_tile(
            draft_ids_ptr,
            target_ptr,
            draft_ptr,
            point_mass_ptr,
            stats_ptr,
            batch,
            slots,
            (first + tl.arange(0, BLOCK))[None, :],
            is_row,
            is_row,
            num_drafts,
            vocab,
            target_stride_b,
            target_stride_i,
            draft_stride_b,
            draft_stride_i,
            ACC,
        )
    mass_ptrs = masses_ptr + (batch * (num_drafts + 1) + slots) * tl.num_programs(1) + tl.program_id(1)
    tl.store(mass_ptrs, tl.sum(sums.to(tl.float64), 1), mask=is_row)


@triton.jit
def accept_prefixes(
    uniforms_ptr,
    stats_ptr,
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
    prefixes = tl.arange(0, SLOTS)[None, :]  # how many drafts are accepted, 0 … num_drafts
    length = length[:, None]
    first_rows = batch[:, None] * (num_drafts + 1)
    splits = tl.arange(0, SPLITS)[None, None, :]
    mask = (is_entry[:, None] & (prefixes < length))[:, :, None] & (splits < num_splits)
    mass_ptrs = masses_ptr + (first_rows + prefixes)[:, :, None] * num_splits + splits
    surplus = tl.sum(tl.load(mass_ptrs, mask=mask, other=0.0), 2).to(ACC)
    is_prefix = is_entry[:, None] & (prefixes > 0) & (prefixes <= length)
    weights = tl.load(stats_ptr + (first_rows + prefixes) * STATS + WEIGHT, mask=is_prefix, other=0.0)
    total = surplus + (1.0 - weights)
    probs = divide(surplus, tl.where(total == 0, 1.0, total).to(ACC))
    probs = tl.where(prefixes == length, weights, tl.where(total == 0, 1.0, probs))
    is_slot = is_entry[:, None] & (prefixes > 0) & (prefixes <= num_drafts)
    uniforms = tl.load(uniforms_ptr + first_rows + prefixes - 1, mask=is_slot, other=0.0).to(tl.float64)
    tl.store(probs_ptr + batch[:, None] * num_drafts + prefixes - 1, tl.where(is_prefix, probs, 0.0), mask=is_slot)
    return tl.max(tl.where(is_prefix & (uniforms < probs.to(tl.float64)), prefixes, 0), 1)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_splits"])
def _bonus_kernel(
    draft_ids_ptr,
    target_ptr,
    draft_ptr,
    point_mass_ptr,
    uniforms_ptr,
    partials_ptr,
    stats_ptr,
    counts_ptr,
    masses_ptr,
    probs_ptr,
    accepted_ptr,
    bonus_ptr,
    num_batch,
    num_drafts,
    vocab,
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
    ACC: tl.constexpr,
):
    """Program (batch entries): accepted length, then the split, the tile and the token that the last uniform meets."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    length = tl.load(counts_ptr + batch * COUNTS + LENGTH, mask=is_entry, other=0)
    if IS_BLOCK:
        accepted = accept_prefixes(
            uniforms_ptr,
            stats_ptr,
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
    # A zero residual means equal laws up to rounding, where a rejection has (nearly) no probability.
    is_residual = tl.sum(masses, 1) > 0
    partials_ptrs = partials_ptr + (rows * num_splits + splits) * PARTIALS + TARGET
    top = tl.load(stats_ptr + rows * STATS + TARGET, mask=is_entry[:, None], other=0.0)
    tops = tl.load(partials_ptrs, mask=is_entry[:, None] & in_split, other=float("-inf"))
    sums = tl.load(partials_ptrs + 1, mask=is_entry[:, None] & in_split, other=0.0)
    masses = tl.where(is_residual[:, None], masses, (sums * tl.exp(tops - top)).to(tl.float64))
    below = tl.cumsum(masses, 1)
    total = tl.sum(tl.where(splits == num_splits - 1, below, 0.0), 1)

    last_uniform_ptrs = uniforms_ptr + batch * (num_drafts + 1) + num_drafts
    threshold = tl.load(last_uniform_ptrs, mask=is_entry, other=0.0).to(tl.float64) * total
    split = tl.min(tl.where((masses > 0) & (below > threshold[:, None]), splits, SPLITS), 1)
    remainder = threshold - tl.sum(tl.where(splits == split[:, None] - 1, below, 0.0), 1)
    # Where the threshold rounds up to the whole sum: the last token that has a probability.
    is_beyond = split == SPLITS
    split = tl.where(is_beyond, tl.max(tl.where(masses > 0, splits, 0), 1), split)
    remainder = tl.where(is_beyond, float("inf"), remainder)

    first_above = tl.where(is_entry, vocab, 0)
    last_possible = tl.where(is_entry, 0, 0)
    running = tl.zeros([ROWS], tl.float64)
    for start in range(0, SPLIT, BLOCK):
        offsets = (split * SPLIT + start)[:, None] + tl.arange(0, BLOCK)[None, :]
        weights = bonus_tile(
            draft_ids_ptr,
            target_ptr,
            draft_ptr,
            point_mass_ptr,
            stats_ptr,
            batch,
            slots,
            offsets,
            is_entry,
            is_residual,
            num_drafts,
            vocab,
            target_stride_b,
            target_stride_i,
            draft_stride_b,
            draft_stride_i,
            ACC,
        )
        cumulative = running[:, None] + tl.cumsum(weights.to(tl.float64), 1)
        is_above = (weights > 0) & (cumulative > remainder[:, None])
        first_above = tl.minimum(first_above, tl.min(tl.where(is_above, offsets, vocab), 1))
        last_possible = tl.maximum(last_possible, tl.max(tl.where(weights > 0, offsets, 0), 1))
        running += tl.sum(weights.to(tl.float64), 1)
    tl.store(bonus_ptr + batch, tl.minimum(first_above, last_possible).to(tl.int64), mask=is_entry)
