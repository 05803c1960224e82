"""Tables that nobody has to guess at: no cell is cut, however narrow the terminal."""

from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNBOUNDED = 100_000  # columns; what is read later has no width that we know


def report_console() -> Console:
    """Where a command prints. A file or a pipe has no width, so that lines are as long as they are."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


def print_table(
    console: Console,
    title: str,
    keys: Sequence[str],
    measures: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Print rows whose first cells, the `keys`, say what the others are of.

    Where the console is too narrow for all `measures`, they are spread over several tables, each with the keys; where
    it is too narrow for the keys and one measure, each row becomes lines of its own.

    Args:
        rows (`list[list[str]]`): Plain text, one cell for each of keys and measures.
    """
    headings = [*keys, *measures]
    widths = [max(cell_len(str(cell)) for cell in column) for column in zip(headings, *rows, strict=True)]
    parts = _parts(widths, len(keys), console.width)
    if parts is None:
        _print_lines(console, title, headings, rows, len(keys))
        return
    for number, places in enumerate(parts):
        named = title if len(parts) == 1 else f"{title} ({number + 1} of {len(parts)})"
        table = Table(title=Text(named), title_justify="left", box=box.SIMPLE_HEAD)
        for place in places:
            is_key = place < len(keys)
            # Room is checked above, so nothing wraps.
            table.add_column(Text(headings[place]), justify="left" if is_key else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[place]) for place in places))
        console.print(table)


def _parts(widths: Sequence[int], num_keys: int, room: int) -> list[list[int]] | None:
    """Which columns go into which table; `None` where not even the keys and a measure fit."""
    keys, parts = list(range(num_keys)), []
    taken = [_table_width([widths[place] for place in keys])]
    places = list(keys)
    for place in range(num_keys, len(widths)):
        if _table_width([widths[one] for one in [*places, place]]) > room and len(places) > num_keys:
            parts.append(places)
            places = list(keys)
        places.append(place)
        taken.append(_table_width([widths[one] for one in places]))
    parts.append(places)
    return parts if max(taken) <= room else None


def _table_width(widths: Sequence[int]) -> int:
    return sum(width + 3 for width in widths) + 1  # a space on both sides of a cell, and the frame between and around


def _print_lines(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int
) -> None:
    console.print(Text(title, style="italic"))
    for row in rows:
        console.print(Text(", ".join(row[:num_keys]), style="bold"))
        for heading, cell in zip(headings[num_keys:], row[num_keys:], strict=True):
            console.print(Text(f"  {heading}: {cell}"))
