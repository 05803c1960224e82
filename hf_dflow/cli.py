"""The commands of `hf-dflow`. Each is a function of its room and imports torch only when it runs."""

from collections.abc import Callable
from typing import Annotated

import typer

from hf_dflow import drafter_commands as drafters
from hf_dflow._version import __version__
from hf_dflow.bench import commands as bench
from hf_dflow.bench.app import app as bench_app
from hf_dflow.console import SafeGroup, errors_in_words, say
from hf_dflow.training import commands as training

app = typer.Typer(
    cls=SafeGroup, help="Block-diffusion speculative decoding with verifier feedback.", no_args_is_help=True
)
commands: list[Callable[..., None]] = [
    bench.demo,
    bench.check,
    bench.probe,
    bench.calibrate,
    drafters.info,
    drafters.drafters,
    drafters.export,
    drafters.publish,
    bench.plan,
    bench.cost,
    training.data,
    training.train,
]


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        say(f"hf-dflow {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in commands:
    app.command()(errors_in_words()(command))
app.add_typer(drafters.card, name="card")
app.add_typer(bench_app, name="bench")


if __name__ == "__main__":
    app()
