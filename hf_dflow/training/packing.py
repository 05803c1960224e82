"""From training rows to tensors: which rows an update sees, how they are packed, and where blocks are drafted."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import Teacher

IGNORED = -100
PADDING = -1  # where a place belongs to no document
CONTEXT = -1  # where a place belongs to no block


class RowOrder:
    """Random order in which every row comes once before any comes again.

    Row number k of a run is a function of the seed and k, so a resumed run needs no more than the count, and
    processes that take turns draw different rows.

    Args:
        num_rows (`int`): Rows of the data.
        seed (`int`): Of the run.
    """

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self.num_rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.num_rows, generator=generator).tolist()
        return self._order[place]

    def share(self, start: int, count: int, process: int, processes: int) -> list[int]:
        """The `count` rows of one process, where all of them together take `count * processes` from `start` on."""
        return [self[start + i * processes + process] for i in range(count)]


@dataclass
class Sequences:
    """A few packed rows, padded on the right to S tokens. Each holds one document (training row) or several."""

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

    def anchor_ids(self, anchors: "Anchors") -> torch.Tensor:
        """`[A]`: the token of each anchor."""
        return self.token_ids[anchors.row, anchors.position]


@dataclass
class Anchors:
    """A blocks to draft, any number per row."""

    row: torch.Tensor  # [A] which row
    position: torch.Tensor  # [A] the anchor's index in it


def draw_anchors(sequences: Sequences, per_row: int, generator: torch.Generator) -> Anchors:
    """Random anchors, distinct, in answers only, and at least one of every document that can teach anything.

    An anchor is a supervised token that another one of its document follows.

    Args:
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
        is_first = torch.zeros(len(places), dtype=torch.bool)  # the first place drawn in its document
        covered: set[int] = set()
        for i, document in enumerate(starts[row, places].tolist()):
            is_first[i] = document not in covered
            covered.add(document)
        others = places[~is_first][: max(0, per_row - int(is_first.sum()))]
        positions.append(torch.cat([places[is_first], others]).sort().values)
        rows.append(torch.full_like(positions[-1], row))
    device = sequences.token_ids.device
    return Anchors(torch.cat(rows).to(device), torch.cat(positions).to(device))


# -- an update's tensors


def place_rows(rows: list[TrainingRow], pack: bool) -> tuple[list[int], list[int]]:
    """The packed row of each row, and its first index there. One each, or side by side as they fit.

    Packed rows are no longer than the longest row; the longest go first, into the fullest packed row that has room.
    """
    if not pack:
        return list(range(len(rows))), [0] * len(rows)
    capacity = max(len(row.token_ids) for row in rows)
    places, starts = [0] * len(rows), [0] * len(rows)
    ends: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].token_ids)):
        length = len(rows[i].token_ids)
        fitting = [place for place, end in enumerate(ends) if end + length <= capacity]
        if not fitting:
            fitting = [len(ends)]
            ends.append(0)
        places[i] = max(fitting, key=lambda place: ends[place])
        starts[i] = ends[places[i]]
        ends[places[i]] += length
    return places, starts


def lay_out(
    rows: list[TrainingRow],
    features: list[torch.Tensor],
    teachers: list[Teacher],
    *,
    anchors_per_row: int,
    pack: bool,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Sequences, Anchors]:
    """Tensors of some rows, and random anchors within their answers.

    Args:
        features (`list[torch.Tensor]`): `[tokens, width]` of each row, on any device.
        teachers (`list[Teacher]`): The target's distribution behind each token of each row; empty without.
        anchors_per_row (`int`): Different anchors of each row; fewer where its answer has fewer places.
    """
    token_ids = [torch.tensor(row.token_ids, dtype=torch.long) for row in rows]
    supervised = [torch.tensor(row.supervised(), dtype=torch.bool) for row in rows]
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    unpacked = Sequences(
        pad_sequence(token_ids, batch_first=True),
        lengths,
        features=torch.empty(0),
        is_supervised=pad_sequence(supervised, batch_first=True),
    )
    anchors = draw_anchors(unpacked, anchors_per_row, generator)  # before packing, which must not change the draw
    places, starts = place_rows(rows, pack)
    by_place: dict[int, list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: starts[i]):
        by_place.setdefault(places[i], []).append(i)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        """`[tokens, …]` of each row -> `[packed rows, S, …]`."""
        return pad_sequence(
            [torch.cat([parts[i] for i in by_place[place]]).to(device) for place in range(len(by_place))],
            batch_first=True,
        )

    place_of = torch.tensor(places)
    sequences = Sequences(
        token_ids=joined(token_ids),
        lengths=torch.zeros(len(by_place), dtype=torch.long).index_add_(0, place_of, lengths).to(device),
        features=joined(features),
        is_supervised=joined(supervised),
    )
    if teachers:
        sequences.teacher_ids = joined([teacher.ids for teacher in teachers])
        sequences.teacher_probs = joined([teacher.probs for teacher in teachers])
    if pack:
        sequences.document_starts = joined(
            [torch.full((int(length),), start) for length, start in zip(lengths, starts, strict=True)]
        )
    position = torch.tensor(starts)[anchors.row] + anchors.position
    return sequences, Anchors(place_of[anchors.row].to(device), position.to(device))


# -- where tokens and slots stand in a packed row


@dataclass
class Places:
    """Where T tokens of each packed row stand. A block's slots take the indices that follow its anchor's."""

    document: torch.Tensor  # [R, T] index of the document's first token, or PADDING
    block: torch.Tensor  # [R, T] number of the block within the row, or CONTEXT
    index: torch.Tensor  # [R, T] index in the row
    bound: torch.Tensor  # [R, T] context from this index on is hidden

    @property
    def positions(self) -> torch.Tensor:
        """`[R, T]` positions for the rotary embedding: each document starts at 0."""
        return self.index - self.document.clamp(min=0)

    def __add__(self, other: "Places") -> "Places":
        """Both side by side."""
        pairs = ((vars(self)[name], vars(other)[name]) for name in vars(self))
        return Places(*(torch.cat(pair, dim=1) for pair in pairs))


def context_places(sequences: Sequences) -> Places:
    """Places of the rows' own tokens; each sees itself and what precedes it in its document."""
    document = sequences.starts()
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    return Places(document, torch.full_like(document, CONTEXT), index, index + 1)


class BlockLayout:
    """Which block goes where: a row's blocks lie side by side in a packed row, P at most, the rest in further ones.

    Args:
        anchors (`Anchors`): A blocks.
        num_rows (`int`): Rows of the sequences.
        block_length (`int`): L, slots of a block.
        max_blocks (`int`, *optional*): Upper limit of P.
    """

    def __init__(self, anchors: Anchors, num_rows: int, block_length: int, max_blocks: int | None = None):
        self.anchors, self.block_length = anchors, block_length
        order = anchors.row.argsort(stable=True)
        ordered = anchors.row[order]
        number = torch.empty_like(order)  # of each block within its row
        number[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
        counts = anchors.row.bincount(minlength=num_rows)
        most = max(1, int(counts.max()))
        self.num_blocks = most if max_blocks is None else min(most, max_blocks)
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
