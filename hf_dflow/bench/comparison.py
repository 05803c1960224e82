"""`hf-dflow bench run`: every strategy on the same prompts, by turns, with conditions that stand beside the figures."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from hf_dflow.bench.answers import Answer, Plan, answer_all, warm_up
from hf_dflow.bench.conditions import prompts_digest, run_conditions
from hf_dflow.bench.figures import as_record, by_tasks, is_identical, times_of
from hf_dflow.bench.intervals import MIN_ITEMS, with_interval
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.peak_memory import NOT_ASKED, peak_of, weight_bytes
from hf_dflow.bench.strategies import PLAIN, Contestant, Mode, classic_contestant, decode_rows
from hf_dflow.bench.workloads import ALL_TASKS, Prompt, batches_of
from hf_dflow.console import Presentation, Remark, ResultTable, matplotlib_figure
from hf_dflow.errors import DFlowError
from hf_dflow.generation.statistics import AcceptanceStatistics

BASELINE = "dflash"
STRATEGIES = ("assisted", "prompt_lookup", "transformers_dflash", "dflash", "dflow")  # and plain, always
KEEP_SECONDS = 10.0  # between two records of an unfinished run
NOT_HELPING = 1.05  # tokens per step up to which a note says that the drafter does not help
NONE = "–"
NOT_RUN = "not run"
DRAFTS = (
    "prompts",
    "tokens/step [95%]",
    "accepted drafts",
    "accepted",
    "wasted",
    "std",
    "forwards/token",
    "by position",
)
TIMES = ("p50 s", "p95 s", "p99 s", "first token s", "per token ms", "accepted drafts/s", "tokens/s", "speed-up [95%]")
MEMORY = ("weights MiB", "call MiB", "together MiB")


def contestants_of(pair: Pair, names: Sequence[str], assistant: Any = None) -> list[Contestant]:
    """One contestant for each name of [`STRATEGIES`]; all propose equally many drafts in a step.

    Args:
        assistant (`PreTrainedModel`, *optional*): Classic draft model of "assisted".
    """
    drafts = pair.drafter.config.drafts_per_block
    contestants = []
    for name in dict.fromkeys(names):
        if name not in STRATEGIES:
            raise DFlowError(f"strategy {name!r} is unknown; use one or more of {', '.join(STRATEGIES)}")
        if name == "assisted":
            if assistant is None:
                raise DFlowError("strategy 'assisted' needs a small model of the target's kind: --assistant FOLDER")
            contestants.append(classic_contestant(name, assistant, drafts))
        elif name == "prompt_lookup":
            contestants.append(Contestant(name, lookup_tokens=drafts))
        elif name == "dflow" and pair.drafter.relay is None:
            raise DFlowError("strategy 'dflow' needs a drafter with a relay; leave it out, or name another drafter")
        else:
            is_theirs = name == "transformers_dflash"
            contestants.append(Contestant(name, pair.drafter, use_relay=name == "dflow", is_their_loop=is_theirs))
    return contestants


def run(
    pair: Pair,
    contestants: Sequence[Contestant],
    modes: Sequence[Mode],
    prompts: Sequence[Prompt],
    *,
    output_tokens: int,
    concurrency: int = 1,
    repeats: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
    baseline: str = BASELINE,
    workload: str = "prompts of the caller",
    with_memory: bool = True,
    keep: Callable[[dict[str, Any]], Any] = lambda record: None,
) -> dict[str, Any]:
    """Measure by turns: a prompt goes through every strategy before the next; who begins changes from turn to turn.

    Args:
        concurrency (`int`, *optional*, defaults to 1): Prompts that are decoded together, as one batch of `generate`;
            see [`batches_of`]. A strategy that takes one sequence at a time is left out, with the reason.
        repeats (`int`, *optional*, defaults to 1): Turns over all prompts, for times. Counts are those of the first.
        minutes (`float`, *optional*): No prompt is begun after so long; the record states how many were left out.
        baseline (`str`, *optional*): The contestant that the others are compared with.
        workload (`str`, *optional*): A description of the prompts' source.
        with_memory (`bool`, *optional*, defaults to `True`): One more call of each strategy and mode, for its peak.
        keep (`Callable`, *optional*): Called with the record so far, now and then.

    A `KeyboardInterrupt` after the first prompt ends the measuring: the record holds what was finished, and
    `interrupted` is true.

    Returns:
        `dict`: For JSON: `modes` (counts as [`as_record`], beside them `latency`, `peak_memory` and `not_run`),
        `identity`, `rows`, `conditions`, `notes`, `interrupted`.
    """
    # Greedy texts are always compared with the target's own, which is decoded anyway.
    plan = Plan(list(contestants), list(modes), output_tokens, with_plain=True)
    left_out = [plan.left_out(mode, concurrency) for mode in modes]
    if contestants and all(len(reasons) == len(contestants) for reasons in left_out):
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out[0].items())
        raise DFlowError(f"no strategy can be measured so ({why}); name others, or change --concurrency or the mode")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def is_over() -> bool:
        return deadline is not None and time.monotonic() > deadline

    calls = batches_of(prompts, concurrency) if concurrency > 1 else [(prompt,) for prompt in prompts]
    longest = max(calls, key=lambda call: max(len(prompt.text) for prompt in call))
    inputs = pair.encode_batch([prompt.text for prompt in longest])
    not_run = warm_up(pair.target, inputs, plan)
    memory = {mode.name: peak_memory(pair, plan, mode, inputs, not_run[mode.name]) for mode in modes if with_memory}
    answers: list[Answer] = []
    counted: dict[tuple, Answer] = {}

    def record_so_far() -> dict[str, Any]:
        record = as_record(list(counted.values()), baseline)
        for name, measured in record["modes"].items():
            of_mode = [answer for answer in answers if answer.mode.name == name]
            measured |= {"not_run": not_run[name], "peak_memory": memory.get(name, {}), "latency": times_of(of_mode)}
            for task, group in by_tasks(of_mode).items():
                measured["by_task"][task]["latency"] = times_of(group)
        used = list(dict.fromkeys(answer.prompt for answer in counted.values()))
        memory_how = next((peak["how"] for peaks in memory.values() for peak in peaks.values()), NOT_ASKED)
        record["conditions"] = _conditions(pair, modes, used, output_tokens, concurrency) | {
            "workload": workload,
            "repeats": repeats,
            "prompts_left_out": len(set(prompts)) - len(used),
            "peak_memory": memory_how,
        }
        record["notes"] = notes(list(counted.values()))
        record["interrupted"] = is_interrupted
        return record

    is_interrupted, kept_at = True, time.monotonic()
    try:
        for repeat in range(repeats):
            numbered: Iterable[tuple[int, Any]] = [(repeat + number, call) for number, call in enumerate(calls)]
            if console:
                numbered = track(numbered, description=f"turn {repeat + 1}", console=console)
            for call in numbered:
                if is_over():
                    break
                finished = answer_all(pair.target, pair.encode_batch, [call], plan, not_run=not_run)
                answers += finished
                for answer in finished:  # a prompt that fills up a batch, or is decoded again, is counted once
                    key = (answer.prompt.task, answer.prompt.digest, answer.mode.name, answer.seed)
                    counted.setdefault(key, answer)
                if time.monotonic() - kept_at > KEEP_SECONDS:
                    keep(record_so_far())
                    kept_at = time.monotonic()
        is_interrupted = False
    except KeyboardInterrupt:
        if not answers:
            raise
    if not answers:
        raise DFlowError(
            f"--minutes {minutes:g} were over before the first prompt, warm-up and memory included; give more"
        )
    return record_so_far()


def _conditions(
    pair: Pair, modes: Sequence[Mode], used: Sequence[Prompt], output_tokens: int, concurrency: int
) -> dict[str, Any]:
    """What the run was measured under, as far as the pair, the modes and the prompts decide it."""
    batching = f", of times over batches; a request takes as long as its batch of {concurrency}"
    device = pair.target.device
    return run_conditions(**pair.describe()) | {
        "engine": "transformers, in this process",
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "output_tokens": output_tokens,
        "modes": [mode.name for mode in modes],
        "decoding": ", ".join(mode.name for mode in modes),
        "draft_rule": "sampled drafts are tested against their law; prompt lookup's must be what the target draws",
        "concurrency": concurrency,
        "prompts_sha256": prompts_digest(used),
        "prompts": len(used),
        "tasks": sorted({prompt.task for prompt in used}),
        "measuring": f"interleaved, warm-up not counted; interval: 95% bootstrap over prompts, from {MIN_ITEMS} on"
        + (batching if concurrency > 1 else ""),
    }


def peak_memory(pair: Pair, plan: Plan, mode: Mode, inputs: dict, not_run: Mapping[str, str]) -> dict[str, Any]:
    """Peak memory of each strategy in one call that is not timed, with the longest prompts, and its models' weights.

    Returns:
        `dict`: By strategy, `weight_bytes`, `call_bytes` (`None` where it cannot be measured) and `how` it was.
    """
    peaks = {}
    for contestant in [Contestant(PLAIN), *plan.contestants]:
        if contestant.name in not_run:
            continue
        with peak_of(pair.target.device) as peak:
            decode_rows(pair.target, inputs, contestant, mode, plan.max_new_tokens)
        weights = weight_bytes(pair.target, contestant.model)
        peaks[contestant.name] = {"weight_bytes": weights, "call_bytes": peak.bytes, "how": peak.how}
    return peaks


def notes(answers: Sequence[Answer]) -> list[str]:
    """What a reader must not miss: each strategy that does not help."""
    sentences = []
    for mode in dict.fromkeys(answer.mode.name for answer in answers):
        of_mode = [answer for answer in answers if answer.mode.name == mode]
        for name in of_mode[0].runs:
            rate = AcceptanceStatistics.pooled(answer.runs[name].statistics for answer in of_mode).tokens_per_step
            if name != PLAIN and rate <= NOT_HELPING:
                sentences.append(f"{mode}: speculation is not helping with {name}: {rate:.2f} tokens per step")
    return sentences


def mode_warning(pair: Pair) -> str | None:
    """A warning where the drafter was trained on another kind of answers than the template asks for."""
    trained_on, asked_for = pair.drafter.config.chat_mode, pair.chat_mode
    if None in (trained_on, asked_for) or asked_for == trained_on:
        return None
    return f"The drafter was trained on {trained_on} answers, and the template asks for {asked_for} ones: expect less."


def present(record: Mapping[str, Any]) -> Presentation:
    """Drafts, times and memory of each mode, the identity of greedy texts, and the notes."""
    tables, remarks = [], []
    for mode, measured in record["modes"].items():
        drafts, times = [], []
        for task, part in parts_of(measured).items():
            for name, timed in part["latency"].items():
                drafts.append([task, name, *_drafts(part["contestants"].get(name), timed, part["prompts"])])
                times.append([task, name, *_times(timed)])
        for name, reason in measured.get("not_run", {}).items():
            drafts.append([ALL_TASKS, name, NOT_RUN, *[NONE] * (len(DRAFTS) - 1)])
            times.append([ALL_TASKS, name, NOT_RUN, *[NONE] * (len(TIMES) - 1)])
            remarks.append(Remark(f"{mode}: {name} was not run: {reason}", "yellow"))
        tables.append(ResultTable(f"{mode}: drafts", ("task", "strategy"), DRAFTS, drafts))
        tables.append(ResultTable(f"{mode}: times", ("task", "strategy"), TIMES, times))
        if peaks := measured.get("peak_memory"):
            rows = [[name, *_memory(peak)] for name, peak in peaks.items()]
            rows += [[name, NOT_RUN, NONE, NONE] for name in measured.get("not_run", {})]
            tables.append(ResultTable(f"{mode}: peak memory of a call", ("strategy",), MEMORY, rows))
        if spread := measured.get("tokens_per_step_std_over_tasks"):
            values = ", ".join(f"{name} {value:.2f}" for name, value in spread.items())
            remarks.append(Remark(f"{mode}: standard deviation of tokens per step over tasks: {values}"))
    same = record["identity"]
    if same["compared_with_plain"]:
        counts = ", ".join(f"{name} {count}" for name, count in same["identical_to_plain"].items())
        text = f"Greedy texts equal to the target's own, of {same['compared_with_plain']}: {counts}"
        remarks.append(Remark(text, "" if is_identical(dict(record)) else "red"))
    remarks.append(
        Remark(
            "tokens/step: emitted tokens of drafting steps over these steps; accepted drafts: the mean accepted length."
        )
    )
    remarks += [Remark(note, "yellow") for note in record["notes"]]
    if record.get("interrupted"):
        remarks.append(Remark("The run was interrupted: the figures are of the prompts that were finished.", "yellow"))
    title = f"{record['conditions']['target']}, drafter {record['conditions']['drafter']}"
    return Presentation(title, tables, remarks, record["conditions"])


def parts_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and times of each task in a mode of a record, and of all tasks."""
    return {**measured["by_task"], ALL_TASKS: {**measured["all"], "latency": measured["latency"]}}


