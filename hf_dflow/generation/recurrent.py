"""Rollback of recurrent layers: linear attention, state-space models, short convolutions.

Rejected drafts cannot be cropped out of a recurrent state. So the states are copied before a block's forward, and the
inputs of the mixers that update them are recorded in it. Once it is known how many rows a sequence keeps, the copies
are put back and the mixers alone run again over the kept rows (*state advance*, docs/how-it-works.md). The rest of the
target computes no token twice, and blocks keep their size.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.untouched import in_turn

UPDATES = ("update_conv_state", "update_recurrent_state")  # by which a mixer is known
ATTENTION = (DynamicSlidingWindowLayer, DynamicLayer, StaticSlidingWindowLayer, StaticLayer)
ANY_SIZE = (0.0, float("inf"))
KINDS = ("conv_states", "recurrent_states")
KEYS = ("keys", "values", "cumulative_length", "is_initialized")  # what a layer may hold beside its states


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer holds a recurrent state, perhaps beside keys and values."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_keys(layer: Any) -> bool:
    """Whether a cache layer holds keys and values, perhaps beside a recurrent state."""
    return isinstance(layer, ATTENTION)


def repeat_states(cache: Cache, count: int) -> None:
    """Make the one row of all recurrent states `count` rows."""
    layers: list[Any] = [layer for layer in cache.layers if is_recurrent(layer)]
    for layer in layers:
        for states in (layer.conv_states, layer.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state.repeat_interleave(count, 0)


def clamping_mixers(model: nn.Module) -> list[Any]:
    """The mixers that `steps_of_any_size` is for."""
    return [module for module in model.modules() if hasattr(module, "time_step_limit")]


@contextmanager
def steps_of_any_size(mixers: list[Any]) -> Iterator[None]:
    """Let a block compute what plain decoding computes token by token.

    transformers' state-space mixers (Nemotron-H, Zamba2, …) clamp time steps to `time_step_limit` where they run over
    several tokens, so in a prompt, but not where they run over one.
    """
    limits = [mixer.time_step_limit for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.time_step_limit = ANY_SIZE
        yield
    finally:
        for mixer, limit in zip(mixers, limits, strict=True):
            mixer.time_step_limit = limit


@dataclass(frozen=True)
class Part:
    """The first `count` of a block's `length` tokens, of some or all of its `batch_size` rows."""

    length: int
    count: int
    batch_size: int
    rows: torch.Tensor | None = None  # None for all

    def of(self, value: Any) -> Any:
        """What belongs to it of a mixer's inputs, whose tensors have rows and tokens first, or tokens alone."""
        if isinstance(value, torch.Tensor):
            if value.ndim == 1:
                return value[: self.count] if value.shape[0] == self.length else value
            if self.rows is not None and value.ndim and value.shape[0] == self.batch_size:
                value = value.index_select(0, self.rows.to(value.device))
            return value[:, : self.count] if value.ndim and value.shape[1] == self.length else value
        if isinstance(value, tuple | list):
            return type(value)(map(self.of, value))
        if isinstance(value, dict):
            return {name: self.of(part) for name, part in value.items()}
        return value


@dataclass
class MixerCall:
    """What a mixer was called with in a block's forward."""

    mixer: nn.Module
    args: tuple
    kwargs: dict[str, Any]

    def run_again(self, part: "Part") -> None:
        """Run the mixer over a part of the block.

        Not as `mixer(…)`: hooks that somebody else put there belong to a forward of the whole model.
        """
        self.mixer.forward(*part.of(self.args), **part.of(self.kwargs))


