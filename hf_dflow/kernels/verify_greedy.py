"""Greedy verification as Triton kernels: the first maximum of each row, and how many drafts match it."""

import triton
import triton.language as tl

from hf_dflow.kernels.tiles import verified_lengths

NOWHERE = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_batch", "num_drafts"])
def _argmax_kernel(
    target_ptr,
    lengths_ptr,
    tops_ptr,
    places_ptr,
    num_batch,
    num_drafts,
    vocab,
    target_stride_b,
    target_stride_i,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (rows, split): the highest logit of one split, and where it stands first."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch, slots = rows // (num_drafts + 1), rows % (num_drafts + 1)
    is_row = (batch < num_batch) & (slots <= verified_lengths(lengths_ptr, batch, batch < num_batch, num_drafts))
    row_ptrs = target_ptr + batch * target_stride_b + slots * target_stride_i
    begin = tl.program_id(1) * SPLIT
    end = tl.where(tl.max(is_row.to(tl.int32), 0) > 0, tl.minimum(begin + SPLIT, vocab), begin)
    tops = tl.full([ROWS, BLOCK], float("-inf"), ACC)
    places = (begin + tl.arange(0, BLOCK))[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        offsets = (first + tl.arange(0, BLOCK))[None, :]
        mask = is_row[:, None] & (offsets < end)
        logits = tl.load(row_ptrs[:, None] + offsets, mask=mask, other=float("-inf")).to(ACC)
        logits = tl.where(logits != logits, float("inf"), logits)  # NaN wins a maximum in torch
        is_higher = logits > tops
        tops = tl.where(is_higher, logits, tops)
        places = tl.where(is_higher, offsets, places)
    top = tl.max(tops, 1)
    cells = rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops_ptr + cells, top, mask=is_row)
    tl.store(places_ptr + cells, tl.min(tl.where(tops == top[:, None], places, NOWHERE), 1), mask=is_row)


@triton.jit(do_not_specialize=["num_batch", "num_drafts", "num_splits"])
def _match_kernel(
    draft_ids_ptr,
    lengths_ptr,
    given_ptr,
    tops_ptr,
    places_ptr,
    probs_ptr,
    accepted_ptr,
    bonus_ptr,
    num_batch,
    num_drafts,
    num_splits,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Program (batch entries): leading matches, and the target's choice behind them."""
    batch = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_entry = batch < num_batch
    length = verified_lengths(lengths_ptr, batch, is_entry, num_drafts)[:, None]
    slots = tl.arange(0, SLOTS)[None, :]
    splits = tl.arange(0, SPLITS)[None, None, :]
    is_row = is_entry[:, None] & (slots <= length)
    mask = is_row[:, :, None] & (splits < num_splits)
    cells = (batch[:, None] * (num_drafts + 1) + slots)[:, :, None] * num_splits + splits
    tops = tl.load(tops_ptr + cells, mask=mask, other=float("-inf"))
    places = tl.load(places_ptr + cells, mask=mask, other=NOWHERE)
    choices = tl.min(tl.where(tops == tl.max(tops, 2)[:, :, None], places, NOWHERE), 2)
    is_drafted = is_entry[:, None] & (slots < length)
    entries = batch[:, None] * num_drafts + slots
    ids = tl.load(draft_ids_ptr + entries, mask=is_drafted, other=-1)
    probs = tl.where(ids == choices, 1.0, 0.0).to(ACC)
    if given_ptr is not None:
        probs = tl.load(given_ptr + entries, mask=is_drafted, other=0.0).to(ACC)
    accepted = tl.min(tl.where(is_drafted & ((probs >= 0.5) == 0), slots, length), 1)
    is_slot = is_entry[:, None] & (slots < num_drafts)
    tl.store(probs_ptr + entries, tl.where(is_drafted, probs, 0.0), mask=is_slot)
    tl.store(accepted_ptr + batch, accepted.to(tl.int64), mask=is_entry)
    bonus = tl.sum(tl.where(slots == accepted[:, None], choices, 0), 1)
    tl.store(bonus_ptr + batch, bonus.to(tl.int64), mask=is_entry)
