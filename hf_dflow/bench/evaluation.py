"""Several ways to decode the same prompts, compared: what is run, and what is made of the counts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import pstdev
from typing import Any

import numpy as np
import transformers

from hf_dflow.bench.report import figure, pooled, resampled_sums
from hf_dflow.bench.runners import Contestant, Mode, Run, decode_rows, padded
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import SAMPLING_RULES

PLAIN = "plain"
SEED_STRIDE = 1_000_003  # so that no two prompts of a run draw the same numbers
WARM_UP_TOKENS = 12  # a block and the beginning of the next, so that a loop that fails does so before it counts
LONGEST_REASON = 160  # characters of another project's error message
NotRun = dict[str, dict[str, str]]  # mode -> contestant -> why it is left out


@dataclass(frozen=True)
class Answer:
    """One prompt in one mode with one seed, by every contestant.

    Args:
        batch (`str`, *optional*): Which prompts were decoded together; answers of one batch share their times.
    """

    prompt: Prompt
    mode: Mode
    seed: int
    runs: dict[str, Run]
    batch: str | None = None

    @property
    def timed_with(self) -> str:
        """What times are drawn by when an interval is made of them: its batch, else its prompt."""
        return self.batch or self.prompt.digest


@dataclass(frozen=True)
class Plan:
    """What is asked of the contestants.

    Args:
        contestants (`list[Contestant]`): Each beside every other, on each prompt in turn.
        modes (`list[Mode]`): Greedy, sampled, or both.
        max_new_tokens (`int`): At which an answer is cut.
        seeds (`list[int]`, *optional*, defaults to `[0]`): Sampled answers are drawn once with each.
        with_plain (`bool`, *optional*, defaults to `False`): Also the target alone, for the seconds.
        check_identity (`int`, *optional*, defaults to 0): On so many prompts, the target alone for its greedy text.
    """

    contestants: list[Contestant]
    modes: list[Mode]
    max_new_tokens: int
    seeds: Sequence[int] = (0,)
    with_plain: bool = False
    check_identity: int = 0

    def left_out(self, mode: Mode, batch_size: int) -> dict[str, str]:
        """The contestants that cannot decode so many prompts at a time in `mode`, and why."""
        reasons = {one.name: one.why_not(mode, batch_size) for one in self.contestants}
        return {name: reason for name, reason in reasons.items() if reason}


def modes_of(temperatures: Sequence[float], rules: Sequence[str]) -> list[Mode]:
    """Greedy decoding once, and each temperature above 0 with each verification rule.

    Raises:
        DFlowError: A rule or a temperature that does not exist.
    """
    unknown = [rule for rule in rules if rule not in SAMPLING_RULES]
    if unknown or not rules:
        raise DFlowError(f"--verification {', '.join(unknown)}: use one or more of {', '.join(SAMPLING_RULES)}")
    wrong = [temperature for temperature in temperatures if not 0 <= temperature < math.inf]
    if wrong:
        raise DFlowError(f"--temperature {wrong[0]:g}: use 0 for greedy decoding, or a number above 0")
    return [
        Mode(temperature, rule)
        for temperature in dict.fromkeys(temperatures)
        for rule in (rules if temperature else [None])
    ]


def batches_of(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    """Batches of `size` prompts of one task each, one of each task after the other.

    Where a task has no more of them, its prompts fill the batch over again, so that all batches are a load of `size`.
    """
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    made = [
        [tuple(mine[place % len(mine)] for place in range(start, start + size)) for start in range(0, len(mine), size)]
        for mine in by_task.values()
    ]
    return [batch for turn in zip_longest(*made) for batch in turn if batch is not None]


def answer_prompts(
    target: Any, inputs: dict, prompts: Sequence[Prompt], number: int, plan: Plan, not_run: NotRun | None = None
) -> list[Answer]:
    """Answers of all contestants, side by side so that a busy machine slows them alike.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` `[B, T]` of the prompts.
        number (`int`): Of the call in the workload. Who begins changes with it.
        not_run (`dict`, *optional*): Names of contestants that are left out of a mode, see [`warm_up`].
    """
    answers = []
    batch = None if len(prompts) == 1 else " ".join(prompt.digest for prompt in prompts)
    for mode in plan.modes:
        out = plan.left_out(mode, len(prompts)) | (not_run or {}).get(mode.name, {})
        contestants = [one for one in plan.contestants if one.name not in out]
        if plan.with_plain or (not mode.temperature and number < plan.check_identity):
            contestants.append(Contestant(PLAIN))
        first = number % max(1, len(contestants))
        contestants = contestants[first:] + contestants[:first]
        for seed in plan.seeds if mode.temperature else [0]:
            draws = seed * SEED_STRIDE + number
            rows = {one.name: decode_rows(target, inputs, one, mode, plan.max_new_tokens, draws) for one in contestants}
            for place, prompt in enumerate(prompts):
                runs = {name: found[place] for name, found in rows.items()}
                answers.append(Answer(prompt, mode, seed, runs, batch))
    return answers


def warm_up(target: Any, inputs: dict, plan: Plan) -> NotRun:
    """A first call pays for what later ones reuse; it also shows who cannot decode so.

    Returns:
        `dict`: For each mode, the contestants that are left out of it, and why.
    """
    batch_size, not_run = inputs["input_ids"].shape[0], {}
    for mode in plan.modes:
        not_run[mode.name] = plan.left_out(mode, batch_size)
        for one in [*plan.contestants, Contestant(PLAIN)]:
            if one.name in not_run[mode.name]:
                continue
            try:
                decode_rows(target, inputs, one, mode, min(WARM_UP_TOKENS, plan.max_new_tokens))
            except Exception as error:
                # Another project's loop may fail in some of its releases, and ours is measured all the same.
                if not one.is_transformers:
                    raise
                said = " ".join(str(error).split())
                not_run[mode.name][one.name] = (
                    f"transformers {transformers.__version__} fails: {type(error).__name__}: {said[:LONGEST_REASON]}"
                )
    return not_run


def answer_all(
    target: Any,
    encode: Callable[[str], dict],
    prompts: Iterable[tuple[int, Prompt | tuple[Prompt, ...]]],
    plan: Plan,
    is_over: Callable[[], bool] = lambda: False,
    *,
    not_run: NotRun | None = None,
    pad: int = 0,
) -> list[Answer]:
    """Answers to numbered prompts, or batches of them, until `is_over`; whole prompts and batches only.

    Args:
        not_run (`dict`, *optional*): What [`warm_up`] returned. Without it, a first call warms up where times count.
        pad (`int`, *optional*, defaults to 0): The token that pads a batch.
    """
    answers: list[Answer] = []
    for number, given in prompts:
        group = given if isinstance(given, tuple) else (given,)
        encoded = [encode(prompt.text) for prompt in group]
        inputs = encoded[0] if len(group) == 1 else padded([one["input_ids"] for one in encoded], pad)
        if not answers and plan.with_plain and not_run is None:
            not_run = warm_up(target, inputs, plan)
        answers += answer_prompts(target, inputs, group, number, plan, not_run)
        if is_over():
            break
    return answers


def as_record(answers: Sequence[Answer], baseline: str, also: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Figures of each mode, for all prompts and by task; the texts' identity; and every count, prompt by prompt.

    Args:
        baseline (`str`): The contestant that the others are compared with.
        also (`list[tuple[str, str]]`, *optional*): Further pairs to compare, the second being the base.
    """
    modes: dict[str, Any] = {}
    for name in dict.fromkeys(answer.mode.name for answer in answers):
        group = [answer for answer in answers if answer.mode.name == name]
        tasks = dict.fromkeys(answer.prompt.task for answer in group)
        by_task = {task: figures([one for one in group if one.prompt.task == task], baseline, also) for task in tasks}
        modes[name] = {"all": figures(group, baseline, also), "by_task": by_task}
        if len(by_task) > 1:
            modes[name]["tokens_per_step_std_over_tasks"] = {
                contestant: pstdev(
                    task["contestants"][contestant]["tokens_per_step"]["value"] for task in by_task.values()
                )
                for contestant in modes[name]["all"]["contestants"]
            }
    return {"modes": modes, "identity": identity(answers), "rows": [_row(answer) for answer in answers]}


def figures(answers: Sequence[Answer], baseline: str, also: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """What each contestant came to, and paired differences; answers of one mode. See [`as_record`].

    A resample of the bootstrap draws prompts, with all their seeds, and reads every contestant on the same ones.
    """
    names = [name for name in answers[0].runs if name != PLAIN]
    names = sorted(names, key=lambda name: name != baseline)
    has_plain = all(PLAIN in answer.runs for answer in answers)
    ways = [*names, PLAIN] if has_plain else names
    numbers: dict[tuple[str, str], int] = {}
    for answer in answers:
        numbers.setdefault((answer.prompt.task, answer.prompt.text), len(numbers))
    counts = np.zeros((len(ways), 4, len(numbers)))  # accepted, steps, seconds, tokens of each prompt
    for answer in answers:
        for way, name in enumerate(ways):
            run = answer.runs[name]
            steps = run.statistics.num_spec_steps
            values = (run.statistics.num_accepted_draft_tokens, steps, run.own_seconds, len(run.new_tokens))
            counts[way, :, numbers[answer.prompt.task, answer.prompt.text]] += values
    sums = resampled_sums(counts.reshape(-1, len(numbers))).reshape(len(ways), 4, -1)
    tokens_per_step = 1.0 + sums[:, 0] / np.maximum(sums[:, 1], 1)
    seconds_per_token = sums[:, 2] / np.maximum(sums[:, 3], 1)
    contestants = {}
    for way, name in enumerate(names):
        total = pooled([answer.runs[name].statistics for answer in answers])
        forwards = sum(answer.runs[name].own_target_forwards for answer in answers)
        contestants[name] = {
            "tokens_per_step": figure(tokens_per_step[way]),
            "accepted_length_std": total.accepted_length_std,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_rate_per_position": total.acceptance_rate_per_position,
            "target_forwards_per_token": forwards / max(1, sums[way, 3, 0]),
            "num_spec_steps": total.num_spec_steps,
            "num_output_tokens": total.num_output_tokens,
            "seconds_per_token": float(seconds_per_token[way][0]),
        }
        if has_plain:
            contestants[name]["speed_up"] = figure(seconds_per_token[-1] / seconds_per_token[way])
    differences = {}
    for name, base in [*((name, baseline) for name in names if name != baseline), *also]:
        if name in names and base in names:
            ours, theirs = (tokens_per_step[names.index(one)] for one in (name, base))
            differences[f"{name} - {base}"] = {"difference": figure(ours - theirs), "gain": figure(ours / theirs - 1.0)}
    record: dict[str, Any] = {"prompts": len(numbers), "contestants": contestants, "differences": differences}
    if has_plain:
        record["plain_seconds_per_token"] = float(seconds_per_token[-1][0])
    return record


def identity(answers: Sequence[Answer]) -> dict[str, Any]:
    """How many greedy texts were compared, with the target's own and with each other's, and how many were the same."""
    greedy = [answer for answer in answers if not answer.mode.temperature]
    with_plain = [answer for answer in greedy if PLAIN in answer.runs]
    names = dict.fromkeys(name for answer in greedy for name in answer.runs if name != PLAIN)
    return {
        "compared_with_plain": len(with_plain),
        "identical_to_plain": {
            name: sum(answer.runs[name].new_tokens == answer.runs[PLAIN].new_tokens for answer in with_plain)
            for name in names
        },
        "compared_with_each_other": len(greedy),
        "identical_to_each_other": sum(
            len({tuple(run.new_tokens) for run in answer.runs.values()}) == 1 for answer in greedy
        ),
    }


def is_identical(record: dict[str, Any]) -> bool:
    """Whether no greedy text that was compared differs."""
    found = record["identity"]
    same = [*found["identical_to_plain"].values()] if found["compared_with_plain"] else []
    return found["identical_to_each_other"] == found["compared_with_each_other"] and all(
        count == found["compared_with_plain"] for count in same
    )


def _row(answer: Answer) -> dict[str, Any]:
    return {
        **answer.prompt.as_record(),
        "mode": answer.mode.name,
        "seed": answer.seed,
        **({"batch_of": next(iter(answer.runs.values())).batch_size} if answer.batch else {}),
        "runs": {
            name: {
                "new_tokens": len(run.new_tokens),
                "accepted": run.statistics.num_accepted_draft_tokens,
                "steps": run.statistics.num_spec_steps,
                "target_forwards": run.target_forwards,
                "seconds": round(run.seconds, 4),
            }
            for name, run in sorted(answer.runs.items())
        },
    }
