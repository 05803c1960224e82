"""Runs in this process and loads on endpoints in one table and one plot, if they were measured under the same load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.bench.comparison import NONE, parts_of
from hf_dflow.bench.conditions import is_endpoint, temperatures_of
from hf_dflow.bench.workloads import ALL_TASKS
from hf_dflow.console import Presentation, Remark, ResultTable, matplotlib_figure

KEYS = ("T", "task", "record", "strategy")
MEASURES = {  # heading: field of an entry, format
    "tokens/s": ("tokens_per_second", "{:.1f}"),
    "p50 s": ("p50", "{:.2f}"),
    "p95 s": ("p95", "{:.2f}"),
    "p99 s": ("p99", "{:.2f}"),
    "first token s": ("first_token", "{:.2f}"),
    "per token ms": ("milliseconds_per_token", "{:.1f}"),
    "tokens/step": ("tokens_per_step", "{:.2f}"),
    "tokens/forward": ("tokens_per_target_forward", "{:.2f}"),
    "accepted": ("acceptance", "{:.1%}"),
}
PANELS = {"tokens_per_second": "tokens/s", "p95": "p95, s", "tokens_per_step": "tokens per step"}
STATIC_BATCH = (
    "In this process, prompts decoded together are one batch, which ends with its last answer; an endpoint begins the "
    "next request when one ends. Tokens/s of a task are given where each task was measured by itself."
)


@dataclass(frozen=True)
class Entry:
    """One strategy or endpoint on one task, at one temperature. A measure that nobody reported is `None`.

    Args:
        source (`str`): Its record's name.
        temperature (`str`): As "T=0".
        p50, p95, p99, first_token (`float`, *optional*): Seconds.
        tokens_per_target_forward (`float`, *optional*): Also over forwards without drafts; of a batch's rows together.
    """

    source: str
    strategy: str
    temperature: str
    task: str
    tokens_per_second: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    first_token: float | None = None
    milliseconds_per_token: float | None = None
    tokens_per_step: float | None = None
    tokens_per_target_forward: float | None = None
    acceptance: float | None = None

    @property
    def cells(self) -> list[str]:
        """The measures as text, one for each of [`MEASURES`]."""
        values = [(getattr(self, name), form) for name, form in MEASURES.values()]
        return [NONE if value is None else form.format(value) for value, form in values]


def entries(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Entry]:
    """Everything that the records measured, by temperature, then by task, all tasks together last."""
    measured: list[Entry] = []
    for record, name in zip(records, names, strict=True):
        source = str(Path(name).with_suffix(""))
        measured += (_of_endpoint if is_endpoint(record) else _of_run)(record, source)
    tasks = sorted(dict.fromkeys(entry.task for entry in measured), key=lambda task: task == ALL_TASKS)
    return sorted(measured, key=lambda entry: (entry.temperature, tasks.index(entry.task)))


def _of_run(record: Mapping[str, Any], source: str) -> list[Entry]:
    made = []
    for mode, measured in record["modes"].items():
        temperature, _, rule = mode.partition(", ")
        for task, part in parts_of(measured).items():
            for name, times in part["latency"].items():
                strategy = f"{name}, {rule}" if rule else name
                values = {"tokens_per_second": times["effective_tps_with_bonus"], "tokens_per_step": 1.0}
                values["tokens_per_target_forward"] = 1.0 / times["target_forwards_per_token"]
                if counts := part["contestants"].get(name):
                    values["tokens_per_step"] = counts["tokens_per_step"]["value"]
                    values["acceptance"] = counts["draft_acceptance_rate"]
                made.append(Entry(source, strategy, temperature, task, **values, **_times(times)))
    return made


def _of_endpoint(record: Mapping[str, Any], source: str) -> list[Entry]:
    (temperature,) = temperatures_of(record)
    conditions, acceptance = record["conditions"], record["acceptance"] or {}
    strategy = f"endpoint {conditions['target']}"
    if conditions.get("server"):
        strategy += f" ({conditions['server']})"
    made = []
    for task, part in {**record["by_task"], ALL_TASKS: record["all"]}.items():
        values = _times(part["latency"]) if part["latency"] else {}
        if task == ALL_TASKS:
            # Tasks share the server, so a task's tokens over the whole time would be no rate of its own.
            values["tokens_per_second"] = part["effective_tps_with_bonus"] if part["latency"] else None
            values["tokens_per_step"] = acceptance.get("tokens_per_step")
            values["acceptance"] = acceptance.get("draft_acceptance_rate")
        made.append(Entry(source, strategy, temperature, task, **values))
    return made


def _times(times: Mapping[str, Any]) -> dict[str, Any]:
    per_token = times["seconds_per_output_token"]
    return {
        **{key: times["latency_seconds"][key] for key in ("p50", "p95", "p99")},
        "first_token": times["first_token_seconds"]["p50"],
        "milliseconds_per_token": None if per_token is None else 1e3 * per_token["p50"],
    }


def present(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Presentation:
    """Everything in one table."""
    rows = [
        [entry.temperature, entry.task, entry.source, entry.strategy, *entry.cells] for entry in entries(records, names)
    ]
    remarks = [Remark(note, "yellow") for note in notes(records, names)]
    return Presentation("Side by side", [ResultTable("side by side", KEYS, list(MEASURES), rows)], remarks)


def notes(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """What a reader of the comparison must know beside it."""
    sentences = [STATIC_BATCH]
    for record, name in zip(records, names, strict=True):
        elsewhere = {t for other in records if other is not record for t in temperatures_of(other)}
        alone = [temperature for temperature in temperatures_of(record) if temperature not in elsewhere]
        if alone and len(records) > 1:
            sentences.append(f"{', '.join(alone)}: only in {name}, compared with nothing")
        for mode, measured in record.get("modes", {}).items():
            left_out = measured.get("not_run", {})
            sentences += [f"{mode}: {strategy} was not run: {why}" for strategy, why in left_out.items()]
        outcomes = record.get("all", {}).get("outcomes", {})
        if failed := [f"{count} {outcome}" for outcome, count in outcomes.items() if outcome != "ok"]:
            sentences.append(f"{name}: {', '.join(failed)}, not in its times")
    return sentences


def plot(records: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> None:
    """Draw throughput, p95 and tokens per step over all tasks, a row of panels for each temperature."""
    figure_class = matplotlib_figure()
    groups: dict[str, list[Entry]] = {}
    for entry in entries(records, names):
        if entry.task == ALL_TASKS:
            groups.setdefault(entry.temperature, []).insert(0, entry)  # the lowest bar is the first
    height = 1.2 + 0.35 * max(map(len, groups.values()))
    picture = figure_class(figsize=(14, height * len(groups)), layout="constrained")
    rows = picture.subplots(len(groups), len(PANELS), squeeze=False)
    for panels, (temperature, group) in zip(rows, groups.items(), strict=True):
        labels = [f"{entry.strategy} ({entry.source})" for entry in group]
        for panel, (name, heading) in zip(panels, PANELS.items(), strict=True):
            values = [getattr(entry, name) for entry in group]
            bars = panel.barh(labels, [value or 0.0 for value in values])
            panel.bar_label(bars, ["unknown" if value is None else f"{value:.2f}" for value in values], padding=2)
            panel.set_title(f"{temperature}: {heading}", fontsize="medium")
            panel.margins(x=0.2)
            panel.tick_params(labelleft=panel is panels[0])
    picture.savefig(path, dpi=110)
