"""Which rows an update sees, and how they lie in its tensors."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_dflow.training.data import TrainingRow
from hf_dflow.training.packing import Anchors, Sequences, draw_anchors


class RowOrder:
    """Every row once, in random order, before any comes again.

    Row number k of a run is a function of the seed and k, so that a resumed run needs no more than the count, and
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


def place_rows(rows: list[TrainingRow], pack: bool) -> tuple[list[int], list[int]]:
    """Where each row goes: its packed row, and its first index there. One each, or side by side as they fit.

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
    teachers: list[Any],
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
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    padded = pad_sequence([torch.tensor(row.token_ids, dtype=torch.long) for row in rows], batch_first=True)
    supervised = pad_sequence([torch.tensor(row.supervised(), dtype=torch.bool) for row in rows], batch_first=True)
    apart = Sequences(padded, lengths, padded.new_empty(0), is_supervised=supervised)
    anchors = draw_anchors(apart, anchors_per_row, generator)
    places, starts = place_rows(rows, pack)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        """`[tokens, …]` of each row -> `[packed rows, S, …]`."""
        by_place: dict[int, list[int]] = {}
        for i in sorted(range(len(rows)), key=lambda i: starts[i]):
            by_place.setdefault(places[i], []).append(i)
        return pad_sequence(
            [torch.cat([parts[i] for i in by_place[place]]).to(device) for place in range(len(by_place))],
            batch_first=True,
        )

    where = torch.tensor(places)
    total = torch.zeros(int(where.max()) + 1, dtype=torch.long).index_add_(0, where, lengths)
    sequences = Sequences(
        token_ids=joined([padded[i, :length] for i, length in enumerate(lengths)]),
        lengths=total.to(device),
        features=joined(features),
        is_supervised=joined([supervised[i, :length] for i, length in enumerate(lengths)]),
    )
    if teachers:
        sequences.teacher_ids = joined([one.ids for one in teachers])
        sequences.teacher_probs = joined([one.probs for one in teachers])
    if pack:
        sequences.document_starts = joined(
            [torch.full((int(length),), start) for length, start in zip(lengths, starts, strict=True)]
        )
    position = torch.tensor(starts)[anchors.row] + anchors.position
    return sequences, Anchors(where[anchors.row].to(device), position.to(device))
