"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def writable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, a file that could not be written at the end.

    Raises:
        typer.BadParameter: It is a folder, or lies in one that does not exist.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise typer.BadParameter(f"{path} {reason}; name a file in a folder that does")
    return path


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="Also write all figures and their conditions here.")
]
