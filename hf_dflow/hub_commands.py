"""`hf-dflow drafters`, `export`, `card` and `publish`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# What needs torch is imported inside the commands: --help must not wait for it.


def drafters(
    target: Annotated[str | None, typer.Option(help="Only the drafters of this target, by its Hub name.")] = None,
) -> None:
    """List the drafters that `for_target` knows; any other is loaded by its own name."""
    from hf_dflow.hub import TABLE, drafter_for, drafters_for

    if target is not None:
        drafter_for(target)  # says what is near where there is none
    table = Table("drafter", "target", "block", "format", "licence", "mode")
    for row in TABLE if target is None else drafters_for(target):
        block, unknown = str(row.block_size or "?"), "see its page"
        table.add_row(row.name, row.target, block, row.format, row.licence or unknown, row.chat_mode or "?")
    Console().print(table)


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub name.")],
    output: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    to: Annotated[str, typer.Option("--to", help="dflash (z-lab) or speculators (vLLM).")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the drafter.")] = None,
    num_target_layers: Annotated[int | None, typer.Option(min=1, help="Where the drafter does not say.")] = None,
) -> None:
    """Write a drafter as other servers read it, and print what to pass to them."""
    from hf_dflow import DFlowDrafter
    from hf_dflow.checkpoints.export import export_drafter

    model = DFlowDrafter.from_pretrained(drafter, revision=revision or "main")
    for line in export_drafter(model, output, to, num_target_layers):
        typer.echo(line)
    if model.relay is not None:
        typer.echo("The relay is kept aside: these servers draft without it; DFlowDrafter.from_pretrained finds it.")
