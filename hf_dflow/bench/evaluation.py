"""Several ways to decode the same prompts, compared: what is run, and what is made of the counts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

import numpy as np

from hf_dflow.bench.report import figure, pooled, resampled_sums
from hf_dflow.bench.runners import Contestant, Mode, Run, decode
from hf_dflow.bench.workloads import Prompt

PLAIN = "plain"
SEED_STRIDE = 1_000_003  # so that no two prompts of a run draw the same numbers


@dataclass(frozen=True)
class Answer:
    """One prompt in one mode with one seed, by every contestant."""

    prompt: Prompt
    mode: Mode
    seed: int
    runs: dict[str, Run]


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


def answer_prompt(target: Any, inputs: dict, prompt: Prompt, number: int, plan: Plan) -> list[Answer]:
    """Answers of all contestants, side by side so that a busy machine slows them alike.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` `[1, T]` of the prompt.
        number (`int`): Of the prompt in the workload. Who begins changes with it.
    """
    answers = []
    for mode in plan.modes:
        contestants = [one for one in plan.contestants if one.can_decode(mode)]
        if plan.with_plain or (not mode.temperature and number < plan.check_identity):
            contestants.append(Contestant(PLAIN))
        first = number % len(contestants)
        contestants = contestants[first:] + contestants[:first]
        for seed in plan.seeds if mode.temperature else [0]:
            draws = seed * SEED_STRIDE + number
            runs = {one.name: decode(target, inputs, one, mode, plan.max_new_tokens, draws) for one in contestants}
            answers.append(Answer(prompt, mode, seed, runs))
    return answers


def warm_up(target: Any, inputs: dict, plan: Plan) -> None:
    """A first call pays for what later ones reuse."""
    for contestant in [*plan.contestants, Contestant(PLAIN)]:
        decode(target, inputs, contestant, Mode(), 4)


def answer_all(
    target: Any,
    encode: Callable[[str], dict],
    prompts: Iterable[tuple[int, Prompt]],
    plan: Plan,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Answers to numbered prompts until `is_over`, whole prompts only."""
    answers: list[Answer] = []
    for number, prompt in prompts:
        inputs = encode(prompt.text)
        if not answers and plan.with_plain:
            warm_up(target, inputs, plan)
        answers += answer_prompt(target, inputs, prompt, number, plan)
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
            values = (run.statistics.num_accepted_draft_tokens, steps, run.seconds, len(run.new_tokens))
            counts[way, :, numbers[answer.prompt.task, answer.prompt.text]] += values
    sums = resampled_sums(counts.reshape(-1, len(numbers))).reshape(len(ways), 4, -1)
    tokens_per_step = 1.0 + sums[:, 0] / np.maximum(sums[:, 1], 1)
    seconds_per_token = sums[:, 2] / np.maximum(sums[:, 3], 1)
    contestants = {}
    for way, name in enumerate(names):
        total = pooled([answer.runs[name].statistics for answer in answers])
        contestants[name] = {
            "tokens_per_step": figure(tokens_per_step[way]),
            "accepted_length_std": total.accepted_length_std,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_rate_per_position": total.acceptance_rate_per_position,
            "target_forwards_per_token": total.target_forwards_per_token,
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
