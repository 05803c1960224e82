"""`hf-dflow bench sweep`: which block size and verification rule to use for which task, on one's own machine."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dflow.bench import suite
from hf_dflow.bench.eval_drafter import modes_of
from hf_dflow.bench.runners import Contestant, Mode, Pair
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

ALL = "all"


@dataclass(frozen=True)
class Setting:
    """What a sweep chooses. A verification rule matters to sampling alone.

    Args:
        block_size (`int`): Anchor and verified drafts; the drafter drafts its full block anyway.
        verification (`str`, *optional*): "token" or "block"; `None` where nothing is sampled.
    """

    block_size: int
    verification: str | None

    def defaults(self) -> dict[str, Any]:
        """As fields of [`DFlowGenerationConfig`]."""
        found: dict[str, Any] = {"num_draft_tokens": self.block_size - 1}
        return found if self.verification is None else {**found, "verification": self.verification}


@dataclass(frozen=True)
class Point:
    """A setting on one task under one condition.

    Args:
        tokens_per_second (`float`): Output tokens, prompt included in the time.
    """

    task: str
    temperature: float
    output_tokens: int
    setting: Setting
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_step: float


def check_block_sizes(pair: Pair, block_sizes: Sequence[int]) -> None:
    """Raise [`DFlowError`] for a block that the drafter does not draft."""
    longest = pair.drafter.config.drafts_per_block + 1
    wrong = [size for size in block_sizes if not 2 <= size <= longest]
    if wrong or not block_sizes:
        raise DFlowError(f"block size {', '.join(map(str, wrong))}: this drafter allows 2 … {longest}")


def sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    block_sizes: Sequence[int],
    verifications: Sequence[str],
    temperatures: Sequence[float],
    output_tokens: Sequence[int],
    repeats: int = 1,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure every combination; all block sizes of a condition by turns on each prompt, plain decoding among them.

    Returns:
        `dict`: For JSON: `points`, `best` by condition and task, `conditions` of each run.
    """
    check_block_sizes(pair, block_sizes)
    sizes = sorted(set(block_sizes))
    contestants = [Contestant(f"block {size}", pair.drafter, num_draft_tokens=size - 1) for size in sizes]
    points: list[Point] = []
    conditions = []
    for temperature, length in itertools.product(dict.fromkeys(temperatures), dict.fromkeys(output_tokens)):
        modes = modes_of([temperature], verifications)
        record = suite.run(
            pair, contestants, modes, prompts, output_tokens=length, repeats=repeats, console=console,
            baseline=contestants[0].name,
        )  # fmt: skip
        conditions.append(record["conditions"])
        for mode in modes:
            points += _points(record["modes"][mode.name], mode, length, sizes)
    return {
        "points": [_as_record(point) for point in points],
        "best": best(points),
        "conditions": conditions,
    }


def _points(found: dict[str, Any], mode: Mode, length: int, sizes: Sequence[int]) -> list[Point]:
    parts = {**found["by_task"], ALL: {**found["all"], "latency": found["latency"]}}
    points = []
    for task, part in parts.items():
        plain = part["latency"]["plain"]["effective_tps_with_bonus"]
        for size in sizes:
            name = f"block {size}"
            rate = part["latency"][name]["effective_tps_with_bonus"]
            per_step = part["contestants"][name]["tokens_per_step"]["value"]
            setting = Setting(size, mode.verification if mode.temperature else None)
            points.append(Point(task, mode.temperature, length, setting, rate, plain, per_step))
    return points


def best(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each temperature, output length and task, the fastest setting, as generation defaults.

    Where plain decoding is the faster, `use_drafter` is false: no setting pays there.
    """
    groups: dict[tuple[float, int, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.temperature, point.output_tokens, point.task), []).append(point)
    found = []
    for (temperature, length, task), group in groups.items():
        first = max(group, key=lambda point: point.tokens_per_second)
        found.append(
            {
                "task": task,
                "temperature": temperature,
                "output_tokens": length,
                "generation_defaults": first.setting.defaults(),
                "tokens_per_step": first.tokens_per_step,
                "speed_up": first.tokens_per_second / first.plain_tokens_per_second,
                "use_drafter": first.tokens_per_second > first.plain_tokens_per_second,
            }
        )
    return found


def _as_record(point: Point) -> dict[str, Any]:
    return {**vars(point), "setting": vars(point.setting)}


def show(record: dict[str, Any], console: Console) -> None:
    """Print the best setting of each task and condition."""
    table = Table("task", "temperature", "output tokens", "best setting", "tokens/step", "speed-up", "use the drafter")
    for one in record["best"]:
        setting = ", ".join(f"{key}={value}" for key, value in one["generation_defaults"].items())
        pays = "yes" if one["use_drafter"] else "no: plain decoding is faster here"
        table.add_row(
            one["task"], f"{one['temperature']:g}", str(one["output_tokens"]), setting,
            f"{one['tokens_per_step']:.2f}", f"{one['speed_up']:.2f}", pays,
        )  # fmt: skip
    console.print(table)
