"""A corrected draft law: the drafter's, mixed with what the verifier said on the rejected rows of the step before.

Rejected row j was computed behind a wrong prefix, but it is the verifier's own word on the position of slot j - a. It
may enter the draft law, since that law is what sampling, ratio and residual all use (Leviathan et al., 2211.17192,
ask no more of q than that); it never enters the accept test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_dflow.fitted import NUM_TRAITS
from hf_dflow.generation.acceptance import AcceptanceProcessor

if TYPE_CHECKING:
    from hf_dflow.generation.drafting import DraftBlock
    from hf_dflow.generation.feedback import VerifierFeedback
    from hf_dflow.generation.verification import Verification

TOP_K = 64  # tokens of a rejected row that are looked at; the rest of its mass stays with the drafter
PRIOR_WEIGHT, PRIOR_COUNT = 0.05, 8.0  # what a row begins with, and how many revealed slots that is worth
ENTROPIES = (0.5, 2.0)  # nats, between a sure, a hesitant and a clueless row
NUM_BUCKETS = 2 * 2 * (len(ENTROPIES) + 1)  # first slot or later; tops agree or not; entropy
LEARNED = "learned"  # the value of `stale_mixture` for weights that were fitted and lie with the drafter
LARGEST_WEIGHT = 0.9  # of these: something stays the drafter's


@dataclass
class _Mixed:
    """What the last draft was mixed from, until its outcome is known."""

    draft_log_probs: torch.Tensor  # [1, n, V] the drafter's
    token_ids: torch.Tensor  # [1, n, K] the rejected row's likeliest
    probs: torch.Tensor  # [1, n, K] renormalised; 0 for what the drafter cannot say
    weights: torch.Tensor  # [1, n] of these in the mixture; 0 where no row fed the slot
    kept: torch.Tensor  # [1, n] the mass of the likeliest
    buckets: torch.Tensor  # [1, n]
    traits: torch.Tensor  # [1, n, NUM_TRAITS]


@dataclass
class Revealed:
    """What verification told of the slots that a mixture fed, `[1, n]` each."""

    own: torch.Tensor  # the drafter's probability of the token that was right
    stale: torch.Tensor  # and the rejected row's, among its likeliest
    is_revealed: torch.Tensor  # False behind the first failure, and where no row fed the slot


class StaleMixture(AcceptanceProcessor):
    """Drafts from `(1 - w) q + w p_stale`; the output's law stays the target's.

    `w` is learned for each row of each call on the tokens that verification reveals: of each revealed slot, the share
    of its probability that the rejected row accounts for is averaged (an online EM step for a mixture's weight), apart
    for first and later slots, for rows whose most likely token the drafter agrees with or not, and by entropy. It
    begins at 0.05 and tends to 0 where rejected rows say nothing.

    It keeps the drafter's law of one block, `N * V` numbers, and 64 tokens of each rejected row.

    Args:
        weight (`float`, *optional*): A fixed `w` in (0, 1] instead.
        coefficients (`list[float]`, *optional*): Or the logit of `w` as a sum over a slot's traits ([`traits_of`]);
            `hf-dflow calibrate` fits them on recorded text, and nothing is learned online.
    """

    def __init__(self, weight: float | None = None, coefficients: Sequence[float] | None = None):
        self.weight = weight
        self.coefficients = None if coefficients is None else torch.tensor(coefficients, dtype=torch.float32)
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
        # Half precision rounds a weight near 1 up to it, and what is left of a small probability to nothing.
        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        own, is_fed = draft_logits[:, :hinted].to(dtype), feedback.is_fed[:, :hinted].to(draft_logits.device)
        stale = feedback.target_logits[:, :hinted].to(own)
        log_q, log_p = own.log_softmax(dim=-1), stale.log_softmax(dim=-1)
        top, token_ids = log_p.topk(min(TOP_K, stale.shape[-1]), dim=-1)
        probs = top.exp() * log_q.gather(-1, token_ids).isfinite()  # the mask token, and others it has no row for
        kept = probs.sum(dim=-1).clamp(max=1.0)  # a sum of all probabilities may be rounded above 1
        probs = probs / kept.clamp(min=torch.finfo(probs.dtype).tiny)[..., None]
        is_agreed = log_q.argmax(dim=-1) == token_ids[..., 0]
        entropy = _entropy(top)
        buckets = self._buckets(entropy, is_agreed)
        traits = traits_of(log_q, top, token_ids, entropy, is_agreed)
        weights = self._weights(buckets, traits).to(kept) * kept * is_fed
        mixed = torch.logaddexp(
            log_q + torch.log1p(-weights)[..., None],
            torch.full_like(log_q, -torch.inf).scatter(-1, token_ids, (weights[..., None] * probs).log()),
        )
        self._mixed = _Mixed(log_q, token_ids, probs, weights, kept, buckets, traits)
        mixed = torch.where(weights[..., None] > 0, mixed, own).to(draft_logits.dtype)
        return torch.cat([mixed, draft_logits[:, hinted:]], dim=1)

    def _buckets(self, entropy: torch.Tensor, is_agreed: torch.Tensor) -> torch.Tensor:
        """The bucket `[1, n]` of each slot."""
        level = sum(((entropy >= edge).long() for edge in ENTROPIES), torch.zeros_like(is_agreed, dtype=torch.long))
        is_later = (torch.arange(entropy.shape[1], device=entropy.device) > 0).long()
        return (is_later * 2 + is_agreed.long()) * (len(ENTROPIES) + 1) + level

    def _weights(self, buckets: torch.Tensor, traits: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return torch.full(buckets.shape, self.weight, device=buckets.device)
        if self.coefficients is not None:
            return (traits @ self.coefficients.to(traits)).sigmoid().clamp(max=LARGEST_WEIGHT)
        return self.learned_weights.to(buckets.device)[buckets]

    def observe(self, draft: "DraftBlock", verification: "Verification") -> None:
        mixed, self._mixed = self._mixed, None
        if mixed is not None and self.weight is None and self.coefficients is None:
            self._learn(mixed, self._reveal(mixed, draft, verification))

    def _reveal(self, mixed: _Mixed, draft: "DraftBlock", verification: "Verification") -> Revealed:
        slots = mixed.weights.shape[1]
        accepted = verification.accepted_length[:, None].to(mixed.weights.device)
        places = torch.arange(slots, device=accepted.device)
        bonus = verification.bonus_ids[:, None].to(accepted.device)
        drafts = draft.token_ids[:, :slots].to(accepted.device)
        drafts = torch.nn.functional.pad(drafts, (0, slots - drafts.shape[1]))  # fewer may have been verified
        truth = torch.where(places < accepted, drafts, bonus)  # [1, n]
        own = mixed.draft_log_probs.gather(-1, truth[..., None])[..., 0].exp()
        stale = (mixed.probs * (mixed.token_ids == truth[..., None])).sum(dim=-1)
        return Revealed(own, stale, (places <= accepted) & (mixed.weights > 0))

    def _learn(self, mixed: _Mixed, revealed: Revealed) -> None:
        own, stale = revealed.own * (1.0 - mixed.weights), revealed.stale * mixed.weights
        is_revealed = revealed.is_revealed & (own + stale > 0)
        # The weight of a slot is w times the kept mass, so that share is credited to w.
        credit = torch.where(is_revealed, stale / (own + stale).clamp(min=1e-30) / mixed.kept.clamp(min=1e-6), 0.0)
        for total, amount in ((self._credit, credit.clamp(max=1.0)), (self._counts, is_revealed)):
            total.index_add_(0, mixed.buckets[0].to(total.device), amount[0].to(total))


def _entropy(top: torch.Tensor) -> torch.Tensor:
    """Of distributions whose likeliest log-probabilities are `[..., K]`, in nats; the rest counts as one token more,
    which makes it a lower bound."""
    rest = (1.0 - top.exp().sum(dim=-1)).clamp(min=0.0)
    return -(top.exp() * top.nan_to_num(neginf=0.0)).sum(dim=-1) - torch.special.xlogy(rest, rest)


def traits_of(
    log_q: torch.Tensor, top: torch.Tensor, token_ids: torch.Tensor, entropy: torch.Tensor, is_agreed: torch.Tensor
) -> torch.Tensor:
    """What a learned weight of each slot is made from, `[1, n, NUM_TRAITS]`.

    One; whether the slot is not the first, and how far from the rejection it is, as a share of 8; whether drafter and
    rejected row agree; the row's entropy in nats; the drafter's largest probability; the drafter's probability of the
    row's likeliest token; and the row's.

    Args:
        log_q (`torch.Tensor` of shape `(1, n, V)`): The drafter's log-probabilities.
        top, token_ids (`torch.Tensor` of shape `(1, n, K)`): The row's likeliest, in falling order.
        entropy, is_agreed (`torch.Tensor` of shape `(1, n)`): Of the row; whether the likeliest tokens are the same.
    """
    place = torch.arange(top.shape[1], device=top.device).to(top).expand(top.shape[:2])
    of_top = log_q.gather(-1, token_ids[..., :1])[..., 0].exp()
    columns = [
        torch.ones_like(place),
        (place > 0).to(place),
        place / 8.0,
        is_agreed.to(place),
        entropy.to(place),
        log_q.amax(dim=-1).exp(),
        of_top,
        top[..., 0].exp(),
    ]
    assert len(columns) == NUM_TRAITS
    return torch.stack(columns, dim=-1)


def is_mixture_weight(value: object) -> bool:
    """Whether `value` is a fixed weight, a number in (0, 1]."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value <= 1.0 and math.isfinite(value)
    )
