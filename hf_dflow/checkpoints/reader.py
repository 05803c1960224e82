"""Reading a drafter's checkpoint: which layout it has, its configuration values, and its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dflow.checkpoints.dflash import DFlash2Layout, DFlashLayout
from hf_dflow.checkpoints.files import read_config, read_tensors, stored_tensors
from hf_dflow.checkpoints.layout import Layout, OwnLayout, StoredTensor, refuse
from hf_dflow.checkpoints.native import NativeLayout
from hf_dflow.checkpoints.speculators import SpeculatorsLayout
from hf_dflow.checkpoints.vllm import VllmLayout

LAYOUTS: dict[str, Layout] = {
    "dflow": OwnLayout(),
    "vllm": VllmLayout(),
    "dflash": DFlashLayout(),
    "dflash2": DFlash2Layout(),
    "speculators": SpeculatorsLayout(),
    "transformers": NativeLayout(),
}
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Checkpoint:
    """What a drafter's files hold. Tensors are read from disk only by [`Checkpoint.read_weights`]."""

    path: str
    layout: Layout
    stored: dict[str, StoredTensor]  # under the names in the files
    fields: dict[str, Any] = field(default_factory=dict)  # of `DFlowDrafterConfig`, without the caller's
    commit: str | None = None  # of config.json; `None` for a folder

    @property
    def headers(self) -> dict[str, StoredTensor]:
        """The tensors that drafting needs, under our names."""
        names = {name: self.layout.rename(name) for name in self.stored}
        return {ours: self.stored[name] for name, ours in names.items() if ours is not None}

    def read_weights(self) -> dict[str, torch.Tensor]:
        """The tensors, under our names."""
        return self.layout.convert_weights(read_tensors(self.stored), self.path)


def read_checkpoint(
    path: str,
    hub_options: Mapping[str, Any],
    *,
    config_source: str | None = None,
    variant: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read config.json and the headers of the weights.

    Args:
        path (`str`): Folder or repository.
        hub_options (`Mapping`): Of [`~hf_dflow.checkpoints.files.HUB_OPTIONS`].
        config_source (`str`, *optional*, defaults to `path`): Folder or repository of config.json.
        variant (`str`, *optional*): As in transformers, of the weights' file names.
        overrides (`Mapping`, *optional*): Fields that the caller sets, which the file need not give.

    Raises:
        [`DrafterConfigError`]: Unknown layout, missing or impossible key.
        [`DrafterWeightsError`]: No safetensors file, or a damaged one.
    """
    overrides = overrides or {}
    source = config_source or path
    raw, commit = read_config(source, hub_options)
    layout = layout_of(raw, source)
    if commit is not None and config_source is None:
        hub_options = {**hub_options, "revision": commit}  # a branch may move between two look-ups
    exported = _exported_fields(raw, path)
    has_relay = bool(exported.get("use_relay")) and overrides.get("use_relay") is not False
    has_correction = exported.get("correction_intermediate_size") is not None
    stored = stored_tensors(path, hub_options, variant, has_relay or has_correction)
    is_unwanted = overrides.get("use_relay") is False if layout.holds_own_parts else bool(exported) and not has_relay
    if is_unwanted:
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith("relay.")}
    fields = read_fields(raw, layout, source, stored, {**exported, **overrides})
    return Checkpoint(path, layout, stored, {**fields, **exported, "dtype": fields["dtype"]}, commit)


def read_fields(
    raw: Mapping[str, Any],
    layout: Layout,
    source: str,
    stored: Mapping[str, StoredTensor],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Configuration fields in the content `raw` of `source`'s config.json, its dtype among them."""
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if dtype is not None and dtype not in DTYPES:
        refuse(source, f"'dtype' is {dtype!r}; use one of {', '.join(DTYPES)}")
    return {**layout.read_fields(raw, source, stored, overrides), "dtype": dtype}


def layout_of(raw: Mapping[str, Any], source: str) -> Layout:
    """The layout that the content `raw` of `source`'s config.json claims.

    Raises:
        [`DrafterConfigError`]: None of those supported.
    """
    if raw.get("quantization_config") is not None:
        refuse(
            source,
            "'quantization_config' says that the weights are quantised; dequantise them first, or load the original "
            "drafter",
        )
    for layout in LAYOUTS.values():
        if layout.matches(raw):
            return layout
    model_type = raw.get("speculators_model_type") or raw.get("model_type")
    supported = "; ".join(layout.description for layout in LAYOUTS.values())
    refuse(
        source,
        f"'architectures' {raw.get('architectures')} with 'model_type' '{model_type}' is not a drafter this hf_dflow "
        f"can load. Supported: {supported}",
    )


def _exported_fields(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Fields that [`~hf_dflow.checkpoints.export.export_drafter`] noted beside another layout, if it wrote the file."""
    note = raw.get("hf_dflow")
    fields = note.get("config", {}) if isinstance(note, dict) else {}
    if not isinstance(fields, dict):
        refuse(path, f"'hf_dflow.config' is {fields!r}; give an object")
    return fields
