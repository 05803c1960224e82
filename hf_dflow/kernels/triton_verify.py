"""`verify_block` on a GPU: which kernels run, with what, and those of the greedy rule. The contract is torch_ops.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hf_dflow.kernels import triton_sampled, triton_tiles
from hf_dflow.kernels.torch_ops import BlockDecision, VerifyInputs
from hf_dflow.kernels.triton_tiles import Launch, tile_vocabulary, verified_lengths

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
    given_probs_ptr,
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
    drafts = batch[:, None] * num_drafts + slots
    ids = tl.load(draft_ids_ptr + drafts, mask=is_drafted, other=-1)
    probs = tl.where(ids == choices, 1.0, 0.0).to(ACC)
    if given_probs_ptr is not None:
        probs = tl.load(given_probs_ptr + drafts, mask=is_drafted, other=0.0).to(ACC)
    accepted = tl.min(tl.where(is_drafted & ((probs >= 0.5) == 0), slots, length), 1)
    is_slot = is_entry[:, None] & (slots < num_drafts)
    tl.store(probs_ptr + drafts, tl.where(is_drafted, probs, 0.0), mask=is_slot)
    tl.store(accepted_ptr + batch, accepted.to(tl.int64), mask=is_entry)
    bonus = tl.sum(tl.where(slots == accepted[:, None], choices, 0), 1)
    tl.store(bonus_ptr + batch, bonus.to(tl.int64), mask=is_entry)


@dataclass(frozen=True)
class Plan:
    """The launches of one verification, in order, and the decision whose tensors they fill."""

    launches: list[Launch]
    decision: BlockDecision


def plan_verification(inputs: VerifyInputs, empty: Callable[..., torch.Tensor] = torch.empty) -> Plan:
    """Allocate outputs and scratch, and list the launches that fill them. The inputs are checked already.

    The scratch holds a few numbers for each row and split; `empty` makes it, as `torch.empty` would.
    """
    (batch, num_drafts), device = inputs.draft_ids.shape, inputs.target_logits.device
    vocab = inputs.target_logits.shape[-1]
    is_greedy = inputs.rule == "greedy"
    draft_logits = None if is_greedy else inputs.draft_logits
    is_double = any(
        logits is not None and logits.dtype == torch.float64 for logits in (inputs.target_logits, draft_logits)
    )
    float_dtype = torch.float64 if is_double else torch.float32
    decision = BlockDecision(
        accepted_length=empty(batch, dtype=torch.long, device=device),
        bonus_ids=empty(batch, dtype=torch.long, device=device),
        acceptance_probs=empty(batch, num_drafts, dtype=float_dtype, device=device),
    )
    plan = Plan([], decision)
    if batch == 0:
        return plan

    target_logits = _with_dense_rows(inputs.target_logits)
    draft_logits = None if draft_logits is None or num_drafts == 0 else _with_dense_rows(draft_logits)
    num_rows = batch * (num_drafts + 1)
    tiling = tile_vocabulary(vocab, num_rows)
    num_splits = tiling.num_splits
    arguments = {
        "draft_ids_ptr": inputs.draft_ids.contiguous(),
        "target_ptr": target_logits,
        "draft_ptr": draft_logits,
        "point_mass_ptr": None if draft_logits is None else _contiguous(inputs.point_mass),
        "uniforms_ptr": _contiguous(inputs.uniforms),
        "given_probs_ptr": _contiguous(inputs.acceptance_probs),
        "lengths_ptr": _contiguous(inputs.lengths),
        "probs_ptr": decision.acceptance_probs,
        "accepted_ptr": decision.accepted_length,
        "bonus_ptr": decision.bonus_ids,
        "num_batch": batch,
        "num_drafts": num_drafts,
        "vocab": vocab,
        "num_splits": num_splits,
        "target_stride_b": target_logits.stride(0),
        "target_stride_i": target_logits.stride(1),
        "draft_stride_b": 0 if draft_logits is None else draft_logits.stride(0),
        "draft_stride_i": 0 if draft_logits is None else draft_logits.stride(1),
        "IS_BLOCK": inputs.rule == "block",
        "ROWS": triton_tiles.ROWS,
        "SPLIT": tiling.split,
        "BLOCK": tiling.block,
        "SLOTS": max(16, triton.next_power_of_2(num_drafts + 1)),
        "SPLITS": tiling.max_splits,
        "ACC": tl.float64 if is_double else tl.float32,
    }

    def scratch(name: str, *shape: int, dtype: torch.dtype = float_dtype) -> None:
        arguments[name] = empty(*shape, dtype=dtype, device=device)

    def launch(kernel, rows: int, num_columns: int = 1, num_warps: int = tiling.num_warps) -> None:
        # Fused multiply-add would leave a residual where target and draft have the very same probability.
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        own = {name: arguments[name] for name in kernel.arg_names}
        plan.launches.append(Launch(kernel, (triton.cdiv(rows, triton_tiles.ROWS), num_columns), own, options))

    if is_greedy:
        scratch("tops_ptr", num_rows, num_splits)
        scratch("places_ptr", num_rows, num_splits, dtype=torch.int32)
        launch(_argmax_kernel, num_rows, num_splits)
        launch(_match_kernel, batch, num_warps=4)
        return plan
    scratch("partials_ptr", num_rows, num_splits, triton_sampled.PARTIALS_SIZE)
    scratch("stats_ptr", num_rows, triton_sampled.STATS_SIZE)
    scratch("masses_ptr", num_rows, num_splits, dtype=torch.float64)
    scratch("counts_ptr", batch, triton_sampled.COUNTS_SIZE, dtype=torch.int32)
    launch(triton_sampled._partials_kernel, num_rows, num_splits)
    launch(triton_sampled._weights_kernel, batch, num_warps=4)
    if num_drafts:
        launch(triton_sampled._residual_kernel, batch * num_drafts if inputs.rule == "block" else batch, num_splits)
    launch(triton_sampled._bonus_kernel, batch)
    return plan


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _with_dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows may lie anywhere; the entries of one must be neighbours."""
    return logits if logits.shape[-1] == 1 or logits.stride(-1) == 1 else logits.contiguous()


@torch.compiler.disable  # a compiled caller breaks its graph here
@torch.no_grad()
def verify_block(inputs: VerifyInputs) -> BlockDecision:
    """The contract of [`~hf_dflow.kernels.torch_ops.verify_block`], decided by the kernels."""
    plan = plan_verification(inputs)
    for launch in plan.launches:
        launch.run()
    return plan.decision
