"""`python -m experiments.gain_curve OUTPUT.json`: DFlow's gain against the probe's figures and DFlash's quality.

One point for each task of each pair, or for a lab corpus without tasks; everything is read from committed records. The
gain over DFlash includes what training over several rounds gives; the gain over `multi_round`, trained over as many
rounds without a relay, is the relay's own.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.common import markdown_table, read_json, write_record
from hf_dflow.console import writable
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
    """One task of one pair: the probe's figures of the DFlash drafter, and DFlow's gain over it."""

    pair: str
    task: str
    re_convergence: float
    rescue_rate: float
    largest_gain: float
    dflash_tokens_per_step: float
    gain: float
    interval_95: tuple[float, float]
    relay_gain: float | None  # over the kind "multi_round", where it was trained
    relay_interval_95: tuple[float, float] | None


def lab_points(record: dict[str, Any]) -> list[Point]:
    """Points of a record of `lab report`: each corpus by task, or as a whole where it has none."""
    return [
        _point(
            corpus,
            task,
            entry["probe"],
            entry["dflash"],
            entry["dflow"]["gain_over_dflash"],
            entry.get("pairs", {}).get("dflow over multi_round", {}).get("gain"),
        )
        for corpus, corpus_record in record["corpora"].items()
        for task, entry in _tasks(corpus_record).items()
    ]


def _tasks(corpus_record: dict[str, Any]) -> dict[str, Any]:
    if corpus_record.get("tasks"):
        return corpus_record["tasks"]
    return {WHOLE: corpus_record} if {"probe", "dflow"} <= corpus_record.keys() else {}


def pair_points(name: str, evaluation: dict[str, Any], probe: dict[str, Any]) -> list[Point]:
    """Points of records of `hf-dflow probe` and of a greedy `eval_drafter` with "dflash" and "dflow".

    Raises:
        DFlowError: They have no task in common, or the evaluation lacks the two.
    """
    groups = evaluation["modes"].get("T=0", {}).get("by_task", {})
    points = []
    for task, group in groups.items():
        if task in probe["by_task"] and "dflow - dflash" in group["differences"]:
            probed = {key: figure["value"] for key, figure in probe["by_task"][task].items()}
            gain = group["differences"]["dflow - dflash"]["gain"]
            relay = group["differences"].get("dflow - multi_round", {}).get("gain")
            relay = relay or _inverse(group["differences"].get("multi_round - dflow", {}).get("gain"))
            points.append(_point(name, task, probed, group["contestants"]["dflash"], gain, relay))
    if not points:
        raise DFlowError(f"{name}: evaluation and probe share no task with greedy runs of dflash and dflow")
    return points


def _inverse(gain: dict[str, Any] | None) -> dict[str, Any] | None:
    """The gain of B over A, from that of A over B."""
    if gain is None:
        return None
    low, high = gain["interval_95"]
    return {"value": 1 / (1 + gain["value"]) - 1, "interval_95": [1 / (1 + high) - 1, 1 / (1 + low) - 1]}


def _point(
    pair: str,
    task: str,
    probed: dict[str, float],
    dflash: dict[str, Any],
    gain: dict[str, Any],
    relay: dict[str, Any] | None,
) -> Point:
    quality = dflash["tokens_per_step"]["value"]
    low, high = gain["interval_95"]
    return Point(
        pair,
        task,
        re_convergence=probed["re_convergence"],
        rescue_rate=probed["rescue_rate"],
        largest_gain=probed["largest_gain"],
        dflash_tokens_per_step=quality,
        gain=gain["value"],
        interval_95=(low, high),
        relay_gain=None if relay is None else relay["value"],
        relay_interval_95=None if relay is None else (relay["interval_95"][0], relay["interval_95"][1]),
    )


def correlations(points: list[Point], of: str = "gain") -> dict[str, float | None]:
    """Pearson's r of "gain" or "relay_gain" with each axis, over the points that have it.

    `None` where one of the two does not vary, or fewer than three points have it.
    """
    result: dict[str, float | None] = {}
    points = [point for point in points if getattr(point, of) is not None]
    for axis in AXES:
        pairs = np.array([[getattr(point, axis), getattr(point, of)] for point in points]).T
        varies = pairs.size > 4 and bool(np.ptp(pairs, axis=1).all())
        result[axis] = float(np.corrcoef(pairs)[0, 1]) if varies else None
    return result


def plot(points: list[Point], path: Path) -> None:
    """Write a PNG with a panel for each axis and gain; bars are 95% intervals."""
    from matplotlib.figure import Figure

    rows = {"gain": "DFlash", "relay_gain": "multi_round"}
    rows = {of: other for of, other in rows.items() if any(getattr(point, of) is not None for point in points)}
    figure = Figure(figsize=(4 * len(AXES), 3.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(AXES), sharex="col", sharey="row", squeeze=False)
    for (of, other), line in zip(rows.items(), panels, strict=True):
        for panel, axis in zip(line, AXES, strict=True):
            for pair in dict.fromkeys(point.pair for point in points):
                own = [point for point in points if point.pair == pair and getattr(point, of) is not None]
                _draw(panel, [100 * getattr(point, of) for point in own], own, axis, of, pair)
            panel.axhline(0, color="gray", linewidth=0.8)
        line[0].set_ylabel(f"DFlow over {other}, tokens per step, %")
    for panel, (axis, label) in zip(panels[-1], AXES.items(), strict=True):
        panel.set_xlabel(label + ("" if axis.startswith("dflash") else ", %"))
    panels[0][0].legend()
    figure.savefig(path, dpi=110)


def _draw(panel: Any, gains: list[float], points: list[Point], axis: str, of: str, pair: str) -> None:
    bounds = [point.interval_95 if of == "gain" else point.relay_interval_95 for point in points]
    low, high = 100 * np.array(bounds, dtype=float).reshape(-1, 2).T
    x = np.array([getattr(point, axis) for point in points]) * (1 if axis.startswith("dflash") else 100)
    panel.errorbar(x, gains, np.abs([np.array(gains) - low, high - np.array(gains)]), fmt="o", capsize=3, label=pair)


def as_markdown(points: list[Point]) -> str:
    """The points as a table, as the documentation prints them."""
    rows = []
    for point in points:
        shares = (f"{value:.1%}" for value in (point.re_convergence, point.rescue_rate, point.largest_gain))
        gains = (_cell(point.gain, point.interval_95), _cell(point.relay_gain, point.relay_interval_95))
        rows.append([f"{point.pair}, {point.task}", *shares, f"{point.dflash_tokens_per_step:.2f}", *gains])
    headings = ("pair, task", "re-convergence", "rescue rate", "largest gain", "DFlash", "gain", "over multi_round")
    return markdown_table(headings, rows)


def _cell(gain: float | None, interval: tuple[float, float] | None) -> str:
    return "–" if gain is None or interval is None else f"{gain:+.1%} [{interval[0]:+.1%}, {interval[1]:+.1%}]"


def main(
    output: Annotated[
        Path, typer.Argument(help="JSON file to write; the picture goes beside it as .png.", callback=writable)
    ],
    lab: Annotated[list[Path] | None, typer.Option(help="JSON of the lab's report; repeatable.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="NAME=EVALUATION.json,PROBE.json of another pair; repeatable.")
    ] = None,
) -> None:
    """Collect the points of all records, print and draw them, with their correlations."""
    if output.suffix != ".json":
        raise DFlowError(f"{output}: give a name that ends in .json; the picture takes the same name with .png")
    points = [point for path in lab or [] for point in _points(str(path), lab_points, read_json(path))]
    for option in pair or []:
        name, _, files = option.partition("=")
        evaluation, _, probe = files.partition(",")
        if not (name and evaluation and probe):
            raise DFlowError(f"--pair {option}: give NAME=EVALUATION.json,PROBE.json")
        points += _points(option, partial(pair_points, name), read_json(Path(evaluation)), read_json(Path(probe)))
    if len(points) < 2:
        raise DFlowError(f"{len(points)} points make no curve; give --lab or --pair with more tasks")
    with_gain, with_relay_gain = correlations(points), correlations(points, "relay_gain")
    record = {
        "points": [asdict(point) for point in points],
        "correlation_with_gain": with_gain,
        "correlation_with_relay_gain": with_relay_gain,
    }
    write_record(output, record)
    plot(points, output.with_suffix(".png"))
    typer.echo(as_markdown(points))
    for axis, label in AXES.items():
        gain, relay_gain = ("none" if r is None else f"{r:.2f}" for r in (with_gain[axis], with_relay_gain[axis]))
        typer.echo(f"r with {label}: {gain}; over multi_round: {relay_gain}")


def _points(where: str, read: Callable[..., list[Point]], *records: dict[str, Any]) -> list[Point]:
    try:
        return read(*records)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DFlowError(f"{where}: not a record of the kind that this option takes ({error!r})") from error


if __name__ == "__main__":
    typer.run(main)
