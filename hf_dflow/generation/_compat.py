"""Every touch of a transformers API that moves between releases or is private."""

import copy
import inspect
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.recurrent import is_recurrent
from hf_dflow.generation.step import DraftTree

STATIC_IS_CROPPABLE = StaticLayer.is_croppable  # since 5.20 or so
CACHE_NAMES = ("cache", "past_key_values")  # since 5.24, before
HOLDING_HOLES = ("DynamicLayer", "DummyLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
BATCHED = ("attention_mask", "position_ids", "token_type_ids")  # tensors with a row for each row of the batch
PROMPT_ONLY = tuple(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)  # images and the like, which no later forward is given


def get_cache(container: Any) -> Any:
    """The cache among model keyword arguments or in a model output, whatever this release calls it; `None` for none."""
    return next((container[name] for name in CACHE_NAMES if container.get(name) is not None), None)


def takes(model: Any, name: str) -> bool:
    """Whether the forward of `model` has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def cache_argument(model: Any) -> str:
    """What the forward of `model` calls its cache."""
    return "cache" if takes(model, "cache") else "past_key_values"


def holds_holes(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether rows of a batch can advance at their own pace in `cache`, rejected columns staying behind a 2-D mask.

    Needs full attention in every layer (the masks of other layers count columns) and positions that the caller gives
    (a model that counts columns would count holes).
    """
    config = model.config.get_text_config()
    if getattr(cache, "offloading", False) or not isinstance(cache, DynamicCache):
        return False
    layers = [*DynamicCache(config=config).layers, *cache.layers]
    if not all(type(layer).__name__ in HOLDING_HOLES for layer in layers):
        return False
    if not (_is_standard(model, "_update_model_kwargs_for_generation") and _is_standard(model, PREPARE, adds=True)):
        return False
    if getattr(config, "alibi", False):
        return False
    return {"position_ids", "attention_mask"} <= set(inspect.signature(model.forward).parameters)


PREPARE = "prepare_inputs_for_generation"


def _is_standard(model: Any, name: str, adds: bool = False) -> bool:
    """Whether a method is that of all models, or with `adds` one that reads neither mask nor positions by name."""
    method = getattr(model, name)
    if getattr(method, "__func__", None) is getattr(GenerationMixin, name):
        return True
    return adds and {"self", "input_ids", "kwargs"} >= set(inspect.signature(method).parameters)


def has_recurrent_cache(model: PreTrainedModel) -> bool:
    """Whether the states of the model's recurrent layers lie in the cache that `generate` makes for it.

    Some models keep them in their modules, or in an object of their own.
    """
    supports_cache: Any = model._supports_default_dynamic_cache
    if not supports_cache():
        return False
    return any(map(is_recurrent, DynamicCache(config=model.config.get_text_config()).layers))


def num_layer_states(model: Any) -> int:
    """How many layers return their states with `output_hidden_states=True`.

    LongCat-Flash counts two layers for each module of `layers`, which returns states once.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    num_layers = model.config.get_text_config().num_hidden_layers
    return min(num_layers, len(getattr(decoder, "layers", None) or ()) or num_layers)


def fixed_rope_length(model: PreTrainedModel) -> int | None:
    """Up to which length rotary tables stay as they are; `None` for any.

    Beyond it, tables depend on the largest position of a forward, so that a block and single tokens disagree.
    """
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    by_layer_type = any(isinstance(parameters, dict) for parameters in given.values())
    lengths = []
    for parameters in given.values() if by_layer_type else [given]:
        kind = (parameters or {}).get("rope_type")
        if kind == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
        elif kind == "dynamic":
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


def fresh_cache(model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Give one row of a batch the cache that `generate` would have made for it alone."""
    for name in CACHE_NAMES:
        model_kwargs.pop(name, None)
    mode = generation_config.get_generation_mode()
    model._prepare_cache_for_generation(generation_config, model_kwargs, mode, 1, generation_config.max_length - 1)


def logits_width(model: Any, head: Any) -> int:
    """Width of the target's logits, which padding can make larger than the vocabulary."""
    weight = getattr(head, "weight", None)
    width = getattr(head, "out_features", None) or (None if weight is None else weight.shape[0])
    return width or model.config.get_text_config().vocab_size


def model_inputs(
    model: Any,
    token_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    *,
    new_tokens: int | None,
    num_drafts: int,
    is_prefill: bool,
    furthest: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of one target forward over the last `new_tokens` of `token_ids` `[B, T + num_drafts]`.

    `new_tokens=None` means all of them. Masks and positions are lengthened by the drafts without touching
    `model_kwargs`, which describe the T committed tokens. No position goes beyond `furthest` `[B, 1]`: a row that
    verifies fewer drafts than its neighbours may have no more positions.
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
    if furthest is not None:
        inputs["position_ids"] = torch.minimum(inputs["position_ids"], furthest.to(inputs["position_ids"].device))
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_drafts + 1
    return inputs


def shape_as_tree(
    inputs: dict[str, Any], tree: DraftTree, dtype: torch.dtype, anchor_position: int, cached: int
) -> None:
    """Turn the inputs of a chain of all nodes behind `cached` columns into those of the tree, in place."""
    device = inputs["input_ids"].device
    depths = torch.tensor([0, *tree.depths], device=device)
    inputs["position_ids"] = (anchor_position + depths)[None]
    committed = torch.ones(1, cached, dtype=torch.bool, device=device)
    if inputs.get("attention_mask") is not None:
        committed = inputs["attention_mask"][:, :cached].bool()
    visible = torch.cat([committed.expand(tree.size + 1, -1), tree.visible(device)], dim=1)[None, None]
    inputs["attention_mask"] = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def compiled_call(model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """What plain decoding would run in place of `model` on the cache in `model_kwargs`: the compiled forward that the
    model keeps for all calls, or `None` (transformers compiles on a GPU, for static caches, unless `disable_compile`).
    """
    if model._valid_auto_compile_criteria(model_kwargs, generation_config):
        return model.get_compiled_call(generation_config.compile_config)
    return None


def advance(model: Any, outputs, model_kwargs: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """Model keyword arguments after `new_tokens` tokens were committed."""
    return model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=new_tokens)


def capture_features(hidden_states: tuple[torch.Tensor, ...], layer_ids: list[int]) -> torch.Tensor:
    """Context features `[B, T, taps * H]` from what `output_hidden_states=True` returns.

    Layer id l is `hidden_states[l + 1]`: entry 0 is the embedding, the entry after the last layer carries the final
    norm. A *list* for `output_hidden_states` is indexed differently before and after 5.23, so True it is.
    """
    num_states = len(hidden_states or ())
    if max(layer_ids) + 1 >= num_states:
        raise UnsupportedGenerationError(
            f"the drafter reads the states of layer {max(layer_ids)} (target_layer_ids), but this target returns the "
            f"states of {max(0, num_states - 1)} layers; decode without the drafter."
        )
    states = [hidden_states[layer_id + 1] for layer_id in layer_ids]
    if len({state.shape[-1] for state in states}) > 1:
        raise UnsupportedGenerationError(
            f"the states of the layers {layer_ids}, which the drafter reads, have the different widths "
            f"{[state.shape[-1] for state in states]} in this target; decode without the drafter."
        )
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)
