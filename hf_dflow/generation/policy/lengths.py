"""How many drafts a step verifies: as many as are expected to pay, by a row's past steps and what a step costs.

Verifying more drafts costs time and helps only where all before them are accepted. Which drafts are, the drafter's own
confidence says once it is calibrated on what verification answered. SpecDec++ (arXiv 2405.19715) stops drafting by a
learned acceptance predictor; a block drafter has drafted everything before the question arises, so here the cut is made
in what is verified.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat
from hf_dflow.generation.drafting import DraftSession
from hf_dflow.model.configuration import SLOT_GROUPS

if TYPE_CHECKING:
    from hf_dflow.model.drafter import DFlowDrafter

BINS = 8  # of confidence
PRIOR_COUNT = 4.0  # judged drafts that the drafter's own word is worth
ROW_PRECISION = 4.0  # where none was fitted, of a row's own difficulty at first: half a logit up or down is common
FORGET = 0.9  # of the yield of drafting, with each step
STALE = 0.95  # of what was judged, with each further draft of the same slot and confidence
LEAST_CONFIDENCE = 1e-4  # and one less it at most, so that its logit is a number
TRIAL = 6  # drafted steps before the first judgement whether drafting pays
AFTER_PAUSE = 0.25  # what a pause leaves of the past yield, so that a drafter that turned good is soon back


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
        """Of a [`StepCosts`] or a `{"draft": seconds, "verify": [seconds, …]}`.

        Raises:
            UnsupportedGenerationError: It is neither, or has too few or impossible numbers.
        """
        if isinstance(value, Mapping) and {"draft", "verify"} == set(value):
            is_list = isinstance(value["verify"], Sequence) and not isinstance(value["verify"], str)
            value = cls(value["draft"], tuple(value["verify"])) if is_list else value
        if not isinstance(value, cls) or not all(_is_seconds(one) for one in (value.draft, *value.verify)):
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


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")


@dataclass
class LengthPlanner:
    """Decides for one row, from its own past and the present drafts' confidence.

    Confidence is a number of the draft law before anything was sampled, so the cut does not depend on the tokens it
    cuts. The text's law stays the target's; greedy text stays the same. Where `hf-dflow calibrate` fitted the drafter's
    confidence on other texts, a row learns how much easier or harder its own is; else it learns by slot and confidence.
    """

    costs: StepCosts
    calibration: Sequence[Sequence[float]] | None = None  # of `fitted_decisions`, for drafts of this kind
    accepted: list[list[float]] = field(default_factory=lambda: [[0.0] * BINS for _ in range(SLOT_GROUPS)])
    judged: list[list[float]] = field(default_factory=lambda: [[0.0] * BINS for _ in range(SLOT_GROUPS)])
    ease: float = 0.0  # how much better than calibrated this row's drafts are, in logits
    precision: float = ROW_PRECISION  # of that
    steps: int = 0
    explores: bool = False  # the next drafted step verifies one draft at least: else nothing would be learned any more
    tokens: float = 0.0
    seconds: float = 0.0
    seen: list[float] = field(default_factory=list)  # confidences of the present block; empty where nothing was drafted
    predicted: list[float] = field(default_factory=list)  # and what they were taken for
    outcomes: list[tuple[float, bool]] = field(default_factory=list)  # of each judged draft: predicted, and accepted

    def acceptance(self, slot: int, confidence: float) -> float:
        """Probability that the draft of `slot`, from 0, is accepted once all before it are."""
        group, place = min(slot, SLOT_GROUPS - 1), min(BINS - 1, int(confidence * BINS))
        if self.calibration is not None:
            intercept, slope = self.calibration[group]
            return calibrated(confidence, intercept + self.ease, slope)
        accepted = self.accepted[group][place] + PRIOR_COUNT * confidence
        return accepted / (self.judged[group][place] + PRIOR_COUNT)

    def choose(self, confidences: Sequence[float]) -> int:
        """How many of the drafts with these confidences to verify: what maximises expected tokens per second."""
        self.seen = list(confidences)
        self.predicted = [self.acceptance(slot, one) for slot, one in enumerate(confidences)]
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
            `bool`: Whether drafting should pause: as it went of late, it is slower than decoding without.
        """
        if not self.seen:
            return False
        for slot in range(min(verified, accepted + 1)):
            group, place = min(slot, SLOT_GROUPS - 1), min(BINS - 1, int(self.seen[slot] * BINS))
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
        self.seen = []
        if self.steps < TRIAL or self.tokens * self.costs.verify[0] >= self.seconds:
            return False
        self.tokens *= AFTER_PAUSE
        self.seconds *= AFTER_PAUSE
        self.explores = True
        return True


