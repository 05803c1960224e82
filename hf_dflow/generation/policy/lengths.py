"""How many drafts a step verifies: as many as are expected to pay, by a row's past steps and what a step costs.

Verifying more drafts takes time and helps only where all before them are accepted. Which drafts are accepted follows
from the drafter's own confidence, once it is calibrated on what verification decided. SpecDec++ (arXiv 2405.19715)
stops drafting by a learned acceptance predictor; a block drafter has drafted everything before the question arises, so
here the cut is made in what is verified.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_dflow.generation.policy.base import DraftPolicy, HowMuch
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.model.configuration import SLOT_GROUPS

BINS = 8  # of confidence
PRIOR_COUNT = 4.0  # judged drafts that the drafter's confidence is worth
ROW_PRECISION = 4.0  # of a row's own difficulty at first, where none was fitted: half a logit up or down is common
FORGET = 0.9  # of the yield of drafting, with each step
STALE = 0.95  # of what was judged, with each further draft of the same slot and confidence
LEAST_CONFIDENCE = 1e-4  # and 1 - LEAST_CONFIDENCE at most, so that its logit is finite
TRIAL = 6  # drafted steps before the first judgement whether drafting pays
AFTER_PAUSE = 0.25  # what a pause leaves of the past yield, so that a drafter that turned good is soon back


@dataclass
class LengthPlanner:
    """Chooses lengths for one row, from its past steps and the present drafts' confidence.

    Confidence follows from the draft law before anything was sampled, so a cut does not depend on the tokens it cuts:
    the text keeps the target's law, and greedy text does not change. Where `hf-dflow calibrate` fitted the drafter's
    confidence on other texts, a row learns how much easier or harder its own text is; otherwise it learns by slot and
    confidence.
    """

    costs: StepCosts
    calibration: Sequence[Sequence[float]] | None = None  # of `fitted_decisions`, for drafts of this kind
    accepted: list[list[float]] = field(default_factory=lambda: [[0.0] * BINS for _ in range(SLOT_GROUPS)])
    judged: list[list[float]] = field(default_factory=lambda: [[0.0] * BINS for _ in range(SLOT_GROUPS)])
    ease: float = 0.0  # how much better than calibrated this row's drafts are, in logits
    precision: float = ROW_PRECISION  # of that
    steps: int = 0
    explores: bool = False  # the next drafted step verifies at least one draft, or nothing would be learned any more
    tokens: float = 0.0  # of the last steps, and
    seconds: float = 0.0  # what they cost
    confidences: list[float] = field(default_factory=list)  # of the present block; empty where nothing was drafted
    predicted: list[float] = field(default_factory=list)  # acceptance probabilities of the present block
    outcomes: list[tuple[float, bool]] = field(default_factory=list)  # of each judged draft: predicted, and accepted

    def acceptance(self, slot: int, confidence: float) -> float:
        """Probability that the draft of `slot` (from 0) is accepted once all drafts before it are."""
        group, place = min(slot, SLOT_GROUPS - 1), min(BINS - 1, int(confidence * BINS))
        if self.calibration is not None:
            intercept, slope = self.calibration[group]
            return calibrated(confidence, intercept + self.ease, slope)
        accepted = self.accepted[group][place] + PRIOR_COUNT * confidence
        return accepted / (self.judged[group][place] + PRIOR_COUNT)

    def choose(self, confidences: Sequence[float]) -> int:
        """How many of the drafts with these confidences to verify: what maximises expected tokens per second."""
        self.confidences = list(confidences)
        self.predicted = [self.acceptance(slot, confidence) for slot, confidence in enumerate(confidences)]
        best, best_rate = 0, 1.0 / (self.costs.draft + self.costs.verify[0])
        expected, survives = 1.0, 1.0
        for slot, probability in enumerate(self.predicted):
            survives *= probability
            expected += survives
            rate = expected / (self.costs.draft + self.costs.verify[slot + 1])
            if rate > best_rate:
                best, best_rate = slot + 1, rate
        if self.explores and confidences:
            best = max(best, 1)
        self.explores = False
        return best

    def learn(self, verified: int, accepted: int) -> bool:
        """Take note of a step: drafts up to the first failure were judged, those behind were not.

        Returns:
            `bool`: Whether drafting should pause, as the last steps were slower than decoding without drafts.
        """
        if not self.confidences:
            return False
        for slot in range(min(verified, accepted + 1)):
            group, place = min(slot, SLOT_GROUPS - 1), min(BINS - 1, int(self.confidences[slot] * BINS))
            predicted, is_accepted = self.predicted[slot], slot < accepted
            self.outcomes.append((predicted, is_accepted))
            # One step of a normal approximation to the posterior of a logistic model's intercept (assumed density).
            self.precision += predicted * (1.0 - predicted)
            self.ease += (is_accepted - predicted) / self.precision
            self.judged[group][place] = STALE * self.judged[group][place] + 1
            self.accepted[group][place] = STALE * self.accepted[group][place] + (slot < accepted)
        self.steps += 1
        self.tokens = FORGET * self.tokens + accepted + 1
        self.seconds = FORGET * self.seconds + self.costs.draft + self.costs.verify[verified]
        self.confidences = []
        if self.steps < TRIAL or self.tokens * self.costs.verify[0] >= self.seconds:
            return False
        self.tokens *= AFTER_PAUSE
        self.seconds *= AFTER_PAUSE
        self.explores = True
        return True


def calibrated(confidence: float, intercept: float, slope: float) -> float:
    """Acceptance probability from a line through the logit of a confidence (Platt scaling, 1999)."""
    confidence = min(max(confidence, LEAST_CONFIDENCE), 1.0 - LEAST_CONFIDENCE)
    logit = intercept + slope * math.log(confidence / (1.0 - confidence))
    return 0.5 * (1.0 + math.tanh(0.5 * logit))  # the logistic function, which no logit overflows


class AdaptiveLength(HowMuch):
    """Lets a planner choose each step's length, and pauses drafting where the planner finds that it does not pay."""

    reads_confidences = True

    def __init__(self, planner: LengthPlanner, pausing: DraftPolicy):
        super().__init__(pausing)
        self.planner = planner

    def num_verified(self, confidences: Sequence[float]) -> int:
        return self.planner.choose(confidences)

    def learn(self, verified: int, accepted: int) -> bool:
        if self.planner.learn(verified, accepted):
            self.pausing.pause()
        return super().learn(verified, accepted)
