"""DFlow's verifier relay (arXiv 2609.06498): what a rejected target row adds to the slot it feeds."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_dflow.model.configuration import DFlowDrafterConfig


class ZeroLinear(nn.Linear):
    """A last layer whose weights start at zero, so that a new part changes nothing before it is trained."""


class DFlowRelay(nn.Module):
    """Reject-conditioned initialisation: an addition to the mask embedding of a slot that a rejected target row feeds.

    `[beta; gamma] = MLP([E(bonus); E(first rejected draft); h])`, addition `beta * LayerNorm(h) + gamma`. A converted
    DFlash checkpoint starts as exactly that DFlash.
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        width = config.relay_intermediate_size
        self.up_proj = nn.Linear(3 * config.hidden_size, width)
        self.act_fn = ACT2FN[config.relay_hidden_act]
        self.down_proj = ZeroLinear(width, 2 * config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, elementwise_affine=config.relay_norm_affine)

    def forward(self, states, bonus_embeds, rejected_embeds) -> torch.Tensor:
        """`states` `[B, S, H]` (projected like context) and both embeddings `[B, H]` -> additions `[B, S, H]`."""
        pair = torch.cat([bonus_embeds, rejected_embeds], dim=-1)[:, None].expand(-1, states.shape[1], -1)
        modulation = self.down_proj(self.act_fn(self.up_proj(torch.cat([pair, states], dim=-1))))
        beta, gamma = modulation.chunk(2, dim=-1)
        return beta * self.norm(states) + gamma
