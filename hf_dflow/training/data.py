"""Answers of the target as training rows: token ids and where the supervised span starts."""

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from hf_dflow.errors import DFlowError


@dataclass(frozen=True)
class TrainingRow:
    """One prompt and the target's answer to it."""

    token_ids: list[int]
    prompt_length: int  # tokens before the answer; the answer is what is supervised
    prompt: str
    temperature: float

    @property
    def answer_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


def read_rows(path: str | Path, min_answer_tokens: int = 3, max_length: int = 1024) -> list[TrainingRow]:
    """Read a JSONL file (`.gz` allowed) with `prompt_ids` and `answer_ids` on each line.

    Rows whose answer is shorter than an anchor and two labels teach nothing and are left out, as are over-long ones.

    Raises:
        DFlowError: A line is no such object, or no row is left.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    rows = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                prompt_ids, answer_ids = record["prompt_ids"], record["answer_ids"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DFlowError(f"{path}, line {number}: expected an object with prompt_ids and answer_ids") from error
            if len(answer_ids) >= min_answer_tokens and len(prompt_ids) + len(answer_ids) <= max_length:
                row = TrainingRow(
                    token_ids=prompt_ids + answer_ids,
                    prompt_length=len(prompt_ids),
                    prompt=record.get("prompt", ""),
                    temperature=record.get("temperature", 0.0),
                )
                rows.append(row)
    if not rows:
        raise DFlowError(f"{path}: no row has an answer of at least {min_answer_tokens} tokens")
    return rows


def split_rows(rows: list[TrainingRow], held_out_share: float = 0.06) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Split into (training, held out) by a hash of the prompt, so that the split does not depend on the order."""

    def is_held_out(row: TrainingRow) -> bool:
        digest = hashlib.sha256(row.prompt.encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32 < held_out_share

    return [row for row in rows if not is_held_out(row)], [row for row in rows if is_held_out(row)]
