"""Packed training rows: documents side by side in a row, and behind it the blocks that are drafted from it."""

from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100
PADDING = -1  # where a place belongs to no document
CONTEXT = -1  # where a place belongs to no block


@dataclass
class Sequences:
    """A few training rows, padded on the right. S is the longest row; a row holds one document or several."""

    token_ids: torch.Tensor  # [R, S]
    lengths: torch.Tensor  # [R]
    features: torch.Tensor  # [R, S, taps * target_hidden_size]
    teacher_ids: torch.Tensor | None = None  # [R, S, K] the target's likeliest tokens behind each position
    teacher_probs: torch.Tensor | None = None  # [R, S, K]
    document_starts: torch.Tensor | None = None  # [R, S] index of the first token of each token's document; None: 0
    is_supervised: torch.Tensor | None = None  # [R, S] tokens that may be labels; None: all
    target_cache: Any = None  # the frozen target's keys and values of these rows, once a relay round has needed them

    def starts(self) -> torch.Tensor:
        """`[R, S]`: the index of each token's document's first token, `PADDING` behind the row's end."""
        indices = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        starts = torch.zeros_like(self.token_ids) if self.document_starts is None else self.document_starts
        return torch.where(indices < self.lengths[:, None], starts, PADDING)

    def document_ends(self, anchors: "Anchors") -> torch.Tensor:
        """`[A]`: the index behind the last token of each anchor's document."""
        if self.document_starts is None:
            return self.lengths[anchors.row]
        starts = self.starts()
        own = starts[anchors.row, anchors.position]
        return own + (starts[anchors.row] == own[:, None]).sum(dim=1)


@dataclass
class Anchors:
    """A blocks to draft, any number a row."""

    row: torch.Tensor  # [A] which row
    position: torch.Tensor  # [A] the anchor's index in it


@dataclass
class Places:
    """Where T tokens of each packed row stand. A block's slots take the indices that follow its anchor's."""

    document: torch.Tensor  # [R, T] index of the document's first token, or PADDING
    block: torch.Tensor  # [R, T] number of the block within the row, or CONTEXT
    index: torch.Tensor  # [R, T] index in the row
    bound: torch.Tensor  # [R, T] context at this index and behind is hidden

    @property
    def positions(self) -> torch.Tensor:
        """`[R, T]` positions for the rotary embedding: each document starts at 0."""
        return self.index - self.document.clamp(min=0)

    def __add__(self, other: "Places") -> "Places":
        """Both side by side."""
        pairs = ((vars(self)[name], vars(other)[name]) for name in vars(self))
        return Places(*(torch.cat(pair, dim=1) for pair in pairs))


def context_places(sequences: Sequences) -> Places:
    """Places of the rows' own tokens; each sees itself and what stands before it in its document."""
    document = sequences.starts()
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    return Places(document, torch.full_like(document, CONTEXT), index, index + 1)


class BlockLayout:
    """Which block goes where: the blocks of a row side by side in a packed row, P at most, the rest in further ones.

    Args:
        anchors (`Anchors`): A blocks.
        num_rows (`int`): Rows of the sequences.
        block_length (`int`): L, slots of a block.
        most (`int`, *optional*): Blocks of one packed row, at most.
    """

    def __init__(self, anchors: Anchors, num_rows: int, block_length: int, most: int | None = None):
        self.anchors, self.block_length = anchors, block_length
        order = anchors.row.argsort(stable=True)
        ordered = anchors.row[order]
        number = torch.empty_like(order)  # of each block within its row
        number[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
        counts = anchors.row.bincount(minlength=num_rows)
        longest = max(1, int(counts.max()))
        self.num_blocks = longest if most is None else min(longest, most)
        rows_needed = (-(-counts // self.num_blocks)).clamp(min=1)
        self.row = (rows_needed.cumsum(0) - rows_needed)[anchors.row] + number // self.num_blocks  # [A]
        self.place = number % self.num_blocks  # [A]
        self.source_row = torch.arange(num_rows, device=order.device).repeat_interleave(rows_needed)  # [packed rows]
        self.is_split = len(self.source_row) > num_rows

    def pack(self, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """`[A, L, …]` -> `[packed rows, P * L, …]`; `fill` where there is no block."""
        shape = (len(self.source_row), self.num_blocks, *values.shape[1:])
        return values.new_full(shape, fill).index_put((self.row, self.place), values).flatten(1, 2)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`[packed rows, P * L, …]` -> `[A, L, …]`."""
        return packed.unflatten(1, (self.num_blocks, self.block_length))[self.row, self.place]

    def repeat(self, by_row: torch.Tensor) -> torch.Tensor:
        """`[R, …]` -> `[packed rows, …]`: what each packed row shares with the row that its blocks come from."""
        return by_row[self.source_row] if self.is_split else by_row

    def places(self, sequences: Sequences) -> Places:
        """Places of all slots; those of no block belong to no document and see one another only."""
        anchors, slots = self.anchors, torch.arange(self.block_length, device=self.row.device)
        document = sequences.starts()[anchors.row, anchors.position]
        like = torch.zeros_like(slots).expand(len(self.row), -1)
        numbers = torch.arange(self.num_blocks, device=slots.device).repeat_interleave(self.block_length)
        return Places(
            document=self.pack(document[:, None] + like, PADDING),
            block=numbers.expand(len(self.source_row), -1),
            index=self.pack(anchors.position[:, None] + slots),
            bound=self.pack(anchors.position[:, None] + like),
        )


def draw_anchors(sequences: Sequences, per_row: int, generator: torch.Generator) -> Anchors:
    """Random anchors, distinct, in answers only, and at least one of every document that can teach anything.

    An anchor is a supervised token with a supervised one behind it in the same document.

    Args:
        sequences (`Sequences`): The rows.
        per_row (`int`): Anchors of a row; more where it holds more documents, fewer where it has fewer places.
        generator (`torch.Generator`): On the CPU, so that the draw does not depend on the device.
    """
    starts = sequences.starts().cpu()
    supervised = starts != PADDING
    if sequences.is_supervised is not None:
        supervised = supervised & sequences.is_supervised.cpu()
    can_anchor = torch.zeros_like(supervised)
    can_anchor[:, :-1] = supervised[:, :-1] & supervised[:, 1:] & (starts[:, :-1] == starts[:, 1:])
    rows, positions = [], []
    for row, allowed in enumerate(can_anchor):
        places = allowed.nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=generator)]
        firsts = torch.zeros(len(places), dtype=torch.bool)
        seen: set[int] = set()
        for i, document in enumerate(starts[row, places].tolist()):
            firsts[i] = document not in seen
            seen.add(document)
        rest = places[~firsts][: max(0, per_row - int(firsts.sum()))]
        positions.append(torch.cat([places[firsts], rest]).sort().values)
        rows.append(torch.full_like(positions[-1], row))
    device = sequences.token_ids.device
    return Anchors(torch.cat(rows).to(device), torch.cat(positions).to(device))
