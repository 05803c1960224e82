"""`python -m experiments.loop`: this package's loop, relay and correction off, against transformers' own DFlash loop.

Same target, drafter, prompts and tokens, in one process, in turn. Run it on an idle machine.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from experiments.common import pass_or_fail
from hf_dflow import DFlowGenerationConfig
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import bootstrap_interval
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.workloads import HELD_OUT, Prompt, first_of_each_task, read_prompts
from hf_dflow.console import JsonOption, ThreadsOption, use_threads, write_json
from hf_dflow.generation.statistics import tokens_per_step

LOOPS = ("hf_dflow", "transformers")
AS_TRANSFORMERS = {"use_relay": False, "use_correction": False}  # which has neither
MAX_RATIO = 1.03  # of seconds per step; the upper end of the interval counts
MAX_OWN_MILLISECONDS = 5.0  # per step, forwards of target and drafter not counted
DRAFT_WORK = ("embed", "project_context", "context_key_values", "draft_hidden", "compute_logits")


@dataclass
class Stopwatch:
    """Sums the time inside wrapped functions, none of which calls another."""

    seconds: float = 0.0

    def wrap(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@dataclass(frozen=True)
class Timing:
    """One answer, timed from the end of the prefill to the end of the call."""

    new_tokens: list[int]
    steps: int  # target forwards after the prefill
    seconds: float
    forward_seconds: float  # inside forwards of target and drafter; 0 without a stopwatch

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def own_seconds_per_step(self) -> float:
        return (self.seconds - self.forward_seconds) / self.steps


@contextmanager
def _wrapped(owner: torch.nn.Module, name: str, watch: Stopwatch) -> Iterator[None]:
    setattr(owner, name, watch.wrap(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)  # the class's own shows again


def time_loop(
    pair: Pair, inputs: dict[str, torch.Tensor], loop: str, max_new_tokens: int, watch: Stopwatch | None = None
) -> Timing:
    """Decode with one of `LOOPS`; a `watch` also times the forwards, which costs a few microseconds each.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(1, T)`.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    if loop == "hf_dflow":
        arguments: dict[str, Any] = {"generation_config": DFlowGenerationConfig(**options, **AS_TRANSFORMERS)}
    else:
        arguments = {**options, "speculation_type": "dflash"}
    target: Any = pair.target
    marks: list[tuple[float, float]] = []

    def mark(*_):
        marks.append((time.perf_counter(), watch.seconds if watch else 0.0))

    with ExitStack() as stack:
        if watch is not None:
            stack.enter_context(_wrapped(target, "forward", watch))
            for name in DRAFT_WORK:
                stack.enter_context(_wrapped(pair.drafter, name, watch))
        stack.callback(target.register_forward_hook(mark).remove)
        output = target.generate(**inputs, **arguments, assistant_model=pair.drafter)
        end, forwards_end = time.perf_counter(), watch.seconds if watch else 0.0
    prefill_end, forwards_start = marks[0]
    new_tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Timing(new_tokens, len(marks) - 1, end - prefill_end, forwards_end - forwards_start)


@dataclass
class PromptResult:
    """All timings of one prompt."""

    prompt: Prompt
    pairs: list[dict[str, Timing]] = field(default_factory=list)
    watched: list[Timing] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether both loops always wrote the same text in the same number of steps."""
        return all(
            pair["hf_dflow"].new_tokens == pair["transformers"].new_tokens
            and pair["hf_dflow"].steps == pair["transformers"].steps
            for pair in self.pairs
        )

    @property
    def ratios(self) -> list[float]:
        """Seconds per step of this package over those of transformers, pair by pair."""
        return [pair["hf_dflow"].seconds_per_step / pair["transformers"].seconds_per_step for pair in self.pairs]

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens over steps; the first token comes from the prefill."""
        first = self.pairs[0]["hf_dflow"]
        return tokens_per_step(len(first.new_tokens) - 1, first.steps)


def measure(pair: Pair, prompts: list[Prompt], repeats: int, max_new_tokens: int) -> list[PromptResult]:
    """Time both loops in turn on each prompt; the order alternates."""
    results = [PromptResult(prompt) for prompt in prompts]
    for loop in LOOPS:
        time_loop(
            pair, pair.encode(prompts[0].text), loop, max_new_tokens
        )  # warm-up: a first call pays for allocations
    for repeat in range(repeats):
        for index, result in enumerate(results):
            inputs = pair.encode(result.prompt.text)
            order = LOOPS if (repeat + index) % 2 == 0 else LOOPS[::-1]
            timings = {loop: time_loop(pair, inputs, loop, max_new_tokens) for loop in order}
            if timings["hf_dflow"].steps == 0:
                raise typer.BadParameter(f"no step to time: the answer to {result.prompt.text!r} has one token")
            result.pairs.append(timings)
            result.watched.append(time_loop(pair, inputs, "hf_dflow", max_new_tokens, Stopwatch()))
    return results


def as_record(results: list[PromptResult], **conditions: Any) -> dict[str, Any]:
    """Figures, goals, and whether the goals are met."""
    ratios = np.array([ratio for result in results for ratio in result.ratios])
    interval = bootstrap_interval(len(ratios), lambda chosen: float(np.median(ratios[chosen])))
    own = 1000 * median(timing.own_seconds_per_step for result in results for timing in result.watched)
    is_identical = all(result.is_identical for result in results)
    rows = [
        {
            "task": result.prompt.task,
            "prompt": result.prompt.text,
            "text_identical": result.is_identical,
            "new_tokens": len(result.pairs[0]["hf_dflow"].new_tokens),
            "steps": result.pairs[0]["hf_dflow"].steps,
            "tokens_per_step": result.tokens_per_step,
            "milliseconds_per_step": {
                loop: 1000 * median(pair[loop].seconds_per_step for pair in result.pairs) for loop in LOOPS
            },
            "ratios": result.ratios,
            "own_milliseconds_per_step": [1000 * timing.own_seconds_per_step for timing in result.watched],
        }
        for result in results
    ]
    return {
        "rows": rows,
        "median_ratio": float(np.median(ratios)),
        "median_ratio_95": interval,
        "own_milliseconds_per_step": own,
        "tokens_per_step": mean(result.tokens_per_step for result in results),
        "goals": {"median_ratio_95_upper": MAX_RATIO, "own_milliseconds_per_step": MAX_OWN_MILLISECONDS},
        "passed": is_identical and interval[1] <= MAX_RATIO and own <= MAX_OWN_MILLISECONDS,
        "conditions": run_conditions(prefill="not counted", relay="off", **conditions),
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Print the table, and each goal with PASS or FAIL."""
    table = Table("task", "text")
    for heading in ("tokens", "steps", "tokens/step", *(f"ms/step {loop}" for loop in LOOPS), "ratio", "own ms/step"):
        table.add_column(heading, justify="right")
    for row in record["rows"]:
        table.add_row(
            row["task"],
            "identical" if row["text_identical"] else "DIFFERS",
            str(row["new_tokens"]),
            str(row["steps"]),
            f"{row['tokens_per_step']:.2f}",
            *(f"{row['milliseconds_per_step'][loop]:.1f}" for loop in LOOPS),
            f"{median(row['ratios']):.3f}",
            f"{median(row['own_milliseconds_per_step']):.2f}",
        )
    console.print(table)
    low, high = record["median_ratio_95"]
    own = record["own_milliseconds_per_step"]
    console.print(
        f"{pass_or_fail(high <= MAX_RATIO)} seconds per step over transformers' own loop: median of paired ratios "
        f"{record['median_ratio']:.3f}, 95% interval {low:.3f} … {high:.3f}, goal: upper end ≤ {MAX_RATIO}"
    )
    console.print(
        f"{pass_or_fail(own <= MAX_OWN_MILLISECONDS)} the loop's own time: {own:.2f} ms per step, goal ≤ "
        f"{MAX_OWN_MILLISECONDS:.0f} ms"
    )
    console.print(f"{pass_or_fail(all(row['text_identical'] for row in record['rows']))} same text in as many steps")


def main(
    json_path: JsonOption = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter folder; the bundled one by default.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON file of {"task": ["prompt", …]}.')] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs for each prompt.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    threads: ThreadsOption = None,
) -> None:
    """Time this package's loop against transformers' own on SmolLM2; exit code 1 if a goal is missed."""
    use_threads(threads)
    workload = read_prompts(prompts) if prompts else first_of_each_task(read_prompts(HELD_OUT))
    pair = load_pair(drafter=drafter)
    results = measure(pair, workload, repeats, max_new_tokens)
    record = as_record(results, **pair.describe(), repeats=repeats, max_new_tokens=max_new_tokens)
    show(record, Console())
    write_json(json_path, record)
    raise typer.Exit(0 if record["passed"] else 1)


if __name__ == "__main__":
    typer.run(main)
