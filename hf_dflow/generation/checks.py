"""What a call refuses before its first forward, and in which words."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat, cache
from hf_dflow.generation.selfcheck import check_of
from hf_dflow.model.drafter import DFlowDrafter

FLAG = 'speculation_type="dflow"'
CACHES = (None, "dynamic", "static") if _compat.STATIC_IS_CROPPABLE else (None, "dynamic")
TREE_ATTENTION = ("eager", "sdpa")  # implementations that take a mask of any shape


def check_mode(generation_config: GenerationConfig, drafter: Any) -> None:
    """Refuse options under which `generate` would decode in another way than asked for.

    Raises:
        UnsupportedGenerationError: Naming the option, what is allowed and what to do.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            f"{FLAG} needs a drafter: pass assistant_model=DFlowDrafter.from_pretrained(…)."
        )
    if not isinstance(drafter, DFlowDrafter):
        raise UnsupportedGenerationError(
            f"{FLAG} needs a DFlowDrafter as assistant_model, got {type(drafter).__name__}; load it with "
            "DFlowDrafter.from_pretrained(…), or leave speculation_type out for classic assisted generation."
        )
    if generation_config.use_cache is False:
        raise UnsupportedGenerationError(f"{FLAG} needs use_cache=True: drafts are verified behind the target's cache.")
    refused = {
        "num_beams": (generation_config.num_beams or 1) > 1,
        "penalty_alpha": (generation_config.penalty_alpha or 0) > 0,
        "prompt_lookup_num_tokens": generation_config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": generation_config.assistant_early_exit is not None,
        "use_mtp": bool(getattr(generation_config, "use_mtp", False)),
        "dola_layers": generation_config.dola_layers is not None,
        "constraints": generation_config.constraints is not None,
        "force_words_ids": generation_config.force_words_ids is not None,
        "assistant_ensemble_weight": getattr(generation_config, "assistant_ensemble_weight", None) is not None,
        "token_healing": bool(generation_config.token_healing),
        "cache_implementation": generation_config.cache_implementation not in CACHES,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedGenerationError(
                f"{FLAG} does not support {name}={getattr(generation_config, name)!r}: greedy decoding or sampling, "
                f"with a {' or '.join(filter(None, CACHES))} cache. Leave the option out, or decode without it."
            )
    chunk_size = generation_config.prefill_chunk_size
    if chunk_size is not None and chunk_size < 1:
        raise UnsupportedGenerationError(f"prefill_chunk_size={chunk_size}; use a number of tokens, or leave it out.")


def check_target(model: PreTrainedModel) -> None:
    """Refuse models that rejected drafts cannot be taken out of.

    Raises:
        UnsupportedGenerationError: Naming the model's class.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedGenerationError(f"{FLAG} drafts for decoder-only models; {type(model).__name__} is not one.")
    if "prepare_inputs_for_generation" in vars(model):  # PEFT, for virtual tokens, which no mask or position counts
        raise UnsupportedGenerationError(
            f"{FLAG} does not support prompt tuning, which puts virtual tokens before the prompt; use LoRA or another "
            "adapter of the weights, or decode without the drafter."
        )
    if getattr(model, "_is_stateful", False) and not _compat.has_recurrent_cache(model):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} keeps a recurrent state that rejected drafts cannot be taken out of; decode "
            "without the drafter."
        )


def check_inputs(model: PreTrainedModel, input_ids: torch.Tensor, max_length: int, model_kwargs: dict) -> None:
    """Refuse inputs that cannot be decoded exactly.

    Raises:
        UnsupportedGenerationError: Naming the input and what to do.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(f"{FLAG} does not support inputs_embeds; pass input_ids.")
    if not input_ids.numel():
        raise UnsupportedGenerationError(
            f"{FLAG} needs a prompt of at least one token, got input_ids of the shape {tuple(input_ids.shape)}; begin "
            "an empty prompt with the BOS token, and leave empty batches out."
        )
    _check_cache(_compat.get_cache(model_kwargs), input_ids.shape[0])
    longest = _compat.fixed_rope_length(model)
    if longest is not None and max_length > longest:
        raise UnsupportedGenerationError(
            f"{FLAG}: the rotary embedding of {type(model).__name__} changes with the length beyond {longest} tokens, "
            f"so that blocks are not computed as single tokens are; max_length is {max_length}, set it to at most "
            f"{longest}, or decode without the drafter."
        )


def _check_cache(held: Cache | None, batch_size: int) -> None:
    kinds = " or ".join(filter(None, CACHES))
    if not isinstance(held, (DynamicCache, StaticCache)[: len(CACHES) - 1]):
        raise UnsupportedGenerationError(
            f"{FLAG} needs a cache that rejected drafts can be taken out of ({kinds}), this target uses "
            f"{'none' if held is None else type(held).__name__}; decode without the drafter."
        )
    if held.offloading:
        raise UnsupportedGenerationError(
            f"{FLAG} does not crop an offloaded cache; make it with offloading=False, or decode without the drafter."
        )
    if not cache.is_croppable(held):
        refuse_layers("This target")
    if cache.is_filled(held) and cache.length(held) is None:
        raise UnsupportedGenerationError(
            f"{FLAG} cannot tell how many tokens a filled cache of recurrent layers alone holds; leave the cache out, "
            "and pass the whole text."
        )
    cached_rows = cache.cached_batch_size(held)
    if cached_rows not in (None, batch_size):
        raise UnsupportedGenerationError(
            f"the cache holds {cached_rows} rows for {batch_size} sequences; pass one of the same batch, or none."
        )


def check_batch(batch_size: int, model_kwargs: dict, *, has_streamer: bool, has_padding: bool) -> None:
    """Refuse what cannot be told apart by row in a batch.

    Args:
        has_padding (`bool`): Whether rows that end early can be padded.

    Raises:
        UnsupportedGenerationError: Naming it.
    """
    if has_streamer:
        raise UnsupportedGenerationError(
            f"{FLAG} streams one sequence, got a batch of {batch_size}: its rows do not advance together. Leave the "
            "streamer out, or call generate for each row."
        )
    refuse_tensors(model_kwargs, f"which part of it belongs to which of the {batch_size} rows", _compat.PROMPT_ONLY)
    if not has_padding:
        raise UnsupportedGenerationError(
            f"pad_token_id is not set, and a batch of {batch_size} whose rows may end at different lengths is padded "
            "with it; set it."
        )


def check_rows_alone(model: PreTrainedModel, model_kwargs: dict) -> None:
    """Refuse what belongs to a whole batch where its rows are decoded one by one.

    Raises:
        UnsupportedGenerationError: Naming a filled cache, or an input of another modality.
    """
    held = _compat.get_cache(model_kwargs)
    if held is not None and cache.is_filled(held):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} decodes a batch row by row, for which a filled {type(held).__name__} of the whole "
            "batch is of no use; leave it out, or call generate for each row."
        )
    refuse_tensors(model_kwargs, "which part of it belongs to which row")


