"""Seconds of requests: percentiles, throughput with and without the bonus, and how sure they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hf_dflow.bench.evaluation import PLAIN, Answer
from hf_dflow.bench.report import bootstrap_interval, pooled

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Timed:
    """One finished request.

    Args:
        prompt (`str`): Which prompt, or batch of them; intervals draw these, with all their repeats.
        seconds (`float`): To its last token.
        first_token_seconds (`float`): To its first.
        new_tokens (`int`): Tokens written.
    """

    prompt: str
    seconds: float
    first_token_seconds: float
    new_tokens: int

    @property
    def seconds_per_token(self) -> float | None:
        """Behind the first; `None` for an answer of one token."""
        if self.new_tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.new_tokens - 1)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99, interpolated."""
    return {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}


def summarise(requests: Sequence[Timed]) -> dict[str, Any]:
    """Latency, time to first token and time per output token; the median latency with its interval over prompts."""
    by_prompt: dict[str, list[float]] = {}
    for one in requests:
        by_prompt.setdefault(one.prompt, []).append(one.seconds)
    groups = list(by_prompt.values())

    def median_of(chosen: Any) -> float:
        return float(median(seconds for index in chosen for seconds in groups[index]))

    per_token = [value for one in requests if (value := one.seconds_per_token) is not None]
    return {
        "requests": len(requests),
        "latency_seconds": percentiles([one.seconds for one in requests]),
        "median_latency": {
            "value": median_of(range(len(groups))),
            "interval_95": bootstrap_interval(len(groups), median_of, resamples=500),
        },
        "first_token_seconds": percentiles([one.first_token_seconds for one in requests]),
        "seconds_per_output_token": percentiles(per_token) if per_token else None,
    }


def of_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of each contestant, in answers of one mode: [`summarise`], throughput, and the paired ratio to plain decoding.

    `effective_tps` counts accepted drafts a second, as `hf_dflow.metrics.report_acceptance` does;
    `effective_tps_with_bonus` all tokens that entered the output.
    """
    found = {}
    for name in sorted(answers[0].runs, key=lambda name: (name != PLAIN, name)):  # who began decides no table
        runs = [answer.runs[name] for answer in answers]
        total, seconds = pooled([run.statistics for run in runs]), sum(run.own_seconds for run in runs)
        requests = [
            Timed(answer.timed_with, run.seconds, run.first_token_seconds, len(run.new_tokens))
            for answer, run in zip(answers, runs, strict=True)
        ]
        found[name] = {
            **summarise(requests),
            "effective_tps": None if name == PLAIN else total.num_accepted_draft_tokens / seconds,
            "effective_tps_with_bonus": sum(len(run.new_tokens) for run in runs) / seconds,
            "target_forwards_per_token": sum(run.own_target_forwards for run in runs)
            / max(1, sum(len(run.new_tokens) for run in runs)),
        }
        if name != PLAIN and all(PLAIN in answer.runs for answer in answers):
            found[name]["speed_up"] = _speed_up(answers, name)
    return found


def _speed_up(answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """Median over prompts, or batches of them, of plain seconds per token over this strategy's, runs of one repeat
    paired."""
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        ours, plain = answer.runs[name].seconds_per_token, answer.runs[PLAIN].seconds_per_token
        if ours and plain:
            ratios.setdefault(answer.timed_with, []).append(plain / ours)
    groups = list(ratios.values())

    def median_of(chosen: Any) -> float:
        return float(median(ratio for index in chosen for ratio in groups[index]))

    return {
        "value": median_of(range(len(groups))),
        "interval_95": bootstrap_interval(len(groups), median_of, resamples=500),
    }
