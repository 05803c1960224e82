"""`python -m experiments.decisions WHAT`: the gain of decisions based on verifier feedback, alone and together.

* mixture: the draft law mixed with the verifier's logits on rejected rows (`stale_mixture`);
* length: how many drafts a step verifies (`adaptive_length`), against fixed numbers;
* tree: several paths of one block verified together (`tree_budget`), greedy;
* together: each switch alone, and all that go together, by task;
* calibration: predicted against observed acceptance, with step costs under which every draft is verified, so that
  unlikely drafts count too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from experiments.common import BundledOption, RulesOption
from experiments.eval_drafter import show
from hf_dflow.bench.answers import Answer, Plan, answer_all
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.figures import as_record, is_identical
from hf_dflow.bench.options import (
    DrafterOption,
    HumanEvalOption,
    PromptFilesOption,
    ShareGptOption,
    TargetOption,
    TemperaturesOption,
)
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import Contestant, modes_of
from hf_dflow.bench.workloads import chosen_prompts, tasks_in_turn
from hf_dflow.checkpoints.names import check_name
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
    """The drafter with each setting that one comparison is about.

    Args:
        fixed (`list[int]`): Fixed numbers of drafts to compare adaptive lengths with.
        costs (`StepCosts`, *optional*): Costs of a step, for lengths and trees.
    """
    if what == "mixture":
        return _mixtures(pair)
    if what == "calibration":
        free = {"draft": 0.0, "verify": [1.0] * (pair.drafter.config.drafts_per_block + 1)}
        return [Contestant(ADAPTIVE, pair.drafter, options={"adaptive_length": True, "step_costs": free})]
    if costs is None:
        raise ValueError(f"{what} needs the costs of a step")
    measured = {"step_costs": {"draft": costs.draft, "verify": list(costs.verify)}}
    tree: dict[str, Any] = {"tree_budget": AUTO, **measured}
    adaptive: dict[str, Any] = {"adaptive_length": True, **measured}
    mixture = {"stale_mixture": LEARNED if _has_fitted_mixture(pair) else True}
    settings: dict[str, dict[str, dict[str, Any]]] = {
        "tree": {"chain": {}, **{f"tree of {n}": {"tree_budget": n} for n in BUDGETS}, "tree by costs": tree},
        "length": {
            **{f"{n} drafts": {"num_draft_tokens": n} for n in fixed},
            ADAPTIVE: adaptive,
            "adaptive, mixture": {**adaptive, "stale_mixture": True},
        },
        "together": {
            "none": {},
            "mixture": mixture,
            "length": adaptive,
            "mixture, length": {**mixture, **adaptive},
            "tree": tree,
            "mixture, tree": {**mixture, **tree},
        },
    }
    return [Contestant(name, pair.drafter, options=options) for name, options in settings[what].items()]


def _mixtures(pair: Pair) -> list[Contestant]:
    """Every weight of the mixture, with the relay off and on."""
    weights: dict[str, dict[str, Any]] = {
        "": {},
        ", mixture": {"stale_mixture": True},
        f", mixture {FIXED_WEIGHT}": {"stale_mixture": FIXED_WEIGHT},
    }
    if _has_fitted_mixture(pair):
        weights[", mixture learned"] = {"stale_mixture": LEARNED}
    bases = {"dflash": False, "dflow": True} if pair.drafter.relay is not None else {"dflash": False}
    return [
        Contestant(base + name, pair.drafter, use_relay, options=options)
        for base, use_relay in bases.items()
        for name, options in weights.items()
    ]


def _has_fitted_mixture(pair: Pair) -> bool:
    return "mixture" in (pair.drafter.config.fitted_decisions or {})


def calibration(answers: Sequence[Answer], contestant: str) -> dict[str, Any] | None:
    """Predicted against observed acceptance of verified drafts, in ten bins; `None` without a prediction."""
    predictions = [pair for answer in answers for pair in answer.runs[contestant].statistics.predictions]
    if not predictions:
        return None
    predicted, accepted = (np.array(column, dtype=float) for column in zip(*predictions, strict=True))
    bins = np.minimum(CALIBRATION_BINS - 1, (predicted * CALIBRATION_BINS).astype(int))
    drawn = (np.random.default_rng(0).random((CHANCE_DRAWS, len(predicted))) < predicted).astype(float)
    return {
        "drafts": len(predicted),
        "expected_calibration_error": float(_calibration_errors(predicted, bins, accepted[None])[0]),
        # The error that true predictions would show: outcomes drawn from them, sorted into the same bins.
        "error_by_chance": float(_calibration_errors(predicted, bins, drawn).mean()),
        "bins": [
            {
                "drafts": int((bins == number).sum()),
                "predicted": float(predicted[bins == number].mean()),
                "observed": float(accepted[bins == number].mean()),
            }
            for number in range(CALIBRATION_BINS)
            if (bins == number).any()
        ],
    }


def _calibration_errors(predicted: np.ndarray, bins: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Mean distance between predicted `[n]` and observed share, bins weighted by drafts, for each row of `[m, n]`."""
    return np.abs((outcomes - predicted) @ np.eye(CALIBRATION_BINS)[bins]).sum(axis=1) / len(predicted)


