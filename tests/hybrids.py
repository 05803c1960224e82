"""Tiny random targets with recurrent layers, of every family whose block forwards agree with single tokens."""

from functools import cache

import torch
from kit import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, WEIGHT_STD, prompt_of
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

IMAGE = 60  # the token of an image
MARGIN = 1e-3  # of logits; blocks and single tokens differ by 1e-6
FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
FAMILIES = {
    "qwen3_next": {**LINEAR_ATTENTION, **EXPERTS},
    "qwen3_5_text": LINEAR_ATTENTION,
    "olmo_hybrid": LINEAR_ATTENTION,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 64},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_ff_dim": 64},
    "granitemoehybrid": {
        **STATE_SPACE,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}
# Further families, which other tests name.
OTHERS = {
    "qwen3_5_moe_text": {**LINEAR_ATTENTION, **EXPERTS},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "kimi_linear": {
        "layer_types": LINEAR_ATTENTION["layer_types"],
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "zaya": {},
    "zaya, sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
    "lara_mini": {},
    "lfm3": {},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1]},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "recurrent_gemma": {
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": 32,
        "attention_window_size": 64,
    },
}


@cache
def hybrid(family: str, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 1, **overrides):
    """A random model of `family`, on CPU; `overrides` are config fields. No test may change it.

    Float32, because mixers compute in it whatever the weights are.
    """
    config = AutoConfig.for_model(family.partition(",")[0], **{**FIELDS, **{**FAMILIES, **OTHERS}[family], **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in target.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD / 2)
    if config.get_text_config().vocab_size > MASK_TOKEN_ID:
        with torch.no_grad():
            target.get_output_embeddings().weight[MASK_TOKEN_ID] *= 0.01
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target.to(dtype).eval().requires_grad_(False)


@cache
def multimodal_hybrid():
    """A random Qwen3.5 that sees images of 4 tokens with the id `IMAGE`, on CPU. No test may change it."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(
        text_config={**FIELDS, **LINEAR_ATTENTION, "rope_parameters": {**rope, "mrope_interleaved": True}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        for parameter in target.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD / 2)
    with torch.no_grad():
        target.get_output_embeddings().weight[IMAGE - 2 :] *= 0.01  # it says neither images nor the mask token
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target.eval().requires_grad_(False)


def image_inputs(seed: int) -> dict[str, torch.Tensor]:
    """A prompt `[1, 11]` with one image, and the image."""
    ids = torch.tensor([[5, 6, IMAGE - 2, *[IMAGE] * 4, IMAGE - 1, 7, 8, 9]])
    pixels = torch.randn(16, 3 * 16, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, 4, 4]])
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}


@cache
def followed(family: str, new_tokens: int, length: int = 12) -> torch.Tensor:
    """A prompt of `length` tokens and its plain greedy text `[1, length + new_tokens]`, varied and without near ties.

    A block and single tokens round differently, in a recurrent layer too; where the two likeliest tokens are closer
    than `MARGIN`, that could decide.
    """
    target = hybrid(family)
    for seed in range(50):
        output = target.generate(
            prompt_of(length, seed),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best, second = torch.stack(output.logits).topk(2, dim=-1).values.unbind(-1)
        text = output.sequences
        if (best - second).min() > MARGIN and len(set(text[0, length:].tolist())) > min(10, new_tokens // 2):
            return text
    raise ValueError(f"no varied text without near ties among 50 prompts of {family}")
