"""A corrected draft law: the drafter's, mixed with what the verifier said on the rejected rows of the step before.

Rejected row j was computed behind a wrong prefix, but it is the verifier's own word on the position of slot j - a. It
may enter the draft law, since that law is what sampling, ratio and residual all use (Leviathan et al., 2211.17192,
ask no more of q than that); it never enters the accept test.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_dflow.generation.acceptance import AcceptanceProcessor

if TYPE_CHECKING:
    from hf_dflow.generation.drafting import DraftBlock
    from hf_dflow.generation.feedback import VerifierFeedback
    from hf_dflow.generation.verification import Verification

TOP_K = 64  # tokens of a rejected row that are looked at; the rest of its mass stays with the drafter
PRIOR_WEIGHT, PRIOR_COUNT = 0.05, 8.0  # what a row begins with, and how many revealed slots that is worth
ENTROPIES = (0.5, 2.0)  # nats, between a sure, a hesitant and a clueless row
NUM_BUCKETS = 2 * 2 * (len(ENTROPIES) + 1)  # first slot or later; tops agree or not; entropy


@dataclass
class _Mixed:
    """What the last draft was mixed from, until its outcome is known."""

    draft_log_probs: torch.Tensor  # [1, n, V] the drafter's
    token_ids: torch.Tensor  # [1, n, K] the rejected row's likeliest
    probs: torch.Tensor  # [1, n, K] renormalised; 0 for what the drafter cannot say
    weights: torch.Tensor  # [1, n] of these in the mixture; 0 where no row fed the slot
    kept: torch.Tensor  # [1, n] the mass of the likeliest
    buckets: torch.Tensor  # [1, n]


class StaleMixture(AcceptanceProcessor):
    """Drafts from `(1 - w) q + w p_stale`; the output's law stays the target's.

    `w` is learned for each row of each call on the tokens that verification reveals: of each revealed slot, the share
    of its probability that the rejected row accounts for is averaged (an online EM step for a mixture's weight), apart
    for first and later slots, for rows whose most likely token the drafter agrees with or not, and by entropy. It
    begins at 0.05 and tends to 0 where rejected rows say nothing.

    It keeps the drafter's law of one block, `N * V` numbers, and 64 tokens of each rejected row.

    Args:
        weight (`float`, *optional*): A fixed `w` in (0, 1] instead.
    """

    def __init__(self, weight: float | None = None):
        self.weight = weight
        self._credit = torch.full((NUM_BUCKETS,), PRIOR_WEIGHT * PRIOR_COUNT)
        self._counts = torch.full((NUM_BUCKETS,), PRIOR_COUNT)
        self._mixed: _Mixed | None = None

    @property
    def learned_weights(self) -> torch.Tensor:
        """Present `w` of each bucket, `[first or later slot * tops agree or not * entropy]`."""
        return self._credit / self._counts

    def adjust_draft_logits(self, draft_logits: torch.Tensor, feedback: "VerifierFeedback | None") -> torch.Tensor:
        self._mixed = None
        if feedback is None or feedback.target_logits is None:
            return draft_logits
        hinted = min(draft_logits.shape[1], feedback.is_fed.shape[1])
        own, is_fed = draft_logits[:, :hinted], feedback.is_fed[:, :hinted].to(draft_logits.device)
        stale = feedback.target_logits[:, :hinted].to(own)
        log_q, log_p = own.log_softmax(dim=-1), stale.log_softmax(dim=-1)
        top, token_ids = log_p.topk(min(TOP_K, stale.shape[-1]), dim=-1)
        probs = top.exp() * log_q.gather(-1, token_ids).isfinite()  # the mask token, and others it has no row for
        kept = probs.sum(dim=-1)
        probs = probs / kept.clamp(min=torch.finfo(probs.dtype).tiny)[..., None]
        buckets = self._buckets(top, is_agreed=log_q.argmax(dim=-1) == token_ids[..., 0])
        weights = self._weights(buckets) * kept * is_fed
        mixed = torch.logaddexp(
            log_q + torch.log1p(-weights)[..., None],
            torch.full_like(log_q, -torch.inf).scatter(-1, token_ids, (weights[..., None] * probs).log()),
        )
        self._mixed = _Mixed(log_q, token_ids, probs, weights, kept, buckets)
        mixed = torch.where(weights[..., None] > 0, mixed, own)
        return torch.cat([mixed, draft_logits[:, hinted:]], dim=1)

    def _buckets(self, top: torch.Tensor, is_agreed: torch.Tensor) -> torch.Tensor:
        """The bucket `[1, n]` of each slot, from its rejected row's likeliest log-probabilities `[1, n, K]`."""
        rest = (1.0 - top.exp().sum(dim=-1)).clamp(min=0.0)  # counted as one token more: an entropy's lower bound
        entropy = -(top.exp() * top.nan_to_num(neginf=0.0)).sum(dim=-1) - torch.special.xlogy(rest, rest)
        level = sum(((entropy >= edge).long() for edge in ENTROPIES), torch.zeros_like(is_agreed, dtype=torch.long))
        is_later = (torch.arange(top.shape[1], device=top.device) > 0).long()
        return (is_later * 2 + is_agreed.long()) * (len(ENTROPIES) + 1) + level

    def _weights(self, buckets: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return torch.full(buckets.shape, self.weight, device=buckets.device)
        return self.learned_weights.to(buckets.device)[buckets]

    def observe(self, draft: "DraftBlock", verification: "Verification") -> None:
        mixed, self._mixed = self._mixed, None
        if mixed is None or self.weight is not None:
            return
        slots = mixed.weights.shape[1]
        accepted = verification.accepted_length[:, None].to(mixed.weights.device)
        places = torch.arange(slots, device=accepted.device)
        bonus = verification.bonus_ids[:, None].to(accepted.device)
        drafts = draft.token_ids[:, :slots].to(accepted.device)
        drafts = torch.nn.functional.pad(drafts, (0, slots - drafts.shape[1]))  # fewer may have been verified
        truth = torch.where(places < accepted, drafts, bonus)  # [1, n]
        own = mixed.draft_log_probs.gather(-1, truth[..., None])[..., 0].exp() * (1.0 - mixed.weights)
        stale = (mixed.probs * (mixed.token_ids == truth[..., None])).sum(dim=-1) * mixed.weights
        is_revealed = (places <= accepted) & (mixed.weights > 0) & (own + stale > 0)
        # The weight of a slot is w times the kept mass, so that share is credited to w.
        credit = torch.where(is_revealed, stale / (own + stale).clamp(min=1e-30) / mixed.kept.clamp(min=1e-6), 0.0)
        for total, amount in ((self._credit, credit.clamp(max=1.0)), (self._counts, is_revealed)):
            total.index_add_(0, mixed.buckets[0].to(total.device), amount[0].to(total))


def is_mixture_weight(value: object) -> bool:
    """Whether `value` is a fixed weight, a number in (0, 1]."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= 1.0 and math.isfinite(value)
    )
