"""`python -m hf_dflow.bench.gain_curve OUTPUT.json`: DFlow's gain against what the probe saw and how good DFlash was.

One point for each task of each pair, or for a lab corpus that has no tasks; everything is read from committed records,
nothing is measured.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_dflow.bench.options import writable
from hf_dflow.errors import DFlowError

AXES = {
    "re_convergence": "re-convergence of rejected rows",
    "rescue_rate": "rescue rate at first failures",
    "largest_gain": "largest gain that the probe allows a relay",
    "dflash_tokens_per_step": "tokens per step of equally trained DFlash",
}

WHOLE = "held-out text"


@dataclass(frozen=True)
class Point:
    """One task of one pair: what `hf-dflow probe` saw with the DFlash drafter, and what DFlow gained over it."""

    pair: str
    task: str
    re_convergence: float
    rescue_rate: float
    largest_gain: float
    dflash_tokens_per_step: float
    gain: float
    interval_95: tuple[float, float]


def lab_points(record: dict[str, Any]) -> list[Point]:
    """Of `python -m hf_dflow.bench.lab report`: each corpus by task, or as a whole where it has none."""
    return [
        _point(corpus, task, entry["probe"], entry["dflash"], entry["dflow"]["gain_over_dflash"])
        for corpus, found in record["corpora"].items()
        for task, entry in _tasks(found).items()
    ]


def _tasks(found: dict[str, Any]) -> dict[str, Any]:
    if found.get("tasks"):
        return found["tasks"]
    return {WHOLE: found} if {"probe", "dflow"} <= found.keys() else {}


def pair_points(name: str, evaluation: dict[str, Any], probe: dict[str, Any]) -> list[Point]:
    """Of `hf-dflow probe`, and of `hf_dflow.bench.eval_drafter` with the contestants "dflash" and "dflow", greedy.

    Raises:
        DFlowError: They have no task in common, or the evaluation lacks the two.
    """
    groups = evaluation["modes"].get("T=0", {}).get("by_task", {})
    points = []
    for task, group in groups.items():
        if task in probe["by_task"] and "dflow - dflash" in group["differences"]:
            seen = {key: figure["value"] for key, figure in probe["by_task"][task].items()}
            gain = group["differences"]["dflow - dflash"]["gain"]
            points.append(_point(name, task, seen, group["contestants"]["dflash"], gain))
    if not points:
        raise DFlowError(f"{name}: evaluation and probe share no task with greedy runs of dflash and dflow")
    return points


def _point(pair: str, task: str, seen: dict[str, float], dflash: dict[str, Any], gain: dict[str, Any]) -> Point:
    quality = dflash["tokens_per_step"]["value"]
    low, high = gain["interval_95"]
    return Point(
        pair,
        task,
        re_convergence=seen["re_convergence"],
        rescue_rate=seen["rescue_rate"],
        largest_gain=seen["largest_gain"],
        dflash_tokens_per_step=quality,
        gain=gain["value"],
        interval_95=(low, high),
    )


def correlations(points: list[Point]) -> dict[str, float | None]:
    """Pearson's r of the gain with each axis, every point counted once; `None` where one of them is the same in all."""
    found: dict[str, float | None] = {}
    for axis in AXES:
        pairs = np.array([[getattr(point, axis), point.gain] for point in points]).T
        found[axis] = float(np.corrcoef(pairs)[0, 1]) if np.ptp(pairs, axis=1).all() else None
    return found


def plot(points: list[Point], path: Path) -> None:
    """Write a picture with one panel for each axis; bars are the gains' intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(AXES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        for pair in dict.fromkeys(point.pair for point in points):
            own = [point for point in points if point.pair == pair]
            gains = np.array([point.gain for point in own])
            low, high = np.array([point.interval_95 for point in own]).T
            spread = 100 * np.abs([gains - low, high - gains])
            x = np.array([getattr(point, axis) for point in own]) * (1 if axis.startswith("dflash") else 100)
            panel.errorbar(x, 100 * gains, spread, fmt="o", capsize=3, label=pair)
        panel.set_xlabel(label + ("" if axis.startswith("dflash") else ", %"))
        panel.axhline(0, color="gray", linewidth=0.8)
    panels[0].set_ylabel("DFlow over DFlash, tokens per step, %")
    panels[0].legend()
    figure.savefig(path, dpi=110)


def as_markdown(points: list[Point]) -> str:
    """The points as a table, as the documentation prints them."""
    lines = ["| pair, task | re-convergence | rescue rate | largest gain | DFlash | gain |", "|---" * 6 + "|"]
    for point in points:
        low, high = point.interval_95
        shares = (f"{value:.1%}" for value in (point.re_convergence, point.rescue_rate, point.largest_gain))
        gain = f"{point.gain:+.1%} [{low:+.1%}, {high:+.1%}]"
        cells = [f"{point.pair}, {point.task}", *shares, f"{point.dflash_tokens_per_step:.2f}", gain]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    output: Annotated[
        Path, typer.Argument(help="JSON file to write; the picture goes beside it as .png.", callback=writable)
    ],
    lab: Annotated[list[Path] | None, typer.Option(help="JSON of the lab's report; repeatable.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="NAME=EVALUATION.json,PROBE.json of another pair; repeatable.")
    ] = None,
) -> None:
    """Gather the points of all records, say how the gain goes with each axis, and draw them."""
    if output.suffix != ".json":
        raise DFlowError(f"{output}: give a name that ends in .json; the picture takes the same name with .png")
    points = [point for path in lab or [] for point in _points(str(path), lab_points, _read(path))]
    for given in pair or []:
        name, _, files = given.partition("=")
        evaluation, _, probe = files.partition(",")
        if not (name and evaluation and probe):
            raise DFlowError(f"--pair {given}: give NAME=EVALUATION.json,PROBE.json")
        points += _points(given, partial(pair_points, name), _read(Path(evaluation)), _read(Path(probe)))
    if len(points) < 2:
        raise DFlowError(f"{len(points)} points are no curve; give --lab or --pair with more tasks")
    found = correlations(points)
    record = {"points": [asdict(point) for point in points], "correlation_with_gain": found}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(points, output.with_suffix(".png"))
    typer.echo(as_markdown(points))
    for axis, r in found.items():
        typer.echo(f"r with {AXES[axis]}: {'none, it is the same in all' if r is None else format(r, '.2f')}")


def _points(where: str, read: Callable[..., list[Point]], *records: dict[str, Any]) -> list[Point]:
    try:
        return read(*records)
    except (AttributeError, KeyError, TypeError) as error:
        raise DFlowError(f"{where}: no record of the kind that this option takes ({error!r})") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DFlowError(f"{path}: no JSON record ({error})") from error


if __name__ == "__main__":
    typer.run(main)
