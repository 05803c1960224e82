"""z-lab's DFlash v1 layout (`"architectures": ["DFlashDraftModel"]`) as a [`DFlowDrafterConfig`]; weight names agree.

The format's own reader fills gaps with guesses (block 16, evenly spread layer ids, the rotary base of another model).
A drafter built on a wrong guess still runs and merely drafts badly, so a gap is an error here.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import Qwen3Config

from hf_dflow.checkpoints.own import make_config
from hf_dflow.errors import DrafterConfigError
from hf_dflow.model.configuration import DFlowDrafterConfig

ARCHITECTURE = "DFlashDraftModel"
DESCRIPTION = f"'architectures': ['{ARCHITECTURE}'] with 'model_type': 'qwen3' (z-lab's DFlash v1)"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Absent, these have the same default in Qwen3 and here.
OPTIONAL = ("hidden_act", "rms_norm_eps", "initializer_range", "attention_bias", "attention_dropout")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
# In `dflash_config`, or at top level in older cards.
DRAFT_REQUIRED = ("block_size", "mask_token_id", "target_layer_ids")
DRAFT_OPTIONAL = ("num_target_layers", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# "causal" is not z-lab's; other servers write it. It is read only to refuse a contradiction.
NOTES = ("causal",)
TOP_LEVEL_KEYS = {
    *Qwen3Config().to_dict(),
    *("dflash_config", "is_causal", "rope_theta", "rope_scaling", "rope_parameters"),
    *("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "_attn_implementation", "hf_dflow"),
}


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json claims this format."""
    return ARCHITECTURE in (raw.get("architectures") or []) and "speculators_model_type" not in raw


def convert_config(raw: Mapping[str, Any], path: str, stored: Mapping[str, Any], **overrides) -> DFlowDrafterConfig:
    """Translate the content `raw` of the config.json at `path`.

    Args:
        raw (`dict`): The file's content, with the draft keys in `dflash_config` or at top level.
        path (`str`): Folder or repository, for messages.
        stored (`dict`): What the weights file holds; not needed here.
        overrides: Fields of [`DFlowDrafterConfig`] that win over the file. `use_relay` is `False` unless given: a
            relay that starts at zero adds nothing to a converted drafter until it is trained.

    Raises:
        [`DrafterConfigError`]: A key is missing, contradictory, impossible or unknown; the message names it.
    """
    return ConfigReader(raw, path, overrides).convert()


def rename(name: str) -> str | None:
    """Our name of a stored tensor."""
    return name


def convert_weights(tensors: dict[str, torch.Tensor], config: DFlowDrafterConfig, path: str) -> dict[str, torch.Tensor]:
    """Our weights of the stored ones."""
    return tensors


