"""`hf-dflow bench run`: every strategy on the same prompts, by turns, under conditions that stand with the figures."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from hf_dflow.bench import latency
from hf_dflow.bench.conditions import prompts_digest
from hf_dflow.bench.evaluation import PLAIN, Answer, Plan, answer_all, as_record, batches_of, warm_up
from hf_dflow.bench.peak_memory import NOT_ASKED, peak_of, weight_bytes
from hf_dflow.bench.report import pooled, run_conditions
from hf_dflow.bench.runners import Contestant, Mode, Pair, classic_contestant, decode_rows
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

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
    concurrency: int = 1,
    repeats: int = 1,
    minutes: float | None = None,
    console: Console | None = None,
    baseline: str = BASELINE,
    workload: str = "prompts of the caller",
    with_memory: bool = True,
) -> dict[str, Any]:
    """Measure, interleaved: a prompt goes through every strategy before the next; who begins changes from turn to turn.

    Args:
        concurrency (`int`, *optional*, defaults to 1): Prompts that are decoded together, as one batch of `generate`;
            see [`~hf_dflow.bench.evaluation.batches_of`]. A strategy that takes one alone is left out, with the reason.
        repeats (`int`, *optional*, defaults to 1): Turns over all prompts, for times. Counts are those of the first.
        minutes (`float`, *optional*): No prompt is begun after so long; what was left out is said.
        baseline (`str`, *optional*): The contestant that the others are compared with.
        workload (`str`, *optional*): Where the prompts are from, in words.
        with_memory (`bool`, *optional*, defaults to `True`): One more call of each strategy and mode, for its peak.

    Returns:
        `dict`: For JSON: `modes` (counts as `evaluation.as_record`, beside them `latency`, `peak_memory` and
        `not_run`), `identity`, `rows`, `conditions`, `notes`.

    Raises:
        DFlowError: No strategy can decode so, or `minutes` were over before the first prompt.
    """
    # Greedy texts are always compared with the target's own, which is decoded anyway.
    plan = Plan(list(contestants), list(modes), output_tokens, with_plain=True)
    impossible = [plan.left_out(mode, concurrency) for mode in modes]
    if contestants and all(one.name in out for one in contestants for out in impossible):
        why = "; ".join(f"{name}: {reason}" for name, reason in impossible[0].items())
        raise DFlowError(f"no strategy can be measured so ({why}); name others, or change --concurrency or the mode")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def is_over() -> bool:
        return deadline is not None and time.monotonic() > deadline

    calls = batches_of(prompts, concurrency) if concurrency > 1 else [(prompt,) for prompt in prompts]
    widest = pair.encode_batch([prompt.text for prompt in max(calls, key=_length)])
    not_run = warm_up(pair.target, widest, plan)
    memory = {mode.name: peak_memory(pair, plan, mode, widest, not_run[mode.name]) for mode in modes if with_memory}
    answers: list[Answer] = []
    counted: dict[tuple, Answer] = {}
    for repeat in range(repeats):
        if is_over():
            break
        numbered: Iterable[tuple[int, Any]] = [(repeat + number, call) for number, call in enumerate(calls)]
        followed = track(numbered, description=f"turn {repeat + 1}", console=console) if console else numbered
        pad = pair.tokenizer.pad_token_id or 0
        answers += answer_all(pair.target, pair.encode, followed, plan, is_over, not_run=not_run, pad=pad)
        for answer in answers:  # a prompt that fills a batch up, or is decoded again, is counted once
            counted.setdefault((answer.prompt.task, answer.prompt.digest, answer.mode.name, answer.seed), answer)
    if not answers:
        raise DFlowError(
            f"--minutes {minutes:g} were over before the first prompt, warm-up and memory included; give more"
        )
    record = as_record(list(counted.values()), baseline)
    for name, found in record["modes"].items():
        found["not_run"], found["peak_memory"] = not_run[name], memory.get(name, {})
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
    used = list(dict.fromkeys(answer.prompt for answer in counted.values()))
    record["conditions"] = conditions_of(pair, modes, used, output_tokens=output_tokens, concurrency=concurrency)
    record["conditions"] |= {
        "workload": workload,
        "repeats": repeats,
        "prompts": len(used),
        "prompts_left_out": len(set(prompts)) - len(used),
        "tasks": sorted({prompt.task for prompt in used}),
        "measuring": "interleaved, warm-up not counted; interval: 95% bootstrap over prompts"
        + (
            ""
            if concurrency == 1
            else f", of times over batches; a request takes as long as its batch of {concurrency}"
        ),
        "peak_memory": next((one["how"] for found in memory.values() for one in found.values()), NOT_ASKED),
    }
    record["notes"] = notes(list(counted.values()))
    return record


def _length(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.text) for prompt in prompts)


def conditions_of(
    pair: Pair, modes: Sequence[Mode], prompts: Sequence[Prompt], *, output_tokens: int, concurrency: int
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
        draft_rule="sampled drafts are tested against their law; prompt lookup's must be what the target draws",
        concurrency=concurrency,
        prompts_sha256=prompts_digest(prompts),
    )


def peak_memory(pair: Pair, plan: Plan, mode: Mode, inputs: dict, not_run: dict[str, str]) -> dict[str, Any]:
    """Of each strategy in one call that is not timed, with the longest prompts; and of the models that it needs.

    Returns:
        `dict`: By strategy, `weight_bytes`, `call_bytes` (`None` where it cannot be measured) and `how` it was.
    """
    found = {}
    for one in [Contestant(PLAIN), *plan.contestants]:
        if one.name in not_run:
            continue
        with peak_of(pair.target.device) as peak:
            decode_rows(pair.target, inputs, one, mode, plan.max_new_tokens)
        weights = weight_bytes(pair.target, one.model)
        found[one.name] = {"weight_bytes": weights, "call_bytes": peak.bytes, "how": peak.how}
    return found


def notes(answers: Sequence[Answer]) -> list[str]:
    """What a reader must not miss: a strategy that does not help."""
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
