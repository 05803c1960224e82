"""Caches: the only file that crops, compacts, indexes, copies or restores them, but for recurrent states.

Rows of a batch advance at their own pace. In the drafter's cache each row's context is packed to the left; in the
target's, what a row rejected stays as a *hole* until `compact` squeezes the holes out.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import StaticLayer

from hf_dflow.generation.recurrent import crop_keys, has_keys, is_recurrent, repeat_states
from hf_dflow.kernels import compact_rows
from hf_dflow.model.drafter import DFlowDrafter

MAX_HOLES = 0.25  # share of a target cache's columns that no row needs


def is_croppable(cache: Cache) -> bool:
    """Whether rejected rows can be taken out of `cache` again, recurrent states with the help of [`RecurrentStates`].

    Indexed (sparse) attention is not: its own block, single-token and full forwards disagree, so nothing is exact.
    """
    if not hasattr(cache, "layers"):
        return bool(getattr(cache, "is_croppable", True))
    return all(
        getattr(layer, "is_croppable", True) and "Indexed" not in type(layer).__name__
        for layer in cache.layers
        if not is_recurrent(layer)
    )


def crop(cache: Cache, rows: int) -> None:
    """Take the last `rows` keys and values out of `cache`. With 0, sliding layers still shrink back to their window."""
    for layer in cache.layers:
        _crop_layer(layer, rows)


def crop_to(cache: Cache, length: int) -> None:
    """Leave the first `length` keys and values in each layer; a forward that failed has lengthened some of them."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if has_keys(layer) and (excess := int(layer.get_seq_length()) - length) > 0:
            _crop_layer(layer, excess)


def shrink_recurrent(cache: Cache) -> None:
    """Let recurrent layers with a sliding window, which always record their past, shrink back to it."""
    for layer in filter(is_recurrent, cache.layers):
        crop_keys(layer, 0)


def _crop_layer(layer: Any, rows: int) -> None:
    if is_recurrent(layer):
        crop_keys(layer, rows)
    else:
        layer.crop(-rows)


def length(cache: Cache) -> int | None:
    """Tokens of which `cache` holds keys and values; `None` where it has recurrent layers only."""
    layers: list[Any] = cache.layers
    if layers and all(is_recurrent(layer) and not has_keys(layer) for layer in layers):
        return None
    return int(cache.get_seq_length())


def has_recurrent(cache: Cache) -> bool:
    """Whether a layer of `cache` holds a recurrent state."""
    return any(map(is_recurrent, cache.layers))


def is_filled(cache: Cache) -> bool:
    """Whether any token is cached."""
    recurrent: list[Any] = [layer for layer in cache.layers if is_recurrent(layer)]
    return bool(length(cache)) or any(any(layer.has_previous_state.values()) for layer in recurrent)


