"""DFlow's verifier relay (arXiv 2609.06498): what a rejected target row adds to the slot it feeds.

The paper relays states of chosen layers. What the target would have said at a rejected row is read from its logits; a
relay with `relay_top_k` reads that as well, which is a variant of this package: the likeliest tokens' embeddings,
weighted by their probabilities, and how undecided the target was.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.correction import ZeroLinear


class DFlowRelay(nn.Module):
    """Reject-conditioned initialisation (arXiv 2609.06498): what a rejected target row adds to a slot's mask embedding.

    `[beta; gamma] = MLP([E(bonus); E(first rejected draft); h])`, addition `beta * LayerNorm(h) + gamma`. The MLP's
    last layer starts at zero, so that a converted DFlash checkpoint starts as exactly that DFlash. With `relay_top_k`
    the MLP also reads what the verifier's distribution was, through weights that start at zero too.
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        width = config.relay_intermediate_size
        self.up_proj = nn.Linear(3 * config.hidden_size, width)
        self.act_fn = ACT2FN[config.relay_hidden_act]
        self.down_proj = ZeroLinear(width, 2 * config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, elementwise_affine=config.relay_norm_affine)
        reads = config.relay_top_k is not None
        self.summary_proj = ZeroLinear(config.hidden_size + 1, width) if reads else None

    def forward(self, states, bonus_embeds, rejected_embeds, summary=None) -> torch.Tensor:
        """`states` `[B, S, H]` (projected like context), both embeddings `[B, H]` and, where the relay reads it, the
        verifier's distribution as `summary` `[B, S, H + 1]` -> additions `[B, S, H]`."""
        pair = torch.cat([bonus_embeds, rejected_embeds], dim=-1)[:, None].expand(-1, states.shape[1], -1)
        inner = self.up_proj(torch.cat([pair, states], dim=-1))
        if self.summary_proj is not None:
            inner = inner + self.summary_proj(summary)
        modulation = self.down_proj(self.act_fn(inner))
        beta, gamma = modulation.chunk(2, dim=-1)
        return beta * self.norm(states) + gamma


def summarise_logits(logits: torch.Tensor, top_k: int, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Expected embedding of the likeliest tokens, and the entropy as a share of what it could be.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab)`): The target's, unprocessed.
        top_k (`int`): How many of the likeliest tokens count, by their probabilities among all tokens, so that a flat
            distribution gives a short vector.
        embed (`Callable`): Token ids `[..., K]` to input embeddings `[..., K, H]`.

    Returns:
        `torch.Tensor` of shape `(..., H + 1)`: The last column is in [0, 1]; what lies outside the likeliest counts
        there as one token more.
    """
    top, token_ids = logits.float().log_softmax(dim=-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    probs = top.exp()
    rest = (1.0 - probs.sum(dim=-1)).clamp(min=0.0)
    entropy = -torch.special.xlogy(probs, probs).sum(dim=-1) - torch.special.xlogy(rest, rest)
    embeds = embed(token_ids)
    columns = [probs, entropy / math.log(probs.shape[-1] + 1.0)]
    weights, share = (column.to(device=embeds.device, dtype=embeds.dtype) for column in columns)
    return torch.cat([(weights[..., None] * embeds).sum(dim=-2), share[..., None]], dim=-1)
