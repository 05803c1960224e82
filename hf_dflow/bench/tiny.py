"""The tiny pair: the lab's target and drafter, small enough to travel with the package; for tests and first steps."""

from pathlib import Path

from hf_dflow.checkpoints.names import check_name
from hf_dflow.errors import DFlowError

__all__ = ["TINY_DRAFTER", "TINY_PROMPTS", "TINY_TARGET", "given_or_tiny"]

TINY_PAIR = Path(__file__).parent.parent / "drafters" / "tiny-airports-b8"
TINY_TARGET, TINY_DRAFTER = TINY_PAIR / "target", TINY_PAIR / "drafter"
TINY_PROMPTS = Path(__file__).with_name("tiny_prompts.json")  # requests that no drafter was trained on


def given_or_tiny(
    tiny: bool, target: str | None, drafter: str | Path | None
) -> tuple[str | None, str | None, Path | None]:
    """Target, drafter and prompts of the tiny pair, or what was named and no prompts.

    Raises:
        DFlowError: Both were asked for, or what was named can neither be a folder nor a Hub name.
    """
    if not tiny:
        for name in filter(None, (target, drafter)):
            check_name(name)
        return target, None if drafter is None else str(drafter), None
    if target or drafter:
        raise DFlowError("--tiny brings its own target and drafter; leave --target and --drafter out")
    return str(TINY_TARGET), str(TINY_DRAFTER), TINY_PROMPTS
