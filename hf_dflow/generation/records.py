"""Scores, logits, states and attentions, one entry for each generated token, as plain decoding returns them."""

from typing import Any

import torch
from transformers import Cache, GenerationConfig

from hf_dflow.generation import _compat
from hf_dflow.generation.output import GenerateDFlowOutput
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.generation.verification import Verification


class Records:
    """Collects what `return_dict_in_generate` asked for.

    Args:
        config (`GenerationConfig`): Whose `output_*` flags decide.
    """

    def __init__(self, config: GenerationConfig):
        wanted = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if wanted and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if wanted and config.output_logits else None
        self.hidden_states: list[tuple] | None = [] if wanted and config.output_hidden_states else None
        self.attentions: list[tuple] | None = [] if wanted and config.output_attentions else None

    def scores_with(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Scores of all tokens, those of a step `[B, k, V]` last, for stopping criteria; `None` if not collected."""
        return None if self.scores is None else (*self.scores, *rows.unbind(1))

    def add(self, verification: Verification, outputs, count: int, is_prefill: bool) -> None:
        """Add the first `count` tokens of a step."""
        if self.scores is not None:
            self.scores.extend(verification.scores[:, :count].unbind(1))
        if self.logits is not None:
            self.logits.extend(verification.raw_logits[:, :count].unbind(1))
        if self.hidden_states is not None:
            for i in range(count):
                rows = slice(None) if is_prefill else slice(i, i + 1)
                self.hidden_states.append(tuple(layer[:, rows] for layer in outputs.hidden_states))
        if self.attentions is not None:
            windows = _compat.attention_windows(_compat.get_cache(outputs), len(outputs.attentions))
            for i in range(count):
                if is_prefill:
                    self.attentions.append(tuple(outputs.attentions))
                else:
                    layers = zip(outputs.attentions, windows, strict=True)
                    self.attentions.append(tuple(_attention_row(layer, i, window) for layer, window in layers))

    def output(self, sequences: torch.Tensor, cache: Cache, statistics: AcceptanceStatistics) -> GenerateDFlowOutput:
        collected: dict[str, Any] = {
            name: None if getattr(self, name) is None else tuple(getattr(self, name))
            for name in ("scores", "logits", "hidden_states", "attentions")
        }
        cache_field = next(name for name in _compat.CACHE_NAMES if name in GenerateDFlowOutput.__dataclass_fields__)
        collected[cache_field] = cache
        return GenerateDFlowOutput(sequences=sequences, statistics=statistics, **collected)  # type: ignore[arg-type]


def _attention_row(attention: torch.Tensor, row: int, window: int | None) -> torch.Tensor:
    """Row `row` of `[B, heads, rows, keys]` with the keys that plain decoding would have held for it, no later ones."""
    end = attention.shape[-1] - (attention.shape[-2] - 1 - row)
    start = 0 if window is None else max(0, end - window)
    return attention[:, :, row : row + 1, start:end]
