"""Figures of answers: tokens per step, acceptance, latency, throughput and identity, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

import numpy as np

from hf_dflow.bench.answers import Answer
from hf_dflow.bench.intervals import figure, grouped_median, percentiles, resampled_sums
from hf_dflow.bench.strategies import PLAIN
from hf_dflow.generation.statistics import AcceptanceStatistics, tokens_per_step


def as_record(answers: Sequence[Answer], baseline: str, also: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Figures of each mode, for all prompts and by task; the identity of greedy texts; and all counts by prompt.

    Args:
        baseline (`str`): The contestant that the others are compared with.
        also (`list[tuple[str, str]]`, *optional*): Further pairs to compare, the second being the base.
    """
    modes: dict[str, Any] = {}
    for name in dict.fromkeys(answer.mode.name for answer in answers):
        of_mode = [answer for answer in answers if answer.mode.name == name]
        by_task = {task: figures(group, baseline, also) for task, group in by_tasks(of_mode).items()}
        modes[name] = {"all": figures(of_mode, baseline, also), "by_task": by_task}
        if len(by_task) > 1:
            modes[name]["tokens_per_step_std_over_tasks"] = {
                contestant: pstdev(
                    task["contestants"][contestant]["tokens_per_step"]["value"] for task in by_task.values()
                )
                for contestant in modes[name]["all"]["contestants"]
            }
    return {"modes": modes, "identity": identity(answers), "rows": [_row(answer) for answer in answers]}


