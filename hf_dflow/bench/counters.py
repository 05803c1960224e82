"""Counting what a strategy does from outside, whatever it says of itself."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.generation.streamers import BaseStreamer

from hf_dflow import AcceptanceStatistics


@contextmanager
def count_forwards(model: torch.nn.Module | None) -> Iterator[list[float]]:
    """A list that receives the clock's time at the end of each forward of `model`."""
    ends: list[float] = []
    if model is None:
        yield ends
        return
    handle = model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        yield ends
    finally:
        handle.remove()


class StepCounter(BaseStreamer):
    """Counts the steps of transformers' assisted generation, which keeps no statistics.

    What the target is given tells how many drafts a step verifies; what is streamed behind it, how many were accepted.
    """

    def __init__(self, prompt_length: int):
        self.statistics = AcceptanceStatistics()
        self._known = prompt_length  # tokens of the next forward that are no drafts
        self._given = 0
        self._has_prompt = False

    @contextmanager
    def watch(self, target: torch.nn.Module) -> Iterator[None]:
        """Look at each forward of `target`."""

        def look(_, args, kwargs):
            input_ids = kwargs.get("input_ids", args[0] if args else None)
            self._given = 0 if input_ids is None else input_ids.shape[1]

        handle = target.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then the tokens of each step: accepted drafts and one of the target's own."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        emitted = value.numel()
        self.statistics.record(drafted=self._given - self._known, accepted=emitted - 1, emitted=emitted)
        self._known = 1

    def end(self) -> None:
        """Nothing is left to count."""
