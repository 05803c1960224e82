"""Caches of rows: the only file that crops or indexes them."""

import torch

from hf_dflow.modeling_dflow import DFlowDrafter


class DraftCache:
    """Keys and values of the context features for each draft layer, in buffers that double when full.

    A block's own keys and values are written behind the context's, attended to, and overwritten by whatever comes
    next: nothing is concatenated, nothing is cropped.

    Args:
        drafter (`DFlowDrafter`): Whose layers.
    """

    def __init__(self, drafter: DFlowDrafter):
        self._drafter = drafter
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # per layer [B, KV, capacity, D]
        self.length = 0  # context rows held
        self._next_position = 0
        config = drafter.config
        self._reaches = [config.window_reach if kind == "sliding_attention" else None for kind in config.layer_types]

    def append_context(self, features: torch.Tensor, first_position: int) -> None:
        """Project tapped target states `[B, T, taps * target_hidden_size]` and keep their keys and values.

        Raises:
            ValueError: `first_position` does not follow what is held; a gap would shift every later distance.
        """
        if self.length and first_position != self._next_position:
            raise ValueError(f"context features start at {first_position}, expected {self._next_position}")
        context = self._drafter.project_context(features)
        positions = torch.arange(first_position, first_position + context.shape[1], device=context.device)
        for layer_idx, (keys, values) in enumerate(self._drafter.context_key_values(context, positions[None])):
            self._write(layer_idx, keys, values)
        self.length += context.shape[1]
        self._next_position = first_position + context.shape[1]

    def extend(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of context and block for one layer; a sliding layer gets only what its window reaches."""
        self._write(layer_idx, keys, values)
        end = self.length + keys.shape[2]
        reach = self._reaches[layer_idx]
        start = 0 if reach is None else max(0, self.length - reach)
        held_keys, held_values = self._buffers[layer_idx]
        return held_keys[:, :, start:end], held_values[:, :, start:end]

    def _write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.length + keys.shape[2]
        if not self._buffers:
            self._buffers = [(keys[:, :, :0], values[:, :, :0])] * len(self._reaches)
        held_keys, held_values = self._buffers[layer_idx]
        if held_keys.shape[2] < end:
            capacity = max(64, 2 * end)
            grown = [new.new_empty(*new.shape[:2], capacity, new.shape[3]) for new in (keys, values)]
            for new, old in zip(grown, (held_keys, held_values), strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
            held_keys, held_values = grown
            self._buffers[layer_idx] = (held_keys, held_values)
        held_keys[:, :, self.length : end] = keys
        held_values[:, :, self.length : end] = values


def shift_left(rows: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move row `shift[b] + i` of each batch entry to index `i`.

    Args:
        rows (`torch.Tensor` of shape `(B, T, ...)`): What to move.
        shift (`torch.LongTensor` of shape `(B,)`): By how much.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The moved rows, same shape, and `(B, T)` which of them exist.
    """
    source = shift[:, None] + torch.arange(rows.shape[1], device=rows.device)
    exists = source < rows.shape[1]
    index = source.clamp(max=rows.shape[1] - 1)
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], index], exists
