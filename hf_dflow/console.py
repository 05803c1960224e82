"""What the commands of all rooms share: errors in words, threads, files for results, and tables of any width.

Nothing here imports torch before it is needed: `--help` must not wait for it.
"""

import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hf_dflow.errors import DFlowError
from hf_dflow.text import visible

UNBOUNDED = 100_000  # columns of a file or a pipe, which has no width of its own


class SafeConsole(Console):
    """rich's console, on which no text from outside can command the terminal."""

    def render(self, renderable, options=None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def say(text: Any, err: bool = False) -> None:
    """Print a line of text from anywhere."""
    print(visible(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def utf8_in_files() -> None:
    """Print UTF-8 where standard output is redirected: what a command makes for a file is read as UTF-8 again."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")


class SafeGroup(typer.core.TyperGroup):
    """All commands: what their output's encoding lacks is written out, and errors about arguments are safe to print."""

    def main(self, *args: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **options)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _safe_messages():
            return super().make_context(*args, **options)

    def invoke(self, context: Any) -> Any:
        with _safe_messages():
            return super().invoke(context)


@contextmanager
def _safe_messages() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(message := vars(error).get("message"), str):  # a click exception's
            error.message = visible(message)  # type: ignore[attr-defined]
        raise


@contextmanager
def errors_in_words() -> Iterator[None]:
    """End a problem that the user can fix with its message and exit code 2 instead of a traceback."""
    try:
        yield
    except (DFlowError, OSError, ValueError) as error:  # transformers raises the last two for what it cannot load
        say(f"hf-dflow: {error}", err=True)
        raise typer.Exit(2) from error


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses: each of their fields becomes an option of its own.

    Typer reads options off a function's signature, where a group of options that several commands share would be
    spelled out each time.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in group]

    @wraps(command)
    def with_groups(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
        command(**options)

    with_groups.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {option.name: option.annotation for option in parameters}
    return with_groups


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads; `None` leaves torch's own choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; all by default.")]


INTERRUPTED = 130  # exit code of a command that Ctrl-C ended
STDOUT = Path("-")  # a file's name that stands for standard output


def writable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, a file that could not be written at the end."""
    if path is None or path == STDOUT:
        return path
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        reason = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise typer.BadParameter(f"{path} {reason}; name a file in an existing folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} may not be written; name a file that may")
    return path


def writable_folder(path: Path) -> Path:
    """Refuse, before anything is measured, a folder that could not be created or written to at the end."""
    nearest = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "may not be written" if nearest.is_dir() else "is no folder"
        raise typer.BadParameter(f"{path}: {nearest} {reason}; name another folder")
    return path


def drawable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, a picture that could not be drawn or written at the end."""
    if path is not None:
        if path == STDOUT:
            raise typer.BadParameter("a picture is not printed; name a file")
        try:
            matplotlib_figure()
        except DFlowError as error:
            raise typer.BadParameter(str(error)) from error
    return writable(path)


def matplotlib_figure() -> Any:
    """matplotlib's `Figure`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from error
    return Figure


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=writable,
        help="Also write all figures and their conditions here; - prints them in place of the tables.",
    ),
]


def write_json(path: Path | None, record: dict[str, Any], *, is_final: bool = True) -> None:
    """Write a command's record to its `--json` file, whole or not at all.

    If that fails, the record is printed, so that nothing is lost.

    Args:
        is_final (`bool`, *optional*, defaults to `True`): The measuring is over: name the file.
    """
    if path is None or (path == STDOUT and not is_final):
        return
    text = json.dumps(record, indent=1)
    if path == STDOUT:
        typer.echo(text)
        return
    try:
        _replace(path, text + "\n")
    except OSError as error:
        if is_final:
            typer.echo(text)
            raise DFlowError(
                f"{path} could not be written ({error.strerror}); the record was printed instead"
            ) from error
        return
    if is_final:
        written(path)


def _replace(path: Path, text: str) -> None:
    """Put `text` in place of a file's contents in one step; a device or a pipe is written to."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if path.exists():
            unfinished.chmod(path.stat().st_mode)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        if not path.exists():
            raise
        path.write_text(text, encoding="utf-8")  # a file that may be written, in a folder that may not


def written(path: Path) -> None:
    """Name a file that a command wrote, beside its standard output."""
    say(f"Wrote {path}", err=True)


def report_console(json_path: Path | None = None) -> Console:
    """The console that commands print to; in a file or a pipe, lines are as long as they need to be.

    Args:
        json_path (`Path`, *optional*): Where the record goes; if it is printed, everything else goes to standard error.
    """
    to_stderr = json_path == STDOUT
    console = SafeConsole(stderr=to_stderr)
    return console if console.is_terminal else SafeConsole(stderr=to_stderr, width=UNBOUNDED)


@dataclass(frozen=True)
class ResultTable:
    """A table of text.

    Args:
        keys (`list[str]`): Headings of the first columns, which name what the others measure.
        measures (`list[str]`): Headings of the others.
        rows (`list[list[str]]`): One cell for each of keys and measures.
    """

    title: str
    keys: Sequence[str]
    measures: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Remark:
    """A sentence below the tables; `style` is rich's, e.g. "yellow" for what the reader should not miss."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Presentation:
    """What a command shows of its record: printed by [`show`], and a section of the HTML report.

    Args:
        conditions (`dict`, *optional*): What the figures were measured under.
    """

    title: str
    tables: Sequence[ResultTable]
    remarks: Sequence[Remark] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)


def show(presentation: Presentation, console: Console) -> None:
    """Print the tables, the remarks, and the conditions."""
    for table in presentation.tables:
        print_table(console, table)
    for remark in presentation.remarks:
        console.print(Text(remark.text, style=remark.style))
    if presentation.conditions:
        console.print(Text(", ".join(f"{name}: {value}" for name, value in presentation.conditions.items())))


def write_and_show(json_path: Path | None, record: dict[str, Any], presentation: Presentation) -> None:
    """Write a command's record and show it, in this order: who closes the pipe that reads the tables (`| head`) loses
    no record."""
    try:
        write_json(json_path, record)
    finally:
        show(presentation, report_console(json_path))


def print_table(console: Console, table: ResultTable) -> None:
    """Print a table of which no cell is ever cut.

    Where the console is too narrow for all measures, they are spread over several tables, each with the keys. Where it
    is too narrow for the keys and one measure, each row becomes lines of its own.
    """
    rows = [[visible(cell) for cell in row] for row in table.rows]
    headings, num_keys = [*table.keys, *table.measures], len(table.keys)
    # A cell has a space on both sides and a frame line; one more line closes the table.
    widths = [max(map(cell_len, column)) + 3 for column in zip(headings, *rows, strict=True)]
    room = console.width - 1 - sum(widths[:num_keys])
    if max(widths[num_keys:]) > room:
        console.print(Text(table.title, style="italic"))
        for row in rows:
            console.print(Text(", ".join(row[:num_keys]), style="bold"))
            for heading, cell in zip(table.measures, row[num_keys:], strict=True):
                console.print(Text(f"  {heading}: {cell}"))
        return
    parts: list[list[int]] = [[]]
    for column in range(num_keys, len(headings)):
        if sum(widths[other] for other in parts[-1]) + widths[column] > room:
            parts.append([])
        parts[-1].append(column)
    for number, measured in enumerate(parts, start=1):
        title = table.title if len(parts) == 1 else f"{table.title} ({number} of {len(parts)})"
        printed = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
        columns = [*range(num_keys), *measured]
        for column in columns:
            printed.add_column(Text(headings[column]), justify="left" if column < num_keys else "right", no_wrap=True)
        for row in rows:
            printed.add_row(*(Text(row[column]) for column in columns))
        console.print(printed)
