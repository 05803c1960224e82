"""Logits processors along a draft path, and for one row of a batch: each row's see it alone and share no state."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from hf_dflow.errors import UnsupportedGenerationError


def _classes(*names: str) -> tuple[type, ...]:
    return tuple(getattr(lp, name) for name in names if hasattr(lp, name))


# Processors that look at one row of logits and at nothing else: all positions at once.
POSITION_INDEPENDENT = _classes(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "LogitNormalization",
)
# Pure functions of prefix and logits: position by position, on any path, any number of times.
PURE = POSITION_INDEPENDENT + _classes(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)


class PathProcessor:
    """A `LogitsProcessorList` applied to drafts and to target rows.

    A processor that is not known to be pure may keep state, or be a grammar that must never see an illegal prefix. It
    is called exactly as plain decoding calls it, once for each committed token in order, and never on drafts; the
    drafts are then judged one by one (`is_lazy`). Drafting without it is lossless, as any draft law is.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared it.
    """

    def __init__(self, processors: LogitsProcessorList):
        self.processors: Any = processors  # transformers annotates its tensors more narrowly than torch returns them
        self.unknown = [type(p).__name__ for p in processors if type(p) not in PURE]
        self.is_lazy = bool(self.unknown)
        self._for_drafts: Any = LogitsProcessorList(p for p in processors if type(p) in PURE)
        self.drafts_at_once = all(type(p) in POSITION_INDEPENDENT for p in self._for_drafts)

    def drafts(self, logits: torch.Tensor) -> torch.Tensor:
        """Process draft logits `[B, N, V]` of all positions; only where `drafts_at_once`."""
        return _all_at_once(self._for_drafts, logits)

    def draft_row(self, prefix_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Process draft logits `[B, V]` that follow `prefix_ids` `[B, T]`."""
        return self._for_drafts(prefix_ids, logits)

    def target_row(self, prefix_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Process target logits `[B, V]` that follow `prefix_ids` `[B, T]`."""
        processed = self.processors(prefix_ids, logits.clone())
        if processed.shape != logits.shape:
            names = ", ".join(type(processor).__name__ for processor in self.processors)
            raise UnsupportedGenerationError(
                f"the logits processors ({names}) made scores of shape {tuple(processed.shape)} of "
                f"{tuple(logits.shape)}; they see one row of a batch at a time, so none may hold a value for each "
                "row. Call generate for each row."
            )
        return processed

    def target(self, path_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Process target logits `[B, N + 1, V]`; `path_ids` `[B, T + N]` are prefix and drafts. Never when lazy."""
        if self.drafts_at_once:
            return _all_at_once(self.processors, logits)
        first = path_ids.shape[1] - logits.shape[1] + 1
        return torch.stack(
            [self.target_row(path_ids[:, : first + i], row) for i, row in enumerate(logits.unbind(1))], 1
        )


def _all_at_once(processors: Any, logits: torch.Tensor) -> torch.Tensor:
    if not processors or not logits.numel():
        return logits
    flat = logits.flatten(0, 1).clone()
    no_prefix = torch.empty(flat.shape[0], 0, dtype=torch.long, device=flat.device)
    return processors(no_prefix, flat).view_as(logits)


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
