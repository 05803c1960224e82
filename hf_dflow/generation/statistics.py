"""Every count and ratio of speculative decoding, defined once. Names follow vLLM's where it has one."""

from collections import Counter
from dataclasses import dataclass, field
from statistics import pstdev


@dataclass
class AcceptanceStatistics:
    """What happened in the steps of one call, or of one row where it stands in `per_row`.

    A *step* drafts at least one token and verifies it with one target forward. Prefill and forwards without a draft are
    target forwards, not steps. In a batch's total the lists of steps are those of its rows one after the other, and a
    forward that serves several rows counts once; each of these rows counts it as its own.

    Args:
        per_step_accepted (`list[int]`): Accepted drafts that entered the output, each step; the bonus is not counted.
        per_step_drafted (`list[int]`): Drafts verified, each step.
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

    def record(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Count one target forward: `drafted` drafts verified, `emitted` tokens output, `accepted` of them drafts."""
        self.num_target_forwards += 1
        self.num_output_tokens += emitted
        if drafted:
            self.num_draft_forwards += 1
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)

    @classmethod
    def total(
        cls, rows: list["AcceptanceStatistics"], *, num_target_forwards: int, num_draft_forwards: int
    ) -> "AcceptanceStatistics":
        """The statistics of a batch of `rows`, given the forwards that were really run."""
        return cls(
            per_step_accepted=[length for row in rows for length in row.per_step_accepted],
            per_step_drafted=[length for row in rows for length in row.per_step_drafted],
            predictions=[prediction for row in rows for prediction in row.predictions],
            num_target_forwards=num_target_forwards,
            num_draft_forwards=num_draft_forwards,
            num_output_tokens=sum(row.num_output_tokens for row in rows),
            verification=rows[0].verification,
            lossless=all(row.lossless for row in rows),
            per_row=rows,
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
    def num_accepted_draft_tokens(self) -> int:
        """Drafts that were accepted and entered the output."""
        return sum(self.per_step_accepted)

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
        """Mean accepted length plus the bonus (papers: τ; vLLM: mean acceptance length)."""
        return self.mean_accepted_length + 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's name for `tokens_per_step`."""
        return self.tokens_per_step

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts over drafts."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def wasted_ratio(self) -> float:
        """Share of the drafts that did not enter the output."""
        return 1.0 - self.draft_acceptance_rate

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many steps accepted 0, 1, … drafts."""
        counts = Counter(self.per_step_accepted)
        return [counts[length] for length in range(max(self.per_step_drafted, default=0) + 1)]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of all steps whose accepted length reaches position 1, 2, … (unconditional, as in vLLM)."""
        longest = max(self.per_step_drafted, default=0)
        reached = [sum(a >= i for a in self.per_step_accepted) for i in range(1, longest + 1)]
        return [count / self.num_spec_steps for count in reached]

    @property
    def conditional_acceptance_rate_per_position(self) -> list[float | None]:
        """Of the steps that drafted position 1, 2, … and accepted all drafts before it, the share that accepted it.

        `None` where no step came so far.
        """
        rates: list[float | None] = []
        steps = list(zip(self.per_step_accepted, self.per_step_drafted, strict=True))
        for position in range(1, max(self.per_step_drafted, default=0) + 1):
            tried = [accepted for accepted, drafted in steps if drafted >= position and accepted >= position - 1]
            rates.append(sum(accepted >= position for accepted in tried) / len(tried) if tried else None)
        return rates

    @property
    def target_forwards_per_token(self) -> float:
        """Target forwards, prefill included, over output tokens; plain decoding needs 1."""
        return self.num_target_forwards / self.num_output_tokens if self.num_output_tokens else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.tokens_per_step:.2f} tokens per step ({self.mean_accepted_length:.2f} accepted drafts + 1 bonus), "
            f"{self.draft_acceptance_rate:.1%} of {self.num_draft_tokens} drafts accepted, "
            f"{self.num_target_forwards} target forwards for {self.num_output_tokens} tokens"
        )
        return text if self.lossless else f"{text}; LOSSY acceptance: the text may differ from the target's own"