def _drafts(counts: Mapping[str, Any] | None, times: Mapping[str, Any], prompts: int) -> list[str]:
    forwards = f"{times['target_forwards_per_token']:.3f}"
    if counts is None:
        return [str(prompts), "1", *[NONE] * 4, forwards, NONE]
    return [
        str(prompts),
        with_interval(counts["tokens_per_step"]),
        f"{counts['mean_accepted_length']:.2f}",
        f"{counts['draft_acceptance_rate']:.1%}",
        f"{counts['wasted_ratio']:.1%}",
        f"{counts['accepted_length_std']:.2f}",
        forwards,
        " ".join(f"{rate:.2f}" for rate in counts["acceptance_rate_per_position"]) or NONE,
    ]


def _times(times: Mapping[str, Any]) -> list[str]:
    per_token, drafts = times["seconds_per_output_token"], times["effective_tps"]
    return [
        *(f"{times['latency_seconds'][key]:.2f}" for key in ("p50", "p95", "p99")),
        f"{times['first_token_seconds']['p50']:.2f}",
        NONE if per_token is None else f"{1e3 * per_token['p50']:.1f}",
        NONE if drafts is None else f"{drafts:.1f}",
        f"{times['effective_tps_with_bonus']:.1f}",
        with_interval(times["speed_up"]) if "speed_up" in times else "1",
    ]