class ConfigReader:
    """One config.json of z-lab's; a later format of theirs adds draft keys and changes nothing else."""

    description = DESCRIPTION
    own_required: tuple[str, ...] = ()  # draft keys beyond v1's

    def __init__(self, raw: Mapping[str, Any], path: str, overrides: Mapping[str, Any]):
        self.raw, self.path, self.overrides = raw, path, overrides
        self.where = f"{path}/config.json"
        self.required_keys = DRAFT_REQUIRED + self.own_required
        self.nested = raw.get("dflash_config") or {}
        if not isinstance(self.nested, dict):
            self.refuse(f"'dflash_config' is {self.nested!r}, not an object")

    def refuse(self, what: str) -> NoReturn:
        raise DrafterConfigError(f"{self.where}: {what}.")

    def convert(self) -> DFlowDrafterConfig:
        self.check_format()
        fields = {key: self.required(key) for key in SIZES}
        fields |= {key: self.required(key) for key in self.required_keys}
        fields |= {key: self.raw[key] for key in OPTIONAL + TOKEN_IDS if self.raw.get(key) is not None}
        fields |= {
            "num_target_layers": self.draft_value("num_target_layers"),
            "input_embedding_scale": self.factor("input_embedding_scale", 1.0),
            "output_multiplier": self.factor("output_multiplier", 1.0),
            "rope_parameters": self.rope(),
            "dtype": self.raw.get("dtype", self.raw.get("torch_dtype")),
            "input_embedding": "raw",
            "output_head": "target",
            "window_is_inclusive": False,
            "use_relay": False,
        }
        cap = self.factor("final_logit_softcapping", 0.0)
        fields["final_logit_softcapping"] = cap if cap > 0 else None  # the format ignores a cap of 0 or less
        self.check_types(fields)
        fields |= self.attention(fields["num_hidden_layers"])
        return make_config(self.path, fields, self.overrides)

    def check_format(self) -> None:
        model_type = self.raw.get("model_type")
        if model_type not in (None, "qwen3"):
            self.refuse(f"'model_type' is '{model_type}'. Supported: {self.description}")
        draft_keys = (*self.required_keys, *DRAFT_OPTIONAL)
        nested, flat = {*draft_keys, *NOTES}, {*TOP_LEVEL_KEYS, *draft_keys}
        unknown = {f"dflash_config.{key}" for key in self.nested if key not in nested and self.nested[key] is not None}
        unknown |= {key for key in self.raw if key not in flat and self.raw[key] is not None}
        if unknown:
            self.refuse(
                f"unknown key(s) {', '.join(sorted(unknown))}, which may change what the drafter computes. Supported: "
                f"{self.description} with the draft keys {', '.join(draft_keys)}. If a key is only a note, remove it "
                "from the file"
            )

    def draft_value(self, key: str) -> Any:
        """`key` from `dflash_config` or the top level, `None` where neither has it."""
        nested, flat = self.nested.get(key), self.raw.get(key)
        if nested is not None and flat is not None and nested != flat:
            self.refuse(f"'{key}' is {nested!r} in 'dflash_config' and {flat!r} at top level; keep the right one")
        return flat if nested is None else nested

    def required(self, key: str) -> Any:
        value = self.overrides.get(key)
        if value is None:
            value = self.draft_value(key) if key in self.required_keys else self.raw.get(key)
        if value is None:
            self.refuse(f"'{key}' is missing and has no safe default; add it, or pass {key}= to from_pretrained")
        return value

    def check_types(self, fields: dict[str, Any]) -> None:
        others = ("block_size", "mask_token_id", "num_target_layers", *self.own_required)
        integers = {key: fields[key] for key in (*SIZES, *others)}
        for key, value in {**integers, "sliding_window": self.raw.get("sliding_window")}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                self.refuse(f"'{key}' is {value!r}; give an integer")
        for key, value in (
            ("target_layer_ids", fields["target_layer_ids"]),
            ("layer_types", self.raw.get("layer_types")),
        ):
            if value is not None and not isinstance(value, (list, tuple)):
                self.refuse(f"'{key}' is {value!r}; give a list")

    def factor(self, key: str, default: float) -> float:
        value = self.draft_value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(f"'{key}' is {value!r}; give a number")
        return float(value)

    def rope(self) -> dict[str, Any]:
        """Rotary parameters, from `rope_parameters` or the older `rope_theta` with `rope_scaling`."""
        if self.overrides.get("rope_parameters") is not None:
            return self.overrides["rope_parameters"]
        rope = dict(self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {})
        rope.setdefault("rope_theta", self.raw.get("rope_theta"))
        if rope["rope_theta"] is None:
            self.refuse("'rope_theta' (the rotary base) is missing, also from 'rope_parameters'; add it")
        rope.setdefault("rope_type", rope.pop("type", "default"))
        return rope

    def attention(self, num_layers: int) -> dict[str, Any]:
        """Layer types, window and causality of the draft layers."""
        raw, layer_types = self.raw, self.overrides.get("layer_types") or self.raw.get("layer_types")
        if layer_types is None:
            if raw.get("use_sliding_window") or raw.get("sliding_window") is not None:
                self.refuse(
                    "'layer_types' is missing though 'use_sliding_window' or 'sliding_window' is set; "
                    "add one of full_attention, sliding_attention for each layer"
                )
            layer_types = ["full_attention"] * num_layers
        slides = "sliding_attention" in layer_types
        if slides and not raw.get("use_sliding_window"):
            self.refuse(
                "'layer_types' has sliding layers but 'use_sliding_window' is not true, which turns their window off; "
                "set it to true, or make the layers full_attention"
            )
        is_causal = raw.get("is_causal")
        if is_causal not in (None, True, False):
            self.refuse(f"'is_causal' is {is_causal!r}; allowed: true, false, or null (causal on sliding layers only)")
        causal = {
            "sliding_attention": True if is_causal is None else bool(is_causal),
            "full_attention": bool(is_causal),
        }
        claimed = self.nested.get("causal")
        if claimed is not None and any(causal.get(layer_type) != claimed for layer_type in layer_types):
            self.refuse(
                f"'dflash_config.causal' {claimed!r} contradicts 'is_causal' {is_causal!r} for the given 'layer_types' "
                "(null: causal on sliding layers only); set 'is_causal' to what the drafter was trained with"
            )
        return {
            "layer_types": layer_types,
            "sliding_window": raw.get("sliding_window") if slides else None,
            "sliding_is_causal": causal["sliding_attention"],
            "full_is_causal": causal["full_attention"],
        }
