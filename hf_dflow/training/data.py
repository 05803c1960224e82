"""Training rows: token ids, which of them the target wrote, and the files that hold them."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError

HEADER_KEY = "hf_dflow_data"  # its value is the version of the format


@dataclass(frozen=True)
class TrainingRow:
    """A chat whose assistant tokens are the target's own.

    One answer to one prompt needs no more than `prompt_length`; chats of several turns name their spans.

    Args:
        token_ids (`list[int]`): The whole chat.
        prompt_length (`int`): Tokens before the first supervised one.
        prompt (`str`): The first thing that the user said; decides the split.
        temperature (`float` or `None`): At which the target wrote, 0 if greedily; `None` if nobody knows.
        spans (`tuple[tuple[int, int], ...]`, *optional*): Supervised tokens as half-open spans in order; by default
            everything from `prompt_length` on.
    """

    token_ids: list[int]
    prompt_length: int
    prompt: str
    temperature: float | None
    spans: tuple[tuple[int, int], ...] = ()

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
        """One flag per token. A label is supervised where its own token is."""
        flags = [False] * len(self.token_ids)
        for start, end in self.spans:
            flags[start:end] = [True] * (end - start)
        return flags

    def anchor_positions(self) -> list[int]:
        """Positions of supervised tokens that another one follows: what can be the anchor of a step in decoding."""
        return [position for start, end in self.spans for position in range(start, end - 1)]


@dataclass(frozen=True)
class DataFile:
    """What [`read_data`] found."""

    rows: list[TrainingRow]
    header: dict[str, Any] | None  # how the file was made; `None` for files that do not say
    too_short: int  # rows left out: no span holds an anchor and its labels
    too_long: int

    def __str__(self) -> str:
        tokens = sum(row.supervised_tokens for row in self.rows)
        return (
            f"{len(self.rows)} rows with {tokens} supervised tokens; left out: {self.too_short} without enough "
            f"supervised tokens, {self.too_long} over-long"
        )


def read_data(path: str | Path, min_answer_tokens: int = 3, max_length: int = 1024) -> DataFile:
    """Read a JSONL file (`.gz` allowed), as `hf-dflow data` writes it or with `prompt_ids` and `answer_ids` a line.

    Rows without a span of `min_answer_tokens` (an anchor and two labels) teach nothing and are left out, as are rows
    longer than `max_length`. A last line that was cut while being written is ignored.

    Raises:
        DFlowError: A line is no such object, or no row is left.
    """
    rows, header, too_short, too_long = [], None, 0, 0
    with closing(_lines(path)) as lines:
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
            longest = max(end - start for start, end in row.spans)
            if longest < min_answer_tokens:
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


def _lines(path: str | Path) -> Generator[str, None, None]:
    """The lines of a text file, `.gz` unpacked; damage is told with the file's name."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DFlowError(f"{path}: no text file, or a damaged one ({error})") from error


def read_rows(path: str | Path, min_answer_tokens: int = 3, max_length: int = 1024) -> list[TrainingRow]:
    """The rows of [`read_data`] alone."""
    return read_data(path, min_answer_tokens, max_length).rows


def parse_row(record: dict[str, Any]) -> TrainingRow:
    """A row from its JSON object.

    Raises:
        KeyError, TypeError, ValueError: It is no row.
    """
    if not isinstance(record, dict):
        raise TypeError("no JSON object")
    prompt, temperature = record.get("prompt", ""), record.get("temperature", 0.0)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {prompt!r}; give its text")
    if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, int | float)):
        raise TypeError(f"temperature is {temperature!r}; give a number, or null")
    if "token_ids" not in record:
        prompt_ids, answer_ids = (_whole_numbers(record, key) for key in ("prompt_ids", "answer_ids"))
        return TrainingRow(prompt_ids + answer_ids, len(prompt_ids), prompt, temperature)
    token_ids = _whole_numbers(record, "token_ids")
    spans = tuple((start, end) for start, end in record["spans"])
    if not all(type(position) is int for span in spans for position in span):
        raise TypeError(f"spans {record['spans']} hold more than whole numbers")
    bounds = [0, *(position for span in spans for position in span), len(token_ids)]
    if not spans or bounds != sorted(bounds) or any(start == end for start, end in spans):
        raise ValueError(f"spans {record['spans']} are not in order within {len(token_ids)} tokens")
    return TrainingRow(token_ids, spans[0][0], prompt, temperature, spans)


def _whole_numbers(record: dict[str, Any], key: str) -> list[int]:
    values = record[key]
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{key} is no list of token ids, which are whole numbers from 0")
    return values


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


def is_held_out(prompt: str, held_out_share: float = 0.06) -> bool:
    """Whether a prompt belongs to the share never trained on: by its hash, so that no order and no file decides.

    See [`split_rows`] for rows whose prompt has no text.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < held_out_share


def split_rows(rows: list[TrainingRow], held_out_share: float = 0.06) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Split into (training, held out) with [`is_held_out`]; a prompt without text is told by its tokens."""
    parts: tuple[list[TrainingRow], list[TrainingRow]] = ([], [])
    for row in rows:
        name = row.prompt or json.dumps(row.token_ids[: row.prompt_length])
        parts[is_held_out(name, held_out_share)].append(row)
    return parts
