"""`python -m experiments NAME`: benchmarks that are not meant for every user."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Benchmarks; each prints its conditions with its figures."""


@app.command()
def kernels(
    output: Annotated[Path | None, typer.Option(help="Write the record as JSON to this file.")] = None,
    device: Annotated[str, typer.Option(help="'cuda', or 'cpu' to try the script out under the interpreter.")] = "cuda",
    budget: Annotated[float, typer.Option(help="Seconds after which no further baseline is started.")] = 330.0,
) -> None:
    """Block verification on a GPU: correctness first, then time, bandwidth and memory against torch and vLLM."""
    from experiments.kernels import run

    raise typer.Exit(run(output=output, device=device, budget=budget))


@app.command()
def relay(
    output: Annotated[Path | None, typer.Option(help="Write the record as JSON to this file.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: 'cpu' or 'cuda'.")] = "cpu",
) -> None:
    """What a fused kernel for the relay's inputs could save: its ops, bytes and time beside the rest of a step."""
    from experiments.relay_profile import run

    run(output=output, device=device)


if __name__ == "__main__":
    app()
