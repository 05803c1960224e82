"""z-lab's DFlash 2 layout (`"architectures": ["DFlash2DraftModel"]`, PyPI dflash 0.1.0): v1 with convolutions and a
candidate selector. Published files name the selector's codebooks without `.weight`."""

from collections.abc import Mapping
from typing import Any

import torch

from hf_dflow.checkpoints.dflash import ConfigReader
from hf_dflow.model.configuration import DFlowDrafterConfig

ARCHITECTURE = "DFlash2DraftModel"
DESCRIPTION = f"'architectures': ['{ARCHITECTURE}'] with 'model_type': 'qwen3' (z-lab's DFlash 2)"
DRAFT_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NAMES = {
    f"candidate_selector.{one}_codebook": f"candidate_selector.{one}_codebook.weight"
    for one in ("predecessor", "successor")
}


class _Reader(ConfigReader):
    description = DESCRIPTION
    own_required = DRAFT_KEYS


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json claims this format."""
    return ARCHITECTURE in (raw.get("architectures") or []) and "speculators_model_type" not in raw


def convert_config(raw: Mapping[str, Any], path: str, stored: Mapping[str, Any], **overrides) -> DFlowDrafterConfig:
    """As [`hf_dflow.checkpoints.dflash.convert_config`]."""
    return _Reader(raw, path, overrides).convert()


def rename(name: str) -> str | None:
    """Our name of a stored tensor."""
    return NAMES.get(name, name)


def convert_weights(tensors: dict[str, torch.Tensor], config: DFlowDrafterConfig, path: str) -> dict[str, torch.Tensor]:
    """Our weights of the stored ones."""
    return {NAMES.get(name, name): tensor for name, tensor in tensors.items()}
