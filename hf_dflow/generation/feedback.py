"""A step's rejected rows become the feedback for the next step."""

from hf_dflow.generation.step import Proposal, Verification, VerifierFeedback, shift_left


def make_feedback(
    chain: Proposal, verification: Verification, accepted: list[int], with_logits: bool
) -> VerifierFeedback | None:
    """Feedback for the next step; `None` where the step drafted nothing. It replaces any earlier one.

    Args:
        chain, verification: Of the step.
        accepted (`list[int]`): `verification.accepted_length` as far as it was emitted, on the host.
        with_logits (`bool`): Whether anybody reads the logits.
    """
    if chain.num_drafts == 0:
        return None
    accepted_length = verification.accepted_length
    # Row 0 is the anchor's, so dropping it makes entry i row i + 1; shifting by a then puts row a + i + 1 at entry i.
    features, is_fed = shift_left(verification.features[:, 1:], accepted_length, chain.row_lengths)
    last = chain.num_drafts - 1 if chain.row_lengths is None else (chain.row_lengths - 1).clamp(min=0)
    first_rejected = accepted_length.clamp(max=last)[:, None]
    return VerifierFeedback(
        features=features,
        is_fed=is_fed,
        bonus_ids=verification.bonus_ids,
        rejected_ids=chain.token_ids.gather(1, first_rejected)[:, 0],
        accepted_length=accepted_length,
        accepted=tuple(accepted),
        lengths=chain.lengths,
        step_target_logits=verification.raw_logits if with_logits else None,
        step_draft_logits=chain.logits if with_logits else None,
    )