def record_past(cache: Cache) -> None:
    """Let sliding layers keep what a crop may need. Recurrent ones must not: their convolutions' states would grow."""
    for layer in cache.layers:
        if not is_recurrent(layer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


def keep_path(cache: Any, cached: int, path: list[int], num_nodes: int) -> None:
    """Leave only the anchor and the nodes of `path` of what a tree's forward added behind the first `cached` rows."""
    for layer in cache.layers:
        if type(layer).__name__ == "DummyLayer":  # its keys are another layer's
            continue
        index = cached + torch.tensor([0, *path], device=layer.keys.device)
        for states in (layer.keys, layer.values):
            states[:, :, cached : cached + len(index)] = states.index_select(2, index)
    crop(cache, num_nodes - len(path))


def select_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keep only `rows` of the batch."""
    for layer in _filled(cache):
        layer.keys, layer.values = layer.keys[rows.to(layer.keys.device)], layer.values[rows.to(layer.values.device)]


def contents(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the layers of a dynamic cache hold, for `restore`."""
    return [(layer.keys, layer.values) for layer in _filled(cache)]


def restore(cache: Cache, held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put `contents` back."""
    for layer, (keys, values) in zip(_filled(cache), held, strict=True):
        layer.keys, layer.values = keys, values


def fork(cache: Any) -> Any:
    """A copy that goes its own way. It shares the keys and values of a dynamic cache, which no forward writes into."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        for name, value in vars(layer).items():
            if name not in ("keys", "values"):
                setattr(layer, name, copy.deepcopy(value))
    return twin


def repeat_columns(cache: Cache, count: int) -> None:
    """Make `cache`, of one row, longer by `count` columns: those that it holds, in random order and each scaled a
    little, as equal ones would tie where attention chooses some."""
    generator = torch.Generator().manual_seed(0)
    for layer in _filled(cache) if count else []:
        by_column = _by_column(layer)
        if not by_column:
            continue
        picks = torch.randint(layer.keys.shape[2], (count,), generator=generator)
        scales = 0.8 + 0.4 * torch.rand(count, 1, generator=generator)
        more = {name: held[..., picks.to(held.device), :] * scales.to(held) for name, held in by_column.items()}
        layer.update(more.pop("keys"), more.pop("values"))
        for name, states in more.items():
            setattr(layer, name, torch.cat([by_column[name], states], dim=-2))


def with_holes(cache: Cache, places: list[int], width: int) -> Cache:
    """A batch of the one row of `cache`, each with `width` columns more, which begin at its place of `places`.

    What these hold differs from what the row holds: its values with the other sign.
    """
    twin = fork(cache)
    for layer in _filled(twin):
        for name, held in _by_column(layer).items():
            hole = held[..., torch.arange(width, device=held.device) % held.shape[-2], :]
            hole = -hole if name == "values" else hole
            states = torch.cat([torch.cat([held[..., :at, :], hole, held[..., at:, :]], dim=-2) for at in places])
            kept = getattr(layer, "sliding_window", None) or states.shape[-2] + 1
            setattr(layer, name, states[..., -kept + 1 :, :])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length += width
    repeat_states(twin, len(places))
    return twin


def _by_column(layer: Any) -> dict[str, torch.Tensor]:
    """What a dynamic layer holds for each column: keys, values and, in sparse attention, by what columns are chosen."""
    width = layer.keys.shape[2] if layer.keys.numel() else -1
    tensors = {name: held for name, held in vars(layer).items() if isinstance(held, torch.Tensor) and held.ndim > 2}
    return {name: held for name, held in tensors.items() if held.shape[-2] == width}


def cached_batch_size(cache: Cache) -> int | None:
    """Rows that `cache` holds; `None` for an empty one."""
    held = [layer.keys for layer in _filled(cache) if getattr(layer, "keys", None) is not None]
    for layer in filter(is_recurrent, cache.layers):
        held += [state for state in vars(layer)["conv_states"].values() if state is not None]
    return held[0].shape[0] if held and held[0].numel() else None


def capacity(cache: Cache) -> int | None:
    """How many tokens a static `cache` can hold; `None` for no limit."""
    lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    return min(lengths) if lengths else None


def stop_past_recording(cache: Cache) -> None:
    """Let sliding layers shrink at every forward again, as plain decoding, which never crops, expects of a cache."""
    for layer in getattr(cache, "layers", []):
        if hasattr(layer, "record_past") and not is_recurrent(layer):
            layer.record_past = False


def attention_windows(cache: Cache | None, num_layers: int) -> list[int | None]:
    """How many keys each layer keeps for one query; `None` for all, -1 for all that a static layer has room for."""
    layers = getattr(cache, "layers", [])[:num_layers]
    windows = [-1 if isinstance(layer, StaticLayer) else getattr(layer, "sliding_window", None) for layer in layers]
    return windows + [None] * (num_layers - len(windows))


def _filled(cache: Cache) -> list[Any]:
    layers: list[Any] = cache.layers
    return [layer for layer in layers if getattr(layer, "keys", None) is not None and layer.is_initialized]


class DraftCache:
    """Keys and values of the context features for each draft layer, in buffers that double when full.

    Each row's context is packed to the left. A block's own keys and values are written behind the longest row's
    context, attended to, and overwritten by whatever comes next: nothing is concatenated, nothing is cropped.

    Args:
        drafter (`DFlowDrafter`): Whose layers.
        batch_size (`int`, *optional*, defaults to 1): B, rows.
    """

    def __init__(self, drafter: DFlowDrafter, batch_size: int = 1):
        self._drafter = drafter
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # per layer [B, KV, capacity, D]
        self.lengths = [0] * batch_size  # context rows held
        self._next_positions = [0] * batch_size
        config = drafter.config
        self._reaches = [config.window_reach if kind == "sliding_attention" else None for kind in config.layer_types]

    @staticmethod
    def _grown(end: int) -> int:
        return max(64, 2 * end)

    @classmethod
    def capacity_for(cls, prompt: int, tokens: int, block_size: int) -> int:
        """Columns that are allocated for each row by the time that it holds `tokens`, the first `prompt` put in at
        once; at most."""
        columns = cls._grown(prompt)
        while columns < tokens + block_size:
            columns = cls._grown(columns + block_size)
        return columns

    @property
    def width(self) -> int:
        """Columns in use: the longest row's."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows hold equally much."""
        return min(self.lengths) == self.width

    def append_context(self, features: torch.Tensor, first_positions: list[int], counts: list[int]) -> None:
        """Project tapped target states and keep their keys and values.

        Args:
            features (`torch.Tensor` of shape `(B, T, taps * target_hidden_size)`): Row b counts as far as `counts[b]`.
            first_positions (`list[int]`): Absolute position of each row's first state.
            counts (`list[int]`): How many states each row gets, at most T.

        Raises:
            ValueError: A position does not follow what is held; a gap would shift every later distance.
        """
        if not max(counts):
            return
        rows = zip(self.lengths, first_positions, self._next_positions, counts, strict=True)
        for length, given, expected, count in rows:
            if length and count and given != expected:
                raise ValueError(f"context features start at {given}, expected {expected}")
        context = self._drafter.project_context(features)
        positions = torch.tensor(first_positions, device=context.device)[:, None]
        positions = positions + torch.arange(context.shape[1], device=context.device)
        for layer_idx, (keys, values) in enumerate(self._drafter.context_key_values(context, positions)):
            self._reserve(layer_idx, keys, values)
            for held, new in zip(self._buffers[layer_idx], (keys, values), strict=True):
                self._put(held, new)
        for row, count in enumerate(counts):
            if count:
                self.lengths[row] += count
                self._next_positions[row] = first_positions[row] + count

    def extend(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of context and block for one layer; a sliding layer gets only what its window reaches."""
        self._reserve(layer_idx, keys, values)
        start, end = self._first_column(layer_idx), self.width + keys.shape[2]
        held_keys, held_values = self._buffers[layer_idx]
        held_keys[:, :, self.width : end] = keys
        held_values[:, :, self.width : end] = values
        return held_keys[:, :, start:end], held_values[:, :, start:end]

    def mask(self, layer_idx: int, block_size: int, device: torch.device) -> torch.Tensor | None:
        """Which of the columns that `extend` returned each block row may look at.

        Returns a bool tensor `[B or 1, 1, block_size, columns]`, or `None` where everything is visible.
        """
        start = self._first_column(layer_idx)
        if self.is_even:
            return self._drafter.attention_mask(layer_idx, block_size, self.width - start + block_size, device)
        queries = torch.arange(block_size, device=device)[:, None]  # [L, 1]
        columns = torch.arange(start, self.width, device=device)
        lengths = torch.tensor(self.lengths, device=device)[:, None, None]
        to_context = lengths + queries - columns  # [B, L, context columns]
        to_block = (queries - queries.T).expand(len(self.lengths), -1, -1)  # [B, L, L]
        visible = self._drafter.visible(layer_idx, torch.cat([to_context, to_block], dim=-1), queries)
        visible[..., : len(columns)] &= columns < lengths
        return visible[:, None]

    def select(self, rows: torch.Tensor, kept: list[int]) -> None:
        """Keep only the rows `kept`, given as a tensor too."""
        rows = rows.to(self._buffers[0][0].device) if self._buffers else rows  # the target's may be another
        self._buffers = [(keys[rows], values[rows]) for keys, values in self._buffers]
        self.lengths = [self.lengths[row] for row in kept]
        self._next_positions = [self._next_positions[row] for row in kept]

    def _first_column(self, layer_idx: int) -> int:
        reach = self._reaches[layer_idx]
        return 0 if reach is None else max(0, min(self.lengths) - reach)

    def _reserve(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make room for `keys` and `values` behind every row."""
        end = self.width + keys.shape[2]
        if not self._buffers:
            self._buffers = [(keys[:, :, :0], values[:, :, :0])] * len(self._reaches)
        held_keys, held_values = self._buffers[layer_idx]
        if held_keys.shape[2] < end:
            # Zeros: a hidden column's weight is 0, and 0 times an uninitialised NaN would be NaN.
            grown = [new.new_zeros(*new.shape[:2], self._grown(end), new.shape[3]) for new in (keys, values)]
            for new, old in zip(grown, (held_keys, held_values), strict=True):
                new[:, :, : self.width] = old[:, :, : self.width]
            self._buffers[layer_idx] = (grown[0], grown[1])

    def _put(self, held: torch.Tensor, new: torch.Tensor) -> None:
        """Write `new` `[B, KV, T, D]` behind each row's context. What a row does not count is overwritten later."""
        if self.is_even:
            held[:, :, self.width : self.width + new.shape[2]] = new
            return
        columns = torch.tensor(self.lengths, device=new.device)[:, None] + torch.arange(new.shape[2], device=new.device)
        held.scatter_(2, columns[:, None, :, None].expand_as(new), new)


@dataclass
class TargetColumns:
    """Which token of which row each column of the target's cache holds. Rows are padded, and have holes.

    After a step all rows keep as many columns as the row that accepted most; what a row rejected stays as a hole, which
    the attention mask hides. `compact` takes the holes out once they pass `MAX_HOLES`, so that a row never costs more
    than the longest row's tokens / (1 - MAX_HOLES), and a block.
    """

    tokens: torch.Tensor  # [B, columns] index of the token in its row's sequence, prompt padding counted; -1 in holes

    @classmethod
    def of_prompt(cls, mask: torch.Tensor) -> "TargetColumns":
        """Columns after the prefill, from the prompts' attention mask `[B, T]`; padding counts as holes."""
        return cls(torch.where(mask.bool(), torch.arange(mask.shape[1], device=mask.device), -1))

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def attention_mask(self) -> torch.Tensor:
        """`[B, columns + 1]`: what is cached, and the anchor, which comes next."""
        return torch.nn.functional.pad((self.tokens >= 0).long(), (0, 1), value=1)

    def append(self, lengths: list[int], counts: list[int]) -> None:
        """Add `max(counts)` columns: row b's next `counts[b]` tokens, then holes.

        Args:
            lengths (`list[int]`): Tokens cached of each row so far, its prompt's padding counted.
            counts (`list[int]`): Tokens that each row keeps of this step.
        """
        device = self.tokens.device
        offsets = torch.arange(max(counts), device=device)
        first, kept = torch.tensor([lengths, counts], device=device)[..., None]
        self.tokens = torch.cat([self.tokens, torch.where(offsets < kept, first + offsets, -1)], dim=1)

    def compact(self, cache: Cache, longest: int, backend: str) -> None:
        """Squeeze the holes out of `cache`, where they are too many for a longest row of `longest` tokens."""
        if self.width - longest <= MAX_HOLES * self.width:
            return
        is_kept = self.tokens >= 0
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in _filled(cache):
            for states in (layer.keys, layer.values):
                by_device.setdefault(states.device, []).append(states)
        for device, held in by_device.items():
            compact_rows(held, is_kept.to(device), backend=backend)
        for layer in _filled(cache):
            layer.keys, layer.values = layer.keys[:, :, :longest], layer.values[:, :, :longest]
        self.tokens = pack(self.tokens, is_kept)[:, :longest]

    def select(self, rows: torch.Tensor) -> None:
        self.tokens = self.tokens[rows]

    def spread(self, attention: torch.Tensor, row: int, offset: int, length: int) -> torch.Tensor:
        """One row's attention over columns, in the order of its tokens; 0 for padding.

        Args:
            attention (`torch.Tensor` of shape `(1, heads, 1, columns + rows of the block)`): Of block row `offset`.
            row (`int`): Of the batch.
            offset (`int`): Index of the block row; what comes behind it is not seen.
            length (`int`): Tokens cached of this row, padding counted.

        Returns:
            `torch.Tensor` of shape `(1, heads, 1, length + offset + 1)`.
        """
        total = length + offset + 1
        block = torch.arange(length, total, device=self.tokens.device)
        place = torch.cat([self.tokens[row], block]).to(attention.device)
        place = torch.where(place < 0, total, place).expand_as(attention[..., : len(place)])
        tokens = attention.new_zeros(*attention.shape[:-1], total + 1)
        return tokens.scatter(-1, place, attention[..., : place.shape[-1]])[..., :total]


def pack(rows: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """Move the kept entries of each row to the front, in their order.

    Args:
        rows (`torch.Tensor` of shape `(B, T, ...)`): What to move.
        is_kept (`torch.BoolTensor` of shape `(B, T)`): Which.
    """
    order = (~is_kept).long().argsort(dim=1, stable=True)
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], order]
