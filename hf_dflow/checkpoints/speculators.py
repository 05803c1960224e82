"""vLLM's *speculators* format (`"speculators_model_type": "dflash"` or `"dflash2"`, PyPI speculators 0.9.0).

What differs from z-lab's layout of the same network: a tapped layer is named by its entry in `hidden_states`, one more
than ours; the sizes of the draft layers stand in `transformer_layer_config`, which leaves out what equals its class's
default; a reduced vocabulary has a head of its own and two maps, `d2t` (by how much the target's id exceeds the
draft's) and `t2d` (which target ids have one); the window of sliding layers is measured from the anchor for the whole
block. Embedding and full head come from the target unless the file holds them. `dflash2` adds z-lab's convolutions and
candidate selector under z-lab's names; its sliding layers are bidirectional unless told otherwise.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import CONFIG_MAPPING

from hf_dflow.checkpoints import dflash2
from hf_dflow.checkpoints.files import StoredTensor
from hf_dflow.checkpoints.own import make_config
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError
from hf_dflow.model.configuration import DFlowDrafterConfig

MODEL_TYPE, MODEL_TYPE_2 = "dflash", "dflash2"
DESCRIPTION = f"'speculators_model_type': '{MODEL_TYPE}' or '{MODEL_TYPE_2}' (vLLM's speculators)"
NAMES = {"d2t": "draft_token_ids", **dflash2.NAMES}
OF_TRAINING = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # t2d says what d2t says
LAYER_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
]
TOP_LEVEL_KEYS = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings", "model_type"),
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id"),
    *("sliding_window_non_causal", "sample_from_anchor", "has_no_defaults_at_init", "hf_dflow", "is_encoder_decoder"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "problem_type"),
    *("id2label", "label2id", "name_or_path", "_name_or_path"),
}


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json claims this format."""
    return raw.get("speculators_model_type") in (MODEL_TYPE, MODEL_TYPE_2)


def convert_config(
    raw: Mapping[str, Any], path: str, stored: Mapping[str, StoredTensor], **overrides
) -> DFlowDrafterConfig:
    """Translate the content `raw` of the config.json at `path`.

    Args:
        raw (`dict`): The file's content.
        path (`str`): Folder or repository, for messages.
        stored (`dict`): What the weights file holds: it decides whose embedding and head are used.
        overrides: Fields of [`DFlowDrafterConfig`] that win over the file. `use_relay` is `False` unless given.

    Raises:
        [`DrafterConfigError`]: A key is missing, contradictory, impossible or unknown.
    """

    def refuse(what: str) -> NoReturn:
        raise DrafterConfigError(f"{path}/config.json: {what}.")

    is_second = raw["speculators_model_type"] == MODEL_TYPE_2
    added = dflash2.DRAFT_KEYS if is_second else ()
    known = TOP_LEVEL_KEYS.union(added)
    unknown = sorted(key for key in raw if key not in known and raw[key] is not None)
    if unknown:
        refuse(f"unknown key(s) {', '.join(unknown)}, which may change what the drafter computes; if a key is only a "
               "note, remove it from the file")  # fmt: skip
    fields = _layer_fields(raw.get("transformer_layer_config"), refuse)
    for key in ("block_size", "mask_token_id", "draft_vocab_size", "aux_hidden_state_layer_ids", *added):
        if raw.get(key) is None:
            refuse(f"'{key}' is missing and has no safe default; add it")
    taps = raw["aux_hidden_state_layer_ids"]
    if not isinstance(taps, list) or any(type(i) is not int for i in taps):
        refuse(f"'aux_hidden_state_layer_ids' is {taps!r}; give a list of whole numbers")
    if min(taps, default=1) < 1:
        refuse(f"'aux_hidden_state_layer_ids' is {taps}; entry 0, the embedding's output, cannot be tapped")
    is_reduced = raw["draft_vocab_size"] != fields["vocab_size"]
    if is_reduced and not {"d2t", "lm_head.weight"} <= set(stored):
        refuse(
            f"'draft_vocab_size' is {raw['draft_vocab_size']} of {fields['vocab_size']}, but the weights file lacks "
            "'d2t' or 'lm_head.weight', which such a drafter needs"
        )
    proposal = _proposal(raw.get("speculators_config"))
    rows = raw["block_size"] if raw.get("sample_from_anchor") else raw["block_size"] - 1
    fields |= {
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in taps],
        "target_hidden_size": raw.get("target_hidden_size"),
        "target_name": proposal["target"],
        "sample_from_anchor": bool(raw.get("sample_from_anchor")),
        "draft_vocab_size": raw["draft_vocab_size"] if is_reduced else None,
        "input_embedding": "own" if "embed_tokens.weight" in stored else "raw",
        "output_head": "own" if "lm_head.weight" in stored else "target",
        "sliding_is_causal": not raw.get("sliding_window_non_causal", is_second),
        **{key: raw[key] for key in added},
        "window_from_anchor": True,
        "generation_defaults": None if proposal["drafts"] in (None, rows) else {"num_draft_tokens": proposal["drafts"]},
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
        "use_relay": False,
    }
    return make_config(path, fields, overrides)


