"""Runs in this process and loads on endpoints side by side, where they were measured under the same load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_dflow.bench.conditions import refuse_unequal
from hf_dflow.console import print_table
from hf_dflow.errors import DFlowError

# What a client decides; target, dtype and machine of an endpoint are its own affair and are told beside the figures.
LOAD = {"prompts_sha256": "prompts", "output_tokens": "output tokens", "concurrency": "concurrency"}
ENDPOINT = "endpoint"
NONE = "–"
KEYS = ("T", "task", "record", "strategy")
MEASURES = ("tokens/s", "p50 s", "p95 s", "p99 s", "first token s", "per token ms", "tokens/step", "accepted")
PANELS = (("tokens_per_second", "tokens/s"), ("p95", "p95, s"), ("tokens_per_step", "tokens per step, bonus counted"))
STATIC_BATCH = (
    "In this process, prompts at a time are one batch, which is over when its last answer is; an endpoint begins the "
    "next request when one is over. Tokens/s of a task are told where each task was measured by itself."
)


@dataclass(frozen=True)
class Entry:
    """One strategy or endpoint on one task, at one temperature.

    Args:
        source (`str`): Its record's name.
        temperature (`str`): As "T=0".
        p50, p95, p99, first_token (`float`, *optional*): Seconds; `None` where no request was answered.
        tokens_per_step, acceptance (`float`, *optional*): `None` where nobody told.
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
    seconds_per_token: float | None = None
    tokens_per_step: float | None = None
    acceptance: float | None = None

    @property
    def label(self) -> str:
        return f"{self.strategy} ({self.source})"


def is_endpoint(record: Mapping[str, Any]) -> bool:
    """Whether a record is of `hf-dflow bench endpoint`."""
    return record.get("conditions", {}).get("engine") == ENDPOINT


def temperatures_of(record: Mapping[str, Any]) -> list[str]:
    """As "T=0", without rules of verification."""
    return list(dict.fromkeys(mode.split(",")[0] for mode in record["conditions"]["modes"]))


def refuse_other_loads(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], *, except_for: Sequence[str] = ()
) -> None:
    """Refuse records that were not measured on the same prompts, output tokens, concurrency, and a common temperature.

    Those of this process must agree in everything, see [`~hf_dflow.bench.conditions.refuse_unequal`].

    Raises:
        DFlowError: Two of them differ, and in what.
    """
    own = [(record, name) for record, name in zip(records, names, strict=True) if not is_endpoint(record)]
    if len(own) > 1:
        refuse_unequal([one for one, _ in own], [name for _, name in own], except_for=[*except_for, "modes"])
    for record, name in zip(records[1:], names[1:], strict=True):
        pairs = {
            words: tuple(one["conditions"].get(key, "not stated") for one in (records[0], record))
            for key, words in LOAD.items()
            if key not in except_for
        }
        told = [f"{words}: {ours!r} / {theirs!r}" for words, (ours, theirs) in pairs.items() if ours != theirs]
        ours, theirs = (temperatures_of(one) for one in (records[0], record))
        if not set(ours) & set(theirs):
            told.append(f"temperature: {', '.join(ours)} / {', '.join(theirs)}")
        if told:
            raise DFlowError(
                f"{names[0]} and {name} were measured under different conditions, so they are not compared. "
                f"{'; '.join(told)}. Measure both again with the same options."
            )


def entries(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Entry]:
    """Everything that the records measured, by temperature, then by task, "all" being the last."""
    found = []
    for record, name in zip(records, names, strict=True):
        source = str(Path(name).with_suffix(""))
        found += _of_endpoint(record, source) if is_endpoint(record) else _of_run(record, source)
    tasks = sorted(dict.fromkeys(one.task for one in found), key=lambda task: task == "all")
    return sorted(found, key=lambda one: (one.temperature, tasks.index(one.task)))


def _of_run(record: Mapping[str, Any], source: str) -> list[Entry]:
    made = []
    for mode, found in record["modes"].items():
        temperature, _, rule = mode.partition(", ")
        parts = {**found["by_task"], "all": {**found["all"], "latency": found["latency"]}}
        for task, part in parts.items():
            for name, times in part["latency"].items():
                counts = part["contestants"].get(name)
                made.append(
                    Entry(
                        source,
                        f"{name}, {rule}" if rule else name,
                        temperature,
                        task,
                        tokens_per_second=times["effective_tps_with_bonus"],
                        **_times(times),
                        tokens_per_step=counts["tokens_per_step"]["value"] if counts else 1.0,
                        acceptance=counts["draft_acceptance_rate"] if counts else None,
                    )
                )
    return made


