"""`hf-dflow bench report`: records of all commands side by side, in one HTML file, with the rollout checklist."""

import base64
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from hf_dflow.bench import comparison, cost, endpoint_record, memory_plan, probe, side_by_side, sweep
from hf_dflow.bench.checklist import Evidence, checklist
from hf_dflow.console import Presentation
from hf_dflow.errors import DFlowError
from hf_dflow.text import read_text

# A key that only records of one command hold.
KINDS = {
    "runs": "modes",
    "endpoints": "acceptance",
    "sweeps": "points",
    "plans": "largest_batch",
    "costs": "who_keeps_the_gain",
    "probes": "by_task",
}


def read_evidence(paths: list[Path], **stated: Any) -> Evidence:
    """What the records in files show, and what the user states."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise DFlowError("a record was given twice; give each once")
    records: dict[str, Any] = {kind: {} for kind in KINDS}
    for path in paths:
        record = read_record(path)
        # Rows and bars are named after the file, or after its path where another file has the same name.
        is_unique = sum(other.stem == path.stem for other in paths) == 1
        records[kind_of(record, path)][path.name if is_unique else str(path)] = record
    for kind in ("costs", "probes"):
        if len(records[kind]) > 1:
            raise DFlowError(f"{len(records[kind])} records of hf-dflow {kind[:-1]}; give one")
    return Evidence(**records, **stated)


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        record = json.loads(read_text(path))
    except ValueError as error:
        raise DFlowError(f"{path}: no JSON record ({error})") from error
    if not isinstance(record, dict):
        raise DFlowError(f"{path}: no record of this program")
    return record


def kind_of(record: Mapping[str, Any], path: Path) -> str:
    """Which command wrote a record: one of [`KINDS`]."""
    for kind, key in KINDS.items():
        if key in record:
            return kind
    raise DFlowError(f"{path}: no record of bench run, endpoint or sweep, plan, cost or probe")


def render(evidence: Evidence, *, with_plots: bool = True) -> str:
    """The HTML file. It loads nothing when it is opened: pictures are embedded."""
    # Names and prompts in records may hold markup: everything is escaped.
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    try:
        sections = _sections(evidence, with_plots)
        if not sections:
            raise DFlowError("nothing to report; give records of bench run, endpoint or sweep, plan, cost or probe")
        return environment.get_template("report.html.j2").render(sections=sections, items=checklist(evidence))
    except (KeyError, TypeError, AttributeError, ValueError, TemplateError) as error:
        raise DFlowError(f"a record is not of the command that it was given as ({error!r})") from error


def _sections(evidence: Evidence, with_plots: bool) -> list[tuple[Presentation, str | None]]:
    """What each record shows, and a picture where there is one."""
    sections: list[tuple[Presentation, str | None]] = []
    loads, names = list(evidence.loads.values()), list(evidence.loads)
    if len(loads) > 1:
        picture = _picture(partial(side_by_side.plot, loads, names)) if with_plots else None
        sections.append((side_by_side.present(loads, names), picture))
    for record in evidence.runs.values():
        picture = _picture(partial(comparison.plot, record)) if with_plots else None
        sections.append((comparison.present(record), picture))
    presented = [
        (endpoint_record, evidence.endpoints),
        (sweep, evidence.sweeps),
        (probe, evidence.probes),
        (memory_plan, evidence.plans),
    ]
    for module, records in [*presented, (cost, evidence.costs)]:
        sections += [(module.present(record), None) for record in records.values()]
    return sections


def _picture(draw: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        draw(path)
        return base64.b64encode(path.read_bytes()).decode("ascii")
