"""Whether a backend decides as the reference does, where rounding may tip a draw."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_dflow.kernels import torch_ops as reference
from hf_dflow.kernels.torch_ops import BlockDecision, SparseLogits

NEAR = 1e-5  # a float32 probability over the largest vocabularies is off by less


@dataclass(frozen=True)
class Agreement:
    """What a comparison found.

    Args:
        num_rows (`int`): Rows compared.
        num_excluded (`int`): Rows that differ where a uniform lies within `NEAR` of what it was compared with: an
            acceptance probability, or an edge of the bonus token's cumulative law, both computed in float64.
        wrong_rows (`list[int]`): Rows that differ without that excuse.
        largest_error (`float`): Of an acceptance probability of the token rule, where the rule is "token".
    """

    num_rows: int
    num_excluded: int
    wrong_rows: list[int]
    largest_error: float


def compare_decisions(decision: BlockDecision, arguments: dict[str, Any]) -> Agreement:
    """Compare `decision` with the reference's on the keyword arguments of `verify_block` that led to it."""
    expected = reference.verify_block(**arguments)
    exact = reference.verify_block(**{**_in_float64(arguments), "return_residual": True})
    same_length = decision.accepted_length == expected.accepted_length
    differs = ~same_length | (decision.bonus_ids != expected.bonus_ids)
    is_excused = torch.zeros_like(differs)
    uniforms = arguments["uniforms"]
    if arguments["rule"] != "greedy":
        uniforms = uniforms.double()
        num_drafts = arguments["draft_ids"].shape[1]
        lengths = arguments.get("lengths")
        slots = torch.arange(num_drafts, device=differs.device)
        active = slots < (num_drafts if lengths is None else lengths[:, None])
        near_acceptance = ((uniforms[:, :-1] - exact.acceptance_probs).abs() < NEAR) & active
        assert exact.residual_probs is not None  # asked for
        near_edge = (exact.residual_probs.cumsum(-1) - uniforms[:, -1:]).abs() < NEAR
        same_row = same_length & (exact.accepted_length == decision.accepted_length)
        is_excused = near_acceptance.any(-1) | (same_row & near_edge.any(-1))
    errors = (decision.acceptance_probs.double() - expected.acceptance_probs.double()).abs()
    return Agreement(
        num_rows=differs.shape[0],
        num_excluded=int((differs & is_excused).sum()),
        wrong_rows=(differs & ~is_excused).nonzero()[:, 0].tolist(),
        largest_error=float(errors.max()) if arguments["rule"] == "token" and errors.numel() else 0.0,
    )


def _in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    wide = dict(arguments)
    wide["target_logits"] = arguments["target_logits"].double()
    law = arguments["draft_logits"]
    if isinstance(law, SparseLogits):
        wide["draft_logits"] = SparseLogits(law.ids, law.logits.double())
    elif law is not None:
        wide["draft_logits"] = law.double()
    return wide
