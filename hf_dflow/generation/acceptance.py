"""The LogitsProcessor-style hook into drafting and acceptance, and the relaxed rule that is built on it."""

from dataclasses import dataclass

import torch

from hf_dflow.generation.step import Proposal, Verification, VerifierFeedback


@dataclass(frozen=True)
class AcceptanceContext:
    """What a relaxed acceptance rule may look at."""

    draft_ids: torch.Tensor  # [B, N]
    target_logits: torch.Tensor  # [B, N, V] processed; row i judges draft i
    draft_logits: torch.Tensor  # [B, N, V] processed; the law the drafts were drawn from
    acceptance_probs: torch.Tensor  # [B, N] what the lossless rule compares its uniforms with; 0 or 1 when greedy


class AcceptanceProcessor:
    """Hook into the steps of `speculation_type="dflow"`.

    Each row of a call works on its own deep copy, so what a processor learns belongs to one row of one call, and every
    tensor has a batch dimension of 1. Changing the *draft* distribution before sampling keeps the output law, whatever
    changes it: the same logits enter sampling, ratio and residual. Changing *acceptance* does not keep it: set
    `is_lossy`, and output and statistics report it.
    """

    is_lossy: bool = False

    def adjust_draft_logits(self, draft_logits: torch.Tensor, feedback: VerifierFeedback | None) -> torch.Tensor:
        """Draft logits to sample from.

        Args:
            draft_logits (`torch.Tensor` of shape `(1, num_drafts, vocab)`): The drafter's, unprocessed. Others read
                this tensor until the step ends: return a new one, do not write into it.
            feedback (`VerifierFeedback`, *optional*): Of the step before; `None` in the first.

        Returns:
            `torch.Tensor`: Of the same shape.
        """
        return draft_logits

    def adjust_acceptance(self, context: AcceptanceContext) -> torch.Tensor:
        """Acceptance probabilities `(1, num_drafts)`, 0 or 1 when greedy. Called only if `is_lossy`."""
        return context.acceptance_probs

    def observe(self, proposal: Proposal, verification: Verification) -> None:
        """Called at the end of each step with the drafts of this row and what was decided about them."""


class AcceptanceThreshold(AcceptanceProcessor):
    """Relaxed acceptance: a draft whose target probability reaches `threshold` is accepted. **Lossy.**

    Args:
        threshold (`float`): A probability in (0, 1].
    """

    is_lossy = True

    def __init__(self, threshold: float):
        self.threshold = threshold

    def adjust_acceptance(self, context: AcceptanceContext) -> torch.Tensor:
        target_probs = context.target_logits.softmax(dim=-1).gather(-1, context.draft_ids[..., None])[..., 0]
        return torch.where(target_probs >= self.threshold, 1.0, context.acceptance_probs)
