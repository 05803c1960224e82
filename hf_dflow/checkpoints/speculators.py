"""vLLM's *speculators* layout (`"speculators_model_type": "dflash"` or `"dflash2"`, PyPI speculators 0.9.0).

It differs from z-lab's layout of the same network as follows. A tapped layer is named by its entry in `hidden_states`,
one more than ours. `transformer_layer_config` holds the sizes of the draft layers and omits what equals its class's
default. A reduced vocabulary has its own head and two maps: `d2t` (the target's id minus the draft's) and `t2d` (which
target ids have one). For the whole block the window of sliding layers is measured from the anchor. Embedding and full
head come from the target unless the file holds them. `dflash2` adds z-lab's convolutions and candidate selector under
z-lab's names; its sliding layers are bidirectional by default.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import CONFIG_MAPPING, Qwen3Config

from hf_dflow.checkpoints.dflash import (
    DFLASH2_REQUIRED,
    QWEN3_FIELDS,
    DFlash2Layout,
    DFlashLayout,
    published_names,
)
from hf_dflow.checkpoints.layout import Export, Layout, check_layer_count, refuse, refuse_export
from hf_dflow.errors import DrafterWeightsError

DFLASH, DFLASH2 = "dflash", "dflash2"  # values of speculators_model_type
LAYER_FIELDS = (*QWEN3_FIELDS, "sliding_window")
TOP_LEVEL_KEYS = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings", "model_type"),
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id"),
    *("sliding_window_non_causal", "sample_from_anchor", "has_no_defaults_at_init", "hf_dflow", "is_encoder_decoder"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "problem_type"),
    *("id2label", "label2id", "name_or_path", "_name_or_path"),
}


class SpeculatorsLayout(Layout):
    description = f"'speculators_model_type': '{DFLASH}' or '{DFLASH2}' (vLLM's speculators)"
    renamed = {"d2t": "draft_token_ids", **DFlash2Layout.renamed}
    training_only = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # t2d repeats d2t
    needs_weights = True  # they tell whose embedding and head the drafter uses

    def matches(self, raw):
        return raw.get("speculators_model_type") in (DFLASH, DFLASH2)

    def read_fields(self, raw, path, stored, overrides):
        def refuse_key(problem: str) -> NoReturn:
            refuse(path, problem)

        is_dflash2 = raw["speculators_model_type"] == DFLASH2
        added_keys = DFLASH2_REQUIRED if is_dflash2 else ()
        known = TOP_LEVEL_KEYS.union(added_keys)
        unknown = sorted(key for key in raw if key not in known and raw[key] is not None)
        if unknown:
            refuse_key(
                f"unknown key(s) {', '.join(unknown)}, which may change what the drafter computes; if a key is only a "
                "note, remove it from the file"
            )
        layers = raw.get("transformer_layer_config")
        if not isinstance(layers, dict):
            refuse_key("'transformer_layer_config' is missing; add the configuration of the draft layers")
        if "num_hidden_layers" in layers:
            check_layer_count(path, layers["num_hidden_layers"])
        fields = _layer_fields(layers, refuse_key)
        for key in ("block_size", "mask_token_id", "draft_vocab_size", "aux_hidden_state_layer_ids", *added_keys):
            if raw.get(key) is None:
                refuse_key(f"'{key}' is missing and has no safe default; add it")
        taps = raw["aux_hidden_state_layer_ids"]
        if not isinstance(taps, list) or any(type(i) is not int for i in taps):
            refuse_key(f"'aux_hidden_state_layer_ids' is {taps!r}; give a list of whole numbers")
        if min(taps, default=1) < 1:
            refuse_key(f"'aux_hidden_state_layer_ids' is {taps}; entry 0, the embedding's output, cannot be tapped")
        is_reduced = raw["draft_vocab_size"] != fields["vocab_size"]
        if is_reduced and not {"d2t", "lm_head.weight"} <= set(stored):
            refuse_key(
                f"'draft_vocab_size' is {raw['draft_vocab_size']} of {fields['vocab_size']}, but the weights file "
                "lacks 'd2t' or 'lm_head.weight', which such a drafter needs"
            )
        target_name, num_draft_tokens = _recorded_use(raw.get("speculators_config"))
        drafts_per_block = raw["block_size"] if raw.get("sample_from_anchor") else raw["block_size"] - 1
        is_default_number = num_draft_tokens in (None, drafts_per_block)
        return {
            **fields,
            **{key: raw[key] for key in ("block_size", "mask_token_id", *added_keys)},
            "target_layer_ids": [i - 1 for i in taps],
            "target_hidden_size": raw.get("target_hidden_size"),
            "target_name": target_name,
            "sample_from_anchor": bool(raw.get("sample_from_anchor")),
            "draft_vocab_size": raw["draft_vocab_size"] if is_reduced else None,
            "input_embedding": "own" if "embed_tokens.weight" in stored else "raw",
            "output_head": "own" if "lm_head.weight" in stored else "target",
            "sliding_is_causal": not raw.get("sliding_window_non_causal", is_dflash2),
            "window_from_anchor": True,
            "generation_defaults": None if is_default_number else {"num_draft_tokens": num_draft_tokens},
            "use_relay": False,
        }

    def convert_weights(self, tensors, path):
        """With ids in the place of differences, ascending.

        Raises:
            [`DrafterWeightsError`]: The two vocabulary maps contradict each other.
        """
        weights = super().convert_weights(tensors, path)
        if "draft_token_ids" in weights:
            differences = weights["draft_token_ids"]
            ids, order = (torch.arange(len(differences)) + differences).sort()
            has_draft = tensors.get("t2d")
            if has_draft is not None and not torch.equal(has_draft.nonzero()[:, 0], ids):
                raise DrafterWeightsError(f"{path}: 'd2t' and 't2d' name different tokens; the file is damaged.")
            weights |= {"draft_token_ids": ids, "lm_head.weight": weights["lm_head.weight"][order]}
        return weights


def _layer_fields(layers: dict[str, Any], refuse_key: Callable[[str], NoReturn]) -> dict[str, Any]:
    """The draft layers' fields; what `transformer_layer_config` omits has its class's default."""
    model_type = layers.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        refuse_key(f"'transformer_layer_config.model_type' is {model_type!r}, which transformers does not know")
    read = (*LAYER_FIELDS, "use_sliding_window", "rope_theta", "rope_scaling")
    try:
        config = CONFIG_MAPPING[model_type](**{key: value for key, value in layers.items() if key in read})
    except Exception as error:  # whatever a configuration class raises on wrong values
        refuse_key(f"'transformer_layer_config' is no configuration of {model_type} ({error})")
    fields = {key: getattr(config, key, None) for key in LAYER_FIELDS}
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if fields[key] is None:
            refuse_key(f"'transformer_layer_config.{key}' is missing; add it")
    rope = fields["rope_parameters"] or {}
    fields["rope_parameters"] = dict(rope.get("sliding_attention") or rope)  # one set serves all layers
    layer_types = fields["layer_types"] or ["full_attention"] * int(fields["num_hidden_layers"] or 0)
    fields["layer_types"] = layer_types
    if "sliding_attention" not in layer_types:
        fields["sliding_window"] = None
    return {key: value for key, value in fields.items() if value is not None}


def _recorded_use(settings: Any) -> tuple[str | None, int | None]:
    """Target and number of drafts that `speculators_config` records, where it does."""
    target_name = num_draft_tokens = None
    if isinstance(settings, dict):
        verifier, methods = settings.get("verifier"), settings.get("proposal_methods")
        if isinstance(verifier, dict) and isinstance(verifier.get("name_or_path"), str):
            target_name = verifier["name_or_path"]
        for method in methods if isinstance(methods, list) else []:
            if isinstance(method, dict) and type(method.get("speculative_tokens")) is int:
                num_draft_tokens = method["speculative_tokens"]
    return target_name, num_draft_tokens


def export_speculators(config: Any, weights: dict[str, torch.Tensor], num_target_layers: int | None) -> Export:
    """A drafter's configuration and weights in this layout, as "dflash2" where it has convolutions and selector."""
    has_sliding = "sliding_attention" in config.layer_types
    is_reduced = config.draft_vocab_size is not None
    has_convolutions, has_selector = config.conv_kernel_size is not None, config.selector_rank is not None
    refuse_export(
        "speculators",
        {
            "it does not read the raw rows of the target's embedding": config.input_embedding != "raw",
            "it scales its embeddings": config.input_embedding_scale != 1.0,
            "it scales or soft-caps its logits": config.output_multiplier != 1.0
            or bool(config.final_logit_softcapping),
            "it has a whole head of its own": config.output_head == "own" and not is_reduced,
            "the window of its sliding layers is measured from each row": has_sliding and not config.window_from_anchor,
            "its full layers are causal": config.full_is_causal and "full_attention" in config.layer_types,
            "it has convolutions or a selector, but not both": has_convolutions != has_selector,
            "its vocab_size is not known; load it with vocab_size=": config.vocab_size is None,
        },
    )
    layers = Qwen3Config(
        **{key: getattr(config, key) for key in QWEN3_FIELDS},
        use_sliding_window=has_sliding,
        sliding_window=config.window_reach if has_sliding else None,
    ).to_dict()
    for key in ("dtype", "architectures", "transformers_version"):
        layers.pop(key, None)
    weights = published_names(weights)
    ids = weights.pop("draft_token_ids", None)
    if ids is not None:
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    model_type, network = (DFLASH2, DFlash2Layout) if has_convolutions else (DFLASH, DFlashLayout)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": (config.generation_defaults or {}).get("num_draft_tokens") or config.drafts_per_block,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw = {
        "architectures": [network.architecture],
        "speculators_model_type": model_type,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "target_hidden_size": None,
        "sliding_window_non_causal": not config.sliding_is_causal,
        "sample_from_anchor": config.sample_from_anchor,
        "tie_word_embeddings": False,
        **{key: getattr(config, key) for key in network.added_keys},
        "speculators_config": {
            "algorithm": model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
    }
    return Export(SpeculatorsLayout(), raw, weights)
