"""What `hf-dflow calibrate` fits for a drafter's decisions and its configuration keeps: a few numbers, checked here."""

import sys
from typing import Any

NUM_TRAITS = 8  # of a slot, from which the mixture's learned weight is made
SLOT_GROUPS = 3  # first, second, later
DRAFT_RULES = ("greedy", "sampled")


def fault_of(fitted: Any) -> str | None:
    """What is wrong with a drafter's `fitted_decisions`, or `None`.

    Args:
        fitted (`dict`): `{"mixture": [NUM_TRAITS numbers], "calibration": {rule: [SLOT_GROUPS pairs]}, "row_precision":
            {rule: number}}`; any key may be missing.
    """
    if not isinstance(fitted, dict) or not fitted.keys() <= {"mixture", "calibration", "row_precision"}:
        return "it may hold 'mixture', 'calibration' and 'row_precision', and nothing else"
    if "mixture" in fitted and not _is_table(fitted["mixture"], (NUM_TRAITS,)):
        return f"'mixture' must be {NUM_TRAITS} numbers"
    calibration = fitted.get("calibration", {})
    if not isinstance(calibration, dict) or not calibration.keys() <= set(DRAFT_RULES):
        return f"'calibration' may hold {' and '.join(map(repr, DRAFT_RULES))}, and nothing else"
    for rule, lines in calibration.items():
        if not _is_table(lines, (SLOT_GROUPS, 2)):
            return f"'calibration' for {rule} drafts must be {SLOT_GROUPS} pairs of numbers"
    precisions = fitted.get("row_precision", {})
    if not isinstance(precisions, dict) or not precisions.keys() <= set(DRAFT_RULES):
        return f"'row_precision' may hold {' and '.join(map(repr, DRAFT_RULES))}, and nothing else"
    for rule, value in precisions.items():
        if not _is_table(value, ()) or value <= 0:
            return f"'row_precision' for {rule} drafts must be a number above 0"
    return None


def _is_table(value: Any, shape: tuple[int, ...]) -> bool:
    if not shape:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and -sys.float_info.max <= value <= sys.float_info.max  # an int may be beyond any float
    return isinstance(value, list) and len(value) == shape[0] and all(_is_table(one, shape[1:]) for one in value)
