"""`verify_block` on a GPU: which kernels run, with what. The contract is `reference.verify_block`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from hf_dflow.kernels import tiles, verify_bonus, verify_greedy, verify_sampled
from hf_dflow.kernels.tiles import DENSE, LISTED, POINT_MASS, SPARSE, tile_vocabulary, wide_dtype
from hf_dflow.kernels.torch_ops import BlockDecision, DraftLaw, SparseLogits, check_arguments


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything that it takes, so that it can be run here or compiled for another device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch where the tensors lie: Triton takes the current device, which theirs need not be."""
        tensors = (one for one in self.arguments.values() if isinstance(one, torch.Tensor))
        device = next(tensors).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True)
class Plan:
    """The launches of one verification, in order, and the tensors that they fill."""

    launches: list[Launch]
    accepted_length: torch.Tensor  # [B]
    bonus_ids: torch.Tensor  # [B]
    acceptance_probs: torch.Tensor  # [B, N]
    residual_probs: torch.Tensor  # [B, V], or [0, V] where it was not asked for


def plan_verification(
    *,
    draft_ids: torch.Tensor,  # [B, N]
    draft_logits: torch.Tensor | None,  # [B, N, V], or [B, N, K] with `listed_ids`
    listed_ids: torch.Tensor | None,  # [B, N, K]
    target_logits: torch.Tensor,  # [B, N + 1, V]
    uniforms: torch.Tensor | None,  # [B, N + 1]
    rule: str,
    lengths: torch.Tensor | None = None,  # [B]
    point_mass: torch.Tensor | None = None,  # [B, N]
    acceptance_probs: torch.Tensor | None = None,  # [B, N]
    temperature: torch.Tensor | None = None,  # [B]
    return_residual: bool = False,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> Plan:
    """Allocate outputs and scratch, and list the launches that fill them. Arguments are checked already.

    The scratch holds a few numbers for each row and split; `empty` makes it, as `torch.empty` would.
    """
    batch, num_drafts = draft_ids.shape
    vocab, device = target_logits.shape[-1], target_logits.device
    is_greedy = rule == "greedy"
    wide, acc = wide_dtype(target_logits, None if is_greedy else draft_logits)
    accepted_length, bonus_ids = (empty(batch, dtype=torch.long, device=device) for _ in range(2))
    probs = empty(batch, num_drafts, dtype=wide, device=device)
    law = empty(batch if return_residual else 0, vocab, dtype=wide, device=device)
    plan = Plan([], accepted_length, bonus_ids, probs, law)
    if batch == 0:
        return plan

    target_logits = _with_dense_rows(target_logits)
    num_rows = batch * (num_drafts + 1)
    tiling = tile_vocabulary(vocab, num_rows)
    num_splits = tiling.num_splits
    form = POINT_MASS
    if draft_logits is not None and num_drafts and not is_greedy:
        form = DENSE if listed_ids is None else SPARSE
        draft_logits = _with_dense_rows(draft_logits)
    else:
        draft_logits = listed_ids = point_mass = None
    everything = {
        "draft_ids_ptr": draft_ids.contiguous(),
        "target_ptr": target_logits,
        "draft_ptr": draft_logits,
        "listed_ids_ptr": _contiguous(listed_ids),
        "point_mass_ptr": _contiguous(point_mass),
        "uniforms_ptr": _contiguous(uniforms),
        "given_ptr": _contiguous(acceptance_probs),
        "lengths_ptr": _contiguous(lengths),
        "temperature_ptr": _contiguous(temperature),
        "probs_ptr": probs,
        "accepted_ptr": accepted_length,
        "bonus_ptr": bonus_ids,
        "law_ptr": law,
        "num_batch": batch,
        "num_drafts": num_drafts,
        "vocab": vocab,
        "num_listed": 0 if listed_ids is None else listed_ids.shape[-1],
        "num_splits": num_splits,
        "target_stride_b": target_logits.stride(0),
        "target_stride_i": target_logits.stride(1),
        "draft_stride_b": 0 if draft_logits is None else draft_logits.stride(0),
        "draft_stride_i": 0 if draft_logits is None else draft_logits.stride(1),
        "IS_BLOCK": rule == "block",
        "LAW": form.value,
        "ROWS": tiles.ROWS,
        "SPLIT": tiling.split,
        "BLOCK": tiling.block,
        "SLOTS": max(16, triton.next_power_of_2(num_drafts + 1)),
        "SPLITS": tiling.max_splits,
        "LISTED": LISTED,
        "ACC": acc,
    }

    def launch(kernel, rows: int, num_columns: int = 1, num_warps: int = tiling.num_warps) -> None:
        # Fused multiply-add would leave a residual where target and draft have the very same probability.
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        arguments = {name: everything[name] for name in kernel.arg_names}
        plan.launches.append(Launch(kernel, (triton.cdiv(rows, tiles.ROWS), num_columns), arguments, options))

    if is_greedy:
        everything["tops_ptr"] = empty(num_rows, num_splits, dtype=wide, device=device)
        everything["places_ptr"] = empty(num_rows, num_splits, dtype=torch.int32, device=device)
        launch(verify_greedy._argmax_kernel, num_rows, num_splits)
        launch(verify_greedy._match_kernel, batch, num_warps=4)
        return plan
    everything["cells_ptr"] = empty(num_rows, num_splits, verify_sampled.CELL_SIZE, dtype=wide, device=device)
    everything["rows_ptr"] = empty(num_rows, verify_sampled.ROW_SIZE, dtype=wide, device=device)
    everything["masses_ptr"] = empty(num_rows, num_splits, dtype=torch.float64, device=device)
    everything["counts_ptr"] = empty(batch, verify_sampled.COUNTS_SIZE, dtype=torch.int32, device=device)
    everything["totals_ptr"] = empty(batch, dtype=torch.float64, device=device)
    launch(verify_sampled._partials_kernel, num_rows, num_splits)
    launch(verify_sampled._weights_kernel, batch, num_warps=4)
    if num_drafts:
        launch(verify_sampled._residual_kernel, batch * num_drafts if rule == "block" else batch, num_splits)
    launch(verify_bonus._bonus_kernel, batch)
    if return_residual:
        launch(verify_bonus._law_kernel, batch, triton.cdiv(vocab, tiling.block))
    return plan


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _with_dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows may lie anywhere; the entries of one must be neighbours."""
    return logits if logits.shape[-1] == 1 or logits.stride(-1) == 1 else logits.contiguous()


def launch_verification(
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    listed_ids: torch.Tensor | None,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor | None,
    rule: str,
    lengths: torch.Tensor | None,
    point_mass: torch.Tensor | None,
    acceptance_probs: torch.Tensor | None,
    temperature: torch.Tensor | None,
    return_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plan and run; returns the tensors of [`Plan`]."""
    plan = plan_verification(
        draft_ids=draft_ids,
        draft_logits=draft_logits,
        listed_ids=listed_ids,
        target_logits=target_logits,
        uniforms=uniforms,
        rule=rule,
        lengths=lengths,
        point_mass=point_mass,
        acceptance_probs=acceptance_probs,
        temperature=temperature,
        return_residual=return_residual,
    )
    for launch in plan.launches:
        launch.run()
    if rule == "greedy" and return_residual:
        plan.residual_probs.zero_().scatter_(1, plan.bonus_ids[:, None], 1.0)
    return plan.accepted_length, plan.bonus_ids, plan.acceptance_probs, plan.residual_probs


# What torch.compile sees of a verification: one opaque call.
verify_block_op = torch.library.custom_op("hf_dflow::verify_block", launch_verification, mutates_args=())


@verify_block_op.register_fake
def _(
    draft_ids,
    draft_logits,
    listed_ids,
    target_logits,
    uniforms,
    rule,
    lengths,
    point_mass,
    acceptance_probs,
    temperature,
    return_residual,
):
    batch, num_drafts = draft_ids.shape
    wide, _ = wide_dtype(target_logits, None if rule == "greedy" else draft_logits)
    return (
        draft_ids.new_empty(batch, dtype=torch.long),
        draft_ids.new_empty(batch, dtype=torch.long),
        target_logits.new_empty(batch, num_drafts, dtype=wide),
        target_logits.new_empty(batch if return_residual else 0, target_logits.shape[-1], dtype=wide),
    )


@torch.no_grad()
def verify_block(
    *,
    draft_ids: torch.Tensor,  # [B, N]
    draft_logits: DraftLaw,  # [B, N, V] | SparseLogits [B, N, K] | None
    target_logits: torch.Tensor,  # [B, N + 1, V]
    uniforms: torch.Tensor | None,  # [B, N + 1]
    rule: str,
    lengths: torch.Tensor | None = None,  # [B]
    point_mass: torch.Tensor | None = None,  # [B, N]
    acceptance_probs: torch.Tensor | None = None,  # [B, N]
    temperature: torch.Tensor | None = None,  # [B]
    return_residual: bool = False,
) -> BlockDecision:
    """The contract of [`~hf_dflow.kernels.torch_ops.verify_block`], decided by the kernels."""
    check_arguments(
        draft_ids,
        draft_logits,
        target_logits,
        uniforms,
        rule,
        lengths,
        point_mass,
        acceptance_probs,
        temperature,
    )
    _check_devices(
        target_logits.device,
        draft_ids=draft_ids,
        draft_logits=draft_logits.logits if isinstance(draft_logits, SparseLogits) else draft_logits,
        uniforms=uniforms,
        lengths=lengths,
        point_mass=point_mass,
        acceptance_probs=acceptance_probs,
        temperature=temperature,
    )
    # Called directly, the same function saves the dispatcher's way: some twenty microseconds a step.
    op = verify_block_op if torch.compiler.is_compiling() else launch_verification
    accepted_length, bonus_ids, probs, law = op(
        draft_ids,
        draft_logits.logits if isinstance(draft_logits, SparseLogits) else draft_logits,
        draft_logits.ids if isinstance(draft_logits, SparseLogits) else None,
        target_logits,
        uniforms,
        rule,
        lengths,
        point_mass,
        acceptance_probs,
        temperature,
        return_residual,
    )
    return BlockDecision(accepted_length, bonus_ids, probs, law if return_residual else None)


def _check_devices(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"`{name}` is on {tensor.device} but `target_logits` on {device}; move it there.")