def by_tasks(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of each task, tasks in the order in which they first occur."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt.task, []).append(answer)
    return groups


def figures(answers: Sequence[Answer], baseline: str, also: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Counts of each contestant, and paired differences; answers of one mode. See [`as_record`].

    A resample of the bootstrap draws prompts, with all their seeds, and compares all contestants on the same ones.
    """
    names = sorted((name for name in answers[0].runs if name != PLAIN), key=lambda name: name != baseline)
    has_plain = all(PLAIN in answer.runs for answer in answers)
    columns: dict[tuple[str, str], int] = {}  # of each prompt
    for answer in answers:
        columns.setdefault((answer.prompt.task, answer.prompt.text), len(columns))
    measured = [*names, PLAIN] if has_plain else names
    counts = np.zeros((4, len(measured), len(columns)))
    for answer in answers:
        for row, name in enumerate(measured):
            run = answer.runs[name]
            counts[:, row, columns[answer.prompt.task, answer.prompt.text]] += (
                run.statistics.num_step_tokens,
                run.statistics.num_spec_steps,
                run.own_seconds,
                len(run.new_tokens),
            )
    emitted, steps, seconds, tokens = resampled_sums(counts.reshape(-1, len(columns))).reshape(4, len(measured), -1)
    rates = dict(zip(measured, tokens_per_step(emitted, steps), strict=True))
    seconds_per_token = dict(zip(measured, seconds / np.maximum(tokens, 1), strict=True))
    contestants = {}
    for row, name in enumerate(names):
        total = AcceptanceStatistics.pooled(answer.runs[name].statistics for answer in answers)
        forwards = sum(answer.runs[name].own_target_forwards for answer in answers)
        contestants[name] = {
            "tokens_per_step": figure(rates[name], len(columns)),
            "mean_accepted_length": total.mean_accepted_length,
            "mean_acceptance_length": total.mean_acceptance_length,
            "accepted_length_std": total.accepted_length_std,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "wasted_ratio": total.wasted_ratio,
            "acceptance_rate_per_position": total.acceptance_rate_per_position,
            "target_forwards_per_token": forwards / max(1, tokens[row, 0]),
            "num_spec_steps": total.num_spec_steps,
            "num_output_tokens": total.num_output_tokens,
            "seconds_per_token": float(seconds_per_token[name][0]),
        }
        if has_plain:
            contestants[name]["speed_up"] = figure(seconds_per_token[PLAIN] / seconds_per_token[name], len(columns))
    pairs = [*((name, baseline) for name in names if name != baseline), *also]
    record: dict[str, Any] = {
        "prompts": len(columns),
        "contestants": contestants,
        "differences": {
            f"{name} - {base}": difference(rates[name], rates[base], len(columns))
            for name, base in pairs
            if name in names and base in names
        },
    }
    if has_plain:
        record["plain_seconds_per_token"] = float(seconds_per_token[PLAIN][0])
    return record


def difference(rates: np.ndarray, base_rates: np.ndarray, count: int | None = None) -> dict[str, Any]:
    """How much longer steps are than the base's, in tokens and as a share; see [`figure`]."""
    return {"difference": figure(rates - base_rates, count), "gain": figure(rates / base_rates - 1.0, count)}


def identity(answers: Sequence[Answer]) -> dict[str, Any]:
    """How many greedy texts were compared, with the target's own and with each other, and how many were the same."""
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
    """Whether all greedy texts that were compared are the same."""
    counts = record["identity"]
    compared = counts["compared_with_plain"]
    return counts["identical_to_each_other"] == counts["compared_with_each_other"] and (
        not compared or all(count == compared for count in counts["identical_to_plain"].values())
    )


def _row(answer: Answer) -> dict[str, Any]:
    batch = {"batch_of": next(iter(answer.runs.values())).batch_size} if answer.batch else {}
    runs = {
        name: {
            "new_tokens": len(run.new_tokens),
            "accepted": run.statistics.num_accepted_draft_tokens,
            "steps": run.statistics.num_spec_steps,
            "emitted": run.statistics.num_step_tokens,
            "drafted": run.statistics.num_draft_tokens,
            "offered": run.statistics.num_offered_draft_tokens,
            "target_forwards": run.target_forwards,
            "seconds": round(run.seconds, 4),
        }
        for name, run in sorted(answer.runs.items())
    }
    return {**answer.prompt.as_record(), "mode": answer.mode.name, "seed": answer.seed, **batch, "runs": runs}


@dataclass(frozen=True)
class Timed:
    """One finished request.

    Args:
        group (`str`): Its prompt, or batch of prompts; intervals resample these, with all their repeats.
        seconds (`float`): To its last token.
        first_token_seconds (`float`): To its first.
        new_tokens (`int`): Tokens written.
        first_tokens (`int`, *optional*, defaults to 1): How many came with the first; `None` if that is not known.
        last_token_seconds (`float`, *optional*): To the last token, if the request ended later.
    """

    group: str
    seconds: float
    first_token_seconds: float
    new_tokens: int
    first_tokens: int | None = 1
    last_token_seconds: float | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens behind the first ones; `None` where there are none, or nobody knows how many."""
        if self.first_tokens is None or self.new_tokens <= self.first_tokens:
            return None
        end = self.seconds if self.last_token_seconds is None else self.last_token_seconds
        if end <= self.first_token_seconds:  # one piece of text, whatever the server counted behind it
            return None
        return (end - self.first_token_seconds) / (self.new_tokens - self.first_tokens)


def latencies(requests: Sequence[Timed]) -> dict[str, Any]:
    """Latency, time to first token and time per output token; the median latency with its interval over prompts."""
    per_token = [seconds for request in requests if (seconds := request.seconds_per_token) is not None]
    return {
        "requests": len(requests),
        "latency_seconds": percentiles([request.seconds for request in requests]),
        "median_latency": grouped_median([(request.group, request.seconds) for request in requests]),
        "first_token_seconds": percentiles([request.first_token_seconds for request in requests]),
        "requests_with_time_per_token": len(per_token),
        "seconds_per_output_token": percentiles(per_token) if per_token else None,
    }


def times_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """[`latencies`] of each contestant in answers of one mode, its throughput, and its paired ratio to plain decoding.

    `effective_tps` counts accepted drafts a second, as `hf_dflow.metrics.report_acceptance` does;
    `effective_tps_with_bonus` all tokens that entered the output.
    """
    times = {}
    for name in sorted(answers[0].runs, key=lambda name: (name != PLAIN, name)):  # whatever the order of turns
        runs = [answer.runs[name] for answer in answers]
        seconds, tokens = sum(run.own_seconds for run in runs), sum(len(run.new_tokens) for run in runs)
        accepted = sum(run.statistics.num_accepted_draft_tokens for run in runs)
        requests = [
            Timed(answer.timed_with, run.seconds, run.first_token_seconds, len(run.new_tokens))
            for answer, run in zip(answers, runs, strict=True)
        ]
        times[name] = {
            **latencies(requests),
            "effective_tps": None if name == PLAIN else accepted / seconds,
            "effective_tps_with_bonus": tokens / seconds,
            "target_forwards_per_token": sum(run.own_target_forwards for run in runs) / max(1, tokens),
        }
        if name != PLAIN and all(PLAIN in answer.runs for answer in answers):
            times[name]["speed_up"] = grouped_median(_speed_ups(answers, name))
    return times


def _speed_ups(answers: Sequence[Answer], name: str) -> list[tuple[str, float]]:
    """Plain seconds per token over the contestant's, runs of one repeat paired."""
    ratios = []
    for answer in answers:
        drafting, plain = answer.runs[name].seconds_per_token, answer.runs[PLAIN].seconds_per_token
        if drafting and plain:
            ratios.append((answer.timed_with, plain / drafting))
    return ratios
