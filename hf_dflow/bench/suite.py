"""`hf-dflow bench run`: every strategy on the same prompts, by turns, under conditions that stand with the figures."""

import logging
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_dflow.bench import latency
from hf_dflow.bench.conditions import prompts_digest
from hf_dflow.bench.evaluation import PLAIN, Answer, Plan, answer_all, as_record
from hf_dflow.bench.report import pooled, run_conditions
from hf_dflow.bench.runners import Contestant, Mode, Pair, classic_contestant
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

logger = logging.getLogger(__name__)

BASELINE = "dflash"
STRATEGIES = ("assisted", "prompt_lookup", "transformers_dflash", "dflash", "dflow")  # and plain, always
SAME = 1.05  # tokens per step up to which the drafter is said not to help


def contestants_of(pair: Pair, names: Sequence[str], assistant: Any = None) -> list[Contestant]:
    """One contestant for each name of `STRATEGIES`; all propose equally many drafts in a step.

    Args:
        assistant (`PreTrainedModel`, *optional*): Classic draft model of "assisted".

    Raises:
        DFlowError: A name is unknown, or needs what is not there.
    """
    drafts = pair.drafter.config.drafts_per_block
    found = []
    for name in dict.fromkeys(names):
        if name not in STRATEGIES:
            raise DFlowError(f"strategy {name!r} is unknown; use one or more of {', '.join(STRATEGIES)}")
        if name == "assisted":
            if assistant is None:
                raise DFlowError("strategy 'assisted' needs a small model of the target's kind: --assistant FOLDER")
            found.append(classic_contestant(name, assistant, drafts))
        elif name == "prompt_lookup":
            found.append(Contestant(name, lookup_tokens=drafts))
        elif name == "dflow" and pair.drafter.relay is None:
            raise DFlowError("strategy 'dflow' needs a drafter with a relay; leave it out, or name another drafter")
        else:
            is_theirs = name == "transformers_dflash"
            found.append(Contestant(name, pair.drafter, use_relay=name == "dflow", is_their_loop=is_theirs))
    return found


def run(
    pair: Pair,
    contestants: Sequence[Contestant],
    modes: Sequence[Mode],
    prompts: Sequence[Prompt],
    *,
    output_tokens: int,
    repeats: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
    baseline: str = BASELINE,
) -> dict[str, Any]:
    """Measure, interleaved: a prompt goes through every strategy before the next; who begins changes from turn to turn.

    Args:
        repeats (`int`, *optional*, defaults to 1): Turns over all prompts, for times. Counts are those of the first.
        minutes (`float`, *optional*): No prompt is begun after so long; what was left out is said.
        baseline (`str`, *optional*): The contestant that the others are compared with.

    Returns:
        `dict`: For JSON: `modes` (counts as `evaluation.as_record`, `latency` beside them), `identity`, `rows`,
        `conditions`.
    """
    # Greedy texts are always compared with the target's own, which is decoded anyway.
    plan = Plan(list(contestants), list(modes), output_tokens, with_plain=True)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def is_over() -> bool:
        return deadline is not None and time.monotonic() > deadline

    answers: list[Answer] = []
    counted: list[Answer] = []
    for repeat in range(repeats):
        if is_over():
            break
        numbered = [(repeat + number, prompt) for number, prompt in enumerate(prompts)]
        followed = track(numbered, description=f"turn {repeat + 1}", console=console) if console else numbered
        answers += answer_all(pair.target, pair.encode, followed, plan, is_over)
        counted = counted or list(answers)
    record = as_record(counted, baseline)
    for name, found in record["modes"].items():
        group = [answer for answer in answers if answer.mode.name == name]
        found["latency"] = latency.of_answers(group)
        tasks = dict.fromkeys(answer.prompt.task for answer in group)
        for task in tasks:
            mine = [answer for answer in group if answer.prompt.task == task]
            found["by_task"][task]["latency"] = latency.of_answers(mine)
        for part in (found["all"], *found["by_task"].values()):
            for one in part["contestants"].values():
                one["wasted_ratio"] = 1.0 - one["draft_acceptance_rate"]
                one["mean_accepted_length"] = one["tokens_per_step"]["value"] - 1.0
    used = list(dict.fromkeys(answer.prompt for answer in counted))
    record["conditions"] = conditions_of(pair, modes, used, output_tokens=output_tokens)
    record["conditions"] |= {
        "repeats": repeats,
        "prompts": len(used),
        "prompts_left_out": len(prompts) - len(used),
        "tasks": sorted({prompt.task for prompt in used}),
        "measuring": "interleaved, warm-up not counted; interval: 95% bootstrap over prompts",
        "peak_memory_bytes": peak_memory(pair.target.device),
    }
    record["notes"] = notes(counted)
    return record


