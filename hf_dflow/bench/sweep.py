"""`hf-dflow bench sweep`: which block size and verification rule to use for which task, on this machine."""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_dflow.bench import comparison
from hf_dflow.bench.intervals import MIN_ITEMS, with_interval
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import Contestant, Mode, modes_of
from hf_dflow.bench.workloads import Prompt
from hf_dflow.console import Presentation, Remark, ResultTable, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import DFlowGenerationConfig

RECORD = "sweep.json"
KEYS = ("task", "T", "tokens", "at a time")
MEASURES = ("best setting", "n", "tokens/step", "tokens/forward", "speed-up [95%]", "use the drafter")


@dataclass(frozen=True)
class Point:
    """A setting on one task under one condition.

    Args:
        block_size (`int`): Anchor and verified drafts; the drafter drafts its full block anyway.
        verification (`str`, *optional*): "token" or "block"; `None` where nothing is sampled.
        tokens_per_second (`float`): Output tokens, prompt included in the time.
    """

    task: str
    temperature: float
    output_tokens: int
    concurrency: int
    block_size: int
    verification: str | None
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_step: float
    tokens_per_target_forward: float  # also over forwards in which the policy did not draft
    speed_up: Mapping[str, Any]  # over plain decoding, the median of paired runs: value, interval_95, n

    def as_record(self) -> dict[str, Any]:
        """The point for JSON, its setting apart from its figures."""
        fields = vars(self).copy()
        setting = {name: fields.pop(name) for name in ("block_size", "verification")}
        return {**fields, "setting": setting}

    def generation_defaults(self) -> dict[str, Any]:
        """The setting as fields of [`DFlowGenerationConfig`]."""
        rule = {} if self.verification is None else {"verification": self.verification}
        return {"num_draft_tokens": self.block_size - 1, **rule}


def split_block_sizes(pair: Pair, block_sizes: Sequence[int]) -> tuple[list[int], dict[str, str]]:
    """The block sizes that the drafter can draft, and why each other one is left out."""
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
    keep: Callable[[dict[str, Any]], Any] = lambda record: None,
) -> dict[str, Any]:
    """Measure every combination; all block sizes of a condition by turns on each prompt, and plain decoding.

    A `KeyboardInterrupt` after the first prompt of a condition ends the measuring, as in [`comparison.run`].

    Args:
        keep (`Callable`, *optional*): Called with the record after each condition.

    Returns:
        `dict`: For JSON: `points`, `best` by condition and task, `left_out` block sizes, `conditions` of each run, and
        `interrupted`.
    """
    sizes, left_out = split_block_sizes(pair, block_sizes)
    modes_of(temperatures, verifications)
    if min((*output_tokens, *concurrencies), default=0) < 1:
        raise DFlowError("--output-tokens and --concurrency must be 1 or more")
    contestants = [Contestant(_name(size), pair.drafter, num_draft_tokens=size - 1) for size in sizes]
    points: list[Point] = []
    conditions: list[dict[str, Any]] = []
    is_interrupted = False

    def record_so_far() -> dict[str, Any]:
        return {
            "points": [point.as_record() for point in points],
            "best": best(points),
            "left_out": left_out,
            "conditions": list(conditions),
            "interrupted": is_interrupted,
        }

    loads = list(itertools.product(dict.fromkeys(output_tokens), dict.fromkeys(concurrencies)))
    for temperature, (length, concurrency) in itertools.product(dict.fromkeys(temperatures), loads):
        modes = modes_of([temperature], verifications)
        try:
            record = comparison.run(
                pair,
                contestants,
                modes,
                prompts,
                output_tokens=length,
                concurrency=concurrency,
                repeats=repeats,
                console=console,
                baseline=contestants[0].name,
                workload=workload,
                with_memory=False,
            )
        except KeyboardInterrupt:
            if not points:
                raise
            is_interrupted = True
            break
        conditions.append(record["conditions"])
        for mode in modes:
            points += _points(record["modes"][mode.name], mode, length, concurrency, sizes)
        if record["interrupted"]:
            is_interrupted = True
            break
        keep(record_so_far())
    return record_so_far()


def _name(block_size: int) -> str:
    return f"block {block_size}"


def _points(measured: Mapping[str, Any], mode: Mode, length: int, concurrency: int, sizes: list[int]) -> list[Point]:
    points = []
    for task, part in comparison.parts_of(measured).items():
        rates = {name: times["effective_tps_with_bonus"] for name, times in part["latency"].items()}
        for size in sizes:
            points.append(
                Point(
                    task=task,
                    temperature=mode.temperature,
                    output_tokens=length,
                    concurrency=concurrency,
                    block_size=size,
                    verification=mode.verification if mode.temperature else None,
                    tokens_per_second=rates[_name(size)],
                    plain_tokens_per_second=rates["plain"],
                    tokens_per_step=part["contestants"][_name(size)]["tokens_per_step"]["value"],
                    tokens_per_target_forward=1.0 / part["latency"][_name(size)]["target_forwards_per_token"],
                    speed_up=part["latency"][_name(size)]["speed_up"],
                )
            )
    return points


