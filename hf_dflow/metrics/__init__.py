"""Metrics of speculative decoding as modules of the `evaluate` library, and what they share.

`evaluate.load(hf_dflow.metrics.folder("acceptance"))` loads one; nothing is downloaded. All of them take two lists with
one entry a step, `per_step_accepted` and `per_step_drafted` of [`AcceptanceStatistics`], which defines every ratio.
Where a text's end cut a step, what was emitted and judged there is given as further lists of it, `emitted`, `offered`
and `positions`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

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


def report_acceptance(
    total_drafted: int, total_accepted: int, wall_seconds: float, total_offered: int | None = None
) -> AcceptanceReport:
    """Whether drafting paid, from three totals of a run.

    Args:
        total_drafted (`int`): Drafts that were verified, 1 or more.
        total_accepted (`int`): Drafts that entered the output.
        wall_seconds (`float`): What the run took.
        total_offered (`int`, *optional*, defaults to `total_drafted`): Drafts that were judged; those behind the end of
            a text were verified in vain.

    Returns:
        `dict`: `accept_rate`, accepted over judged drafts; `effective_tps`, accepted drafts a second, the bonus tokens
        not counted; `wasted_ratio`, the share of drafts that did not enter the output.

    Raises:
        DFlowError: The totals cannot belong to a run.
    """
    total_offered = total_drafted if total_offered is None else total_offered
    if not 0 <= total_accepted <= total_offered <= total_drafted or not total_offered:
        raise DFlowError(
            f"total_drafted={total_drafted}, total_offered={total_offered}, total_accepted={total_accepted}; give 1 or "
            "more drafts, of which no more than all were accepted"
        )
    check_seconds(wall_seconds)
    return {
        "accept_rate": total_accepted / total_offered,
        "effective_tps": total_accepted / wall_seconds,
        "wasted_ratio": (total_drafted - total_accepted) / total_drafted,
    }


def check_seconds(wall_seconds: float) -> None:
    """Raise [`DFlowError`] unless `wall_seconds` is a time that something can take."""
    if not 0 < wall_seconds < float("inf"):
        raise DFlowError(f"wall_seconds={wall_seconds}; give the seconds that the run took, more than 0")


def statistics_of(
    accepted: Sequence[int],
    drafted: Sequence[int],
    *,
    emitted: Sequence[int] | None = None,
    offered: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> AcceptanceStatistics:
    """The statistics of steps given as lists.

    Args:
        accepted (`list[int]`): Accepted drafts of each step, the bonus not counted.
        drafted (`list[int]`): Drafts verified in each step, 1 or more.
        emitted (`list[int]`, *optional*): Tokens that each step put into the output, by default its accepted drafts
            and one; the end of a text may cut the one off.
        offered (`list[int]`, *optional*, defaults to `drafted`): Drafts that were judged.
        positions (`list[int]`, *optional*, defaults to `offered`): Positions they stand at; of trees fewer than drafts.

    Raises:
        DFlowError: The lists are empty or of different lengths, or a step accepted more than it drafted.
    """
    emitted = [kept + 1 for kept in accepted] if emitted is None else emitted
    offered = drafted if offered is None else offered
    positions = offered if positions is None else positions
    if not accepted or len(accepted) != len(drafted):
        raise DFlowError(f"{len(accepted)} accepted lengths for {len(drafted)} drafted ones; give one of each a step")
    for step, (kept, tried) in enumerate(zip(accepted, drafted, strict=True)):
        if not 0 <= kept <= tried or not tried:
            raise DFlowError(
                f"step {step} accepted {kept} of {tried} drafts; give 0 … all of 1 or more, the bonus not counted"
            )
    lists = {"drafted": drafted, "emitted": emitted, "offered": offered, "positions": positions}
    for name, counts in lists.items():
        if len(counts) != len(accepted):
            raise DFlowError(f"{len(counts)} entries of {name} for {len(accepted)} steps; give one of each a step")
    for step, (kept, tried, tokens, judged, places) in enumerate(zip(accepted, *lists.values(), strict=True)):
        if not (kept <= tokens <= kept + 1 and kept <= places <= judged <= tried and tokens):
            raise DFlowError(
                f"step {step} emitted {tokens} tokens with {kept} accepted of {tried} drafts, {judged} of them judged "
                f"at {places} positions; give as many tokens as accepted drafts or one more, at least one, and no more "
                "judged drafts than drafts, nor positions than those"
            )
    steps: dict[str, Any] = {f"per_step_{name}": [int(count) for count in counts] for name, counts in lists.items()}
    return AcceptanceStatistics(per_step_accepted=[int(count) for count in accepted], **steps)
