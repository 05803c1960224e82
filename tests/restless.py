"""A pair whose random drafter is right often enough to be accepted and wrong often enough to be rejected."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dflow import DFlowDrafter, DFlowDrafterConfig

VOCAB = 8  # few tokens, so that chance is right often enough


def restless_pair(seed: int = 8, **overrides):
    """A target of few tokens and a random drafter with a live relay; `overrides` are fields of its configuration."""
    torch.manual_seed(seed)  # 8 is one of the pairs whose greedy run accepts two and more, with relay and without
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,  # restless continuations: a small one repeats a token that a random drafter never says
        attn_implementation="eager",
    )
    target = LlamaForCausalLM(config).double().eval()
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "block_size": 5,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2],
        "initializer_range": 0.5,
    }
    drafter_config = DFlowDrafterConfig(**{**fields, **overrides})
    drafter = DFlowDrafter(drafter_config).double().eval()
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.3)
    return target, drafter
