"""Logits processors for one row of a batch: each row's are asked about it alone, and share no state with others'."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.path import PURE


def for_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """The processors that row `row` of `batch_size` would have if it were alone.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them for the batch.

    Raises:
        UnsupportedGenerationError: A processor of the caller's cannot be copied, so rows would share its state.
    """
    if batch_size == 1:
        return processors
    return LogitsProcessorList(_one_row(processor, row, batch_size) for processor in processors)


def _one_row(processor: Any, row: int, batch_size: int) -> Any:
    split = _SPLIT.get(type(processor))
    if split is not None:
        return split(processor, row, batch_size)
    if type(processor) in PURE or type(processor) is lp.WatermarkLogitsProcessor:  # which seeds itself for each prefix
        return processor
    # A model that a processor holds is shared, not copied; so are functions, which deepcopy leaves alone.
    held = getattr(processor, "__dict__", {}).values()
    shared = {id(value): value for value in held if isinstance(value, nn.Module)}
    try:
        return copy.deepcopy(processor, shared)
    except Exception as error:
        raise UnsupportedGenerationError(
            f"each row of a batch needs its own copy of {type(processor).__name__}, which cannot be copied ({error}); "
            "give it a __deepcopy__, or call generate for each row."
        ) from error


def _repetition_penalty(processor, row: int, batch_size: int):
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = _rows_of(ignored, row, batch_size)
    return own


def _encoder_penalty(processor, row: int, batch_size: int):
    own = copy.copy(processor)
    own.encoder_input_ids = _rows_of(processor.encoder_input_ids, row, batch_size)
    return own


def _encoder_ngrams(processor, row: int, batch_size: int):
    own = copy.copy(processor)
    own.generated_ngrams = [processor.generated_ngrams[row * processor.batch_size // batch_size]]
    own.batch_size = 1
    return own


def _prefix_constraint(processor, row: int, batch_size: int):
    # The caller's function learns which prompt it is asked about; how many rows each has, transformers 5.24 keeps here.
    prompt = row // processor._num_beams

    def own_row(_, input_ids):
        return processor._prefix_allowed_tokens_fn(prompt, input_ids)

    return lp.PrefixConstrainedLogitsProcessor(own_row, 1)


def _guidance(processor, row: int, batch_size: int):
    own = copy.copy(processor)
    own.unconditional_context = {
        key: _rows_of(value, row, batch_size) if isinstance(value, torch.Tensor) else value
        for key, value in processor.unconditional_context.items()
    }
    return own


def _rows_of(tensor: torch.Tensor, row: int, batch_size: int) -> torch.Tensor:
    """Row `row`'s part of what belongs to the batch; `num_return_sequences` repeats rows behind its back."""
    at = row * tensor.shape[0] // batch_size
    return tensor[at : at + 1]


_SPLIT: dict[type, Callable[..., Any]] = {
    lp.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    lp.EncoderRepetitionPenaltyLogitsProcessor: _encoder_penalty,
    lp.EncoderNoRepeatNGramLogitsProcessor: _encoder_ngrams,
    lp.PrefixConstrainedLogitsProcessor: _prefix_constraint,
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor: _guidance,
}
