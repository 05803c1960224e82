"""Metrics of speculative decoding as modules of the `evaluate` library, and what they share.

`evaluate.load(hf_dflow.metrics.folder("acceptance"))` loads one; nothing is downloaded. All of them take two lists with
one entry a step, `per_step_accepted` and `per_step_drafted` of [`AcceptanceStatistics`], which defines every ratio.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from hf_dflow.errors import DFlowError
from hf_dflow.generation.statistics import AcceptanceStatistics

METRICS = ("acceptance", "acceptance_per_position", "accepted_length_spread")


class AcceptanceReport(TypedDict):
    """What [`report_acceptance`] returns."""

    accept_rate: float
    effective_tps: float
    wasted_ratio: float


def folder(name: str) -> str:
    """Where `evaluate.load` finds the metric `name`.

    Raises:
        DFlowError: There is no such metric.
    """
    if name not in METRICS:
        raise DFlowError(f"there is no metric {name!r}; use one of {', '.join(METRICS)}")
    return str(Path(__file__).parent / name)


def report_acceptance(total_drafted: int, total_accepted: int, wall_seconds: float) -> AcceptanceReport:
    """Whether drafting paid, from three totals of a run.

    Args:
        total_drafted (`int`): Drafts that were verified, 1 or more.
        total_accepted (`int`): Drafts that entered the output.
        wall_seconds (`float`): What the run took.

    Returns:
        `dict`: `accept_rate`, accepted over drafted; `effective_tps`, accepted drafts a second, the bonus tokens not
        counted; `wasted_ratio`, the share of drafts that did not enter the output.

    Raises:
        DFlowError: The totals cannot belong to a run.
    """
    if not 0 <= total_accepted <= total_drafted or not total_drafted:
        raise DFlowError(
            f"total_drafted={total_drafted}, total_accepted={total_accepted}; give 1 or more drafts, of which no more "
            "than all were accepted"
        )
    check_seconds(wall_seconds)
    return {
        "accept_rate": total_accepted / total_drafted,
        "effective_tps": total_accepted / wall_seconds,
        "wasted_ratio": (total_drafted - total_accepted) / total_drafted,
    }


def check_seconds(wall_seconds: float) -> None:
    """Raise [`DFlowError`] unless `wall_seconds` is a time that something can take."""
    if not 0 < wall_seconds < float("inf"):
        raise DFlowError(f"wall_seconds={wall_seconds}; give the seconds that the run took, more than 0")


def statistics_of(accepted: Sequence[int], drafted: Sequence[int]) -> AcceptanceStatistics:
    """The statistics of steps given as two lists.

    Args:
        accepted (`list[int]`): Accepted drafts of each step, the bonus not counted.
        drafted (`list[int]`): Drafts verified in each step, 1 or more.

    Raises:
        DFlowError: The lists are empty or of different lengths, or a step accepted more than it drafted.
    """
    if not accepted or len(accepted) != len(drafted):
        raise DFlowError(f"{len(accepted)} accepted lengths for {len(drafted)} drafted ones; give one of each a step")
    for step, (kept, tried) in enumerate(zip(accepted, drafted, strict=True)):
        if not 0 <= kept <= tried or not tried:
            raise DFlowError(
                f"step {step} accepted {kept} of {tried} drafts; give 0 … all of 1 or more, the bonus not counted"
            )
    return AcceptanceStatistics(per_step_accepted=[int(count) for count in accepted], per_step_drafted=list(drafted))
