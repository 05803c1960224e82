"""Tiny checkpoints in z-lab's DFlash v1 layout, written by the `dflash` package itself, and what it computes with them.

`dflash_generate` of dflash 0.1.0 runs on CPU with transformers 5.17 and 5.24.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE, HIDDEN_SIZE, BLOCK_SIZE, MASK_TOKEN_ID, WINDOW = 64, 32, 4, 63, 8
TARGET_LAYER_IDS, NUM_TARGET_LAYERS = [0, 2], 4
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},  # not the default of any library
    "rms_norm_eps": 1e-5,
}
DRAFT_CONFIG = {"block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN_ID, "target_layer_ids": TARGET_LAYER_IDS}
MIXED_SLIDING = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PURE_SLIDING = {**MIXED_SLIDING, "layer_types": ["sliding_attention"] * 3}
DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}
SCALES = {"input_embedding_scale": 3.0, "output_multiplier": 0.4, "final_logit_softcapping": 2.5}
VARIANTS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "mixed": MIXED_SLIDING,
    "mixed, causal": {**MIXED_SLIDING, "is_causal": True},
    "mixed, bidirectional": {**MIXED_SLIDING, "is_causal": False},
    "pure sliding": PURE_SLIDING,
    "pure sliding, bidirectional": {**PURE_SLIDING, "is_causal": False},
    "scales": {"draft_config": SCALES},
    "scales, flat": {"nested": False, "draft_config": SCALES},
    "yarn, flat": {"nested": False, "rope_parameters": YARN},
    "two layers, flat": {"nested": False, "num_hidden_layers": 2},
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that a wrong mask or position changes the output by far more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else noise * weight.shape[-1] ** -0.5)


def tiny_target(vocab_size: int = VOCAB_SIZE, seed: int = 0, **config) -> Qwen3ForCausalLM:
    """A random 4-layer Qwen3 target; a larger `vocab_size` than the drafter's stands for a padded vocabulary."""
    config = Qwen3Config(**{**SIZES, "vocab_size": vocab_size, "num_hidden_layers": NUM_TARGET_LAYERS, **config})
    target = Qwen3ForCausalLM(config).eval()
    randomize(target, seed)
    return target


def make_dflash_folder(
    path,
    *,
    nested: bool = True,
    draft_config: dict | None = None,
    seed: int = 1,
    draft_class: str = "DFlashDraftModel",
    **config,
):
    """Write a random checkpoint of the z-lab layout to `path` and return the `draft_class` model behind it.

    Args:
        path (`Path`): Folder to write config.json and model.safetensors to.
        nested (`bool`): Draft keys in `dflash_config`, or at top level.
        draft_config (`dict`, *optional*): Draft keys beside block size, mask token and layer ids.
        config: `Qwen3Config` fields and `is_causal`.
    """
    dflash = pytest.importorskip("dflash.model")
    draft_keys = {**DRAFT_CONFIG, **(draft_config or {})}
    layout = {"dflash_config": draft_keys} if nested else draft_keys
    fields = {**SIZES, "num_hidden_layers": 3, "num_target_layers": NUM_TARGET_LAYERS, **layout, **config}
    model = getattr(dflash, draft_class)(Qwen3Config(**fields)).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    return model


def make_dflash2_folder(path, *, draft_config: dict | None = None, **config):
    """The same with a `DFlash2DraftModel`, its codebooks named as published files name them."""
    draft_config = {**DFLASH2, **(draft_config or {})}
    model = make_dflash_folder(path, draft_class="DFlash2DraftModel", draft_config=draft_config, **config)
    file = Path(path) / "model.safetensors"
    weights = {name.replace("codebook.weight", "codebook"): value for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return model


def features_of(length: int, seed: int = 0) -> torch.Tensor:
    """Random tapped target states `[1, length, taps * H]`."""
    return torch.randn(1, length, len(TARGET_LAYER_IDS) * HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def block_ids(anchor: int = 5) -> torch.Tensor:
    """An anchor and mask tokens, `[1, L]`."""
    return torch.tensor([[anchor] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])


@torch.no_grad()
def oracle_hidden(oracle, target, block_ids, features, positions, cache=None) -> torch.Tensor:
    """Final states `[1, L, H]` that dflash computes for `block_ids` `[1, L]` after new context `features` `[1, T, F]`.

    `positions` `[1, T + L]` are those of the new context and the block.
    """
    import dflash.model as dflash

    scale = float(dflash._draft_value(oracle.config, "input_embedding_scale", 1.0))
    embeds = dflash._raw_input_embeddings(target, block_ids, scale)
    return oracle(
        position_ids=positions, noise_embedding=embeds, target_hidden=features, past_key_values=cache, use_cache=True
    )
