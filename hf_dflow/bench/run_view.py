"""A record of `hf-dflow bench run` for people: tables on a console, a plot."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_dflow.bench.evaluation import is_identical
from hf_dflow.console import print_table
from hf_dflow.errors import DFlowError

NONE = "–"
NOT_RUN = "not run"
DRAFTS = ("tokens/step [95%]", "accepted drafts", "accepted", "wasted", "std", "forwards/token", "by position")
TIMES = ("p50 s", "p95 s", "p99 s", "first token s", "per token ms", "accepted drafts/s", "tokens/s", "speed-up [95%]")
MEMORY = ("weights MiB", "call MiB", "together MiB")
MEBIBYTE = 2**20


def show(record: dict[str, Any], console: Console) -> None:
    """Print drafts, times and memory of each mode, the conditions, and the notes."""
    for mode, found in record["modes"].items():
        parts = [*found["by_task"].items(), ("all", {**found["all"], "latency": found["latency"]})]
        drafts, times = [], []
        for task, part in parts:
            for name, timed in part["latency"].items():
                drafts.append([task, name, *_drafts(part["contestants"].get(name), timed)])
                times.append([task, name, *_times(timed)])
        left_out = found.get("not_run", {})
        for name in left_out:
            drafts.append(["all", name, NOT_RUN, *[NONE] * (len(DRAFTS) - 1)])
            times.append(["all", name, NOT_RUN, *[NONE] * (len(TIMES) - 1)])
        print_table(console, f"{mode}: drafts", ("task", "strategy"), DRAFTS, drafts)
        print_table(console, f"{mode}: times", ("task", "strategy"), TIMES, times)
        if found.get("peak_memory"):
            rows = [[name, *_memory(one)] for name, one in found["peak_memory"].items()]
            rows += [[name, NOT_RUN, NONE, NONE] for name in left_out]
            print_table(console, f"{mode}: peak memory of a call", ("strategy",), MEMORY, rows)
        for name, reason in left_out.items():
            console.print(Text(f"{mode}: {name} was not run: {reason}", style="yellow"))
    same = record["identity"]
    if same["compared_with_plain"]:
        texts = ", ".join(f"{name} {count}" for name, count in same["identical_to_plain"].items())
        text = f"Greedy texts equal to the target's own, of {same['compared_with_plain']}: {texts}"
        console.print(Text(text, style="" if is_identical(record) else "red"))
    said = ", ".join(f"{key}: {value}" for key, value in record["conditions"].items())
    console.print(said, markup=False, highlight=False)
    console.print("tokens/step counts the bonus, accepted drafts (the mean accepted length) does not.")
    for note in record["notes"]:
        console.print(Text(note, style="yellow"))


def _drafts(counts: dict[str, Any] | None, times: dict[str, Any]) -> list[str]:
    forwards = f"{times['target_forwards_per_token']:.3f}"
    if counts is None:
        return ["1", *[NONE] * 4, forwards, NONE]
    return [
        with_interval(counts["tokens_per_step"]),
        f"{counts['mean_accepted_length']:.2f}",
        f"{counts['draft_acceptance_rate']:.1%}",
        f"{counts['wasted_ratio']:.1%}",
        f"{counts['accepted_length_std']:.2f}",
        forwards,
        " ".join(f"{rate:.2f}" for rate in counts["acceptance_rate_per_position"]) or NONE,
    ]


def _times(found: dict[str, Any]) -> list[str]:
    per_token, drafts = found["seconds_per_output_token"], found["effective_tps"]
    return [
        *(f"{found['latency_seconds'][key]:.2f}" for key in ("p50", "p95", "p99")),
        f"{found['first_token_seconds']['p50']:.2f}",
        NONE if per_token is None else f"{1e3 * per_token['p50']:.1f}",
        NONE if drafts is None else f"{drafts:.1f}",
        f"{found['effective_tps_with_bonus']:.1f}",
        with_interval(found["speed_up"]) if "speed_up" in found else "1",
    ]


def _memory(found: dict[str, Any]) -> list[str]:
    weights, call = found["weight_bytes"], found["call_bytes"]
    known = [weights, call, None if call is None else weights + call]
    return [NONE if count is None else f"{count / MEBIBYTE:.1f}" for count in known]


def with_interval(found: dict[str, Any]) -> str:
    """A figure with its interval."""
    low, high = found["interval_95"]
    return f"{found['value']:.2f} [{low:.2f}, {high:.2f}]"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw tokens per step of every strategy by task, one panel a mode, with intervals.

    Raises:
        DFlowError: matplotlib is missing, or no strategy was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from error
    modes = {mode: found for mode, found in record["modes"].items() if found["all"]["contestants"]}
    if not modes:
        raise DFlowError("no strategy was measured, so there is nothing to plot; leave --plot out")
    picture = Figure(figsize=(5.5 * len(modes), 4), layout="constrained")
    panels = picture.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, (mode, found) in zip(panels, modes.items(), strict=True):
        tasks = list(found["by_task"])
        names = list(found["all"]["contestants"])
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            figures = [found["by_task"][task]["contestants"][name]["tokens_per_step"] for task in tasks]
            values = [one["value"] for one in figures]
            spread = [
                [max(0.0, one["value"] - one["interval_95"][0]) for one in figures],
                [max(0.0, one["interval_95"][1] - one["value"]) for one in figures],
            ]
            where = [index + width * place for index in range(len(tasks))]
            panel.bar(where, values, width, yerr=spread, capsize=2, label=name)
        panel.set_xticks([index + 0.4 - width / 2 for index in range(len(tasks))], tasks)
        panel.axhline(1.0, color="gray", linewidth=0.8)
        panel.set_title(mode)
    panels[0].set_ylabel("tokens per step, bonus counted")
    panels[0].legend(fontsize="small")
    picture.savefig(path, dpi=110)
