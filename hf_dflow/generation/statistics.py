"""Every count and ratio of speculative decoding, defined once. Names follow vLLM's where it has one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import pstdev
from typing import Any

import numpy as np


def tokens_per_step(emitted: Any, steps: Any) -> Any:
    """Tokens that drafting steps emitted, over these steps: the definition behind every figure of this name.

    Neither the prefill's token counts nor those of forwards without drafts. Where a step's text was cut (by EOS, a stop
    string or a limit), only what was emitted counts.

    Args:
        emitted, steps (`int`, or `np.ndarray` of equal shape): Counts.

    Returns:
        `float`, or `np.ndarray`: 1 where there was no step, as in plain decoding.
    """
    rates = np.divide(emitted, steps, out=np.ones(np.shape(steps)), where=np.asarray(steps) > 0)
    return rates if np.ndim(rates) else float(rates)


@dataclass
class AcceptanceStatistics:
    """What happened in the steps of one call, or of one row where it stands in `per_row`.

    A *step* drafts at least one token and verifies it with one target forward. Prefill and forwards without a draft are
    target forwards, not steps. In a batch's total the lists of steps are those of its rows one after the other, and a
    forward that serves several rows counts once; each of these rows counts it as its own.

    Args:
        per_step_accepted (`list[int]`): Accepted drafts that entered the output, each step; the bonus is not counted.
        per_step_drafted (`list[int]`): Drafts verified, each step.
        per_step_emitted (`list[int]`, *optional*): Tokens that each step put into the output; the accepted drafts and
            the bonus, unless the text was cut there.
        per_step_offered (`list[int]`, *optional*): Drafts of each step that were judged: all, but for those behind the
            end of the text.
        per_step_positions (`list[int]`, *optional*): How many positions these stand at. A tree has several drafts for a
            position, of which only the path that was followed counts.
        num_target_forwards (`int`): Forwards of the target, prefill included; in chunks it counts once.
        num_draft_forwards (`int`): Forwards of the drafter.
        num_output_tokens (`int`): Tokens that entered the output.
        verification (`str`): The rule: "greedy", "token" or "block".
        lossless (`bool`): `False` where a relaxed rule was asked for.
        predictions (`list[tuple[float, bool]]`): Where step lengths adapt: of each draft that was judged, the
            probability that it was given, once those before it were accepted, and whether it was.
        per_row (`list[AcceptanceStatistics]`): The rows of a batch, in the total only.
    """

    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    num_output_tokens: int = 0
    verification: str = "greedy"
    lossless: bool = True
    predictions: list[tuple[float, bool]] = field(default_factory=list)
    per_row: list["AcceptanceStatistics"] = field(default_factory=list)
    per_step_emitted: list[int] = field(default_factory=list)
    per_step_offered: list[int] = field(default_factory=list)
    per_step_positions: list[int] = field(default_factory=list)

    def __post_init__(self):
        # Without them, no step was cut.
        self.per_step_emitted = self.per_step_emitted or [accepted + 1 for accepted in self.per_step_accepted]
        self.per_step_offered = self.per_step_offered or list(self.per_step_drafted)
        self.per_step_positions = self.per_step_positions or list(self.per_step_offered)

    def record(
        self, *, drafted: int, accepted: int, emitted: int, offered: int | None = None, positions: int | None = None
    ) -> None:
        """Count one target forward.

        Args:
            drafted (`int`): Drafts verified.
            accepted, emitted (`int`): Tokens that entered the output: drafts only, and all.
            offered (`int`, *optional*, defaults to `drafted`): Drafts that were judged.
            positions (`int`, *optional*, defaults to `offered`): Positions they stand at.
        """
        self.num_target_forwards += 1
        self.num_output_tokens += emitted
        if drafted:
            offered = drafted if offered is None else offered
            self.num_draft_forwards += 1
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)
            self.per_step_emitted.append(emitted)
            self.per_step_offered.append(offered)
            self.per_step_positions.append(offered if positions is None else positions)

    @classmethod
    def total(
        cls, rows: list["AcceptanceStatistics"], *, num_target_forwards: int, num_draft_forwards: int
    ) -> "AcceptanceStatistics":
        """The statistics of a batch of `rows`, given the forwards that were really run."""
        return cls(
            **_concatenated(rows),
            num_target_forwards=num_target_forwards,
            num_draft_forwards=num_draft_forwards,
            num_output_tokens=sum(row.num_output_tokens for row in rows),
            verification=rows[0].verification,
            lossless=all(row.lossless for row in rows),
            per_row=rows,
        )

    @classmethod
    def pooled(cls, answers: Iterable["AcceptanceStatistics"]) -> "AcceptanceStatistics":
        """One record of all steps of separate calls, in which long answers weigh more than short ones."""
        answers = list(answers)
        return cls(
            **_concatenated(answers),
            num_target_forwards=sum(answer.num_target_forwards for answer in answers),
            num_draft_forwards=sum(answer.num_draft_forwards for answer in answers),
            num_output_tokens=sum(answer.num_output_tokens for answer in answers),
        )

    @property
    def num_spec_steps(self) -> int:
        """Steps with at least one draft."""
        return len(self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.per_step_drafted)

    @property
    def num_offered_draft_tokens(self) -> int:
        """Drafts that were judged: those behind the end of the text were verified in vain."""
        return sum(self.per_step_offered)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts that were accepted and entered the output."""
        return sum(self.per_step_accepted)

    @property
    def num_step_tokens(self) -> int:
        """Tokens that steps emitted: the output without the prefill's token and those of forwards without drafts."""
        return sum(self.per_step_emitted)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted drafts a step, bonus not counted."""
        return self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def accepted_length_std(self) -> float:
        """Standard deviation of the accepted length over steps."""
        return pstdev(self.per_step_accepted) if self.per_step_accepted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step (papers: τ); see [`tokens_per_step`]. 1 without any step."""
        return tokens_per_step(self.num_step_tokens, self.num_spec_steps)

    @property
    def mean_acceptance_length(self) -> float:
        """As vLLM counts: the mean accepted length and 1, also for a step whose bonus the end of the text cut off."""
        return self.mean_accepted_length + 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts over drafts that were judged."""
        return self.num_accepted_draft_tokens / self.num_offered_draft_tokens if self.num_offered_draft_tokens else 0.0

    @property
    def wasted_ratio(self) -> float:
        """Share of the verified drafts that did not enter the output."""
        wasted = self.num_draft_tokens - self.num_accepted_draft_tokens
        return wasted / self.num_draft_tokens if self.num_draft_tokens else 1.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many steps accepted 0, 1, … drafts."""
        counts = Counter(self.per_step_accepted)
        return [counts[length] for length in range(max(self.per_step_drafted, default=0) + 1)]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Of the steps in which position 1, 2, … was judged, the share whose accepted length reaches it.

        Unconditional as in vLLM, which however divides by all steps.
        """
        return [
            sum(accepted >= position for accepted in tried) / len(tried)
            for position, tried in self._accepted_by_position()
        ]

    @property
    def conditional_acceptance_rate_per_position(self) -> list[float | None]:
        """[`acceptance_rate_per_position`], of the steps only that accepted all drafts before the position.

        `None` where no step came so far.
        """
        rates: list[float | None] = []
        for position, of_steps in self._accepted_by_position():
            tried = [accepted for accepted in of_steps if accepted >= position - 1]
            rates.append(sum(accepted >= position for accepted in tried) / len(tried) if tried else None)
        return rates

    def _accepted_by_position(self) -> list[tuple[int, list[int]]]:
        """Each position, and the accepted lengths of the steps in which it was judged."""
        steps = list(zip(self.per_step_accepted, self.per_step_positions, strict=True))
        return [
            (position, [accepted for accepted, judged in steps if judged >= position])
            for position in range(1, max(self.per_step_positions, default=0) + 1)
        ]

    @property
    def target_forwards_per_token(self) -> float:
        """Target forwards, prefill included, over output tokens; plain decoding needs 1."""
        return self.num_target_forwards / self.num_output_tokens if self.num_output_tokens else 0.0

    @property
    def tokens_per_target_forward(self) -> float:
        """Output tokens over target forwards, prefill included; plain decoding has 1 (a batch: one for each row).

        Unlike tokens per step, it also counts the forwards in which a policy did not draft.
        """
        return self.num_output_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.tokens_per_step:.2f} tokens per step, {self.mean_accepted_length:.2f} of them accepted drafts, "
            f"{self.draft_acceptance_rate:.1%} of {self.num_offered_draft_tokens} drafts accepted, "
            f"{self.num_target_forwards} target forwards for {self.num_output_tokens} tokens"
        )
        return text if self.lossless else f"{text}; LOSSY acceptance: the text may differ from the target's own"


def _concatenated(parts: list[AcceptanceStatistics]) -> dict[str, Any]:
    """The lists of steps, those of one part after the other."""
    names = ("accepted", "drafted", "emitted", "offered", "positions")
    lists = {f"per_step_{name}": [n for part in parts for n in getattr(part, f"per_step_{name}")] for name in names}
    return {**lists, "predictions": [prediction for part in parts for prediction in part.predictions]}
