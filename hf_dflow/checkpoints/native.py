"""transformers' own DFlash assistants (`"model_type": "muse_glimmer_assistant"`).

Their loop hands them what the target's embedding module returns, scaling included, and applies the target's head
without a cap. Sliding layers are bidirectional and see `|q - k| <= W`. The file says nothing of the vocabulary: it is
the target's.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hf_dflow.checkpoints.own import make_config
from hf_dflow.errors import DrafterConfigError
from hf_dflow.model.configuration import DFlowDrafterConfig

MODEL_TYPES = ("muse_glimmer_assistant",)
DESCRIPTION = f"'model_type': '{MODEL_TYPES[0]}' (transformers' DFlash assistant)"
NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "rope_parameters",
    "layer_types",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
]
OPTIONAL = ("sliding_window", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range")


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json claims this format."""
    return raw.get("model_type") in MODEL_TYPES


def convert_config(raw: Mapping[str, Any], path: str, stored: Mapping[str, Any], **overrides) -> DFlowDrafterConfig:
    """Translate the content `raw` of the config.json at `path`; `overrides` win. No relay unless they say so.

    Raises:
        [`DrafterConfigError`]: A key is missing or impossible.
    """
    for key in REQUIRED:
        if raw.get(key) is None and overrides.get(key) is None:
            raise DrafterConfigError(
                f"{path}/config.json: '{key}' is missing and has no safe default; add it, or pass {key}= to "
                "from_pretrained."
            )
    fields = {key: raw[key] for key in (*REQUIRED, *OPTIONAL) if raw.get(key) is not None}
    return make_config(
        path,
        {
            **fields,
            "vocab_size": raw.get("vocab_size"),
            "dtype": raw.get("dtype", raw.get("torch_dtype")),
            "input_embedding": "target",
            "output_head": "target",
            "window_is_inclusive": True,
            "use_relay": False,
        },
        overrides,
    )


def rename(name: str) -> str | None:
    """Our name of a stored tensor."""
    return NAMES.get(name, name)


def convert_weights(tensors: dict[str, torch.Tensor], config: DFlowDrafterConfig, path: str) -> dict[str, torch.Tensor]:
    """Our weights of the stored ones."""
    return {NAMES.get(name, name): tensor for name, tensor in tensors.items()}