def plot_calibration(record: dict[str, Any], path: Path) -> None:
    """Draw predicted against observed acceptance of each mode; dots grow with their drafts.

    Raises:
        DFlowError: matplotlib is missing, or no mode has a prediction.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from missing
    modes = {mode: groups for mode, groups in record["modes"].items() if groups["calibration"] is not None}
    if not modes:
        raise DFlowError("no draft was verified, so there is nothing to plot; give more prompts or --max-new-tokens")
    figure = Figure(figsize=(4.2 * len(modes), 4.2), layout="constrained")
    for place, (mode, groups) in enumerate(modes.items(), start=1):
        axes = figure.add_subplot(1, len(modes), place)
        judged, bins = groups["calibration"], groups["calibration"]["bins"]
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        sizes = [20 + 400 * entry["drafts"] / judged["drafts"] for entry in bins]
        axes.scatter([entry["predicted"] for entry in bins], [entry["observed"] for entry in bins], s=sizes)
        axes.set(xlabel="predicted acceptance", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
        error, chance = judged["expected_calibration_error"], judged["error_by_chance"]
        axes.set_title(f"{mode}: error {error:.1%}\n{judged['drafts']} drafts; by chance {chance:.1%}", fontsize=9)
    figure.savefig(path, dpi=120)


def modelled_seconds(answers: Sequence[Answer], contestant: str, costs: StepCosts) -> float:
    """Seconds per token from the measured cost of each forward, free of the machine's noise; the prefill excluded."""
    seconds, tokens = 0.0, 0
    for answer in answers:
        statistics = answer.runs[contestant].statistics
        undrafted = statistics.num_target_forwards - 1 - len(statistics.per_step_drafted)
        seconds += statistics.num_draft_forwards * costs.draft + undrafted * costs.verify[0]
        seconds += sum(costs.verify[n] for n in statistics.per_step_drafted)
        tokens += statistics.num_output_tokens
    return seconds / max(1, tokens)


def modelled_by_task(answers: Sequence[Answer], contestants: Sequence[Contestant], costs: StepCosts) -> dict[str, Any]:
    """[`modelled_seconds`] of every contestant, by task and over all, beside plain decoding."""
    names = [contestant.name for contestant in contestants if contestant.name in answers[0].runs]
    by_task: dict[str, Any] = {}
    for task in [*dict.fromkeys(answer.prompt.task for answer in answers), "all"]:
        chosen = [answer for answer in answers if task in (answer.prompt.task, "all")]
        by_task[task] = {name: modelled_seconds(chosen, name, costs) for name in names}
    return {"plain": costs.verify[0], "by_task": by_task}


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
    for name in filter(None, (target, drafter)):
        check_name(name)
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
        mode_answers = [answer for answer in answers if answer.mode.name == mode]
        if what in ("length", "calibration"):
            groups["calibration"] = calibration(mode_answers, ADAPTIVE)
        if costs is not None:
            groups["modelled_seconds_per_token"] = modelled_by_task(mode_answers, contestants, costs)
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
    costs = groups["modelled_seconds_per_token"]
    for task, seconds in costs["by_task"].items():
        fixed = {name: value for name, value in seconds.items() if name.endswith("drafts")}
        best = min(fixed, key=lambda name: fixed[name])
        gain = fixed[best] / seconds[ADAPTIVE] - 1.0
        console.print(
            f"{mode}, {task}: by the cost of forwards, plain {1e3 * costs['plain']:.1f} ms a token, best fixed "
            f"({best}) {1e3 * fixed[best]:.1f}, adaptive {1e3 * seconds[ADAPTIVE]:.1f} ({gain:+.1%})",
            highlight=False,
        )


def _show_costs(mode: str, groups: dict[str, Any], console: Console) -> None:
    costs = groups["modelled_seconds_per_token"]
    for task, seconds in costs["by_task"].items():
        figures = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())
        console.print(
            f"{mode}, {task}: ms a token by the cost of forwards: plain {1e3 * costs['plain']:.1f}; {figures}",
            highlight=False,
        )


def _show_calibration(mode: str, judged: dict[str, Any] | None, console: Console) -> None:
    if judged is None:
        console.print(f"{mode}: no draft was verified, so there is no calibration error")
        return
    console.print(
        f"{mode}: calibration error {judged['expected_calibration_error']:.1%} over {judged['drafts']} verified "
        f"drafts; true predictions would show {judged['error_by_chance']:.1%}"
    )


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
