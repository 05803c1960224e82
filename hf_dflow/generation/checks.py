"""What is refused, and in which words, before the first forward."""

from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation._compat import (
    CACHE_NAMES,
    PROMPT_ONLY,
    STATIC_IS_CROPPABLE,
    cached_batch_size,
    fixed_rope_length,
    get_cache,
    is_croppable,
)
from hf_dflow.model.drafter import DFlowDrafter

FLAG = 'speculation_type="dflow"'
CACHES = (None, "dynamic", "static") if STATIC_IS_CROPPABLE else (None, "dynamic")
BATCHED = ("attention_mask", "position_ids", "token_type_ids")  # tensors with a row for each row of the batch


def check_mode(generation_config: GenerationConfig, drafter) -> None:
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
        "use_cache": generation_config.use_cache is False,
        "token_healing": bool(generation_config.token_healing),
        "cache_implementation": generation_config.cache_implementation not in CACHES,
    }
    if refused.pop("use_cache"):
        raise UnsupportedGenerationError(
            f"{FLAG} needs use_cache=True: the target's cache is what drafts are checked on."
        )
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedGenerationError(
                f"{FLAG} does not support {name}={getattr(generation_config, name)!r}: greedy decoding or sampling, "
                f"with a {' or '.join(filter(None, CACHES))} cache. Leave the option out, or decode without it."
            )


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
    if getattr(model, "_is_stateful", False):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} keeps a recurrent state that rejected drafts cannot be taken out of; decode "
            "without the drafter."
        )


def check_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    synced_gpus: bool,
    model_kwargs: dict,
    generation_config: GenerationConfig,
    has_streamer: bool,
    asks_criteria: bool,
) -> None:
    """Refuse inputs that this decoder cannot handle exactly.

    Raises:
        UnsupportedGenerationError: Naming the input and what to do.
    """
    if synced_gpus:
        raise UnsupportedGenerationError(f"{FLAG} does not support synced_gpus=True; set it to False.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(f"{FLAG} does not support inputs_embeds; pass input_ids.")
    _check_cache(get_cache(model_kwargs), input_ids.shape[0])
    longest = fixed_rope_length(model)
    if longest is not None and generation_config.max_length > longest:
        raise UnsupportedGenerationError(
            f"{FLAG}: the rotary embedding of {type(model).__name__} changes with the length beyond {longest} tokens, "
            f"so that blocks are not computed as single tokens are; max_length is {generation_config.max_length}, set "
            f"it to at most {longest}, or decode without the drafter."
        )
    if input_ids.shape[0] > 1:
        _check_batch(input_ids.shape[0], model_kwargs, generation_config, has_streamer, asks_criteria)
    chunk_size = generation_config.prefill_chunk_size
    if chunk_size is not None and chunk_size < 1:
        raise UnsupportedGenerationError(f"prefill_chunk_size={chunk_size}; use a number of tokens, or leave it out.")
    if chunk_size is not None:
        _refuse_tensors(model_kwargs, "which chunk of the prompt needs which part of it")


def _check_cache(cache: Cache | None, batch_size: int) -> None:
    kinds = " or ".join(filter(None, CACHES))
    if not isinstance(cache, (DynamicCache, StaticCache)[: len(CACHES) - 1]):
        raise UnsupportedGenerationError(
            f"{FLAG} needs a cache to take rejected drafts out of ({kinds}), this target uses "
            f"{'none' if cache is None else type(cache).__name__}; decode without the drafter."
        )
    if cache.offloading:
        raise UnsupportedGenerationError(
            f"{FLAG} does not crop an offloaded cache; make it with offloading=False, or decode without the drafter."
        )
    if int(cache.get_seq_length()) == 0 and not is_croppable(cache):
        _refuse_layers("This target")
    cached_rows = cached_batch_size(cache)
    if cached_rows not in (None, batch_size):
        raise UnsupportedGenerationError(
            f"the cache holds {cached_rows} rows for {batch_size} sequences; pass one of the same batch, or none."
        )


def _check_batch(
    batch_size: int, model_kwargs: dict, generation_config: GenerationConfig, has_streamer: bool, asks_criteria: bool
) -> None:
    if has_streamer:
        raise UnsupportedGenerationError(
            f"{FLAG} streams one sequence, got a batch of {batch_size}: its rows do not advance together. Leave the "
            "streamer out, or call generate for each row."
        )
    _refuse_tensors(model_kwargs, f"which part of it belongs to which of the {batch_size} rows", PROMPT_ONLY)
    if asks_criteria and getattr(generation_config, "_pad_token_tensor", None) is None:
        raise UnsupportedGenerationError(
            f"pad_token_id is not set, and a batch of {batch_size} whose rows may end at different lengths is padded "
            "with it; set it."
        )


def _refuse_tensors(model_kwargs: dict, what: str, allowed: tuple[str, ...] = ()) -> None:
    for name, value in model_kwargs.items():
        if name not in (*BATCHED, *CACHE_NAMES, *allowed) and _holds_tensors(value):
            raise UnsupportedGenerationError(
                f"{FLAG} cannot tell {what} for {name}; call generate for each row, the prompt in one chunk."
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_holds_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def check_rows_alone(model: PreTrainedModel, model_kwargs: dict) -> None:
    """Refuse what belongs to a whole batch where its rows are decoded one by one.

    Raises:
        UnsupportedGenerationError: Naming a filled cache, or an input of another modality.
    """
    cache = get_cache(model_kwargs)
    if cache is not None and int(cache.get_seq_length()):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} decodes a batch row by row, for which a filled {type(cache).__name__} of the "
            "whole batch is of no use; leave it out, or call generate for each row."
        )
    _refuse_tensors(model_kwargs, "which part of it belongs to which row")


def check_first_outputs(model: PreTrainedModel, cache: Cache, hidden_states: tuple) -> None:
    """Refuse what only the first forward shows.

    Raises:
        UnsupportedGenerationError: A layer cannot be rolled back, or its states are not one vector for each token.
    """
    if not is_croppable(cache):
        _refuse_layers(type(model).__name__)
    if any(states.ndim != 3 for states in hidden_states):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} has hidden states of {hidden_states[0].ndim} dimensions, a drafter reads (batch, "
            "tokens, hidden); decode without the drafter."
        )


def _refuse_layers(who: str) -> None:
    raise UnsupportedGenerationError(
        f"{who} has layers (linear, recurrent or sparse attention, or a static sliding window) that rejected drafts "
        "cannot be taken out of exactly; decode without the drafter."
    )