class RecurrentStates:
    """The recurrent states in a target's cache, around each of its forwards. Where there are none, all this is nothing.

    `forward` wraps a forward of the whole target; `advance` then leaves in the states what each row keeps of it.

    Args:
        model (`PreTrainedModel`): The target.
        cache (`Cache`): Its cache.
    """

    def __init__(self, model: nn.Module, cache: Cache):
        self.model, self.cache = model, cache
        self.layers: list[Any] = [layer for layer in cache.layers if is_recurrent(layer)]
        self._mixers: list[nn.Module] | None = None  # known after the first forward of several tokens
        self._calls: list[MixerCall] = []
        self.length = 0  # tokens of the forwards that `advance` has not settled yet: a block's, or a prompt's chunks'
        self._copies: dict[tuple[int, str, int], torch.Tensor] = {}
        self._had_state: list[dict[int, bool]] = []
        self._shared: list[Any] = [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        self._clamping = clamping_mixers(model) if self.layers else []

    def __bool__(self) -> bool:
        return bool(self.layers)

    # -- around a forward

    @contextmanager
    def forward(self, length: int, *, is_recorded: bool) -> Iterator[None]:
        """Copies the states, then records what the mixers are called with while the target runs.

        Args:
            length (`int`): Tokens of the forward.
            is_recorded (`bool`): Whether a part of them may be taken back. A prompt's are all kept, and what its mixers
                read is as large as the prompt.
        """
        if not self.layers:
            yield
            return
        if not self.length:
            self._copy()
        with (
            in_turn(self.model),  # hooks and limits of time steps are the model's, which other threads may run
            self._listening(length, is_recorded),
            self._past_of_windows(),
            steps_of_any_size(self._clamping if is_recorded else []),
        ):
            yield

    @contextmanager
    def _listening(self, length: int, is_recorded: bool) -> Iterator[None]:
        """Record what the mixers are called with, or look for them."""
        self.length, self._calls = self.length + length, []
        if self._mixers is None:
            with self._searching(length, is_recorded):
                yield
            return
        record = _in_this_thread(self._record)
        handles = [mixer.register_forward_pre_hook(record, with_kwargs=True) for mixer in self._mixers if is_recorded]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def advance(self, counts: list[int]) -> None:
        """Leave in the states what each row keeps of the last forward.

        Args:
            counts (`list[int]`): Of each row, how many of the forward's tokens.
        """
        if any(count < self.length for count in counts):
            for count in sorted(set(counts)):
                rows = [row for row, its_count in enumerate(counts) if its_count == count]
                if count < self.length:
                    self._advance_rows(rows, count, len(counts))
        self._calls, self.length = [], 0

    def take_back(self) -> None:
        """Leave in the states nothing of a forward that `advance` has not settled, perhaps as it failed."""
        if not self.length:
            return
        self._calls, self.length = [], 0
        self._put_back()

    def select(self, rows: torch.Tensor) -> None:
        """Keep only `rows` of the batch."""
        for layer in self.layers:
            for kind in KINDS:
                states = getattr(layer, kind)
                for index, state in states.items():
                    if state is not None:
                        states[index] = state[rows.to(state.device)]
        self._copies = {}

    def contents(self) -> list[torch.Tensor]:
        """Copies of all states, for `restore`."""
        return [state.clone() for _, state in self._live()]

    def restore(self, held: list[torch.Tensor]) -> None:
        """Put `contents` back; the batch may have shrunk since."""
        for (place, _), state in zip(self._live(), held, strict=True):
            layer, kind, index = place
            getattr(self.layers[layer], kind)[index] = state

    # -- states

    def _live(self) -> Iterator[tuple[tuple[int, str, int], torch.Tensor]]:
        for number, layer in enumerate(self.layers):
            for kind in KINDS:
                for index, state in getattr(layer, kind).items():
                    if state is not None:
                        yield (number, kind, index), state

    def _copy(self) -> None:
        """Copy all states, into the copies of the step before where their shapes still fit."""
        live = dict(self._live())
        if live.keys() != self._copies.keys():
            self._copies = {place: torch.empty_like(state) for place, state in live.items()}
        if live:
            torch._foreach_copy_(list(self._copies.values()), list(live.values()))
        self._had_state = [dict(layer.has_previous_state) for layer in self.layers]

    def _put_back(self) -> None:
        """Copies go back into the tensors that the layers hold: their addresses stay."""
        live = dict(self._live())
        held = [place for place in live if place in self._copies]
        if held:
            torch._foreach_copy_([live[place] for place in held], [self._copies[place] for place in held])
        for place, state in live.items():
            if place not in self._copies:  # it came into being in the forward that is taken back
                state.zero_()
        for layer, had_state in zip(self.layers, self._had_state, strict=True):
            layer.has_previous_state.update(had_state)

    def _advance_rows(self, rows: list[int], count: int, batch_size: int) -> None:
        """Put the states of `rows` back and advance them by the first `count` tokens."""
        if len(rows) == batch_size:
            self._put_back()
            self._run_mixers(Part(self.length, count, batch_size))
            return
        live, selection = dict(self._live()), torch.tensor(rows)
        for (number, kind, index), state in live.items():
            part = self._copies[number, kind, index].index_select(0, selection.to(state.device))
            getattr(self.layers[number], kind)[index] = part
        try:
            self._run_mixers(Part(self.length, count, batch_size, selection))
        finally:
            for (number, kind, index), state in live.items():
                states = getattr(self.layers[number], kind)
                state.index_copy_(0, selection.to(state.device), states[index])
                states[index] = state

    def _run_mixers(self, part: Part) -> None:
        if not part.count:
            return
        if {id(call.mixer) for call in self._calls} != {id(mixer) for mixer in self._mixers or []}:
            raise RuntimeError(
                f"Not all recurrent layers of {type(self.model).__name__} were seen in its last forward: its modules "
                "or their hooks were changed meanwhile, or it runs compiled without them. Decode without the drafter."
            )
        mixed = [layer for layer in self.layers if has_keys(layer)]
        held = [{name: value for name, value in vars(layer).items() if name in KEYS} for layer in mixed]
        with in_turn(self.model), steps_of_any_size(self._clamping):
            for call in self._calls:
                call.run_again(part)
        for layer, values in zip(mixed, held, strict=True):  # a mixer may add keys too; those of its block are there
            vars(layer).update(values)

    # -- mixers

    def _record(self, mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._calls.append(MixerCall(mixer, args, dict(kwargs)))

    @contextmanager
    def _searching(self, length: int, is_recorded: bool) -> Iterator[None]:
        """Find the mixers: the innermost modules that run while a state is updated.

        With a single token some mixers update their state by themselves, so that nothing shows them.
        """
        stack: list[MixerCall] = []
        found: dict[int, MixerCall] = {}
        handles = []

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            stack.append(MixerCall(module, args, dict(kwargs)))

        def leave(*_: Any) -> None:
            stack.pop()

        entering, leaving = _in_this_thread(enter), _in_this_thread(leave)
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
            handles.append(module.register_forward_hook(leaving, always_call=True))
        for name in UPDATES:
            setattr(self.cache, name, _noting(getattr(self.cache, name), stack, found))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in UPDATES:
                delattr(self.cache, name)
        if length == 1:
            return
        inner = {id(part) for call in found.values() for part in call.mixer.modules() if part is not call.mixer}
        calls = [call for call in found.values() if id(call.mixer) not in inner]
        if not calls:
            raise UnsupportedGenerationError(
                f"{type(self.model).__name__} updates its recurrent states outside of its modules, so that rejected "
                "drafts cannot be taken out of them; decode without the drafter."
            )
        self._mixers = list({id(call.mixer): call.mixer for call in calls}.values())
        self._calls = calls if is_recorded else []

    @contextmanager
    def _past_of_windows(self) -> Iterator[None]:
        """Let layers with both a state and a window keep the keys that a crop may need.

        The flag for it is the layer's, and it would make the state of its convolutions grow too. So it is set for the
        update of the keys alone.
        """
        for layer in self._shared:
            layer.update = _with_past(layer)
        try:
            yield
        finally:
            for layer in self._shared:
                del layer.update


def crop_keys(layer: Any, rows: int) -> None:
    """Take the last `rows` keys and values, but no state, out of a layer for which [`is_recurrent`] holds."""
    kind: Any = next((kind for kind in ATTENTION if isinstance(layer, kind)), None)
    if kind is None:
        return
    recorded, layer.record_past = layer.record_past, True
    try:
        kind.crop(layer, -rows)
    finally:
        layer.record_past = recorded


def _with_past(layer: Any) -> Any:
    update = layer.update

    def update_keys(*args: Any, **kwargs: Any) -> Any:
        layer.record_past = True
        try:
            return update(*args, **kwargs)
        finally:
            layer.record_past = False

    return update_keys


def _in_this_thread(hook: Any) -> Any:
    """`hook`, but for forwards of other threads, which share the model."""
    own = threading.get_ident()

    def hook_here(*args: Any) -> None:
        if threading.get_ident() == own:
            hook(*args)

    return hook_here


def _noting(update: Any, stack: list[MixerCall], found: dict[int, MixerCall]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        if stack:
            found[id(stack[-1])] = stack[-1]
        return update(*args, **kwargs)

    return noting
