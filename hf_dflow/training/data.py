"""Training rows: token ids, which of them the target wrote, and the files that hold them."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_dflow.errors import DFlowError
from hf_dflow.text import decode

HEADER_KEY, FORMAT_VERSION = "hf_dflow_data", 1  # a file's first line: {HEADER_KEY: FORMAT_VERSION, settings …}


@dataclass(frozen=True)
class TrainingRow:
    """A chat whose assistant tokens are the target's own.

    One answer to one prompt needs no more than `prompt_length`; chats of several turns list their spans.
    """

    token_ids: list[int]  # the whole chat
    prompt_length: int  # tokens before the first supervised one
    prompt: str  # the first user message; decides the split
    temperature: float | None  # at which the target wrote, 0 if greedily; None if unknown
    spans: tuple[tuple[int, int], ...] = ()  # supervised tokens, half-open, in order; by default all but the prompt

    def __post_init__(self):
        if not self.spans:
            object.__setattr__(self, "spans", ((self.prompt_length, len(self.token_ids)),))

    @property
    def answer_length(self) -> int:
        """Tokens from the first supervised one to the end."""
        return len(self.token_ids) - self.prompt_length

    @property
    def supervised_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    def supervised(self) -> list[bool]:
        """One flag per token: whether it may be a label."""
        flags = [False] * len(self.token_ids)
        for start, end in self.spans:
            flags[start:end] = [True] * (end - start)
        return flags

    def anchor_positions(self) -> list[int]:
        """Positions of supervised tokens that another one follows: the possible anchors of a decoding step."""
        return [position for start, end in self.spans for position in range(start, end - 1)]


def supervised_ids(rows: list[TrainingRow]) -> torch.Tensor:
    """Distinct supervised tokens `[K]` of the rows, in order.

    Raises:
        DFlowError: No row holds a supervised token behind another, so that nothing can be learned.
    """
    if not any(row.anchor_positions() for row in rows):
        raise DFlowError(f"none of the {len(rows)} rows holds a supervised token behind another: nothing to train on")
    ids = {token_id for row in rows for start, end in row.spans for token_id in row.token_ids[start:end]}
    return torch.tensor(sorted(ids))


def row_record(
    token_ids: list[int], spans: Iterable[tuple[int, int]], prompt: str, temperature: float | None, finished: bool
) -> dict[str, Any]:
    """A row as its JSON object; `finished` says whether the last turn ends with the end-of-turn token."""
    return {
        "token_ids": token_ids,
        "spans": [list(span) for span in spans],
        "prompt": prompt,
        "temperature": temperature,
        "finished": finished,
    }


def parse_row(record: Any) -> TrainingRow:
    """A row from its JSON object.

    Raises:
        KeyError, TypeError, ValueError: It is not a row.
    """
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    prompt, temperature = record.get("prompt", ""), record.get("temperature", 0.0)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {prompt!r}; give its text")
    if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, int | float)):
        raise TypeError(f"temperature is {temperature!r}; give a number, or null")
    if "token_ids" not in record:
        prompt_ids, answer_ids = (_token_ids(record, key) for key in ("prompt_ids", "answer_ids"))
        return TrainingRow(prompt_ids + answer_ids, len(prompt_ids), prompt, temperature)
    token_ids = _token_ids(record, "token_ids")
    spans = tuple((start, end) for start, end in record["spans"])
    if not all(type(position) is int for span in spans for position in span):
        raise TypeError(f"spans {record['spans']} hold more than whole numbers")
    bounds = [0, *(position for span in spans for position in span), len(token_ids)]
    if not spans or bounds != sorted(bounds) or any(start == end for start, end in spans):
        raise ValueError(f"spans {record['spans']} are not in order within {len(token_ids)} tokens")
    return TrainingRow(token_ids, spans[0][0], prompt, temperature, spans)


def _token_ids(record: dict[str, Any], key: str) -> list[int]:
    values = record[key]
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{key} is not a list of token ids, which are whole numbers from 0")
    return values


# -- the split


def is_held_out(prompt: str, held_out_share: float = 0.06) -> bool:
    """Whether a prompt is held out of training: decided by its hash alone, not by order or file."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < held_out_share


