"""This package's own format: config.json holds the fields of [`DFlowDrafterConfig`], the weights have our names."""

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_dflow.errors import DrafterConfigError
from hf_dflow.model.configuration import REMOVED, DFlowDrafterConfig

DESCRIPTION = f"'model_type': '{DFlowDrafterConfig.model_type}' (this package)"
DTYPES = (None, "float64", "float32", "bfloat16", "float16")


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json claims this format."""
    return raw.get("model_type") == DFlowDrafterConfig.model_type


def convert_config(raw: Mapping[str, Any], path: str, stored: Mapping[str, Any], **overrides) -> DFlowDrafterConfig:
    """The configuration in the content `raw` of the config.json at `path`.

    Keys that are no fields of ours are left out: transformers would let some of them choose code to run.

    Raises:
        [`DrafterConfigError`]: A value of the wrong type.
    """
    if "vocab_size" not in {**raw, **overrides}:  # null is an answer, the target's; no key at all is none
        raise DrafterConfigError(f"{path}/config.json: 'vocab_size' is missing and has no safe default; add it.")
    fields = {key: raw[key] for key in (*DFlowDrafterConfig.__annotations__, REMOVED) if key in raw}
    return make_config(path, {**fields, "dtype": raw.get("dtype", raw.get("torch_dtype"))}, overrides)


def make_config(path: str, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> DFlowDrafterConfig:
    """A checked [`DFlowDrafterConfig`] of `fields` and, before them, `overrides`; errors name `path`'s config.json."""
    if fields.get("dtype") not in DTYPES:
        allowed = ", ".join(name for name in DTYPES if name)
        raise DrafterConfigError(f"{path}/config.json: 'dtype' is {fields['dtype']!r}; use one of {allowed}.")
    try:
        config = DFlowDrafterConfig(**{"name_or_path": path, **fields, **overrides})
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DrafterConfigError(f"{path}/config.json: {error}") from error
    config.check()
    return config


def rename(name: str) -> str | None:
    """Our name of a stored tensor."""
    return name


def convert_weights(tensors: dict[str, torch.Tensor], config: DFlowDrafterConfig, path: str) -> dict[str, torch.Tensor]:
    """Our weights of the stored ones."""
    return tensors