def can_hold_holes(model: PreTrainedModel) -> bool:
    """Whether nothing that is known of `model` keeps rows of a batch from their own pace in a dynamic cache."""
    return _compat.holds_holes(model, DynamicCache(config=model.config.get_text_config()))


def can_hold_trees(model: PreTrainedModel) -> bool:
    """Whether nothing that is known of `model` keeps it from verifying a tree on a dynamic cache."""
    held = DynamicCache(config=model.config.get_text_config())
    return _compat.holds_holes(model, held) and not cache.has_recurrent(held)


def check_measured(
    model: PreTrainedModel, drafter: DFlowDrafter, input_ids: torch.Tensor, model_kwargs: dict, *, has_tree: bool
) -> str | None:
    """Refuse a target that was measured to compute blocks, trees or states in another way than drafting needs.

    Returns:
        `str`, *optional*: Why rows of a batch cannot advance at their own pace; `None` where they can.

    Raises:
        UnsupportedGenerationError: Naming what was measured.
    """
    batch_size = input_ids.shape[0]
    name, may_hold_holes = type(model).__name__, _compat.holds_holes(model, _compat.get_cache(model_kwargs))
    mask = model_kwargs.get("attention_mask")
    has_padding = mask is not None and not bool(mask.all())
    holes = batch_size > 1 and may_hold_holes
    check = check_of(model, input_ids.device, padding=has_padding, holes=holes, tree=has_tree)
    for part, tried in PARTS.items():
        lacks = check.lacks(part) if part != "padding" or has_padding else None
        # A call with inputs of its own, images and the like, may be all that the target computes.
        if lacks and not (part in check.failures and _has_own_inputs(model_kwargs)):
            raise UnsupportedGenerationError(
                f"{name} does not compute {tried}: tried on random tokens behind {check.columns} cached ones, {lacks}. "
                "Drafts cannot be verified exactly; decode without the drafter."
            )
    if check.state_shapes:
        check_states(name, check.state_shapes)
        states = tuple(torch.empty(shape, device="meta") for shape in check.state_shapes)
        _compat.capture_features(states, drafter.config.target_layer_ids)
    if has_tree and (lacks := check.lacks("holes") or check.lacks("tree")):
        raise UnsupportedGenerationError(
            f"tree_budget does not go with {name}, which does not compute a path of a tree as it computes that path "
            f"alone: tried on random tokens behind {check.columns} cached ones, {lacks}. Leave tree_budget out."
        )
    if batch_size == 1:
        return None
    return check.lacks("holes") if may_hold_holes else ""