def split_rows(rows: list[TrainingRow], held_out_share: float = 0.06) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Split into (training, held out) with [`is_held_out`]; a prompt without text is identified by its tokens."""
    parts: tuple[list[TrainingRow], list[TrainingRow]] = ([], [])
    for row in rows:
        name = row.prompt or json.dumps(row.token_ids[: row.prompt_length])
        parts[is_held_out(name, held_out_share)].append(row)
    return parts


# -- reading


@dataclass(frozen=True)
class DataFile:
    """The content of a data file."""

    rows: list[TrainingRow]
    header: dict[str, Any] | None  # how the file was made; `None` for files without one
    too_short: int  # rows left out: no span holds an anchor and its labels
    too_long: int

    def __str__(self) -> str:
        tokens = sum(row.supervised_tokens for row in self.rows)
        return (
            f"{len(self.rows)} rows with {tokens} supervised tokens; left out: {self.too_short} without enough "
            f"supervised tokens, {self.too_long} over-long"
        )


def read_data(path: str | Path, min_answer_tokens: int = 3, max_length: int = 1024) -> DataFile:
    """Read a JSONL file (`.gz` allowed), as `hf-dflow data` writes it or with `prompt_ids` and `answer_ids` per line.

    Rows without a span of `min_answer_tokens` (an anchor and two labels) teach nothing and are left out, as are rows
    longer than `max_length`. A last line that is still being written is ignored.

    Raises:
        DFlowError: A line is not a row, or no row is left.
    """
    rows, header, too_short, too_long = [], None, 0, 0
    with closing(_read_lines(path)) as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1 and isinstance(record, dict) and HEADER_KEY in record:
                    header = record
                    continue
                row = parse_row(record)
            except (KeyError, TypeError, ValueError) as error:
                if header is not None and not line.endswith("\n"):
                    break
                raise DFlowError(
                    f"{path}, line {number}: expected an object with token_ids and spans, or prompt_ids and "
                    f"answer_ids ({f'{error} is missing' if isinstance(error, KeyError) else error})"
                ) from error
            if max(end - start for start, end in row.spans) < min_answer_tokens:
                too_short += 1
            elif len(row.token_ids) > max_length:
                too_long += 1
            else:
                rows.append(row)
    if not rows:
        raise DFlowError(
            f"{path}: no row has an answer of at least {min_answer_tokens} tokens within {max_length} in all "
            f"({too_short} too short, {too_long} over-long): nothing is supervised"
        )
    return DataFile(rows, header, too_short, too_long)


def _read_lines(path: str | Path) -> Generator[str, None, None]:
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield decode(line, path, number)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DFlowError(f"{path}: not a text file, or a damaged one ({error})") from error


def read_rows(path: str | Path, min_answer_tokens: int = 3, max_length: int = 1024) -> list[TrainingRow]:
    """The rows of [`read_data`] alone."""
    return read_data(path, min_answer_tokens, max_length).rows


# -- writing


class RowFile:
    """JSON lines: a header that says how the rows were made, then one row per line.

    The file grows by whole batches. An existing file is resumed, whenever it was killed; a torn last line is cut off.

    Args:
        path (`Path`): The file; created if it does not exist.
        settings (`dict[str, Any]`): All that the rows depend on, as JSON. An existing file must have the same.

    Raises:
        DFlowError: The file was made with other settings, or is not a data file.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        header = json.dumps({HEADER_KEY: FORMAT_VERSION, **settings}) + "\n"
        self._ends = [len(header.encode())]  # byte offset behind the header and behind each row
        self._tokens: list[int] = []
        self._finished: list[bool] = []
        content = path.read_bytes() if path.exists() else b""
        complete, _, torn = content.rpartition(b"\n")
        if not complete:
            if not header.encode().startswith(torn):
                raise DFlowError(f"{path} is not a data file of hf-dflow; give another output file")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(0, header.encode())
            return
        lines = complete.split(b"\n")
        self._check_header(lines[0], json.loads(header))
        self._ends = [len(lines[0]) + 1]
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                parse_row(record)
                self._count(len(line) + 1, record)
            except (KeyError, TypeError, ValueError) as error:
                raise DFlowError(
                    f"{path}, line {number}: damaged ({error}); delete the file and start again"
                ) from error
        if torn:
            self._write(self._ends[-1], b"")

    @property
    def rows(self) -> int:
        return len(self._tokens)

    @property
    def supervised_tokens(self) -> int:
        return sum(self._tokens)

    @property
    def finished(self) -> int:
        """Rows whose last turn is finished."""
        return sum(self._finished)

    def keep(self, rows: int) -> None:
        """Drop all but the first `rows`."""
        if rows < self.rows:
            del self._ends[rows + 1 :], self._tokens[rows:], self._finished[rows:]
            self._write(self._ends[-1], b"")

    def append(self, records: list[dict[str, Any]]) -> None:
        """Write rows and wait until they are on the disk.

        Raises:
            DFlowError: Another process has written to the file.
        """
        if self.path.stat().st_size != self._ends[-1]:
            raise DFlowError(f"{self.path} changed while it was being written: is another hf-dflow data running on it?")
        lines = [(json.dumps(record) + "\n").encode() for record in records]
        self._write(self._ends[-1], b"".join(lines))
        for line, record in zip(lines, records, strict=True):
            self._count(len(line), record)

    def _count(self, num_bytes: int, record: dict[str, Any]) -> None:
        self._finished.append(bool(record["finished"]))
        self._tokens.append(sum(end - start for start, end in record["spans"]))
        self._ends.append(self._ends[-1] + num_bytes)

    def _write(self, offset: int, content: bytes) -> None:
        with open(self.path, "r+b" if self.path.exists() else "xb") as file:
            file.seek(offset)
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def _check_header(self, line: bytes, expected: dict[str, Any]) -> None:
        try:
            header = json.loads(line)
            is_header = HEADER_KEY in header
        except (TypeError, ValueError):
            is_header = False
        if not is_header:
            raise DFlowError(f"{self.path} is not a data file of hf-dflow; give another output file")
        differing = [
            f"{key} was {header.get(key)!r} and is {expected.get(key)!r}"
            for key in {**header, **expected}
            if header.get(key) != expected.get(key)
        ]
        if differing:
            raise DFlowError(
                f"{self.path} was made with other settings ({'; '.join(differing)}); "
                "use the same ones to resume it, or another output file"
            )
