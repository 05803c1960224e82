"""What several experiments share: figures in words, tables, records, and the prompts a command decodes."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflow.errors import DFlowError

BundledOption = Annotated[bool, typer.Option("--bundled", help="The bundled prompts; the default if none are named.")]
RulesOption = Annotated[
    list[str] | None, typer.Option("--verification", help="token or block, when sampling; both by default.")
]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def with_interval(figure: dict[str, Any], form: str) -> str:
    """`1.84 [1.71, 1.99]` of a figure with its 95% interval."""
    if figure["interval_95"] is None:
        return f"{figure['value']:{form}} (n={figure['n']})"
    low, high = figure["interval_95"]
    return f"{figure['value']:{form}} [{low:{form}}, {high:{form}}]"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without a newline at its end."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def pass_or_fail(is_good: bool) -> str:
    """A coloured word for the console."""
    return "[green]PASS[/]" if is_good else "[red]FAIL[/]"


def read_json(path: Path) -> Any:
    """The record at `path`.

    Raises:
        DFlowError: There is no such file, or it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DFlowError(f"{path}: no JSON record ({error})") from error


def append_line(path: Path, record: Any) -> None:
    """Add a line of JSON; a line that a kill cut short is ended first, so that the new one stands alone."""
    with open(path, "a+b") as lines:
        if lines.tell():
            lines.seek(-1, 2)
            is_cut = lines.read(1) != b"\n"
            lines.write(b"\n" * is_cut)
        lines.write(json.dumps(record).encode() + b"\n")


def write_record(path: Path, record: Any) -> None:
    """Write a record as the committed ones are written."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
