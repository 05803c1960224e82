"""`hf-dflow bench sweep`: which block size and verification rule to use for which task, on one's own machine."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_dflow import DFlowGenerationConfig
from hf_dflow.bench import suite
from hf_dflow.bench.evaluation import modes_of
from hf_dflow.bench.runners import Contestant, Mode, Pair
from hf_dflow.bench.workloads import ALL_TASKS, Prompt
from hf_dflow.console import print_table, write_json
from hf_dflow.errors import DFlowError

RECORD = "sweep.json"
HEADINGS = ("task", "T", "tokens", "at a time"), ("best setting", "tokens/step", "speed-up", "use the drafter")


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
    concurrency: int
    setting: Setting
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_step: float


def split_block_sizes(pair: Pair, block_sizes: Sequence[int]) -> tuple[list[int], dict[str, str]]:
    """The block sizes that the drafter drafts, and why each other one is left out.

    Raises:
        DFlowError: A number is no block size, or no one is left.
    """
    longest = pair.drafter.config.drafts_per_block + 1
    allowed = [size for size in sorted(set(block_sizes)) if 2 <= size <= longest]
    if not allowed or min(block_sizes) < 2:
        raise DFlowError(f"block size {', '.join(map(str, block_sizes))}: this drafter allows 2 … {longest}")
    reason = f"this drafter drafts blocks of {longest} at most"
    return allowed, {str(size): reason for size in sorted(set(block_sizes)) if size > longest}


def sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    block_sizes: Sequence[int],
    verifications: Sequence[str],
    temperatures: Sequence[float],
    output_tokens: Sequence[int],
    concurrencies: Sequence[int] = (1,),
    repeats: int = 1,
    console: Console | None = None,
    workload: str = "prompts of the caller",
) -> dict[str, Any]:
    """Measure every combination; all block sizes of a condition by turns on each prompt, plain decoding among them.

    Returns:
        `dict`: For JSON: `points`, `best` by condition and task, `left_out` block sizes, `conditions` of each run.

    Raises:
        DFlowError: A value that cannot be measured, before anything is.
    """
    sizes, left_out = split_block_sizes(pair, block_sizes)
    modes_of(temperatures, verifications)
    if min((*output_tokens, *concurrencies), default=0) < 1:
        raise DFlowError("--output-tokens and --concurrency must be 1 or more")
    contestants = [Contestant(f"block {size}", pair.drafter, num_draft_tokens=size - 1) for size in sizes]
    points: list[Point] = []
    conditions = []
    loads = list(itertools.product(dict.fromkeys(output_tokens), dict.fromkeys(concurrencies)))
    for temperature in dict.fromkeys(temperatures):
        modes = modes_of([temperature], verifications)
        for length, concurrency in loads:
            record = suite.run(
                pair, contestants, modes, prompts, output_tokens=length, concurrency=concurrency, repeats=repeats,
                console=console, baseline=contestants[0].name, workload=workload, with_memory=False,
            )  # fmt: skip
            conditions.append(record["conditions"])
            for mode in modes:
                points += _points(record["modes"][mode.name], mode, length, concurrency, sizes)
    return {
        "points": [_as_record(point) for point in points],
        "best": best(points),
        "left_out": left_out,
        "conditions": conditions,
    }


def _points(found: dict[str, Any], mode: Mode, length: int, concurrency: int, sizes: Sequence[int]) -> list[Point]:
    parts = {**found["by_task"], ALL_TASKS: {**found["all"], "latency": found["latency"]}}
    points = []
    for task, part in parts.items():
        plain = part["latency"]["plain"]["effective_tps_with_bonus"]
        for size in sizes:
            name = f"block {size}"
            rate = part["latency"][name]["effective_tps_with_bonus"]
            per_step = part["contestants"][name]["tokens_per_step"]["value"]
            setting = Setting(size, mode.verification if mode.temperature else None)
            points.append(Point(task, mode.temperature, length, concurrency, setting, rate, plain, per_step))
    return points


def best(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each temperature, output length, concurrency and task, the fastest setting, as generation defaults.

    Where plain decoding is the faster, `use_drafter` is false: no setting pays there.
    """
    groups: dict[tuple[float, int, int, str], list[Point]] = {}
    for point in points:
        condition = (point.temperature, point.output_tokens, point.concurrency, point.task)
        groups.setdefault(condition, []).append(point)
    found = []
    for (temperature, length, concurrency, task), group in groups.items():
        first = max(group, key=lambda point: point.tokens_per_second)
        found.append(
            {
                "task": task,
                "temperature": temperature,
                "output_tokens": length,
                "concurrency": concurrency,
                "generation_defaults": first.setting.defaults(),
                "tokens_per_step": first.tokens_per_step,
                "speed_up": first.tokens_per_second / first.plain_tokens_per_second,
                "use_drafter": first.tokens_per_second > first.plain_tokens_per_second,
            }
        )
    return found


def _as_record(point: Point) -> dict[str, Any]:
    return {**vars(point), "setting": vars(point.setting)}


def write(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the record, and a file for each task and condition in which the drafter pays.

    Such a file is read by `DFlowGenerationConfig.from_pretrained(folder, name)`. Where plain decoding is the faster
    there is none, and one of an earlier sweep is removed.

    Returns:
        `list[Path]`: The files of generation defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in record["best"]:
        path = folder / file_name(one)
        if not one["use_drafter"]:
            path.unlink(missing_ok=True)
            continue
        mode = Mode(one["temperature"])
        DFlowGenerationConfig(**mode.options(), **one["generation_defaults"]).save_pretrained(folder, path.name)
        written.append(path)
    files = {"files": [path.name for path in written]}
    write_json(folder / RECORD, {**record, **files})
    return written


def file_name(one: dict[str, Any]) -> str:
    """Of the generation defaults of one entry of `best`."""
    task = re.sub(r"[^a-z0-9]+", "-", one["task"].lower()).strip("-")
    if task.replace("-", " ") != one["task"]:  # others come to the same: "C++" and "C#", any two in another script
        task = f"{task or 'task'}-{hashlib.sha256(one['task'].encode()).hexdigest()[:6]}"
    return f"{task}-t{one['temperature']:g}-{one['output_tokens']}-tokens-{one['concurrency']}-at-a-time.json"


def show(record: dict[str, Any], console: Console) -> None:
    """Print the best setting of each task and condition, and what was not measured."""
    rows = []
    for one in record["best"]:
        setting = ", ".join(f"{key}={value}" for key, value in one["generation_defaults"].items())
        pays = "yes" if one["use_drafter"] else "no: plain decoding is faster here"
        condition = [one["task"], f"{one['temperature']:g}", str(one["output_tokens"]), str(one["concurrency"])]
        rows.append([*condition, setting, f"{one['tokens_per_step']:.2f}", f"{one['speed_up']:.2f}", pays])
    for size in record["left_out"]:
        rows.append(["all", "all", "all", "all", f"block {size} not run", "–", "–", "–"])
    print_table(console, "the fastest setting", *HEADINGS, rows)
    for size, reason in record["left_out"].items():
        console.print(Text(f"block {size} was not run: {reason}", style="yellow"))