def _memory(peak: Mapping[str, Any]) -> list[str]:
    weights, call = peak["weight_bytes"], peak["call_bytes"]
    counts = [weights, call, None if call is None else weights + call]
    return [NONE if count is None else f"{count / 2**20:.1f}" for count in counts]


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw tokens per step of every strategy by task with intervals, one panel for each mode."""
    figure_class = matplotlib_figure()
    modes = {mode: measured for mode, measured in record["modes"].items() if measured["all"]["contestants"]}
    if not modes:
        raise DFlowError("no strategy was measured, so there is nothing to plot; leave --plot out")
    picture = figure_class(figsize=(5.5 * len(modes), 4), layout="constrained")
    panels = picture.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, (mode, measured) in zip(panels, modes.items(), strict=True):
        tasks, names = list(measured["by_task"]), list(measured["all"]["contestants"])
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            rates = [measured["by_task"][task]["contestants"][name]["tokens_per_step"] for task in tasks]
            values = [rate["value"] for rate in rates]
            ends = [rate["interval_95"] or [rate["value"]] * 2 for rate in rates]  # none where prompts are too few
            spread = [
                [max(0.0, rate["value"] - low) for rate, (low, _) in zip(rates, ends, strict=True)],
                [max(0.0, high - rate["value"]) for rate, (_, high) in zip(rates, ends, strict=True)],
            ]
            positions = [index + width * number for index in range(len(tasks))]
            panel.bar(positions, values, width, yerr=spread, capsize=2, label=name)
        panel.set_xticks([index + 0.4 - width / 2 for index in range(len(tasks))], tasks)
        panel.axhline(1.0, color="gray", linewidth=0.8)
        panel.set_title(mode)
    panels[0].set_ylabel("tokens per step")
    panels[0].legend(fontsize="small")
    picture.savefig(path, dpi=110)
