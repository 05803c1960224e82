"""Scores, logits, states and attentions, one entry for each generated token, as plain decoding returns them."""

from collections.abc import Collection
from typing import Any

import torch

from hf_dflow.generation import _compat, cache
from hf_dflow.generation.step import TargetForward, Verification

Entry = tuple[torch.Tensor, ...]  # of each layer
COLLECTED = ("scores", "logits", "hidden_states", "attentions")


class Records:
    """Collects for one row what `return_dict_in_generate` asked for.

    Args:
        collected (`Collection[str]`): Which of `COLLECTED`.
    """

    def __init__(self, collected: Collection[str]):
        self.scores: list[torch.Tensor] | None = [] if "scores" in collected else None  # [1, V] each
        self.logits: list[torch.Tensor] | None = [] if "logits" in collected else None  # [1, V] each
        self.hidden_states: list[Entry] | None = [] if "hidden_states" in collected else None
        self.attentions: list[Entry] | None = [] if "attentions" in collected else None

    def scores_with(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Scores of all tokens, those of a step `[1, k, V]` last, for stopping criteria; `None` if not collected."""
        return None if self.scores is None else (*self.scores, *rows.unbind(1))

    def add(
        self,
        row: int,
        count: int,
        *,
        verification: Verification,
        forward: TargetForward,
        is_prefill: bool,
        columns: cache.TargetColumns | None,
        cached_tokens: int,
    ) -> None:
        """Add the first `count` tokens of a step.

        Args:
            row (`int`): Which row of the batch this is.
            verification, forward: Of the step, for the whole batch.
            columns (`TargetColumns`, *optional*): Of the target's cache before the step, where rows have holes.
            cached_tokens (`int`): Of the row before the step, padding counted.
        """
        only, outputs = slice(row, row + 1), forward.outputs
        if self.scores is not None:
            self.scores.extend(verification.scores[only, :count].unbind(1))
        if self.logits is not None:
            self.logits.extend(verification.raw_logits[only, :count].unbind(1))
        for i in range(count):
            # Copies: a slice keeps its whole block alive, and a compiled target overwrites it in the next step.
            if self.hidden_states is not None and is_prefill:
                self.hidden_states.append(tuple(layer[only] for layer in outputs.hidden_states))
            elif self.hidden_states is not None:
                self.hidden_states.append(tuple(layer[only, i : i + 1].clone() for layer in outputs.hidden_states))
            if self.attentions is None:
                continue
            layers = [layer[only] for layer in outputs.attentions]
            if is_prefill:
                self.attentions.append(tuple(layers))
            elif columns is not None:
                rows = [layer[:, :, i : i + 1] for layer in layers]
                self.attentions.append(tuple(columns.spread(layer, row, i, cached_tokens) for layer in rows))
            else:
                windows = cache.attention_windows(_compat.get_cache(outputs), len(layers))
                pairs = zip(layers, windows, strict=True)
                self.attentions.append(tuple(_attention_row(layer, i, window).clone() for layer, window in pairs))


def combine(records: list[Records]) -> dict[str, Any]:
    """The fields of the output: for each step of the longest row, all rows; 0 where a row had ended before.

    Args:
        records (`list[Records]`): Of each row, in the caller's order.
    """
    fields: dict[str, Any] = {}
    for name in COLLECTED:
        rows = [getattr(row_records, name) for row_records in records]
        if rows[0] is None:
            fields[name] = None
            continue
        longest = max(rows, key=len)
        steps = [[row[i] if i < len(row) else _zeros(longest[i]) for row in rows] for i in range(len(longest))]
        fields[name] = tuple(_join(step) for step in steps)
    return fields


def _zeros(entry: torch.Tensor | Entry) -> torch.Tensor | Entry:
    return torch.zeros_like(entry) if isinstance(entry, torch.Tensor) else tuple(map(torch.zeros_like, entry))


def _join(rows: list) -> torch.Tensor | Entry:
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows) if isinstance(rows[0], torch.Tensor) else tuple(map(torch.cat, zip(*rows, strict=True)))


def _attention_row(attention: torch.Tensor, row: int, window: int | None) -> torch.Tensor:
    """Row `row` of `[1, heads, rows, keys]` with the keys that plain decoding would have held for it, no later ones."""
    if window == -1:
        return attention[:, :, row : row + 1]
    end = attention.shape[-1] - (attention.shape[-2] - 1 - row)
    start = 0 if window is None else max(0, end - window)
    return attention[:, :, row : row + 1, start:end]