def _layer_fields(layers: Any, refuse) -> dict[str, Any]:
    """The draft layers' fields; what `transformer_layer_config` leaves out has its class's default."""
    if not isinstance(layers, dict):
        refuse("'transformer_layer_config' is missing; add the configuration of the draft layers")
    kind = layers.get("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        refuse(f"'transformer_layer_config.model_type' is {kind!r}, which transformers does not know")
    known = {
        key: value
        for key, value in layers.items()
        if key in (*LAYER_FIELDS, "use_sliding_window", "rope_theta", "rope_scaling")
    }
    try:
        config = CONFIG_MAPPING[kind](**known)
    except Exception as error:  # whatever a configuration class raises on wrong values
        refuse(f"'transformer_layer_config' is no configuration of {kind} ({error})")
    fields = {key: getattr(config, key, None) for key in LAYER_FIELDS}
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if fields[key] is None:
            refuse(f"'transformer_layer_config.{key}' is missing; add it")
    rope = fields["rope_parameters"] or {}
    fields["rope_parameters"] = dict(rope.get("sliding_attention") or rope)  # one set serves all layers
    layer_types = fields["layer_types"] or ["full_attention"] * int(fields["num_hidden_layers"] or 0)
    fields["layer_types"] = layer_types
    if "sliding_attention" not in layer_types:
        fields["sliding_window"] = None
    return {key: value for key, value in fields.items() if value is not None}


def _proposal(settings: Any) -> dict[str, Any]:
    """Target and number of drafts that `speculators_config` records, where it does."""
    found: dict[str, Any] = {"target": None, "drafts": None}
    if isinstance(settings, dict):
        verifier, methods = settings.get("verifier"), settings.get("proposal_methods")
        if isinstance(verifier, dict) and isinstance(verifier.get("name_or_path"), str):
            found["target"] = verifier["name_or_path"]
        for method in methods if isinstance(methods, list) else []:
            if isinstance(method, dict) and type(method.get("speculative_tokens")) is int:
                found["drafts"] = method["speculative_tokens"]
    return found


def rename(name: str) -> str | None:
    """Our name of a stored tensor; `None` for those that only their training reads."""
    return None if name in OF_TRAINING else NAMES.get(name, name)


def convert_weights(tensors: dict[str, torch.Tensor], config: DFlowDrafterConfig, path: str) -> dict[str, torch.Tensor]:
    """Our weights of the stored ones: ids instead of differences, ascending.

    Raises:
        [`DrafterWeightsError`]: The two vocabulary maps contradict each other.
    """
    weights = {rename(name): tensor for name, tensor in tensors.items()}
    weights.pop(None, None)
    named = {str(name): tensor for name, tensor in weights.items()}
    if "draft_token_ids" in named:
        differences = named["draft_token_ids"]
        ids, order = (torch.arange(len(differences)) + differences).sort()
        has_draft = tensors.get("t2d")
        if has_draft is not None and not torch.equal(has_draft.nonzero()[:, 0], ids):
            raise DrafterWeightsError(f"{path}: 'd2t' and 't2d' name different tokens; the file is damaged.")
        named |= {"draft_token_ids": ids, "lm_head.weight": named["lm_head.weight"][order]}
    return named
