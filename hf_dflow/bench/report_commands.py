"""`hf-dflow bench report`: what is made of records."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflow.console import report_console, writable
from hf_dflow.errors import DFlowError

# What only records of a command hold.
KINDS = {"runs": "modes", "endpoints": "acceptance", "plans": "largest_batch", "cost": "who_keeps_the_gain"}


def report(
    records: Annotated[list[Path], typer.Argument(help="JSON of bench run, bench endpoint, plan, cost and probe.")],
    html: Annotated[Path | None, typer.Option(callback=writable, help="Write all of it as one HTML file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="PNG of runs and endpoints side by side.")
    ] = None,
    monitor: Annotated[Path | None, typer.Option(help="Prometheus text of an AcceptanceMonitor that served.")] = None,
    target_licence: Annotated[str | None, typer.Option(help="E.g. apache-2.0.")] = None,
    drafter_licence: Annotated[str | None, typer.Option(help="E.g. apache-2.0.")] = None,
    canary: Annotated[str | None, typer.Option(help="What the canary period and its bill showed.")] = None,
    except_for: Annotated[list[str] | None, typer.Option(help="A condition that runs may differ in.")] = None,
    allow_open: Annotated[bool, typer.Option("--allow-open", help="Exit with 0 though items are open.")] = False,
) -> None:
    """Put records side by side, of this process and of endpoints alike, and end with the rollout checklist.

    Records of different conditions are refused. Exit code 1 while items of the checklist are open.
    """
    from hf_dflow.bench import compare
    from hf_dflow.bench.checklist import Evidence, checklist
    from hf_dflow.bench.html import render

    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*KINDS, "probe")}
    loads: list[tuple[dict[str, Any], str]] = []
    if len({path.resolve() for path in records}) < len(records):
        raise DFlowError("a record was given twice; give each once")
    for path in records:
        record = read(path)
        kind = kind_of(record, path)
        found[kind].append(record)
        if kind in ("runs", "endpoints"):
            # Rows and bars are told apart by the file's name, or by its path where others are called the same.
            others = [one for one in records if one.stem == path.stem]
            loads.append((record, path.name if len(others) == 1 else str(path)))
    for kind in ("cost", "probe"):
        if len(found[kind]) > 1:
            raise DFlowError(f"{len(found[kind])} records of hf-dflow {kind}; give one")
    licences = {"target": target_licence, "drafter": drafter_licence}
    names = [name for _, name in loads]
    compare.refuse_other_loads([one for one, _ in loads], names, except_for=except_for or [])
    given = Evidence(
        runs=found["runs"],
        endpoints=found["endpoints"],
        plans=found["plans"],
        cost=found["cost"][0] if found["cost"] else None,
        probe=found["probe"][0] if found["probe"] else None,
        monitor=_text(monitor) if monitor else None,
        licences={part: name for part, name in licences.items() if name},
        canary=canary,
        side_by_side=loads,
    )
    text = render(given)  # also what finds a record that is none
    if html is not None:
        html.write_text(text, encoding="utf-8")
    if plot is not None:
        if not loads:
            raise DFlowError("--plot draws runs and endpoints; give the record of one")
        compare.plot([one for one, _ in loads], names, plot)
    console = report_console()
    if loads:
        compare.show([one for one, _ in loads], names, console)
    items = checklist(given)
    for item in items:
        typer.echo(f"[{'x' if item.is_done else ' '}] {item.text}: {item.evidence}")
    raise typer.Exit(0 if allow_open or all(item.is_done for item in items) else 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DFlowError(f"{path}: no text in UTF-8 ({error})") from error


def kind_of(record: dict[str, Any], path: Path) -> str:
    """Which command wrote it: "runs", "endpoints", "plans", "cost" or "probe".

    Raises:
        DFlowError: None of them.
    """
    for kind, key in KINDS.items():
        if key in record:
            return kind
    if "by_task" in record:
        return "probe"
    raise DFlowError(f"{path}: no record of bench run, bench endpoint, plan, cost or probe")


def read(path: Path) -> dict[str, Any]:
    """A record.

    Raises:
        DFlowError: It is no JSON object.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DFlowError(f"{path}: no JSON record ({error})") from error
    if not isinstance(record, dict):
        raise DFlowError(f"{path}: no record of this program")
    return record
