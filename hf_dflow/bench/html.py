"""`hf-dflow bench report`: records of all commands as one HTML file, which ends with the rollout checklist."""

import base64
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from hf_dflow.bench import compare, run_view
from hf_dflow.bench.checklist import Evidence, checklist
from hf_dflow.bench.probe import COLUMNS
from hf_dflow.errors import DFlowError

TEMPLATE = "report.html.j2"


def render(given: Evidence, *, with_plots: bool = True) -> str:
    """The report. Nothing is fetched when it is opened: pictures are inside.

    Raises:
        DFlowError: Nothing was given, or a record is not of the command that it was given as.
    """
    if not (given.runs or given.endpoints or given.plans or given.cost or given.probe):
        raise DFlowError(
            "nothing to report; give one record or more, of bench run, bench endpoint, plan, cost or probe"
        )
    # Names and prompts in records come from elsewhere: all of it is escaped.
    place = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=place, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    try:
        return environment.get_template(TEMPLATE).render(
            given=given,
            items=checklist(given),
            plots=[_plot(dict(one)) for one in given.runs] if with_plots else [None for _ in given.runs],
            probe_columns=COLUMNS,
            side_by_side=_side_by_side(given, with_plots) if len(given.side_by_side) > 1 else None,
        )
    except (KeyError, TypeError, AttributeError, ValueError, TemplateError) as error:
        raise DFlowError(f"a record is not of the command that it was given as ({error!r})") from error


def _side_by_side(given: Evidence, with_plots: bool) -> dict[str, Any]:
    records, names = [one for one, _ in given.side_by_side], [name for _, name in given.side_by_side]
    found = compare.entries(records, names)
    return {
        "headings": [*compare.KEYS, *compare.MEASURES],
        "rows": [[one.temperature, one.task, one.source, one.strategy, *compare.cells(one)] for one in found],
        "notes": compare.notes(records, names),
        "plot": _picture(lambda path: compare.plot(records, names, path)) if with_plots else None,
    }


def _plot(record: dict[str, Any]) -> str:
    return _picture(lambda path: run_view.plot(record, path))


def _picture(draw: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "plot.png"
        draw(picture)
        return base64.b64encode(picture.read_bytes()).decode("ascii")


def _figure(found: dict[str, Any], form: str = "{:.2f}") -> str:
    low, high = found["interval_95"]
    return f"{form.format(found['value'])} [{form.format(low)}, {form.format(high)}]"