PARTS = {
    "block": "a block of tokens behind its cache as it computes them one by one",
    "padding": "a block of tokens of a padded row as it computes them one by one",
    "rollback": "tokens behind a cache that rejected drafts were taken out of as if these had never been there",
}


def check_states(name: str, shapes: Sequence[torch.Size]) -> None:
    """Refuse hidden states that are not one vector a token.

    Raises:
        UnsupportedGenerationError: Naming the target.
    """
    if any(len(shape) != 3 for shape in shapes):
        raise UnsupportedGenerationError(
            f"{name} has hidden states of {len(shapes[0])} dimensions, a drafter reads (batch, tokens, hidden); decode "
            "without the drafter."
        )


def _has_own_inputs(model_kwargs: dict) -> bool:
    return any(
        _holds_tensors(value)
        for name, value in model_kwargs.items()
        if name not in (*_compat.BATCHED, *_compat.CACHE_NAMES)
    )


def check_tree(model: PreTrainedModel, held: Any, batch_size: int, *, do_sample: bool, returns_states: bool) -> None:
    """Refuse what a tree cannot be verified on.

    Raises:
        UnsupportedGenerationError: Naming it.
    """
    attention = model.config.get_text_config()._attn_implementation
    reasons = {
        "sampling (a tree has no rule that keeps the law)": do_sample,
        f"{batch_size} sequences at once": batch_size != 1,
        f"attn_implementation '{attention}'": attention not in TREE_ATTENTION,
        f"{type(model).__name__}, whose recurrent layers hold one state for all paths": cache.has_recurrent(held),
        f"{type(model).__name__} and {type(held).__name__}, which are not full attention on a dynamic cache": (
            not _compat.holds_holes(model, held)
        ),
        "output_hidden_states or output_attentions": returns_states,
    }
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        raise UnsupportedGenerationError(
            f"tree_budget does not go with {'; '.join(holding)}; leave tree_budget out, or decode one sequence "
            "greedily on a target with full attention ('eager' or 'sdpa') and a dynamic cache."
        )


def refuse_tensors(model_kwargs: dict, question: str, allowed: tuple[str, ...] = ()) -> None:
    """Refuse tensors among the target's inputs that this loop cannot take apart.

    Raises:
        UnsupportedGenerationError: Naming the input and the `question` that nothing answers.
    """
    for name, value in model_kwargs.items():
        if name not in (*_compat.BATCHED, *_compat.CACHE_NAMES, *allowed) and _holds_tensors(value):
            raise UnsupportedGenerationError(
                f"{FLAG} cannot tell {question} for {name}; call generate for each row, the prompt in one chunk."
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def refuse_layers(name: str) -> None:
    """Refuse a target whose layers cannot be rolled back.

    Raises:
        UnsupportedGenerationError: Always.
    """
    raise UnsupportedGenerationError(
        f"{name} has layers (linear, recurrent or sparse attention, or a static sliding window) that rejected drafts "
        "cannot be taken out of exactly; decode without the drafter."
    )
