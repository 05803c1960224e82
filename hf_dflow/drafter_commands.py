"""`hf-dflow drafters`, `info`, `export`, `publish`, `card new` and `card check`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

# What needs torch is imported inside the commands: --help must not wait for it.
from hf_dflow.console import (
    STDOUT,
    JsonOption,
    ResultTable,
    SafeConsole,
    errors_in_words,
    print_table,
    report_console,
    say,
    utf8_in_files,
    write_json,
)
from hf_dflow.text import read_text

DrafterArgument = Annotated[str, typer.Argument(help="Folder, Hub name, or name of a bundled drafter.")]


def drafters(
    target: Annotated[str | None, typer.Option(help="Only the drafters of this target: Hub name or folder.")] = None,
    json_path: JsonOption = None,
) -> None:
    """List the drafters that `for_target` knows; any other is loaded by its own name."""
    from hf_dflow.checkpoints.names import TABLE, drafters_for

    listed = list(TABLE)
    if target is not None:
        from hf_dflow.checkpoints.targets import listed_drafter

        listed = drafters_for(listed_drafter(target).target)  # raises where there is none, and names similar targets
    rows = [
        [
            row.name,
            row.target,
            str(row.block_size or "?"),
            row.format,
            row.licence or "see its page",
            row.chat_mode or "?",
        ]
        for row in listed
    ]
    columns = ("target", "block", "format", "licence", "mode")
    print_table(report_console(json_path), ResultTable("published drafters", ("drafter",), columns, rows))
    write_json(json_path, {"drafters": [asdict(row) for row in listed]})


def info(drafter: DrafterArgument, json_path: JsonOption = None) -> None:
    """Show what a drafter was made for."""
    from hf_dflow.checkpoints.names import TABLE
    from hf_dflow.model.drafter import DFlowDrafter

    model = DFlowDrafter.from_pretrained(drafter)
    config = model.config
    listed = next((row for row in TABLE if row.name == drafter), None)  # its configuration goes before
    table = Table("property", "value")
    width, candidates = config.correction_intermediate_size, config.correction_top_k
    relay_is_active = model.relay is not None and bool(model.relay.down_proj.weight.any())
    properties = {
        "block size": f"{config.block_size} ({config.drafts_per_block} drafts a step)",
        "draft layers": ", ".join(config.layer_types),
        "parameters": f"{sum(p.numel() for p in model.parameters()):,} ({config.dtype})",
        "relay": "trained" if relay_is_active else "at zero" if model.relay is not None else "none",
        "causal correction": "none" if width is None else f"width {width}, {candidates} candidates",
        "target": f"hidden size {config.target_hidden_size}, {config.num_target_layers or 'any number of'} layers",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
        "mask token id": str(config.mask_token_id),
        "made for": config.target_name or (listed and listed.target) or "not recorded",
        "chat mode": config.chat_mode or (listed and listed.chat_mode) or "not recorded",
        "tokenizer fingerprint": config.tokenizer_fingerprint or "not recorded",
        "recorded defaults": json.dumps(config.generation_defaults or {}),
        "fitted decisions": ", ".join(config.fitted_decisions or {}) or "none",
    }
    for name, value in properties.items():
        table.add_row(name, value)
    SafeConsole(stderr=json_path == STDOUT).print(table)
    write_json(json_path, {"properties": properties})


def export(
    drafter: DrafterArgument,
    output: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    to: Annotated[str, typer.Option("--to", help="vllm (with this package's plugin), dflash (z-lab) or speculators.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the drafter.")] = None,
    num_target_layers: Annotated[int | None, typer.Option(min=1, help="Where the drafter does not say.")] = None,
) -> None:
    """Write a drafter as other servers read it, and print what to pass to them."""
    from hf_dflow.checkpoints.export import export_drafter
    from hf_dflow.model.drafter import DFlowDrafter

    model = DFlowDrafter.from_pretrained(drafter, revision=revision or "main")
    for line in export_drafter(model, output, to, num_target_layers):
        say(line)
    parts = {"relay": model.relay, "causal correction": model.causal_correction}
    aside = [name for name, part in parts.items() if part is not None]
    if aside and to != "vllm":
        say(f"Kept aside: {' and '.join(aside)}. These servers draft without; DFlowDrafter.from_pretrained finds it.")


def publish(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter, its README.md the finished model card.")],
    repository: Annotated[str, typer.Argument(help="owner/name on the Hub; made where it does not exist.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded, and send nothing.")] = False,
    card: Annotated[Path | None, typer.Option(help="The model card, if it is another file.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; main by default.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Check a drafter and its card, and upload them; log in with `hf auth login` first."""
    from hf_dflow.hub.publishing import publish as upload
    from hf_dflow.model.drafter import DFlowDrafter

    text = _read_card(card or drafter)
    files, commit = upload(
        DFlowDrafter.from_pretrained(drafter),
        repository,
        text,
        private=private or None,
        revision=revision,
        message=message,
        dry_run=dry_run,
    )
    for file in files:
        say(f"{file.size:>14,} {file.path}")
    if commit is None:
        say(f"Nothing was sent. These {len(files)} files would go to {repository}.")
    else:
        say(f"Published: {commit.commit_url}")


card = typer.Typer(help="Model cards of drafters.", no_args_is_help=True)


@card.command("check")
def card_check(path: Annotated[Path, typer.Argument(help="A card, or a folder with its README.md.")]) -> None:
    """List what a model card lacks; exit code 1 if anything."""
    from hf_dflow.hub.cards import check_card

    with errors_in_words():
        problems = check_card(_read_card(path))
    for problem in problems:
        say(f"{path}: {problem}")
    if problems:
        raise typer.Exit(1)
    say(f"{path}: complete")


@card.command("new")
def card_new(
    drafter: DrafterArgument,
    repository: Annotated[str | None, typer.Option(help="Where it will be published.")] = None,
    licence: Annotated[str | None, typer.Option("--license", help="E.g. apache-2.0.")] = None,
) -> None:
    """Print a card for a drafter, its gaps marked where only its maker knows what to write."""
    from hf_dflow.hub.cards import make_card
    from hf_dflow.model.drafter import DFlowDrafter

    utf8_in_files()
    with errors_in_words():
        say(make_card(DFlowDrafter.from_pretrained(drafter), repository, licence))


def _read_card(path: Path) -> str:
    file = path / "README.md" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; `hf-dflow card new DRAFTER > README.md` makes one to finish.")
    return read_text(file)