def calibrated(confidence: float, intercept: float, slope: float) -> float:
    """Probability by a line through the logit of a confidence (Platt scaling, 1999)."""
    sure = min(max(confidence, LEAST_CONFIDENCE), 1.0 - LEAST_CONFIDENCE)
    logit = intercept + slope * math.log(sure / (1.0 - sure))
    return 0.5 * (1.0 + math.tanh(0.5 * logit))  # the logistic function, which no logit overflows


_MEASURED: "WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, StepCosts]]]" = WeakKeyDictionary()


def step_costs(
    target: Any, drafter: "DFlowDrafter", longest: int | None = None, device: torch.device | None = None
) -> StepCosts:
    """[`measure_step_costs`] of a pair, measured once where its models are, and anew for more drafts."""
    of_pair = _MEASURED.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    wanted, place = longest or drafter.config.drafts_per_block, (device or target.device, drafter.device)
    if place not in of_pair or len(of_pair[place].verify) <= wanted:
        of_pair[place] = measure_step_costs(target, drafter, longest=wanted, device=device)
    return of_pair[place]


@torch.no_grad()
def measure_step_costs(
    target: Any,
    drafter: "DFlowDrafter",
    *,
    longest: int | None = None,
    device: torch.device | None = None,
    context_length: int = 64,
    repeats: int = 3,
) -> StepCosts:
    """Time the two forwards of a step, behind a context of random tokens.

    Args:
        longest (`int`, *optional*, defaults to a full block's): Up to how many drafts.
        device (`torch.device`, *optional*, defaults to the target's): Where its inputs go.
        context_length (`int`, *optional*, defaults to 64): Tokens in the caches.
        repeats (`int`, *optional*, defaults to 3): Of each length; medians count. Lengths between 1, 2, 4, 8 … tokens
            are interpolated.
    """
    device, vocab_size = device or target.device, target.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or context_length * 4
    most = (longest or drafter.config.drafts_per_block) + 1
    room = max(most, drafter.config.block_size) + 1
    context_length = max(1, min(context_length, limit - room))
    width = context_length + room
    token_ids = torch.randint(vocab_size, (1, width), generator=generator).to(device)
    cache = DynamicCache()
    cache.activate_past_recording()
    named: Any = {_compat.cache_argument(target): cache}
    output = target(token_ids[:, :context_length], output_hidden_states=True, use_cache=True, **named)
    features = _compat.capture_features(output.hidden_states, drafter.config.target_layer_ids)
    lengths = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})

    def verify(length: int) -> None:
        target(
            token_ids[:, context_length : context_length + length],
            output_hidden_states=True,
            use_cache=True,
            **named,
        )
        _compat.crop(cache, length)

    session = DraftSession(
        drafter,
        target.get_input_embeddings(),
        target.get_output_embeddings(),
        vocab_size=vocab_size,
        use_relay=False,
        device=device,
    )
    session.cache.append_context(features, [0], [context_length])

    def draft() -> None:
        hidden = session.block_hidden(token_ids[:, context_length], [context_length], None)
        drafter.compute_logits(hidden, session.head)

    places = {device, output.logits.device, drafter.device}
    times = {length: _seconds(lambda length=length: verify(length), repeats, places) for length in lengths}
    verify_times, dearest = [], 0.0
    for length in range(1, most + 1):
        above = min(one for one in lengths if one >= length)
        below = max(one for one in lengths if one <= length)
        share = 0.0 if above == below else (length - below) / (above - below)
        dearest = max(dearest, times[below] + share * (times[above] - times[below]))  # more tokens never cost less
        verify_times.append(dearest)
    return StepCosts(_seconds(draft, repeats, places), tuple(verify_times))


def _seconds(run: Any, repeats: int, places: set[torch.device]) -> float:
    """Median time of a call, after one that warms up."""
    taken = []
    for _ in range(repeats + 1):
        _wait(places)
        started = time.perf_counter()
        run()
        _wait(places)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _wait(places: set[torch.device]) -> None:
    for device in places:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
