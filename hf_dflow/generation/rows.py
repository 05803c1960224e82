"""The rows of a call: one for each sequence, with everything that belongs to it alone."""

from dataclasses import dataclass

import torch

from hf_dflow.generation.acceptance import AcceptanceProcessor
from hf_dflow.generation.policy.base import DraftPolicy
from hf_dflow.generation.processors import PathProcessor
from hf_dflow.generation.records import Records
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.generation.step import VerifierFeedback


@dataclass
class Row:
    """One sequence. Nothing in it depends on its neighbours."""

    index: int  # in the caller's batch
    ids: torch.Tensor  # [1, T] committed tokens, the prompt's padding included; the last is the anchor
    path: PathProcessor
    acceptance_processors: list[AcceptanceProcessor]
    policy: DraftPolicy
    records: Records
    generator: torch.Generator | None  # None where nothing is sampled
    statistics: AcceptanceStatistics
    next_position: int = 0  # absolute position of the next row that the target computes, padding not counted
    is_finished: bool = False

    @property
    def length(self) -> int:
        """Committed tokens, padding included."""
        return self.ids.shape[1]


@dataclass
class DecodeState:
    """What a step changes, beside the two caches."""

    rows: list[Row]  # that are still decoded
    feedback: VerifierFeedback | None = None  # of the step before
    num_draft_forwards: int = 0
