"""Logits processors along a draft path."""

from typing import Any

import torch
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
# Pure functions of prefix and logits: position by position, on any path, as often as we like.
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
    is called exactly as plain decoding calls it, once for each committed token in order, and never on drafts; target
    rows are then judged one by one (`is_lazy`). Drafting without it is lossless: any draft law is.

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
                f"{tuple(logits.shape)}; they are asked about one row of a batch at a time, so none may hold a value "
                "for each row. Call generate for each row."
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
