"""What the verifier computed on rejected rows, lined up with the slots of the next block."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from hf_dflow.generation.cache import shift_left
from hf_dflow.generation.drafting import DraftBlock
from hf_dflow.generation.verification import Verification


@dataclass(frozen=True)
class StepLogits:
    """Logits of a step as it left them. They are as wide as the vocabulary, so they are moved only for who asks."""

    target: torch.Tensor  # [B, N + 1, V] raw; row 0 is the anchor's
    draft: torch.Tensor  # [B, N, V] processed
    lengths: torch.Tensor | None = None  # [B] drafts of each row, where that is not N


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
    accepted: list[int] = field(default_factory=list)  # the same on the host, which knows it without another wait
    logits: StepLogits | None = None  # only for who reads them: acceptance processors
    lengths: list[int] = field(default_factory=list)  # drafts of each row in that step, at most N; empty for N each

    @cached_property
    def target_logits(self) -> torch.Tensor | None:
        """`[B, N, V]`, raw, of the rejected rows: what follows a wrong prefix. `None` where nobody was to read them."""
        if self.logits is None:
            return None
        return shift_left(self.logits.target[:, 1:], self.accepted_length, self.logits.lengths)[0]

    @cached_property
    def draft_logits(self) -> torch.Tensor | None:
        """`[B, N, V]`: what the drafter said of the slots' positions one step ago."""
        if self.logits is None:
            return None
        # Draft i predicted position i; slot s of the next block sits at position a + 1 + s.
        return shift_left(self.logits.draft, self.accepted_length + 1, self.logits.lengths)[0]

    @property
    def fed_logits(self) -> torch.Tensor | None:
        """`[1, N - a, V]`: of `target_logits` what feeds slots, without a copy. Only for one row, as processors see it.

        Raises:
            ValueError: There are several rows.
        """
        if self.logits is None:
            return None
        if len(self.logits.target) != 1:
            raise ValueError(
                f"fed_logits of {len(self.logits.target)} rows: each has its own number; ask row(i) for it"
            )
        (accepted,), length = self.accepted, self.lengths[0] if self.lengths else self.is_fed.shape[1]
        return self.logits.target[:, 1 + accepted : 1 + length]

    def row(self, row: int) -> "VerifierFeedback | None":
        """What one row would get if it were alone; `None` where it drafted nothing."""
        length = self.lengths[row] if self.lengths else self.is_fed.shape[1]
        if not length:
            return None
        one, logits = slice(row, row + 1), self.logits
        if logits is not None:
            logits = StepLogits(logits.target[one, : length + 1], logits.draft[one, :length])
        return VerifierFeedback(
            features=self.features[one, :length],
            is_fed=self.is_fed[one, :length],
            bonus_ids=self.bonus_ids[one],
            rejected_ids=self.rejected_ids[one],
            accepted_length=self.accepted_length[one],
            accepted=self.accepted[one],
            logits=logits,
            lengths=[length],
        )

    def select(self, rows: torch.Tensor, kept: list[int]) -> "VerifierFeedback":
        """Only the rows `kept`, given on the device too."""
        logits = self.logits
        if logits is not None:
            lengths = None if logits.lengths is None else logits.lengths[rows]
            logits = StepLogits(logits.target[rows], logits.draft[rows], lengths)
        return VerifierFeedback(
            features=self.features[rows.to(self.features.device)],
            is_fed=self.is_fed[rows],
            bonus_ids=self.bonus_ids[rows],
            rejected_ids=self.rejected_ids[rows],
            accepted_length=self.accepted_length[rows],
            accepted=[self.accepted[row] for row in kept] if self.accepted else [],
            logits=logits,
            lengths=[self.lengths[row] for row in kept] if self.lengths else [],
        )


def make_feedback(
    draft: DraftBlock, verification: Verification, lengths: list[int], accepted: list[int], with_logits: bool
) -> VerifierFeedback | None:
    """Feedback for the next step; `None` where the step drafted nothing. It replaces any earlier one.

    Args:
        draft, verification: Of the step.
        lengths, accepted (`list[int]`): How many drafts each row verified, and how many of them were accepted.
        with_logits (`bool`): Whether anybody reads the logits.
    """
    num_drafts = draft.token_ids.shape[1]
    if num_drafts == 0:
        return None
    accepted_length = verification.accepted_length
    # Row 0 is the anchor's, so dropping it makes entry i row i + 1; shifting by a then puts row a + i + 1 at entry i.
    features, is_fed = shift_left(verification.features[:, 1:], accepted_length, draft.lengths)
    last = num_drafts - 1 if draft.lengths is None else (draft.lengths - 1).clamp(min=0)
    first_rejected = accepted_length.clamp(max=last)[:, None]
    return VerifierFeedback(
        features=features,
        is_fed=is_fed,
        bonus_ids=verification.bonus_ids,
        rejected_ids=draft.token_ids.gather(1, first_rejected)[:, 0],
        accepted_length=accepted_length,
        accepted=accepted,
        logits=StepLogits(verification.raw_logits, draft.logits, draft.lengths) if with_logits else None,
        lengths=lengths,
    )
