"""Attention for one-token decode steps of grouped-query models that does not copy the key/value heads.

`scaled_dot_product_attention` with as many key heads as query heads makes transformers (all of 5.17, and 5.24 where a
batch has no padding) write every cached key and value once per query head, at each step and layer. Folding the query
heads that share a key head into the query length gives the same sums without the copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

GROUPED = "hf_dflow_grouped"


def grouped_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, Hq, L, D]
    key: torch.Tensor,  # [B, Hk, S, D]
    value: torch.Tensor,  # [B, Hk, S, Dv]
    attention_mask: torch.Tensor | None,  # [B, 1, L, S], or one per query head
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, `[B, L, Hq, Dv]`; a single query is folded over the key heads where it can be."""
    batch, query_heads, length, width = query.shape
    key_heads = key.shape[1]
    has_head_masks = attention_mask is not None and attention_mask.shape[1] != 1
    has_more = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if length != 1 or query_heads == key_heads or has_head_masks or has_more:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(batch, key_heads, query_heads // key_heads, width)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, 1, query_heads, value.shape[-1]), None


AttentionInterface.register(GROUPED, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, `model` decodes with grouped attention if sdpa is what it uses; afterwards as before."""
    if model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
