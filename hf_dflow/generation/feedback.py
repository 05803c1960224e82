"""What the verifier computed on rejected rows, lined up with the slots of the next block."""

from dataclasses import dataclass

import torch

from hf_dflow.generation.drafting import DraftBlock
from hf_dflow.generation.rows import shift_left
from hf_dflow.generation.verification import Verification


@dataclass(frozen=True)
class VerifierFeedback:
    """Rejected target rows, shifted to the slots they feed.

    Target row j predicts position j + 1 and a slot its own position; the next anchor sits at position a + 1. So
    rejected row j (j = a + 1 … N) feeds slot j - a, and slots 1 … N - a are fed.
    """

    features: torch.Tensor  # [B, N, taps * target_hidden_size]; entry i feeds slot i + 1
    is_fed: torch.Tensor  # [B, N]
    bonus_ids: torch.Tensor  # [B] the next anchor
    rejected_ids: torch.Tensor  # [B] the first rejected draft; meaningless where nothing is fed
    accepted_length: torch.Tensor  # [B]
    # Only for acceptance processors, which may want them; the relay does not.
    target_logits: torch.Tensor | None  # [B, N, V] raw, of the same rows: what follows a wrong prefix
    draft_logits: torch.Tensor | None  # [B, N, V] what the drafter said of the slots' positions one step ago


def make_feedback(draft: DraftBlock, verification: Verification, with_logits: bool) -> VerifierFeedback | None:
    """Feedback for the next step; `None` where the step drafted nothing. It replaces any earlier one."""
    num_drafts = draft.token_ids.shape[1]
    if num_drafts == 0:
        return None
    accepted = verification.accepted_length
    # Row 0 is the anchor's, so dropping it makes entry i row i + 1; shifting by a then puts row a + i + 1 at entry i.
    features, is_fed = shift_left(verification.features[:, 1:], accepted)
    target_logits = draft_logits = None
    if with_logits:
        target_logits, _ = shift_left(verification.raw_logits[:, 1:], accepted)
        # Draft i predicted position i; slot s of the next block sits at position a + 1 + s.
        draft_logits, _ = shift_left(draft.logits, accepted + 1)
    first_rejected = accepted.clamp(max=num_drafts - 1)[:, None]
    return VerifierFeedback(
        features=features,
        is_fed=is_fed,
        bonus_ids=verification.bonus_ids,
        rejected_ids=draft.token_ids.gather(1, first_rejected)[:, 0],
        accepted_length=accepted,
        target_logits=target_logits,
        draft_logits=draft_logits,
    )
