"""The protocol of a row's draft policy, and the default: draft unless the drafter is of no use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_dflow.generation.step import DraftTree

PATIENCE = 32  # steps without one accepted draft, after which a row pauses
FIRST_PAUSE = 8  # forwards without drafts before the drafter is tried again …
LONGEST_PAUSE = 64  # … and at most, as each trial in vain doubles the pause

# (slot from 0, token before it) -> the slot's likeliest tokens and their log-probabilities, in falling order
Expand = Callable[[int, int], tuple[list[int], list[float]]]


class DraftPolicy:
    """Decides for one row how much each step drafts; this one always drafts a full chain."""

    is_off: bool = False  # for the rest of the call
    reads_confidences: bool = False  # `num_verified` is asked, which costs one more wait for the device
    grows_trees: bool = False  # `grow` is asked, and what it returns is verified in place of a chain

    def may_draft(self) -> bool:
        """Whether the next step drafts. Asked once for each step."""
        return not self.is_off

    def num_verified(self, confidences: Sequence[float]) -> int:
        """How many drafts of a chain with these confidences ([`Proposal.confidences`]) to verify."""
        return len(confidences)

    def grow(self, expand: Expand, anchor_id: int, depth: int) -> DraftTree:
        """The tree of at most `depth` drafts in a path to verify; only where `grows_trees`."""
        raise NotImplementedError

    def learn(self, verified: int, accepted: int) -> bool:
        """Take note of a step.

        Args:
            verified (`int`): Drafts that were verified; 0 where none was.
            accepted (`int`): How many of them were accepted.

        Returns:
            `bool`: Whether the row stops drafting for a while for the first time, which is worth a warning.
        """
        return False

    def pause(self) -> None:
        """Do not draft for a while."""


@dataclass
class BackOff(DraftPolicy):
    """Pauses a row whose drafts are never accepted.

    The text never depends on it; each drafted block costs a drafter forward and a longer target forward. A drafter that
    is of no use for `PATIENCE` steps is tried once a pause, so that it costs a row of n tokens at most
    `PATIENCE + 4 + n / LONGEST_PAUSE` drafter forwards; one that turns good is back after at most `LONGEST_PAUSE` more
    tokens. One accepted draft ends the waiting.
    """

    in_vain: int = 0  # drafted steps since the last accepted draft
    pause_left: int = 0
    next_pause: int = FIRST_PAUSE

    def may_draft(self) -> bool:
        if self.is_off:
            return False
        if self.pause_left:
            self.pause_left -= 1
            return False
        return True

    def learn(self, verified: int, accepted: int) -> bool:
        if not verified:
            return False
        if accepted:
            self.in_vain, self.next_pause = 0, FIRST_PAUSE
            return False
        self.in_vain += 1
        if self.in_vain < PATIENCE:
            return False
        self.pause()
        return self.in_vain == PATIENCE

    def pause(self) -> None:
        """Do not draft for a while, each time for longer until a draft is accepted."""
        self.pause_left = self.next_pause
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)


class HowMuch(DraftPolicy):
    """Base of the policies that decide how much is verified, and leave to `pausing` whether a step drafts at all."""

    def __init__(self, pausing: DraftPolicy):
        self.pausing = pausing

    def may_draft(self) -> bool:
        return not self.is_off and self.pausing.may_draft()

    def learn(self, verified: int, accepted: int) -> bool:
        return self.pausing.learn(verified, accepted)
