"""Heads that condition each draft on the one before it. A plain block-diffusion drafter predicts all slots at once.

The candidate selector is DFlash 2's (PyPI dflash 0.1.0). The causal correction follows Domino (arXiv 2605.29707), which
puts a small causal head behind the parallel backbone and anchors its training in the backbone's own logits. Here it
corrects a slot's final state instead of its logits and the frozen LM head reads the result, so that no matrix as wide
as the vocabulary is added.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.relay import ZeroLinear


class Candidates:
    """The `top_k` most likely tokens of each slot of a block, from logits `[B, N, V]`; -inf stays -inf."""

    def __init__(self, logits: torch.Tensor, top_k: int):
        self.scores, self.token_ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)  # [B, N, K]

    def logits(self, slot: int, previous_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[B, vocab_size]` of a slot after tokens `previous_ids` `[B]`; -inf for all but the candidates."""
        scores = self.scores[:, slot] + self.change(slot, previous_ids)
        return scores.new_full((len(scores), vocab_size), -torch.inf).scatter(-1, self.token_ids[:, slot], scores)

    def following(self) -> torch.Tensor:
        """Scores `[B, N - 1, K, K]` of every pair of candidates: entry `[b, i, j, k]` is that of candidate k of slot
        i + 1 after candidate j of slot i.
        """
        return self.scores[:, 1:, None] + self.changes(self.token_ids[:, :-1])

    def change(self, slot: int, previous_ids: torch.Tensor) -> torch.Tensor:
        """What `previous_ids` `[B]` change in the scores of a slot's candidates, `[B, K]`."""
        raise NotImplementedError

    def changes(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """The same for slots from the second on, after several tokens each: `[B, N - 1, P]` -> `[B, N - 1, P, K]`."""
        raise NotImplementedError


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by the token drafted before them.

    A candidate c of slot i scores `logit_i(c) + sum_r (P[previous, r] * (W h_i)_r * S[c, r])`.
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        rank, vocab_size = config.selector_rank, config.vocab_size
        assert rank is not None and vocab_size is not None and config.selector_top_k is not None
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def candidates(self, hidden: torch.Tensor, logits: torch.Tensor) -> Candidates:
        """Candidates of the slots with final states `[B, N, H]` and logits `[B, N, V]`."""
        return _SelectorCandidates(self, hidden, logits)


class _SelectorCandidates(Candidates):
    def __init__(self, selector: CandidateSelector, hidden: torch.Tensor, logits: torch.Tensor):
        super().__init__(logits, selector.top_k)
        codebook = selector.successor_codebook
        # A target may have padded ids without a row here; their logit is -inf, whatever is added to it.
        rows = codebook(self.token_ids.clamp(max=codebook.num_embeddings - 1))
        self._codebook = selector.predecessor_codebook
        self._rows = rows * selector.hidden_projection(hidden)[:, :, None]  # [B, N, K, R]

    def change(self, slot, previous_ids):
        return (self._rows[:, slot] * self._previous(previous_ids)[:, None]).sum(dim=-1)

    def changes(self, previous_ids):
        return self._previous(previous_ids) @ self._rows[:, 1:].mT

    def _previous(self, token_ids: torch.Tensor) -> torch.Tensor:
        is_known = token_ids < self._codebook.num_embeddings  # a target may emit tokens that a smaller drafter lacks
        return self._codebook(token_ids.where(is_known, 0)) * is_known[..., None]


class CausalCorrection(nn.Module):
    """`h + MLP([normed E(predecessor); normed h])`, the MLP's last layer starting at zero."""

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        width = config.correction_intermediate_size
        assert width is not None and config.correction_top_k is not None
        self.top_k, self.eps = config.correction_top_k, config.rms_norm_eps
        self.up_proj = nn.Linear(2 * config.hidden_size, width)
        self.act_fn = ACT2FN["silu"]
        self.down_proj = ZeroLinear(width, config.hidden_size)

    def forward(self, hidden: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """Corrected states `[..., H]` of final states `[..., H]` after tokens with embeddings `[..., H]`."""
        return hidden + self.correction(hidden, previous_embeds)

    def correction(self, hidden: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """What is added to the states, `[..., H]`."""
        parts = [nn.functional.rms_norm(part, part.shape[-1:], eps=self.eps) for part in (previous_embeds, hidden)]
        return self.down_proj(self.act_fn(self.up_proj(torch.cat(parts, dim=-1))))


class CorrectedCandidates(Candidates):
    """Candidates whose scores change as the corrected state changes their logits.

    Args:
        correction (`CausalCorrection`): The head.
        hidden (`torch.Tensor` of shape `(B, N, H)`): Final states of the slots.
        logits (`torch.Tensor` of shape `(B, N, V)`): Their logits, processed or not.
        embed (`Callable`): Token ids `[...]` to input embeddings `[..., H]`.
        score (`Callable`): States `[..., P, H]` and token ids `[..., K]` to logits `[..., P, K]`.
    """

    def __init__(
        self,
        correction: CausalCorrection,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ):
        super().__init__(logits, correction.top_k)
        self._correction, self._hidden, self._embed, self._score = correction, hidden, embed, score

    def change(self, slot, previous_ids):
        added = self._correction.correction(self._hidden[:, slot], self._embed(previous_ids))
        return self._score(added[:, None], self.token_ids[:, slot])[:, 0].to(self.scores)

    def changes(self, previous_ids):
        hidden = self._hidden[:, 1:, None].expand(*previous_ids.shape, -1)
        added = self._correction.correction(hidden, self._embed(previous_ids))
        return self._score(added, self.token_ids[:, 1:]).to(self.scores)


def head_scores(head: nn.Module, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits `[..., P, K]` that a linear head, its bias left out, gives tokens `[..., K]` for `states`
    `[..., P, H]`.

    Only an `nn.Linear` is described by its weight alone; a quantised, adapted or offloaded head is called as a whole.
    """
    weight: Any = getattr(head, "weight", None)
    if type(head) is nn.Linear and weight.is_floating_point() and not weight.is_meta:
        # A target may have padded ids without a row here; their logit is -inf, whatever is added to it.
        rows = weight[token_ids.to(weight.device).clamp(max=len(weight) - 1)]
        return states.to(rows) @ rows.mT
    logits = head(states) - head(torch.zeros_like(states))
    token_ids = token_ids.to(logits.device).clamp(max=logits.shape[-1] - 1)
    return logits.gather(-1, token_ids[..., None, :].expand(*logits.shape[:-1], -1))
