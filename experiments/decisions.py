"""`python -m experiments.decisions`: what the feedback's own decisions are worth, each switch alone and together.

* mixture: the draft law mixed with what the verifier said on rejected rows (`stale_mixture`);
* length: how many drafts a step verifies (`adaptive_length`), against every fixed number;
* tree: paths of one block judged together (`tree_budget`), greedy;
* together: each switch alone and all that go together, by task;
* calibration: predicted against observed acceptance. Costs under which every draft is verified are given, so that no
  draft is left out because it was thought little of.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from experiments.eval_drafter import show
from hf_dflow.bench.answers import Answer, Plan, answer_all
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.figures import as_record, is_identical
from hf_dflow.bench.options import (
    BundledOption,
    DrafterOption,
    HumanEvalOption,
    PromptFilesOption,
    RulesOption,
    ShareGptOption,
    TargetOption,
    TemperaturesOption,
)
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import Contestant, modes_of
from hf_dflow.bench.tiny import given_or_tiny
from hf_dflow.bench.workloads import chosen_prompts, tasks_in_turn
from hf_dflow.console import JsonOption, ThreadsOption, errors_in_words, use_threads, writable, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import SAMPLING_RULES
from hf_dflow.generation.measure import step_costs
from hf_dflow.generation.mixture import LEARNED
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.trees import AUTO, LARGEST_AUTO

WHAT = ("mixture", "length", "tree", "together", "calibration")
BUDGETS = (8, 16, 32)
ADAPTIVE = "adaptive"
FIXED_WEIGHT = 0.1
CALIBRATION_BINS = 10
CHANCE_DRAWS = 1000


def contestants_of(pair: Pair, what: str, fixed: Sequence[int], costs: StepCosts | None) -> list[Contestant]:
    """The drafter as it is, and with the switches.

    Args:
        fixed (`list[int]`): Numbers of drafts that compete with lengths that adapt.
        costs (`StepCosts`, *optional*): Of a step; needed where a decision asks for them.
    """
    has_relay = pair.drafter.relay is not None
    is_fitted = "mixture" in (pair.drafter.config.fitted_decisions or {})
    if what == "mixture":
        ways: list[tuple[str, dict[str, Any]]] = [
            ("", {}),
            (", mixture", {"stale_mixture": True}),
            (f", mixture {FIXED_WEIGHT}", {"stale_mixture": FIXED_WEIGHT}),
            *([(", mixture learned", {"stale_mixture": LEARNED})] if is_fitted else []),
        ]
        bases = [("dflash", False), *([("dflow", True)] if has_relay else [])]
        return [
            Contestant(name + way, pair.drafter, use_relay, options=options)
            for name, use_relay in bases
            for way, options in ways
        ]
    if what == "calibration":
        free = {"draft": 0.0, "verify": [1.0] * (pair.drafter.config.drafts_per_block + 1)}
        return [Contestant(ADAPTIVE, pair.drafter, options={"adaptive_length": True, "step_costs": free})]
    assert costs is not None
    measured = {"step_costs": {"draft": costs.draft, "verify": list(costs.verify)}}
    auto = {"tree_budget": AUTO, **measured}
    if what == "tree":
        trees = [Contestant(f"tree of {n}", pair.drafter, options={"tree_budget": n}) for n in BUDGETS]
        return [Contestant("chain", pair.drafter), *trees, Contestant("tree by costs", pair.drafter, options=auto)]
    adaptive = {"adaptive_length": True, **measured}
    both = {**adaptive, "stale_mixture": True}
    if what == "together":
        mixture = {"stale_mixture": LEARNED if is_fitted else True}
        switches: dict[str, dict[str, Any]] = {
            "none": {},
            "mixture": mixture,
            "length": adaptive,
            "mixture, length": {**mixture, **adaptive},
            "tree": auto,
            "mixture, tree": {**mixture, **auto},
        }
        return [Contestant(name, pair.drafter, options=options) for name, options in switches.items()]
    contestants = [Contestant(f"{n} drafts", pair.drafter, options={"num_draft_tokens": n}) for n in fixed]
    contestants.append(Contestant(ADAPTIVE, pair.drafter, options=adaptive))
    return [*contestants, Contestant("adaptive, mixture", pair.drafter, options=both)]


def calibration(answers: Sequence[Answer], contestant: str) -> dict[str, Any] | None:
    """Predicted against observed acceptance of judged drafts, in ten bins; `None` where nothing was predicted."""
    told = [one for answer in answers for one in answer.runs[contestant].statistics.predictions]
    if not told:
        return None
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(CALIBRATION_BINS)]
    for predicted, accepted in told:
        bins[min(CALIBRATION_BINS - 1, int(predicted * CALIBRATION_BINS))].append((predicted, accepted))
    rows = [
        {
            "drafts": len(one),
            "predicted": sum(p for p, _ in one) / len(one),
            "observed": sum(a for _, a in one) / len(one),
        }
        for one in bins
        if one
    ]
    told_probs: Any = np.array([one for one, _ in told])
    outcomes: Any = np.array([[accepted for _, accepted in told]])
    by_chance: Any = np.random.default_rng(0).random((CHANCE_DRAWS, len(told))) < told_probs
    return {
        "drafts": len(told),
        "expected_calibration_error": float(_calibration_errors(told_probs, outcomes)[0]),
        # What predictions that are all true would show: outcomes drawn by them, as many, sorted into the same bins.
        "error_by_chance": float(_calibration_errors(told_probs, by_chance).mean()),
        "bins": rows,
    }


def _calibration_errors(predicted: Any, outcomes: Any) -> Any:
    """Mean distance of predicted `[n]` and observed share, bins weighed by their drafts, for each of `[m, n]`."""
    of_bin = np.eye(CALIBRATION_BINS)[np.minimum(CALIBRATION_BINS - 1, (predicted * CALIBRATION_BINS).astype(int))]
    return np.abs((outcomes - predicted) @ of_bin).sum(axis=1) / len(predicted)


def plot_calibration(record: dict[str, Any], path: Path) -> None:
    """Predicted against observed acceptance of each mode, a dot's size by its drafts.

    Raises:
        DFlowError: matplotlib is missing, or nothing was predicted in any mode.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from missing
    modes = {mode: groups for mode, groups in record["modes"].items() if groups["calibration"] is not None}
    if not modes:
        raise DFlowError("no draft was judged, so there is nothing to plot; give more prompts or --max-new-tokens")
    figure = Figure(figsize=(4.2 * len(modes), 4.2), layout="constrained")
    for place, (mode, groups) in enumerate(modes.items(), start=1):
        axes = figure.add_subplot(1, len(modes), place)
        found = groups["calibration"]
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        sizes = [20 + 400 * one["drafts"] / found["drafts"] for one in found["bins"]]
        axes.scatter([one["predicted"] for one in found["bins"]], [one["observed"] for one in found["bins"]], s=sizes)
        axes.set(xlabel="predicted acceptance", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
        error, chance = found["expected_calibration_error"], found["error_by_chance"]
        axes.set_title(f"{mode}: error {error:.1%}\n{found['drafts']} drafts; by chance {chance:.1%}", fontsize=9)
    figure.savefig(path, dpi=120)


def modelled_seconds(answers: Sequence[Answer], contestant: str, costs: StepCosts) -> float:
    """Seconds a token by the measured cost of each forward, free of this machine's noise; the prompt left out."""
    seconds, tokens = 0.0, 0
    for answer in answers:
        statistics = answer.runs[contestant].statistics
        without = statistics.num_target_forwards - 1 - len(statistics.per_step_drafted)
        seconds += statistics.num_draft_forwards * costs.draft + without * costs.verify[0]
        seconds += sum(costs.verify[n] for n in statistics.per_step_drafted)
        tokens += statistics.num_output_tokens
    return seconds / max(1, tokens)


def main(
    what: Annotated[str, typer.Argument(help=f"{', '.join(WHAT)}.")],
    drafter: DrafterOption = None,
    target: TargetOption = None,
    json_path: JsonOption = None,
    bundled: BundledOption = False,
    prompts: PromptFilesOption = None,
    human_eval: HumanEvalOption = 0,
    sharegpt: ShareGptOption = 0,
    temperature: TemperaturesOption = None,
    verification: RulesOption = None,
    fixed: Annotated[list[int] | None, typer.Option(help="Drafts of a fixed block; repeatable, 1, 2, 3 and all.")] = (
        None
    ),
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    threads: ThreadsOption = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="PNG of predicted against observed acceptance.")
    ] = None,
) -> None:
    """Decode held-out prompts with the switches off and on; exit code 1 if a greedy text differs."""
    if what not in WHAT:
        raise DFlowError(f"{what}: use one of {', '.join(WHAT)}")
    modes = modes_of(temperature or [0.0], verification or SAMPLING_RULES)
    workload = tasks_in_turn(
        chosen_prompts(is_bundled=bundled, files=prompts or [], human_eval=human_eval, sharegpt=sharegpt)
    )
    if what == "tree" and any(mode.temperature for mode in modes):
        raise DFlowError("trees are for greedy decoding; leave --temperature out")
    if plot is not None and what != "calibration":
        raise DFlowError(f"--plot goes with calibration; leave it out of {what}")
    target, drafter, _ = given_or_tiny(False, target, drafter)  # names are looked at before anything is loaded
    use_threads(threads)
    pair = load_pair(target, drafter)
    longest = pair.drafter.config.drafts_per_block
    lengths = sorted(set(fixed or [1, 2, 3, longest]))
    if not 1 <= lengths[0] <= lengths[-1] <= longest:
        raise DFlowError(f"--fixed {lengths}: this drafter drafts 1 … {longest} tokens")
    costs = None
    if what != "mixture" and what != "calibration":
        costs = step_costs(pair.target, pair.drafter, longest if what == "length" else LARGEST_AUTO)
    contestants = contestants_of(pair, what, lengths, costs)
    with_plain = what in ("length", "together")
    plan = Plan(contestants, modes, max_new_tokens, with_plain=with_plain, check_identity=len(workload))
    console = Console()
    followed = track(list(enumerate(workload)), description="prompts", console=console)
    answers = answer_all(pair.target, pair.encode_batch, followed, plan)
    record = as_record(answers, contestants[0].name)
    for mode, groups in record["modes"].items():
        own = [one for one in answers if one.mode.name == mode]
        if what in ("length", "calibration"):
            groups["calibration"] = calibration(own, ADAPTIVE)
        if costs is None:
            continue
        by_task: dict[str, Any] = {}
        for task in [*dict.fromkeys(one.prompt.task for one in own), "all"]:
            some = [one for one in own if task in (one.prompt.task, "all")]
            names = [one.name for one in contestants if one.name in own[0].runs]
            by_task[task] = {name: modelled_seconds(some, name, costs) for name in names}
        groups["modelled_seconds_per_token"] = {"plain": costs.verify[0], "by_task": by_task}
    conditions = {**pair.describe(), "max_new_tokens": max_new_tokens, "dtype": "float32", "device": "cpu"}
    if costs is not None:
        conditions["step_costs"] = {"draft": costs.draft, "verify": list(costs.verify)}
    record["conditions"] = run_conditions(prompts=len(workload), **conditions)
    show(record, console)
    for mode, groups in record["modes"].items():
        if what == "length":
            _show_lengths(mode, groups, console)
        elif costs is not None:
            _show_costs(mode, groups, console)
        if "calibration" in groups:
            _show_calibration(mode, groups["calibration"], console)
    write_json(json_path, record)
    if plot is not None:
        plot_calibration(record, plot)
    raise typer.Exit(0 if is_identical(record) else 1)


