"""What a step costs: given by the caller, or measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dflow.errors import UnsupportedGenerationError


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in seconds; only the ratios matter.

    Args:
        draft (`float`): One draft of a full block.
        verify (`tuple[float, ...]`): A target forward over 1, 2, … N + 1 tokens, for N drafts.
    """

    draft: float
    verify: tuple[float, ...]

    @classmethod
    def read(cls, value: Any, num_drafts: int) -> "StepCosts":
        """From a [`StepCosts`] or a `{"draft": seconds, "verify": [seconds, …]}`, for steps of `num_drafts` drafts.

        Raises:
            UnsupportedGenerationError: `value` is neither, or has too few or impossible numbers.
        """
        if isinstance(value, Mapping) and {"draft", "verify"} == set(value):
            is_list = isinstance(value["verify"], Sequence) and not isinstance(value["verify"], str)
            value = cls(value["draft"], tuple(value["verify"])) if is_list else value
        if not isinstance(value, cls) or not all(map(_is_duration, (value.draft, *value.verify))):
            raise UnsupportedGenerationError(
                f'step_costs={value!r}; give {{"draft": seconds, "verify": [seconds of 1, 2, … tokens]}}, or leave it '
                "out to have it measured."
            )
        if len(value.verify) <= num_drafts or min(value.verify) <= 0:
            raise UnsupportedGenerationError(
                f"step_costs has {len(value.verify)} times of verification; {num_drafts} drafts need "
                f"{num_drafts + 1}, all above 0."
            )
        return value


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")
