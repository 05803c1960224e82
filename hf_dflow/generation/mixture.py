"""A corrected draft law: the drafter's, mixed with the verifier's distributions at the rejected rows of the last step.

Rejected row j was computed behind a wrong prefix, but it is the verifier's own distribution at the position of slot
j - a. It may enter the draft law, as that law is what sampling, ratio and residual all use (Leviathan et al.,
2211.17192, require no more of q than that); it never enters the accept test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hf_dflow.generation.acceptance import AcceptanceProcessor
from hf_dflow.generation.step import Proposal, Verification, VerifierFeedback
from hf_dflow.model.configuration import NUM_TRAITS

TOP_K = 64  # likeliest tokens of a rejected row that are used; the rest of its mass stays with the drafter
PRIOR_WEIGHT, PRIOR_COUNT = 0.05, 8.0  # the first weight, and how many revealed slots it is worth
ENTROPIES = (0.5, 2.0)  # nats: the edges between low, medium and high entropy of a row
NUM_BUCKETS = 2 * 2 * (len(ENTROPIES) + 1)  # first or later slot; likeliest tokens agree or not; entropy
LEARNED = "learned"  # the value of `stale_mixture` for the weights that were fitted for the drafter
LARGEST_WEIGHT = 0.9  # of these: a part always stays the drafter's


@dataclass
class _Law:
    """The drafter's law of the slots: its logits, not copied, and the probabilities of chosen tokens."""

    logits: torch.Tensor  # [1, n, V]
    log_total: torch.Tensor  # [1, n] of their exponentials
    highest: torch.Tensor  # [1, n]

    @classmethod
    def of(cls, logits: torch.Tensor) -> "_Law":
        return cls(logits, logits.logsumexp(dim=-1), logits.amax(dim=-1))

    def probs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of tokens `[1, n, K]`."""
        return (self.logits.gather(-1, token_ids) - self.log_total[..., None]).exp()


@dataclass
class _Mixed:
    """The ingredients of the last draft's law, kept until its outcome is known."""

    drafter: _Law
    top: torch.Tensor  # [1, n, K] log-probabilities of the rejected row's likeliest tokens
    token_ids: torch.Tensor  # [1, n, K] these tokens
    own_at_top: torch.Tensor  # [1, n, K] the drafter's logits of these tokens
    probs: torch.Tensor  # [1, n, K] the rejected row's, renormalised; 0 for what the drafter never drafts
    kept: torch.Tensor  # [1, n] the mass of these tokens before
    weights: torch.Tensor = field(init=False)  # [1, n] of the rejected row in the mixture

    @classmethod
    def of(cls, own: torch.Tensor, stale: torch.Tensor) -> "_Mixed":
        """Of logits `[1, n, V]`. The row's law is needed at its likeliest tokens only, and so is the drafter's: a whole
        vocabulary is read as seldom as possible."""
        top, token_ids = stale.topk(min(TOP_K, stale.shape[-1]), dim=-1)
        top = top - stale.logsumexp(dim=-1, keepdim=True)
        own_at_top = own.gather(-1, token_ids)
        probs = top.exp() * own_at_top.isfinite()  # not the mask token, nor what has no row in its head
        kept = probs.sum(dim=-1).clamp(max=1.0)  # a sum of all probabilities may be rounded above 1
        probs = probs / kept.clamp(min=torch.finfo(probs.dtype).tiny)[..., None]
        return cls(_Law.of(own), top, token_ids, own_at_top, probs, kept)

    @property
    def is_agreed(self) -> torch.Tensor:
        """`[1, n]`: whether the row's likeliest token is one of the drafter's likeliest."""
        return self.own_at_top[..., 0] == self.drafter.highest

    def entropy(self) -> torch.Tensor:
        """`[1, n]` of the row, in nats: a lower bound, as all mass outside its likeliest tokens counts as one token."""
        probs = self.top.exp()
        rest = (1.0 - probs.sum(dim=-1)).clamp(min=0.0)
        return -torch.special.xlogy(probs, probs).sum(dim=-1) - torch.special.xlogy(rest, rest)

    @cached_property
    def buckets(self) -> torch.Tensor:
        """`[1, n]`: which of the weights that are learned online a slot uses."""
        entropy = self.entropy()
        level = sum(((entropy >= edge).long() for edge in ENTROPIES), torch.zeros_like(entropy, dtype=torch.long))
        is_later = (torch.arange(entropy.shape[1], device=entropy.device) > 0).long()
        return (is_later * 2 + self.is_agreed.long()) * (len(ENTROPIES) + 1) + level

    @cached_property
    def traits(self) -> torch.Tensor:
        """The inputs of a fitted weight, `[1, n, NUM_TRAITS]`.

        In order: 1; whether the slot is not the first; its distance from the rejection, as a share of 8; whether
        drafter and rejected row agree; the row's entropy in nats; the drafter's largest probability; the drafter's
        probability of the row's likeliest token; and the row's.
        """
        place = torch.arange(self.top.shape[1], device=self.top.device).to(self.top).expand(self.top.shape[:2])
        log_total = self.drafter.log_total
        columns = [
            torch.ones_like(place),
            (place > 0).to(place),
            place / 8.0,
            self.is_agreed.to(place),
            self.entropy(),
            (self.drafter.highest - log_total).exp(),
            (self.own_at_top[..., 0] - log_total).exp(),
            self.top[..., 0].exp(),
        ]
        assert len(columns) == NUM_TRAITS
        return torch.stack(columns, dim=-1)


