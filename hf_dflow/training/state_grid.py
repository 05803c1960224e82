"""Blocks of proposals through a target with recurrent layers, whose states no mask can divide among blocks.

All documents go through the target once, a chunk of tokens at a time, and its recurrent states are copied between the
chunks: the *grid*. A block then starts from the last grid point before its anchor: the tokens from there to the anchor,
less than a chunk, run again in front of it. So a later round, whose anchors have moved on, needs no states of its own;
a document has as many states as chunks, however many anchors are drawn in it; and no mixer has to be known.

The blocks that begin in one chunk, of all documents, are a batch. All have equally many tokens before them, so that no
mask is needed; what pads the shorter ones comes behind all that is read.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_dflow.errors import DFlowError
from hf_dflow.generation._compat import cache_argument, capture_features
from hf_dflow.generation.recurrent import KINDS, clamping_mixers, has_keys, is_recurrent, steps_of_any_size
from hf_dflow.generation.selfcheck import check_of
from hf_dflow.training.frozen_target import inner_model
from hf_dflow.training.packing import PADDING, Anchors, Sequences

Place = tuple[int, str, int]  # of a state: number of its layer, kind, and index within the layer
CHUNK = 32  # tokens between two grid points, where memory allows
# Of all states that are kept, more of which are a wider grid; and of the states, keys, values and hidden states of the
# blocks in one forward. On a GPU at least so much, and else this share of its memory.
GRID_BYTES, GRID_SHARE = 2**31, 1 / 8
FORWARD_BYTES, FORWARD_SHARE = 2**30, 1 / 16


def check_blocks(target: Any) -> None:
    """Refuse a target with recurrent layers whose states on proposals would be wrong.

    Raises:
        DFlowError: It has layers that hold anything but states, keys and values, or was measured to compute blocks in
            another way than single tokens.
    """
    base = target.get_base_model() if hasattr(target, "get_base_model") else target
    others = {
        type(layer).__name__
        for layer in DynamicCache(config=base.config.get_text_config()).layers
        if not is_recurrent(layer)
        and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        and type(layer).__name__ != "DummyLayer"
    }
    if others:
        raise DFlowError(
            f"{type(base).__name__} has layers of kind {', '.join(sorted(others))} beside recurrent ones; relay rounds "
            "know recurrent layers beside full and sliding attention only. Train without relay rounds (relay_rounds=0)."
        )
    lacks = check_of(base).lacks("block")
    if lacks:
        raise DFlowError(
            f"{type(base).__name__} does not compute a block of tokens behind its cache as it computes them one by "
            f"one: tried on random tokens, {lacks}. Relay rounds would learn from wrong states, and no draft could be "
            "verified exactly."
        )


class StateGrid:
    """The frozen target's recurrent states at the grid points of every document, and all its keys and values.

    Memory is bounded: states take `GRID_BYTES`, where that is enough for one of each document; blocks run as many at a
    time as fit into `FORWARD_BYTES`, or one by one.

    Args:
        target (`PreTrainedModel`): The frozen target.
        sequences (`Sequences`): Packed rows; their documents are taken apart.
    """

    @torch.no_grad()
    def __init__(self, target: Any, sequences: Sequences):
        self.target, self.text = target, target.config.get_text_config()
        self._take_apart(sequences)
        self.cache = DynamicCache(config=self.text)
        self.clamping = clamping_mixers(target)  # as if prompts too were decoded: documents are cut alike
        self.spacing = CHUNK
        # At each grid point: of every layer, kind and index the states of the documents that are longer.
        self.states: list[dict[Place, torch.Tensor]] = []
        self.keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of each layer: [D, KV, tokens, width]
        self._fill()

    def _take_apart(self, sequences: Sequences) -> None:
        """One row for each document, padded on the right."""
        starts = sequences.starts()
        index = torch.arange(starts.shape[1], device=starts.device)
        row, first = (starts == index).nonzero(as_tuple=True)
        self.number = torch.full_like(starts, PADDING)  # [R, S] of the document that begins there
        self.number[row, first] = torch.arange(len(row), device=row.device)
        self.lengths = (starts[row] == first[:, None]).sum(dim=1)
        offsets = torch.arange(int(self.lengths.max()), device=starts.device)
        places = (first[:, None] + offsets).clamp(max=starts.shape[1] - 1)
        self.token_ids = sequences.token_ids[row[:, None], places].where(offsets < self.lengths[:, None], 0)
        self.starts = starts

    # -- the grid

    def _fill(self) -> None:
        """Run the documents through the target chunk by chunk."""
        num_chunks, stride = (self.token_ids.shape[1] - 1) // self.spacing, 1  # an anchor follows each
        with self._collected_keys():
            for chunk in range(num_chunks):
                places = chunk * self.spacing + torch.arange(self.spacing, device=self.token_ids.device)
                self._forward(self.token_ids[:, places], places, self.cache)
                states = dict(_states(self.cache))
                if chunk == 0:
                    stride = self._stride(states)
                    empty = {place: torch.zeros_like(state[:1]).expand_as(state) for place, state in states.items()}
                    self.states.append(empty)
                if (chunk + 1) % stride == 0:
                    holders = (self.lengths > (chunk + 1) * self.spacing).nonzero()[:, 0]
                    self.states.append({place: state[holders.to(state.device)] for place, state in states.items()})
        self.spacing *= stride

    @contextmanager
    def _collected_keys(self) -> Iterator[None]:
        """Keep all keys and values of the forwards within, also those that windows drop."""
        layers: dict[int, Any] = {number: layer for number, layer in enumerate(self.cache.layers) if has_keys(layer)}
        collected: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {number: [] for number in layers}
        for number, layer in layers.items():
            layer.update = _collecting(layer.update, collected[number])
        yield
        for number, layer in layers.items():
            del layer.update
            if collected[number]:
                keys, values = zip(*collected[number], strict=True)
                self.keys_values[number] = torch.cat(keys, dim=-2), torch.cat(values, dim=-2)

    def _stride(self, states: dict[Place, torch.Tensor]) -> int:
        """Of how many chunks the states of one are kept."""
        num_states = int(((self.lengths - 1) // self.spacing).sum())
        return max(1, -(-num_states * _bytes_of_one(states) // self._bound(GRID_BYTES, GRID_SHARE)))

    def _forward(self, token_ids: torch.Tensor, places: torch.Tensor, cache: DynamicCache) -> Any:
        """Hidden states of all layers; no logits are computed."""
        limit = getattr(self.text, "max_position_embeddings", None)
        with steps_of_any_size(self.clamping):
            return inner_model(self.target)(
                token_ids,
                position_ids=(places if limit is None else places.clamp(max=limit - 1)).expand_as(token_ids),
                output_hidden_states=True,
                use_cache=True,
                **{cache_argument(inner_model(self.target)): cache},
            ).hidden_states

    # -- blocks

    @torch.no_grad()
    def block_features(self, anchors: Anchors, block_ids: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
        """Target states `[A, L, layers * H]` of the blocks `[A, L]`, which begin with their anchors."""
        start = self.starts[anchors.row, anchors.position]
        document, position = self.number[anchors.row, start], anchors.position - start
        order = position.argsort()
        features = []
        for group in self._groups(position[order] // self.spacing, block_ids.shape[1]):
            some = order[group]
            features.append(self._some_blocks(document[some], position[some], block_ids[some], layer_ids))
        found = torch.cat(features)
        return torch.empty_like(found).index_copy_(0, order.to(found.device), found)

    def _groups(self, chunks: torch.Tensor, block_length: int) -> Iterator[slice]:
        """Of blocks in the order of their `chunks`: as many as begin in the same one, and as memory holds."""
        most, end = self._blocks_per_forward(block_length), 0
        for count in chunks.unique_consecutive(return_counts=True)[1].tolist():
            start, end = end, end + count
            for first in range(start, end, most):
                yield slice(first, min(first + most, end))

    def _blocks_per_forward(self, block_length: int) -> int:
        rows = self.spacing + block_length
        column = sum(states[0, :, :1].nbytes for pair in self.keys_values.values() for states in pair)
        hidden = self.text.num_hidden_layers * self.text.hidden_size * self.target.dtype.itemsize
        states = _bytes_of_one(self.states[0]) if self.states else 0
        of_one = states + column * (self.token_ids.shape[1] + rows) + 2 * hidden * rows
        return max(1, self._bound(FORWARD_BYTES, FORWARD_SHARE) // of_one)

    def _bound(self, least: int, share: float) -> int:
        """Bytes; the same for the same machine, so that a resumed run computes what it would have."""
        device = self.token_ids.device
        if device.type != "cuda":
            return least
        return max(least, int(torch.cuda.get_device_properties(device).total_memory * share))

    def _some_blocks(
        self, document: torch.Tensor, position: torch.Tensor, block_ids: torch.Tensor, layer_ids: list[int]
    ) -> torch.Tensor:
        """[`block_features`] of blocks that begin in the same chunk."""
        length, chunk = block_ids.shape[1], int(position[0]) // self.spacing
        lead = position[:, None] - chunk * self.spacing  # tokens between grid point and anchor
        offsets = torch.arange(int(lead.max()) + length, device=lead.device)
        places = chunk * self.spacing + offsets
        context = self.token_ids[document][:, places.clamp(max=self.token_ids.shape[1] - 1)]
        own = block_ids.gather(1, (offsets - lead).clamp(min=0, max=length - 1))
        hidden_states = self._forward(
            torch.where(offsets < lead, context, own), places, self._cache_at(document, chunk)
        )
        features = capture_features(hidden_states, layer_ids)
        rows = lead + torch.arange(length, device=lead.device)
        return features.gather(1, rows.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))

    def _cache_at(self, document: torch.Tensor, chunk: int) -> DynamicCache:
        """What the target has cached of each of the documents before a chunk."""
        cache, columns = copy.copy(self.cache), chunk * self.spacing
        row = (self.lengths > columns).cumsum(0)[document] - 1  # of its state
        layers: list[Any] = [_copied(layer) for layer in self.cache.layers]
        cache.layers = layers
        for number, layer in enumerate(layers):
            if number in self.keys_values:
                first = 0
                if layer.is_sliding:
                    layer.cumulative_length, first = columns, max(0, columns - layer.sliding_window + 1)
                keys, values = self.keys_values[number]
                rows = document.to(keys.device)
                layer.keys, layer.values = keys[rows, :, first:columns], values[rows, :, first:columns]
            for kind in KINDS if is_recurrent(layer) else ():
                states = getattr(layer, kind)
                for index, state in states.items():
                    if state is not None:
                        held = self.states[chunk][number, kind, index]
                        states[index] = held[row.to(held.device)]
        return cache


def _copied(layer: Any) -> Any:
    """A cache layer that changes without the other: with dictionaries of its own, of the same tensors."""
    other = copy.copy(layer)
    vars(other).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return other


def _bytes_of_one(states: dict[Place, torch.Tensor]) -> int:
    return sum(state.nbytes // len(state) for state in states.values())


def _states(cache: DynamicCache) -> Iterator[tuple[Place, torch.Tensor]]:
    for number, layer in enumerate(cache.layers):
        for kind in KINDS if is_recurrent(layer) else ():
            for index, state in getattr(layer, kind).items():
                if state is not None:
                    yield (number, kind, index), state


def _collecting(update: Any, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """`update` of a cache layer, which also keeps what a window would drop."""

    def collect(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept.append((keys, values))
        return update(keys, values, *args, **kwargs)

    return collect