def _of_endpoint(record: Mapping[str, Any], source: str) -> list[Entry]:
    (temperature,) = temperatures_of(record)
    said = record["conditions"]
    name = " ".join(["endpoint", said["target"], *([f"({said['server']})"] if said.get("server") else [])])
    counted = record["acceptance"] or {}
    made = []
    for task, found in {**record["by_task"], "all": record["all"]}.items():
        is_all = task == "all"
        made.append(
            Entry(
                source,
                name,
                temperature,
                task,
                # Tasks share the lanes, so a task's tokens over the whole time would be no rate of its own.
                tokens_per_second=found["effective_tps_with_bonus"] if is_all and found["latency"] else None,
                **(_times(found["latency"]) if found["latency"] else {}),
                tokens_per_step=counted.get("tokens_per_step") if is_all else None,
                acceptance=counted.get("draft_acceptance_rate") if is_all else None,
            )
        )
    return made


def _times(found: Mapping[str, Any]) -> dict[str, Any]:
    per_token = found["seconds_per_output_token"]
    return {
        **{key: found["latency_seconds"][key] for key in ("p50", "p95", "p99")},
        "first_token": found["first_token_seconds"]["p50"],
        "seconds_per_token": per_token and per_token["p50"],
    }


def cells(one: Entry) -> list[str]:
    """The measures of an entry, in words."""
    forms = {
        "tokens_per_second": "{:.1f}",
        **dict.fromkeys(("p50", "p95", "p99", "first_token"), "{:.2f}"),
        "seconds_per_token": "{:.1f}",
        "tokens_per_step": "{:.2f}",
        "acceptance": "{:.1%}",
    }
    values = {**vars(one), "seconds_per_token": one.seconds_per_token and 1e3 * one.seconds_per_token}
    return [NONE if values[name] is None else form.format(values[name]) for name, form in forms.items()]


def notes(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """What a reader of the comparison must know beside it."""
    told = [STATIC_BATCH]
    for record, name in zip(records, names, strict=True):
        others = {one for other in records if other is not record for one in temperatures_of(other)}
        alone = [one for one in temperatures_of(record) if one not in others]
        if alone and len(records) > 1:
            told.append(f"{', '.join(alone)}: only in {name}, compared with nothing")
        for mode, found in record.get("modes", {}).items():
            told += [f"{mode}: {one} was not run: {why}" for one, why in found.get("not_run", {}).items()]
        failed = {kind: count for kind, count in record.get("all", {}).get("outcomes", {}).items() if kind != "ok"}
        if failed:
            told.append(f"{name}: {', '.join(f'{count} {kind}' for kind, count in failed.items())}, not in its times")
    return told


def show(records: Sequence[Mapping[str, Any]], names: Sequence[str], console: Console) -> None:
    """Print everything in one table."""
    rows = [[one.temperature, one.task, one.source, one.strategy, *cells(one)] for one in entries(records, names)]
    print_table(console, "side by side", KEYS, MEASURES, rows)
    for note in notes(records, names):
        console.print(Text(note, style="yellow"))


def plot(records: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> None:
    """Draw throughput, p95 and tokens per step over all tasks, a row of panels for each temperature.

    Raises:
        DFlowError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from error
    found = [one for one in entries(records, names) if one.task == "all"]
    temperatures = list(dict.fromkeys(one.temperature for one in found))
    most = max(sum(one.temperature == wanted for one in found) for wanted in temperatures)
    picture = Figure(figsize=(14, (1.2 + 0.35 * most) * len(temperatures)), layout="constrained")
    panels = picture.subplots(len(temperatures), len(PANELS), squeeze=False)
    for row, wanted in zip(panels, temperatures, strict=True):
        mine = [one for one in found if one.temperature == wanted][::-1]
        for panel, (field, words) in zip(row, PANELS, strict=True):
            values = [getattr(one, field) for one in mine]
            bars = panel.barh([one.label for one in mine], [value or 0.0 for value in values])
            panel.bar_label(bars, ["not told" if value is None else f"{value:.2f}" for value in values], padding=2)
            panel.set_title(f"{wanted}: {words}", fontsize="medium")
            panel.margins(x=0.2)
            panel.tick_params(labelleft=panel is row[0])
    picture.savefig(path, dpi=110)
