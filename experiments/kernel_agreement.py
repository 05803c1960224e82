"""Compares a backend's decisions with the reference's, where rounding may tip a draw."""

from dataclasses import dataclass, replace

import torch

from hf_dflow.kernels import BlockDecision, VerifyInputs, torch_ops

NEAR = 1e-5  # a float32 probability over the largest vocabularies is off by less


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison.

    Args:
        num_rows (`int`): Rows compared.
        num_excluded (`int`): Rows that differ where a uniform lies within `NEAR` of its threshold: an acceptance
            probability, or an edge of the bonus token's cumulative law, both computed in float64.
        wrong_rows (`list[int]`): All other rows that differ.
        largest_error (`float`): Largest error of an acceptance probability, for the token rule.
    """

    num_rows: int
    num_excluded: int
    wrong_rows: list[int]
    largest_error: float


def compare_decisions(decision: BlockDecision, inputs: VerifyInputs) -> Agreement:
    """Compare `decision` with the reference's on the inputs that led to it."""
    expected = torch_ops.verify_block(inputs)
    same_length = decision.accepted_length == expected.accepted_length
    differs = ~same_length | (decision.bonus_ids != expected.bonus_ids)
    is_excused = torch.zeros_like(differs)
    if inputs.rule != "greedy":
        assert inputs.uniforms is not None  # checked
        uniforms = inputs.uniforms.double()
        exact = torch_ops.accept_drafts(_in_float64(inputs), uniforms)
        num_drafts = inputs.draft_ids.shape[1]
        slots = torch.arange(num_drafts, device=differs.device)
        active = slots < (num_drafts if inputs.lengths is None else inputs.lengths[:, None])
        near_acceptance = ((uniforms[:, :-1] - exact.acceptance_probs).abs() < NEAR) & active
        bonus_probs = exact.bonus_weights / exact.bonus_weights.sum(-1, keepdim=True)
        near_edge = (bonus_probs.cumsum(-1) - uniforms[:, -1:]).abs() < NEAR
        same_row = same_length & (exact.accepted_length == decision.accepted_length)
        is_excused = near_acceptance.any(-1) | (same_row & near_edge.any(-1))
    errors = (decision.acceptance_probs.double() - expected.acceptance_probs.double()).abs()
    return Agreement(
        num_rows=differs.shape[0],
        num_excluded=int((differs & is_excused).sum()),
        wrong_rows=(differs & ~is_excused).nonzero()[:, 0].tolist(),
        largest_error=float(errors.max()) if inputs.rule == "token" and errors.numel() else 0.0,
    )


def _in_float64(inputs: VerifyInputs) -> VerifyInputs:
    draft_logits = None if inputs.draft_logits is None else inputs.draft_logits.double()
    return replace(inputs, target_logits=inputs.target_logits.double(), draft_logits=draft_logits)
