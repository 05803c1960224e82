"""When a row drafts: not past the drafter's positions, not with a broken drafter, and seldom with a useless one."""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PATIENCE = 32  # steps without one accepted draft, after which a row pauses
FIRST_PAUSE = 8  # forwards without drafts before the drafter is tried again …
LONGEST_PAUSE = 64  # … and at most, as each trial in vain doubles the pause


@dataclass
class DraftPolicy:
    """Decides for one row, from its past steps alone, whether the next one drafts.

    The text never depends on it; each drafted block costs a drafter forward and a longer target forward. A drafter that
    is of no use for `PATIENCE` steps is tried once a pause, so that it costs a row of n tokens at most
    `PATIENCE + 4 + n / LONGEST_PAUSE` drafter forwards; one that turns good is back after at most `LONGEST_PAUSE` more
    tokens. One accepted draft ends the waiting.
    """

    is_off: bool = False  # for good
    in_vain: int = 0  # drafted steps since the last accepted draft
    pause_left: int = 0
    next_pause: int = FIRST_PAUSE

    def may_draft(self) -> bool:
        """Whether the next step drafts. Asked once for each step."""
        if self.is_off:
            return False
        if self.pause_left:
            self.pause_left -= 1
            return False
        return True

    def learn(self, accepted: int) -> bool:
        """Take note of a drafted step; `True` where the row begins to pause for the first time."""
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


class Warnings:
    """What a call has to say about its drafter, each thing once."""

    def __init__(self):
        self._said: set[str] = set()

    def say(self, text: str, *args) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *args)
