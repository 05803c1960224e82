"""`python -m hf_dflow.bench.decisions`: what the feedback's own decisions are worth, each switch alone and together.

* mixture: the draft law mixed with what the verifier said on rejected rows (`stale_mixture`);
* length: how many drafts a step verifies (`adaptive_length`), against every fixed number;
* tree: paths of one block judged together (`tree_budget`), greedy.
"""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from hf_dflow.bench.eval_drafter import modes_of, show
from hf_dflow.bench.evaluation import Answer, Plan, answer_all, as_record, is_identical
from hf_dflow.bench.options import (
    BundledOption,
    DrafterOption,
    HumanEvalOption,
    JsonOption,
    PromptFilesOption,
    RulesOption,
    ShareGptOption,
    TargetOption,
    TemperaturesOption,
    ThreadsOption,
)
from hf_dflow.bench.report import run_conditions
from hf_dflow.bench.runners import Contestant, Pair, load_pair, use_threads
from hf_dflow.bench.tiny import given_or_tiny
from hf_dflow.bench.workloads import chosen_prompts, tasks_in_turn
from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import SAMPLING_RULES
from hf_dflow.generation.step_length import StepCosts, step_costs
from hf_dflow.hub_commands import errors_in_words

WHAT = ("mixture", "length", "tree")
BUDGETS = (8, 16, 32)
FIXED_WEIGHT = 0.1
CALIBRATION_BINS = 10


def contestants_of(pair: Pair, what: str, fixed: Sequence[int], costs: StepCosts | None) -> list[Contestant]:
    """The drafter as it is, and with the switches.

    Args:
        fixed (`list[int]`): Numbers of drafts that compete with lengths that adapt.
        costs (`StepCosts`, *optional*): Of a step; needed for lengths.
    """
    has_relay = pair.drafter.relay is not None
    if what == "mixture":
        ways: list[tuple[str, dict[str, Any]]] = [
            ("", {}),
            (", mixture", {"stale_mixture": True}),
            (f", mixture {FIXED_WEIGHT}", {"stale_mixture": FIXED_WEIGHT}),
        ]
        bases = [("dflash", False), *([("dflow", True)] if has_relay else [])]
        return [
            Contestant(name + way, pair.drafter, use_relay, options=options)
            for name, use_relay in bases
            for way, options in ways
        ]
    if what == "tree":
        trees = [Contestant(f"tree of {n}", pair.drafter, options={"tree_budget": n}) for n in BUDGETS]
        return [Contestant("chain", pair.drafter), *trees]
    assert costs is not None
    adaptive = {"adaptive_length": True, "step_costs": {"draft": costs.draft, "verify": list(costs.verify)}}
    both = {**adaptive, "stale_mixture": True}
    contestants = [Contestant(f"{n} drafts", pair.drafter, options={"num_draft_tokens": n}) for n in fixed]
    contestants.append(Contestant("adaptive", pair.drafter, options=adaptive))
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
    error = sum(row["drafts"] * abs(row["predicted"] - row["observed"]) for row in rows) / len(told)
    return {"drafts": len(told), "expected_calibration_error": error, "bins": rows}


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
    target, drafter, _ = given_or_tiny(False, target, drafter)  # names are looked at before anything is loaded
    use_threads(threads)
    pair = load_pair(target, drafter)
    longest = pair.drafter.config.drafts_per_block
    lengths = sorted(set(fixed or [1, 2, 3, longest]))
    if not 1 <= lengths[0] <= lengths[-1] <= longest:
        raise DFlowError(f"--fixed {lengths}: this drafter drafts 1 … {longest} tokens")
    costs = step_costs(pair.target, pair.drafter) if what == "length" else None
    contestants = contestants_of(pair, what, lengths, costs)
    plan = Plan(contestants, modes, max_new_tokens, with_plain=what == "length", check_identity=len(workload))
    console = Console()
    followed = track(list(enumerate(workload)), description="prompts", console=console)
    answers = answer_all(pair.target, pair.encode, followed, plan)
    record = as_record(answers, contestants[0].name)
    for mode, groups in record["modes"].items():
        if costs is None:
            continue
        own = [one for one in answers if one.mode.name == mode]
        groups["calibration"] = calibration(own, "adaptive")
        by_task: dict[str, Any] = {}
        for task in [*dict.fromkeys(one.prompt.task for one in own), "all"]:
            some = [one for one in own if task in (one.prompt.task, "all")]
            by_task[task] = {one.name: modelled_seconds(some, one.name, costs) for one in contestants}
        groups["modelled_seconds_per_token"] = {"plain": costs.verify[0], "by_task": by_task}
    conditions = {**pair.describe(), "max_new_tokens": max_new_tokens, "dtype": "float32", "device": "cpu"}
    if costs is not None:
        conditions["step_costs"] = {"draft": costs.draft, "verify": list(costs.verify)}
    record["conditions"] = run_conditions(prompts=len(workload), **conditions)
    show(record, console)
    for mode, groups in record["modes"].items():
        if costs is not None:
            _show_lengths(mode, groups, console)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if is_identical(record) else 1)


def _show_lengths(mode: str, groups: dict[str, Any], console: Console) -> None:
    found = groups["modelled_seconds_per_token"]
    for task, seconds in found["by_task"].items():
        rivals = {name: value for name, value in seconds.items() if name.endswith("drafts")}
        best = min(rivals, key=lambda name: rivals[name])
        gain = rivals[best] / seconds["adaptive"] - 1.0
        console.print(
            f"{mode}, {task}: by the cost of forwards, plain {1e3 * found['plain']:.1f} ms a token, best fixed "
            f"({best}) {1e3 * rivals[best]:.1f}, adaptive {1e3 * seconds['adaptive']:.1f} ({gain:+.1%})",
            highlight=False,
        )
    told = groups["calibration"]
    error = math.nan if told is None else told["expected_calibration_error"]
    console.print(f"{mode}: calibration error {error:.1%} over {0 if told is None else told['drafts']} judged drafts")


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
