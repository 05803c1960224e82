"""`hf-dflow`: the demo, a losslessness check, a look into a drafter's folder, and training."""

from collections.abc import Callable

import typer

from hf_dflow.bench import commands as bench
from hf_dflow.bench.app import app as bench_app
from hf_dflow.console import errors_in_words
from hf_dflow.hub import commands as hub
from hf_dflow.training import commands as training

app = typer.Typer(help="Block-diffusion speculative decoding with verifier feedback.", no_args_is_help=True)
commands: list[Callable[..., None]] = [
    bench.demo,
    bench.check,
    bench.probe,
    bench.calibrate,
    hub.info,
    hub.drafters,
    hub.export,
    hub.publish,
    bench.plan,
    bench.cost,
    training.data,
    training.train,
]
for command in commands:
    app.command()(errors_in_words()(command))
app.add_typer(hub.card, name="card")
app.add_typer(bench_app, name="bench")


if __name__ == "__main__":
    app()
