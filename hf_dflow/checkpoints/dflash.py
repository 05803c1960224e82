"""z-lab's layouts: DFlash v1 (`"architectures": ["DFlashDraftModel"]`) and DFlash 2 (`"DFlash2DraftModel"`).

DFlash 2 (PyPI dflash 0.1.0) is v1 with convolutions and a candidate selector. Weight names are ours, but for the
selector's codebooks, which published files store without `.weight`.

The format's own reader fills gaps with guesses (block 16, evenly spread layer ids, the rotary base of another model).
A drafter built on a wrong guess still runs and only drafts badly, so a gap is an error here.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import Qwen3Config

from hf_dflow.checkpoints.layout import (
    LAYER_DEFAULTS,
    LAYER_SIZES,
    TOKEN_IDS,
    Export,
    Layout,
    check_layer_count,
    refuse,
    refuse_export,
)

# Draft keys, in `dflash_config` or at top level in older files.
DRAFT_REQUIRED = ("block_size", "mask_token_id", "target_layer_ids")
DRAFT_OPTIONAL = ("num_target_layers", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
DFLASH2_REQUIRED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# "causal" is not z-lab's; other servers write it. It is read only to refuse a contradiction.
NOTES = ("causal",)
QWEN3_FIELDS = (*LAYER_SIZES, *LAYER_DEFAULTS, *TOKEN_IDS, "rope_parameters", "layer_types")
TOP_LEVEL_KEYS = {
    *Qwen3Config().to_dict(),
    *("dflash_config", "is_causal", "rope_theta", "rope_scaling", "rope_parameters"),
    *("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "_attn_implementation", "hf_dflow"),
}


class DFlashLayout(Layout):
    """DFlash v1."""

    architecture = "DFlashDraftModel"
    description = f"'architectures': ['{architecture}'] with 'model_type': 'qwen3' (z-lab's DFlash v1)"
    added_keys: tuple[str, ...] = ()  # required draft keys beyond v1's

    def matches(self, raw):
        return self.architecture in (raw.get("architectures") or []) and "speculators_model_type" not in raw

    def read_fields(self, raw, path, stored, overrides):
        return _ConfigReader(self, raw, path, overrides).read()


class DFlash2Layout(DFlashLayout):
    """DFlash 2."""

    architecture = "DFlash2DraftModel"
    description = f"'architectures': ['{architecture}'] with 'model_type': 'qwen3' (z-lab's DFlash 2)"
    added_keys = DFLASH2_REQUIRED
    renamed = {
        f"candidate_selector.{kind}_codebook": f"candidate_selector.{kind}_codebook.weight"
        for kind in ("predecessor", "successor")
    }


class _ConfigReader:
    """Reads one config.json; every method may refuse a key of it."""

    def __init__(self, layout: DFlashLayout, raw: Mapping[str, Any], path: str, overrides: Mapping[str, Any]):
        self.layout, self.raw, self.path, self.overrides = layout, raw, path, overrides
        self.draft_required = (*DRAFT_REQUIRED, *layout.added_keys)
        self.nested = raw.get("dflash_config") or {}
        if not isinstance(self.nested, dict):
            self.refuse(f"'dflash_config' is {self.nested!r}; give an object")

    def refuse(self, problem: str) -> NoReturn:
        refuse(self.path, problem)

    def read(self) -> dict[str, Any]:
        self.check_keys()
        fields = {key: self.required(key) for key in (*LAYER_SIZES, *self.draft_required)}
        fields |= {key: self.raw[key] for key in LAYER_DEFAULTS + TOKEN_IDS if self.raw.get(key) is not None}
        fields |= {key: value for key in DRAFT_OPTIONAL if (value := self.draft_value(key)) is not None}
        cap = fields.get("final_logit_softcapping")
        if isinstance(cap, int | float) and cap <= 0:  # which the format ignores
            fields["final_logit_softcapping"] = None
        return {
            **fields,
            **self.attention(fields["num_hidden_layers"]),
            "rope_parameters": self.rope(),
            "input_embedding": "raw",
            "output_head": "target",
            "window_is_inclusive": False,
            "use_relay": False,
        }

    def check_keys(self) -> None:
        model_type = self.raw.get("model_type")
        if model_type not in (None, "qwen3"):
            self.refuse(f"'model_type' is '{model_type}'. Supported: {self.layout.description}")
        draft_keys = (*self.draft_required, *DRAFT_OPTIONAL)
        nested, flat = {*draft_keys, *NOTES}, {*TOP_LEVEL_KEYS, *draft_keys}
        unknown = {f"dflash_config.{key}" for key in self.nested if key not in nested and self.nested[key] is not None}
        unknown |= {key for key in self.raw if key not in flat and self.raw[key] is not None}
        if unknown:
            self.refuse(
                f"unknown key(s) {', '.join(sorted(unknown))}, which may change what the drafter computes. Supported: "
                f"{self.layout.description} with the draft keys {', '.join(draft_keys)}. If a key is only a note, "
                "remove it from the file"
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
            value = self.draft_value(key) if key in self.draft_required else self.raw.get(key)
        if value is None:
            self.refuse(f"'{key}' is missing and has no safe default; add it, or pass {key}= to from_pretrained")
        return value

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
        check_layer_count(self.path, num_layers)
        if layer_types is None:
            if raw.get("use_sliding_window") or raw.get("sliding_window") is not None:
                self.refuse(
                    "'layer_types' is missing though 'use_sliding_window' or 'sliding_window' is set; "
                    "add one of full_attention, sliding_attention for each layer"
                )
            layer_types = ["full_attention"] * num_layers
        if not isinstance(layer_types, list):
            self.refuse(f"'layer_types' is {layer_types!r}; give a list")
        has_sliding = "sliding_attention" in layer_types
        if has_sliding and not raw.get("use_sliding_window"):
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
                "(null: causal on sliding layers only); set 'is_causal' to the value used in training"
            )
        return {
            "layer_types": layer_types,
            "sliding_window": raw.get("sliding_window") if has_sliding else None,
            "sliding_is_causal": causal["sliding_attention"],
            "full_is_causal": causal["full_attention"],
        }


def export_dflash(config: Any, weights: dict[str, torch.Tensor], num_target_layers: int | None) -> Export:
    """A drafter's configuration and weights as v1, or as DFlash 2 where it has convolutions and selector."""
    has_sliding = "sliding_attention" in config.layer_types
    has_convolutions, has_selector = config.conv_kernel_size is not None, config.selector_rank is not None
    causal = {
        config.sliding_is_causal if layer_type == "sliding_attention" else config.full_is_causal
        for layer_type in config.layer_types
    }
    is_default_causality = config.sliding_is_causal and not config.full_is_causal
    num_target_layers = config.num_target_layers or num_target_layers
    refuse_export(
        "dflash",
        {
            "it has an embedding of its own": config.input_embedding == "own",
            "it reads the output of the target's embedding module (load it with input_embedding='raw' if that equals "
            "the embedding's rows)": config.input_embedding == "target",
            "it has a head of its own": config.output_head != "target",
            "its anchor's row drafts too (sample_from_anchor)": config.sample_from_anchor,
            "its window is measured from the anchor": has_sliding and config.window_from_anchor,
            "its full layers are causal and its sliding ones not": len(causal) == 2 and not is_default_causality,
            "it has convolutions or a selector, but not both": has_convolutions != has_selector,
            "its vocab_size is not known; load it with vocab_size=": config.vocab_size is None,
            "its num_target_layers is not recorded; give it": num_target_layers is None,
        },
    )
    layout = DFlash2Layout() if has_convolutions else DFlashLayout()
    draft = {key: getattr(config, key) for key in (*DRAFT_REQUIRED, *layout.added_keys)}
    defaults = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    draft |= {key: getattr(config, key) for key, default in defaults.items() if getattr(config, key) != default}
    raw = {
        **{key: getattr(config, key) for key in QWEN3_FIELDS},
        "architectures": [layout.architecture],
        "model_type": "qwen3",
        "num_target_layers": num_target_layers,
        "dflash_config": draft,
        "use_sliding_window": has_sliding,
        "sliding_window": config.window_reach + 1 if has_sliding else None,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        **({"is_causal": causal.pop()} if len(causal) == 1 else {}),
    }
    return Export(layout, raw, published_names(weights))


def published_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The selector's codebooks under the names that published DFlash 2 files use."""
    published = {ours: name for name, ours in DFlash2Layout.renamed.items()}
    return {published.get(name, name): tensor for name, tensor in weights.items()}