@dataclass
class Revealed:
    """What verification revealed about the slots that a mixture fed, `[1, n]` each."""

    own: torch.Tensor  # the drafter's probability of the right token
    stale: torch.Tensor  # the rejected row's, among its likeliest tokens
    is_revealed: torch.Tensor  # False behind the first rejection, and where no row fed the slot


class StaleMixture(AcceptanceProcessor):
    """Drafts from `(1 - w) q + w p_stale`; the output keeps the target's law.

    `w` is learned for each row of each call from the tokens that verification reveals: it averages, over revealed
    slots, the share of the token's probability that the rejected row accounts for (an online EM step for a mixture's
    weight), separately for first and later slots, for rows whose most likely token the drafter agrees with or not, and
    by entropy. It starts at 0.05 and tends to 0 where rejected rows carry no information.

    It holds on to the drafter's logits of one block, `N * V` numbers that are not copied, and 64 tokens of each
    rejected row.

    Args:
        weight (`float`, *optional*): A fixed `w` in (0, 1] instead.
        coefficients (`list[float]`, *optional*): The logit of `w` as a weighted sum of a slot's traits
            ([`_Mixed.traits`]) instead; `hf-dflow calibrate` fits them on recorded text, nothing is learned online.
    """

    def __init__(self, weight: float | None = None, coefficients: Sequence[float] | None = None):
        self.weight = weight
        self.coefficients = None if coefficients is None else torch.tensor(coefficients, dtype=torch.float32)
        self._credit = torch.full((NUM_BUCKETS,), PRIOR_WEIGHT * PRIOR_COUNT)
        self._counts = torch.full((NUM_BUCKETS,), PRIOR_COUNT)
        self._mixed: _Mixed | None = None

    @property
    def learned_weights(self) -> torch.Tensor:
        """The present `w` of each bucket, `(NUM_BUCKETS,)`."""
        return self._credit / self._counts

    def adjust_draft_logits(self, draft_logits: torch.Tensor, feedback: VerifierFeedback | None) -> torch.Tensor:
        self._mixed = None
        fed = None if feedback is None else feedback.fed_logits
        hinted = 0 if fed is None else min(draft_logits.shape[1], fed.shape[1])
        if fed is None or not hinted:
            return draft_logits
        # Half precision rounds a weight near 1 up to it, and what is left of a small probability to nothing.
        own = draft_logits[:, :hinted].to(torch.promote_types(draft_logits.dtype, torch.float32))
        self._mixed = mixed = _Mixed.of(own, fed[:, :hinted].to(own))
        mixed.weights = weights = self._weights(mixed).to(own) * mixed.kept
        # As log-probabilities, which half precision rounds least. All tokens but the row's likeliest become less
        # likely; a slot of weight 0 keeps its law.
        is_mixed = weights > 0
        less = torch.where(is_mixed, torch.log1p(-weights) - mixed.drafter.log_total, 0.0)[..., None]
        at_top = torch.logaddexp(mixed.own_at_top + less, (weights[..., None] * mixed.probs).log())
        logits = (own + less).scatter_(-1, mixed.token_ids, at_top).to(draft_logits.dtype)
        return logits if hinted == draft_logits.shape[1] else torch.cat([logits, draft_logits[:, hinted:]], dim=1)

    def _weights(self, mixed: _Mixed) -> torch.Tensor:
        if self.weight is not None:
            return torch.full_like(mixed.kept, self.weight)
        if self.coefficients is not None:
            return (mixed.traits @ self.coefficients.to(mixed.traits)).sigmoid().clamp(max=LARGEST_WEIGHT)
        return self.learned_weights.to(mixed.kept.device)[mixed.buckets]

    def observe(self, proposal: Proposal, verification: Verification) -> None:
        mixed, self._mixed = self._mixed, None
        if mixed is not None and self.weight is None and self.coefficients is None:
            self._learn(mixed, self._reveal(mixed, proposal, verification))

    def _reveal(self, mixed: _Mixed, proposal: Proposal, verification: Verification) -> Revealed:
        slots = mixed.weights.shape[1]
        accepted = verification.accepted_length[:, None].to(mixed.weights.device)
        places = torch.arange(slots, device=accepted.device)
        bonus = verification.bonus_ids[:, None].to(accepted.device)
        drafts = proposal.token_ids[:, :slots].to(accepted.device)
        drafts = torch.nn.functional.pad(drafts, (0, slots - drafts.shape[1]))  # fewer may have been verified
        truth = torch.where(places < accepted, drafts, bonus)  # [1, n]
        own = mixed.drafter.probs(truth[..., None])[..., 0]
        stale = (mixed.probs * (mixed.token_ids == truth[..., None])).sum(dim=-1)
        return Revealed(own, stale, (places <= accepted) & (mixed.weights > 0))

    def _learn(self, mixed: _Mixed, revealed: Revealed) -> None:
        own, stale = revealed.own * (1.0 - mixed.weights), revealed.stale * mixed.weights
        is_revealed = revealed.is_revealed & (own + stale > 0)
        # The weight of a slot is w times the kept mass, so that share is credited to w.
        credit = torch.where(is_revealed, stale / (own + stale).clamp(min=1e-30) / mixed.kept.clamp(min=1e-6), 0.0)
        for total, amount in ((self._credit, credit.clamp(max=1.0)), (self._counts, is_revealed)):
            total.index_add_(0, mixed.buckets[0].to(total.device), amount[0].to(total))