def conditions_of(
    pair: Pair, modes: Sequence[Mode], prompts: Sequence[Prompt], *, output_tokens: int
) -> dict[str, Any]:
    """What must agree between results that are compared; see `conditions.MUST_AGREE`."""
    device = pair.target.device
    return run_conditions(
        **pair.describe(),
        engine="transformers, in this process",
        dtype=str(pair.target.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        output_tokens=output_tokens,
        modes=[mode.name for mode in modes],
        decoding=", ".join(mode.name for mode in modes),
        draft_rule="ours samples drafts and tests them against their law; prompt lookup and transformers' own match",
        concurrency=1,
        prompts_sha256=prompts_digest(prompts),
    )


def peak_memory(device: torch.device) -> dict[str, int]:
    """Of this process so far: resident memory, and what CUDA allocated."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.max_memory_allocated(device)
    return found


def notes(answers: Sequence[Answer]) -> list[str]:
    """What a reader must not miss: a strategy that does not help, and one that was not run in a mode."""
    told = []
    for mode in dict.fromkeys(answer.mode.name for answer in answers):
        group = [answer for answer in answers if answer.mode.name == mode]
        for name in group[0].runs:
            if name == PLAIN:
                continue
            tokens_per_step = pooled([answer.runs[name].statistics for answer in group]).tokens_per_step
            if tokens_per_step <= SAME:
                told.append(f"{mode}: speculation is not helping with {name}: {tokens_per_step:.2f} tokens per step")
    return told


def mode_warning(pair: Pair) -> str | None:
    """Say so where the drafter was made for answers of another kind than the template is asked for."""
    made_for, asked = pair.drafter.config.chat_mode, pair.chat_mode
    if None in (made_for, asked) or asked == made_for:
        return None
    return f"The drafter was trained on {made_for} answers, and the template is asked for {asked} ones: expect less."


def show(record: dict[str, Any], console: Console) -> None:
    """Print a table for each mode and task, the conditions, and the notes."""
    for mode, found in record["modes"].items():
        table = Table("task", "strategy", title=mode)
        for heading in ("tokens/step [95%]", "accepted drafts", "accepted", "wasted", "std", "forwards/token", "p50 s",
                        "p95 s", "first token s", "tokens/s", "speed-up [95%]"):  # fmt: skip
            table.add_column(heading, justify="right")
        for task, part in [*found["by_task"].items(), ("all", {**found["all"], "latency": found["latency"]})]:
            for name, times in part["latency"].items():
                table.add_row(task, name, *_cells(part["contestants"].get(name), times))
        console.print(table)
    conditions = record["conditions"]
    console.print(", ".join(f"{key}: {value}" for key, value in conditions.items()), markup=False, highlight=False)
    console.print("tokens/step counts the bonus, accepted drafts (the mean accepted length) does not.")
    for note in record["notes"]:
        console.print(f"[yellow]{note}[/]")


def _cells(counts: dict[str, Any] | None, times: dict[str, Any]) -> list[str]:
    if counts is None:
        drafted = ["1", *["–"] * 4]
    else:
        drafted = [
            with_interval(counts["tokens_per_step"]),
            f"{counts['mean_accepted_length']:.2f}",
            f"{counts['draft_acceptance_rate']:.1%}",
            f"{counts['wasted_ratio']:.1%}",
            f"{counts['accepted_length_std']:.2f}",
        ]
    seconds = times["latency_seconds"]
    return [
        *drafted,
        f"{times['target_forwards_per_token']:.3f}",
        f"{seconds['p50']:.2f}",
        f"{seconds['p95']:.2f}",
        f"{times['first_token_seconds']['p50']:.2f}",
        f"{times['effective_tps_with_bonus']:.1f}",
        with_interval(times["speed_up"]) if "speed_up" in times else "1",
    ]


def with_interval(found: dict[str, Any]) -> str:
    """A figure with its interval, for rich."""
    low, high = found["interval_95"]
    return f"{found['value']:.2f} \\[{low:.2f}, {high:.2f}]"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw tokens per step of every strategy by task, one panel a mode, with intervals.

    Raises:
        DFlowError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlowError("the plot needs matplotlib: pip install 'hf-dflow[plot]'; or leave --plot out") from error
    modes = record["modes"]
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
