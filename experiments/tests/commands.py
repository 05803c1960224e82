"""Calls the command of a script as a shell would, in this process."""

import typer
from typer.testing import CliRunner


def invoke(main, *arguments):
    """The result of `main` with `arguments`; one string may hold several, separated by spaces."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, " ".join(map(str, arguments)).split())
