"""Drafts of one block that depend on each other: each slot's state is corrected by the token drafted before it.

A block-diffusion drafter says all slots at once, so that none knows what its neighbours will say. Domino
(arXiv 2605.29707) puts a small causal head behind the parallel backbone and anchors its training in the backbone's own
logits. Here the head is a two-layer MLP of the predecessor's embedding and the slot's state, and it corrects the state
instead of the logits: the frozen LM head reads it, so that no matrix as wide as the vocabulary is added.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_dflow.model.configuration import DFlowDrafterConfig


class ZeroLinear(nn.Linear):
    """A last layer that starts at zero, told apart when weights are initialised."""


class CausalCorrection(nn.Module):
    """`h + MLP([normed E(predecessor); normed h])`, the MLP's last layer at zero to start with."""

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        width = config.correction_intermediate_size
        assert width is not None and config.correction_top_k is not None
        self.top_k, self.eps = config.correction_top_k, config.rms_norm_eps
        self.up_proj = nn.Linear(2 * config.hidden_size, width)
        self.act_fn = ACT2FN["silu"]
        self.down_proj = ZeroLinear(width, config.hidden_size)

    def forward(self, hidden: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """Corrected states `[..., H]` of final states `[..., H]` behind tokens with embeddings `[..., H]`."""
        return hidden + self.correction(hidden, previous_embeds)

    def correction(self, hidden: torch.Tensor, previous_embeds: torch.Tensor) -> torch.Tensor:
        """What is added to the states, `[..., H]`."""
        both = [nn.functional.rms_norm(one, one.shape[-1:], eps=self.eps) for one in (previous_embeds, hidden)]
        return self.down_proj(self.act_fn(self.up_proj(torch.cat(both, dim=-1))))


class CorrectedCandidates:
    """A block's candidates: the most likely tokens of each slot, scored anew behind the token drafted before it.

    Args:
        correction (`CausalCorrection`): The head.
        hidden (`torch.Tensor` of shape `(B, N, H)`): Final states of the slots.
        logits (`torch.Tensor` of shape `(B, N, V)`): Their logits, processed or not; -inf stays -inf.
        embed (`Callable`): Token ids `[B]` to input embeddings `[B, H]`.
        score (`Callable`): Logits `[B, K]` of tokens `[B, K]` for states `[B, H]`.
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
        self._correction, self._hidden, self._embed, self._score = correction, hidden, embed, score
        self._scores, self._token_ids = logits.topk(min(correction.top_k, logits.shape[-1]), dim=-1)  # [B, N, K]

    def logits(self, slot: int, previous_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[B, vocab_size]` of a slot behind `previous_ids` `[B]`; -inf for all but the candidates."""
        token_ids, scores = self._token_ids[:, slot], self._scores[:, slot]
        change = self._correction.correction(self._hidden[:, slot], self._embed(previous_ids))
        scores = scores + self._score(change, token_ids).to(scores)
        nothing = scores.new_full((len(scores), vocab_size), -torch.inf)
        return nothing.scatter(-1, token_ids, scores)


def head_scores(head: nn.Module, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """What a linear head without its bias gives tokens `[B, K]` for `states` `[B, H]`, as `[B, K]`.

    Only an `nn.Linear` shows all of itself in its weight; a quantised, adapted or offloaded head is asked as a whole.
    """
    weight: Any = getattr(head, "weight", None)
    if type(head) is nn.Linear and weight.is_floating_point() and not weight.is_meta:
        # A target may have padded ids without a row here; their logit is -inf, whatever is added to it.
        rows = weight[token_ids.to(weight.device).clamp(max=len(weight) - 1)]
        return torch.einsum("bkh,bh->bk", rows, states.to(rows))
    whole = head(states) - head(torch.zeros_like(states))
    return whole.gather(-1, token_ids.to(whole.device).clamp(max=whole.shape[-1] - 1))
