"""What changes from step to step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from hf_dflow.generation import _compat
from hf_dflow.generation.feedback import VerifierFeedback
from hf_dflow.generation.statistics import AcceptanceStatistics


@dataclass
class DecodeState:
    """Everything that changes from step to step."""

    input_ids: torch.Tensor  # [B, T] committed tokens, padding included
    model_kwargs: dict[str, Any]  # the target's mask, positions and cache, for T tokens
    next_position: int  # absolute position of the next row the target computes, padding not counted
    padding: int  # left padding of the prompt
    feedback: VerifierFeedback | None = None
    can_draft: bool = True
    is_prefill: bool = True
    is_finished: bool = False
    cached_rows: int = 0  # rows of committed tokens in the target cache
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)

    @property
    def cache(self) -> Cache:
        cache = _compat.get_cache(self.model_kwargs)
        assert cache is not None  # checked before the first forward
        return cache

    def give_cache_back(self) -> None:
        """Leave in the target cache, which may be the caller's own, nothing but committed tokens."""
        uncommitted = self.cache.get_seq_length() - self.cached_rows
        if uncommitted > 0:
            _compat.crop(self.cache, uncommitted)
        _compat.stop_past_recording(self.cache)


@dataclass(frozen=True)
class Emission:
    """What of a step enters the output."""

    new_ids: torch.Tensor  # [B, n]
    tokens: list[int]  # the same on the host
    accepted: int  # how many of them are drafts
    is_last: bool

    @property
    def count(self) -> int:
        return len(self.tokens)