def best(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each temperature, output length, concurrency and task, the fastest setting, as generation defaults.

    `use_drafter` is true where the whole 95% interval of its speed-up lies above 1, false where it lies below, and
    `None` where it holds 1 or where there are too few prompts for one.
    """
    groups: dict[tuple[float, int, int, str], list[Point]] = {}
    for point in points:
        condition = (point.temperature, point.output_tokens, point.concurrency, point.task)
        groups.setdefault(condition, []).append(point)
    fastest = [max(group, key=lambda point: point.tokens_per_second) for group in groups.values()]
    return [
        {
            "task": point.task,
            "temperature": point.temperature,
            "output_tokens": point.output_tokens,
            "concurrency": point.concurrency,
            "generation_defaults": point.generation_defaults(),
            "tokens_per_step": point.tokens_per_step,
            "tokens_per_target_forward": point.tokens_per_target_forward,
            "speed_up": point.speed_up,
            "use_drafter": _verdict(point.speed_up["interval_95"]),
        }
        for point in fastest
    ]


def _verdict(interval: Sequence[float] | None) -> bool | None:
    """Whether a speed-up with this interval is one; `None` if that is open."""
    if interval is None or interval[0] <= 1.0 <= interval[1]:
        return None
    return interval[0] > 1.0


def _recommendation(entry: Mapping[str, Any]) -> str:
    if not isinstance(entry["speed_up"], Mapping):
        return "not known: recorded without an interval"
    if entry["use_drafter"]:
        return "yes"
    if entry["use_drafter"] is False:
        return "no: plain decoding is faster here"
    few = entry["speed_up"]["interval_95"] is None
    return f"not known: fewer than {MIN_ITEMS} prompts" if few else "not known: the interval holds 1"


def write(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the record, and a file of generation defaults for each task and condition in which the drafter pays.

    `DFlowGenerationConfig.from_pretrained(folder, name)` reads such a file. Where the drafter does not pay, or where
    that is open, there is none, and one of an earlier sweep is removed.

    Returns:
        `list[Path]`: The files of generation defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in record["best"]:
        path = folder / file_name(entry)
        if not entry["use_drafter"]:
            path.unlink(missing_ok=True)
            continue
        options = Mode(entry["temperature"]).options()
        DFlowGenerationConfig(**options, **entry["generation_defaults"]).save_pretrained(folder, path.name)
        written.append(path)
    write_json(folder / RECORD, {**record, "files": [path.name for path in written]})
    return written


def file_name(entry: Mapping[str, Any]) -> str:
    """The file of the generation defaults of one entry of `best`."""
    task = re.sub(r"[^a-z0-9]+", "-", entry["task"].lower()).strip("-")
    if task.replace("-", " ") != entry["task"]:  # another task may give the same name: "C++" and "C#"
        task = f"{task or 'task'}-{hashlib.sha256(entry['task'].encode()).hexdigest()[:6]}"
    length, concurrency = entry["output_tokens"], entry["concurrency"]
    return f"{task}-t{entry['temperature']:g}-{length}-tokens-{concurrency}-at-a-time.json"


def present(record: Mapping[str, Any]) -> Presentation:
    """The best setting of each task and condition, and what was not measured."""
    rows = []
    for entry in record["best"]:
        setting = ", ".join(f"{name}={value}" for name, value in entry["generation_defaults"].items())
        condition = [entry["task"], f"{entry['temperature']:g}", str(entry["output_tokens"]), str(entry["concurrency"])]
        rates = [
            f"{entry[key]:.2f}" if key in entry else "–" for key in ("tokens_per_step", "tokens_per_target_forward")
        ]
        # Earlier records hold a bare ratio, and no tokens per forward.
        is_bare = not isinstance(entry["speed_up"], Mapping)
        speed_up = f"{entry['speed_up']:.2f}" if is_bare else with_interval(entry["speed_up"])
        count = "–" if is_bare else str(entry["speed_up"]["n"])
        rows.append([*condition, setting, count, *rates, speed_up, _recommendation(entry)])
    nothing = ["–"] * (len(MEASURES) - 1)
    rows += [["all", "all", "all", "all", f"block {size} not run", *nothing] for size in record["left_out"]]
    remarks = [Remark(f"block {size} was not run: {reason}", "yellow") for size, reason in record["left_out"].items()]
    if record.get("interrupted"):
        remarks.append(Remark("The sweep was interrupted: what was not finished is missing.", "yellow"))
    return Presentation("Sweep", [ResultTable("the fastest setting", KEYS, MEASURES, rows)], remarks)
