"""Every touch of a transformers API that moves between releases or is private."""

import copy
import inspect
from typing import Any

import torch
from transformers import Cache
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

CACHE_NAMES = ("cache", "past_key_values")  # since 5.24, before


def get_cache(container: Any) -> Cache | None:
    """The cache among model keyword arguments or in a model output, whatever this release calls it."""
    for name in CACHE_NAMES:
        found = container.get(name)
        if found is not None:
            return found
    return None


def cache_argument(model: Any) -> str:
    """What the forward of `model` calls its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def is_croppable(cache: Cache) -> bool:
    """Whether rejected rows can be taken back out of `cache`. Some layers know only after the first forward.

    Indexed (sparse) attention is no: its own block, single-token and full forwards disagree, so nothing is exact on it.
    """
    if not getattr(cache, "is_croppable", True):
        return False
    names = [type(layer).__name__ for layer in getattr(cache, "layers", [])]
    return not any("LinearAttention" in name or "Indexed" in name for name in names)


def logits_width(model: Any, head: Any) -> int:
    """Width of the target's logits, which padding can make larger than the vocabulary."""
    weight = getattr(head, "weight", None)
    width = getattr(head, "out_features", None) or (None if weight is None else weight.shape[0])
    return width or model.config.get_text_config().vocab_size


def crop(cache: Cache, rows: int) -> None:
    """Take the last `rows` rows out of `cache`. With 0, sliding layers still shrink back to their window."""
    cache.crop(-rows)


def stop_past_recording(cache: Cache) -> None:
    """Let sliding layers shrink on every forward again; plain decoding, which never crops, needs that of a cache."""
    for layer in getattr(cache, "layers", []):
        if hasattr(layer, "record_past"):
            layer.record_past = False


def attention_windows(cache: Cache | None, num_layers: int) -> list[int | None]:
    """How many keys each layer keeps for one query; `None` for all."""
    layers = getattr(cache, "layers", [])
    windows = [getattr(layer, "sliding_window", None) for layer in layers[:num_layers]]
    return windows + [None] * (num_layers - len(windows))


def model_inputs(
    model: Any,
    token_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    *,
    new_tokens: int | None,
    num_drafts: int,
    is_prefill: bool,
) -> dict[str, Any]:
    """Arguments of one target forward over the last `new_tokens` of `token_ids` `[B, T + num_drafts]`.

    `new_tokens=None` means all of them. Masks and positions are lengthened by the drafts without touching
    `model_kwargs`, which describe the T committed tokens.
    """
    kwargs = copy.copy(model_kwargs)
    mask = kwargs.get("attention_mask")
    if num_drafts:
        if mask is not None:
            kwargs = _prepare_attention_mask(kwargs, mask.shape[1] + num_drafts, False)
        kwargs = _prepare_token_type_ids(kwargs, token_ids.shape[1])
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + num_drafts, False)
    inputs = model.prepare_inputs_for_generation(
        token_ids, next_sequence_length=new_tokens, is_first_iteration=is_prefill, **kwargs
    )
    inputs["return_dict"] = True
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_drafts + 1
    return inputs


def advance(model: Any, outputs, model_kwargs: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """Model keyword arguments after `new_tokens` tokens were committed."""
    return model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=new_tokens)


def capture_features(hidden_states: tuple[torch.Tensor, ...], layer_ids: list[int]) -> torch.Tensor:
    """Context features `[B, T, taps * H]` from what `output_hidden_states=True` returns.

    Layer id l is `hidden_states[l + 1]`: entry 0 is the embedding, the entry after the last layer carries the final
    norm. A *list* for `output_hidden_states` is indexed differently before and after 5.23, so True it is.
    """
    device = hidden_states[layer_ids[0] + 1].device
    return torch.cat([hidden_states[i + 1].to(device) for i in layer_ids], dim=-1)
