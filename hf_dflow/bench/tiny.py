"""The tiny pair: small enough to travel with the package; for tests and first steps."""

from pathlib import Path

__all__ = ["TINY_DRAFTER", "TINY_PROMPTS", "TINY_TARGET"]  # the examples' way to the pair

TINY_PAIR = Path(__file__).parent.parent / "drafters" / "tiny-airports-b8"
TINY_TARGET, TINY_DRAFTER = TINY_PAIR / "target", TINY_PAIR / "drafter"
TINY_PROMPTS = Path(__file__).with_name("tiny_prompts.json")  # requests that no drafter was trained on