def _show_lengths(mode: str, groups: dict[str, Any], console: Console) -> None:
    found = groups["modelled_seconds_per_token"]
    for task, seconds in found["by_task"].items():
        rivals = {name: value for name, value in seconds.items() if name.endswith("drafts")}
        best = min(rivals, key=lambda name: rivals[name])
        gain = rivals[best] / seconds[ADAPTIVE] - 1.0
        console.print(
            f"{mode}, {task}: by the cost of forwards, plain {1e3 * found['plain']:.1f} ms a token, best fixed "
            f"({best}) {1e3 * rivals[best]:.1f}, adaptive {1e3 * seconds[ADAPTIVE]:.1f} ({gain:+.1%})",
            highlight=False,
        )


def _show_costs(mode: str, groups: dict[str, Any], console: Console) -> None:
    found = groups["modelled_seconds_per_token"]
    for task, seconds in found["by_task"].items():
        told = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())
        console.print(
            f"{mode}, {task}: ms a token by the cost of forwards: plain {1e3 * found['plain']:.1f}; {told}",
            highlight=False,
        )


def _show_calibration(mode: str, told: dict[str, Any] | None, console: Console) -> None:
    error = math.nan if told is None else told["expected_calibration_error"]
    chance = math.nan if told is None else told["error_by_chance"]
    console.print(
        f"{mode}: calibration error {error:.1%} over {0 if told is None else told['drafts']} judged drafts; "
        f"predictions that are all true would show {chance:.1%}"
    )


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
