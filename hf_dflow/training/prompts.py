"""Prompts of our own for training data, by task: templates times fillings. None of them occurs in an evaluation."""

import itertools
import json
from pathlib import Path


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
