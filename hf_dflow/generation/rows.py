"""What changes from step to step: of each row, and of the batch."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from hf_dflow.generation import _compat
from hf_dflow.generation.cache import TargetColumns
from hf_dflow.generation.feedback import VerifierFeedback
from hf_dflow.generation.statistics import AcceptanceStatistics

if TYPE_CHECKING:
    from hf_dflow.generation.acceptance import AcceptanceProcessor
    from hf_dflow.generation.path import PathProcessor
    from hf_dflow.generation.policy.lengths import LengthPlanner
    from hf_dflow.generation.policy.pausing import DraftPolicy
    from hf_dflow.generation.policy.trees import DraftTree
    from hf_dflow.generation.records import Records
    from hf_dflow.generation.stopping import Emission
    from hf_dflow.generation.verification import Verification


@dataclass
class Row:
    """One sequence. Nothing in it depends on its neighbours."""

    index: int  # in the caller's batch
    ids: torch.Tensor  # [1, T] committed tokens, the prompt's padding included
    path: "PathProcessor"
    acceptance_processors: "list[AcceptanceProcessor]"
    policy: "DraftPolicy"
    records: "Records"
    generator: torch.Generator | None  # None where nothing is sampled
    statistics: AcceptanceStatistics
    planner: "LengthPlanner | None" = None  # where step lengths adapt
    next_position: int = 0  # absolute position of the next row the target computes, padding not counted
    is_finished: bool = False

    @property
    def length(self) -> int:
        """Committed tokens, padding included."""
        return self.ids.shape[1]


@dataclass
class DecodeState:
    """The rows that are still decoded, and what they share."""

    rows: list[Row]
    model_kwargs: dict[str, Any]  # the target's mask, positions and cache, up to the anchors
    columns: TargetColumns | None = None  # of the target's cache; None where one row is alone and has no holes
    feedback: VerifierFeedback | None = None
    is_prefill: bool = True
    tree: "DraftTree | None" = None  # of the present step, where it drafts one
    cached_rows: int = 0  # columns of committed tokens in the target cache
    ahead: int = 0  # tokens that the cache held from the start and that the rows' ids leave out
    is_returned: bool = False  # whether the caller gets the cache
    backend: str = "auto"  # of the op that squeezes holes out of the cache
    prompt_cache: list | None = None  # what the cache held after the prefill of a batch, where the caller gets it back
    num_target_forwards: int = 0
    num_draft_forwards: int = 0

    def room_for(self, row: Row) -> int:
        """How many drafts the target's cache can take behind the row's anchor."""
        capacity = _compat.capacity(self.cache)
        return sys.maxsize if capacity is None else capacity - row.length - self.ahead

    @property
    def cache(self) -> Cache:
        cache = _compat.get_cache(self.model_kwargs)
        assert cache is not None  # checked before the first forward
        return cache

    def committed_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids that end with anchors and drafts `[B, N]`: with all of a single row's, and only these of a batch's,
        whose rows are not equally long."""
        if self.columns is None:
            return torch.cat([self.rows[0].ids, draft_ids], dim=1)
        anchors = torch.cat([row.ids[:, -1:] for row in self.rows])
        return torch.cat([anchors, draft_ids.to(anchors.device)], dim=1)

    def furthest_positions(self, draft_lengths: torch.Tensor | None) -> torch.Tensor | None:
        """The last position `[B, 1]` that each row has room for; `None` where all verify equally much."""
        if draft_lengths is None:
            return None
        return self.model_kwargs["position_ids"][..., -1:] + draft_lengths[:, None]

    def keep_records(self, verification: "Verification", outputs: Any, emissions: "list[Emission]") -> None:
        """Add what was emitted to each row's records, which need to know the columns before the step."""
        for i, (row, emission) in enumerate(zip(self.rows, emissions, strict=True)):
            row.records.add(
                i,
                emission.count,
                verification=verification,
                outputs=outputs,
                is_prefill=self.is_prefill,
                columns=self.columns,
                length=row.length - 1 + self.ahead,
            )

    def keep_columns(self, model: Any, outputs: Any, num_drafts: int, emissions: "list[Emission]") -> None:
        """Take out of the target's cache what no row committed, and lengthen mask and positions to the new anchors.

        The row that emits most decides how many columns stay; the others get holes.
        """
        counts = [emission.count for emission in emissions]
        if len(self.rows) == 1 and self.columns is None:
            count = counts[0]
            _compat.crop(self.cache, 0 if self.is_prefill else num_drafts + 1 - count)
            if self.is_prefill:
                self.cached_rows = int(self.cache.get_seq_length())
                self.ahead = self.cached_rows - self.rows[0].length
            else:
                self.cached_rows += count
            self.model_kwargs = _compat.advance(model, outputs, self.model_kwargs, count)
            return
        if self.is_prefill:
            self._open_columns(counts)
            return
        staying = [0 if emission.is_last else emission.count for emission in emissions]
        kept = max(staying)
        if not kept:  # all rows end here, and nobody reads the cache
            return
        assert self.columns is not None
        _compat.crop(self.cache, num_drafts + 1 - kept)
        self.columns.append([row.length - 1 + self.ahead for row in self.rows], [min(count, kept) for count in counts])
        positions = self.model_kwargs["position_ids"]
        self.model_kwargs["position_ids"] = positions + torch.tensor(counts, device=positions.device)[:, None]

    def _open_columns(self, counts: list[int]) -> None:
        """Begin to keep columns, after the prefill of a batch. Of what grows with the text only the last column stays:
        the target is given that of the anchors."""
        kwargs = dict(self.model_kwargs)
        mask, width = kwargs.get("attention_mask"), int(self.cache.get_seq_length())
        if mask is None:
            mask = torch.ones(len(self.rows), width, dtype=torch.long, device=self.rows[0].ids.device)
        self.columns, self.ahead = TargetColumns.of_prompt(mask), width - self.rows[0].length
        positions = kwargs["position_ids"][..., -1:]
        kwargs["position_ids"] = positions.expand(*positions.shape[:-2], len(self.rows), 1) + 1
        if kwargs.get("token_type_ids") is not None:
            kwargs["token_type_ids"] = kwargs["token_type_ids"][:, -1:]
        if self.is_returned or getattr(self.cache, "_is_user_defined", False):
            self.prompt_cache = _compat.contents(self.cache)
        self.model_kwargs = kwargs

    def drop_finished(self) -> tuple[torch.Tensor, list[int]] | None:
        """Take finished rows out of the batch, which then costs nothing for them, and squeeze holes out of the cache.

        Returns:
            `tuple[torch.Tensor, list[int]]`, *optional*: The rows that stay, on the device and on the host; `None`
            where all or none of them do.
        """
        kept = [i for i, row in enumerate(self.rows) if not row.is_finished]
        selection = None
        if kept and len(kept) < len(self.rows):
            index = torch.tensor(kept, device=self.rows[0].ids.device)
            selection = index, kept
            self.feedback = None if self.feedback is None else self.feedback.select(*selection)
            if self.columns is not None:
                self.columns.select(index)
                _compat.select_rows(self.cache, index)
            for name in ("position_ids", "token_type_ids"):
                if self.model_kwargs.get(name) is not None:
                    self.model_kwargs[name] = self.model_kwargs[name][..., index, :]
        self.rows = [self.rows[i] for i in kept]
        if self.columns is not None and kept:
            self.columns.compact(self.cache, max(row.next_position for row in self.rows), self.backend)
            self.model_kwargs["attention_mask"] = self.columns.attention_mask()
        return selection

    def give_cache_back(self) -> None:
        """Leave in the target cache, which may be the caller's own, nothing but committed tokens.

        A batch leaves its prompts and no more: its rows end at different lengths.
        """
        if self.columns is not None:
            if self.prompt_cache is not None:
                _compat.restore(self.cache, self.prompt_cache)
        else:
            uncommitted = int(self.cache.get_seq_length()) - self.cached_rows
            if uncommitted > 0:
                _compat.crop(self.cache, uncommitted)
        _compat.stop_past_recording(self.cache)
