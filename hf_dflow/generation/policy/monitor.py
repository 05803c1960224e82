"""AcceptanceMonitor: monitors acceptance by route while serving, and stops drafting where it does not pay.

A *route* is whatever the caller distinguishes: a kind of task, a tenant, a prompt template. Each has a rolling window
of its last steps. Drafting pays as long as tokens per step are above break-even, the time of a step with drafts over
that of one without; both are measured while the route is served, or given. Below break-even the route decodes plainly
and tries a few blocks after a pause that doubles with each trial in vain.

Whether a step drafts is decided before it, from past steps. So greedy text does not change, and sampled text keeps its
law, though not its tokens for the same seed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.generation.policy.base import DraftPolicy
from hf_dflow.generation.policy.monitor_report import (
    DRAFTING,
    LOW,
    PLAIN,
    PROBING,
    RECOVERED,
    RouteEvent,
    RouteFigures,
    prometheus_text,
)
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.logs import get_logger

logger = get_logger(__name__)

FEWEST_TIMES = 4  # of a kind of step before its median is used
KEPT_TIMES = 64  # of each kind, the last: times grow with the context, so old ones mislead
CALIBRATION_AFTER = 8  # steps with drafts before the first steps without are measured
REMEASURE_EVERY = 64  # steps with drafts for one without, which keeps the time of plain steps up to date


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of a step's parts, for a monitor that does not measure them itself.

    Args:
        draft (`float`): One drafter forward.
        verify (`float`): One target forward over a block.
        plain (`float`): One target forward over a single token.

    Raises:
        DFlowError: One of them is not a duration.
    """

    draft: float
    verify: float
    plain: float

    def __post_init__(self):
        if not (0 <= self.draft < float("inf") and 0 < self.verify < float("inf") and 0 < self.plain < float("inf")):
            raise DFlowError(f"{self}: give seconds, draft from 0, verify and plain above 0")

    @property
    def break_even(self) -> float:
        """Tokens per step from which drafting pays."""
        return (self.draft + self.verify) / self.plain


@dataclass(frozen=True)
class MonitorSettings:
    """When a route stops drafting, and when it tries again. Steps of a batch count once, whatever its rows.

    Args:
        window (`int`): Drafted steps of single sequences that are judged together.
        fewest_steps (`int`): Steps in the window before it is judged.
        probe_steps (`int`): Steps with drafts in one trial.
        first_pause, longest_pause (`int`): Steps without drafts before a trial, at first and at most.

    Raises:
        DFlowError: A number is below 1, or the two of a pair are the wrong way round.
    """

    window: int = 64
    fewest_steps: int = 32
    probe_steps: int = 8
    first_pause: int = 32
    longest_pause: int = 256

    def __post_init__(self):
        numbers = (self.window, self.fewest_steps, self.probe_steps, self.first_pause, self.longest_pause)
        if any(type(number) is not int or number < 1 for number in numbers):
            raise DFlowError(f"{self}: give whole numbers from 1")
        if self.fewest_steps > self.window or self.first_pause > self.longest_pause:
            raise DFlowError(f"{self}: fewest_steps may not pass window, nor first_pause longest_pause")

    @property
    def steps_until_back(self) -> int:
        """Steps after which a route resumes drafting, at most, once its drafter has turned good: one trial may be lost
        to the bad drafter's last block, the longest pause follows, and the next trial decides."""
        return self.longest_pause + 2 * self.probe_steps

    def largest_waste(self, steps: int) -> int:
        """Steps of the first `steps` that draft in vain, at most, with a drafter that is of no use at all."""
        first = max(self.fewest_steps, CALIBRATION_AFTER + 1)
        trials, pause, passed = 0, self.first_pause, first
        while passed + pause < steps:
            trials, passed = trials + 1, passed + pause + self.probe_steps
            pause = min(2 * pause, self.longest_pause)
        return first + trials * self.probe_steps


@dataclass
class _Totals:
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # by all forwards, with drafts or without
    forwards: int = 0  # of the target, each sequence's own
    spec_steps: int = 0
    plain_steps: int = 0
    switches: int = 0


class MonitoredRoute:
    """One route of an [`AcceptanceMonitor`], made by its `route`, for `DFlowGenerationConfig(monitor=…)`.

    The loop reads `drafts_now` and reports with `end_step`; any other loop can do the same. Threads may share a route.
    """

    def __init__(self, monitor: "AcceptanceMonitor", name: str):
        self.monitor, self.name = monitor, name
        self._lock = threading.Lock()
        self._state, self._is_low = DRAFTING, False
        self._window: deque[tuple[int, int, int]] = deque(maxlen=monitor.settings.window)  # drafted, accepted, emitted
        self._spec_seconds: deque[float] = deque(maxlen=KEPT_TIMES)
        self._plain_seconds: deque[float] = deque(maxlen=KEPT_TIMES)
        self._pause_left, self._next_pause = 0, monitor.settings.first_pause
        self._tried = 0  # steps of this trial
        self._since_plain = 0  # steps with drafts since the last one without
        self._totals = _Totals()

    def __deepcopy__(self, memo) -> "MonitoredRoute":
        """`generate` copies its configuration; the route must stay the one that is monitored."""
        return self

    @property
    def drafts_now(self) -> bool:
        """Whether the next step drafts."""
        with self._lock:
            return self._state != PLAIN and not self._wants_plain_time()

    @property
    def break_even(self) -> float | None:
        """Tokens per step from which drafting pays; `None` while it is not known."""
        if self.monitor.times is not None:
            return self.monitor.times.break_even
        if min(len(self._spec_seconds), len(self._plain_seconds)) < FEWEST_TIMES:
            return None
        return median(self._spec_seconds) / median(self._plain_seconds)

    def end_step(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None = None,
        emitted: Sequence[int] | None = None,
    ) -> None:
        """Report a step.

        Args:
            drafted, accepted (`list[int]`): Of each sequence of the batch; 0 where it did not draft. Drafts behind the
                end of a text are not counted.
            seconds (`float`, *optional*): Duration of the step. Required unless the monitor was given its times.
            emitted (`list[int]`, *optional*): Tokens of each sequence; by default its accepted drafts and the bonus.

        Raises:
            DFlowError: Neither was given, so nothing could ever be judged.
        """
        if seconds is None and self.monitor.times is None:
            raise DFlowError("end_step without seconds; give them, or the monitor its times=StepTimes(…)")
        events: list[RouteEvent] = []
        with self._lock:
            counts = emitted or [kept + 1 for kept in accepted]
            self._totals.emitted += sum(counts)
            self._totals.forwards += len(counts)
            steps = [step for step in zip(drafted, accepted, counts, strict=True) if step[0]]
            if seconds is not None:
                (self._spec_seconds if steps else self._plain_seconds).append(seconds)
            if steps:
                self._note(steps)
                self._check_threshold(events)  # before a switch empties the window
                self._judge(events)
            else:
                self._totals.plain_steps += 1
                self._rest(events)
        self.monitor.tell(events)

    def figures(self) -> RouteFigures:
        """The present figures."""
        with self._lock:
            return self._figures()

    # -- everything below is called with the lock held

    def _note(self, steps: list[tuple[int, int, int]]) -> None:
        self._window.extend(steps)
        self._totals.spec_steps += len(steps)
        self._totals.drafted += sum(tried for tried, _, _ in steps)
        self._totals.accepted += sum(kept for _, kept, _ in steps)
        self._since_plain += 1
        self._tried += 1

    def _judge(self, events: list[RouteEvent]) -> None:
        settings, break_even = self.monitor.settings, self.break_even
        if self._state == PROBING:
            enough = self._tried >= settings.probe_steps
        else:
            enough = len(self._window) >= settings.fewest_steps
        if break_even is None or not enough:
            return
        pays = self._statistics().tokens_per_step >= break_even
        if not pays:
            self._totals.switches += self._state == DRAFTING
            self._pause_left, self._next_pause = self._next_pause, min(2 * self._next_pause, settings.longest_pause)
            self._enter(PLAIN, events)
            self._window.clear()
        elif self._state == PROBING:
            self._enter(DRAFTING, events)
        elif len(self._window) == settings.window:  # only a full window rules out a lucky trial
            self._next_pause = settings.first_pause

    def _rest(self, events: list[RouteEvent]) -> None:
        if len(self._plain_seconds) >= FEWEST_TIMES:
            self._since_plain = 0
        if self._state == PLAIN:
            self._pause_left -= 1
            if self._pause_left <= 0:
                self._tried = 0
                self._enter(PROBING, events)

    def _wants_plain_time(self) -> bool:
        if self.monitor.times is not None or self._state == PROBING:
            return False
        is_first = len(self._plain_seconds) < FEWEST_TIMES
        return self._since_plain >= (CALIBRATION_AFTER if is_first else REMEASURE_EVERY)

    def _check_threshold(self, events: list[RouteEvent]) -> None:
        threshold = self.monitor.threshold_of(self.name)
        if threshold is None or len(self._window) < self.monitor.settings.fewest_steps:
            return
        is_low = self._statistics().draft_acceptance_rate < threshold
        if is_low != self._is_low:
            events.append(RouteEvent(LOW if is_low else RECOVERED, self._figures()))
        self._is_low = is_low

    def _enter(self, state: str, events: list[RouteEvent]) -> None:
        events.append(RouteEvent(state, self._figures()))
        self._state = state

    def _statistics(self) -> AcceptanceStatistics:
        drafted, accepted, emitted = map(list, zip(*self._window, strict=True)) if self._window else ([], [], [])
        return AcceptanceStatistics(per_step_accepted=accepted, per_step_drafted=drafted, per_step_emitted=emitted)

    def _figures(self) -> RouteFigures:
        window, totals = self._statistics(), self._totals
        return RouteFigures(
            route=self.name,
            state=self._state,
            draft_acceptance_rate=window.draft_acceptance_rate if self._window else None,
            tokens_per_step=window.tokens_per_step if self._window else None,
            break_even=self.break_even,
            num_draft_tokens=totals.drafted,
            num_accepted_draft_tokens=totals.accepted,
            num_spec_steps=totals.spec_steps,
            num_plain_steps=totals.plain_steps,
            num_output_tokens=totals.emitted,
            num_target_forwards=totals.forwards,
            num_switches=totals.switches,
            low_acceptance=self.monitor.threshold_of(self.name),
        )


class RoutePolicy(DraftPolicy):
    """The policy of a monitored call's rows: the route decides for all of them, in place of each row's own back-off."""

    def __init__(self, route: MonitoredRoute):
        self.route = route

    def may_draft(self) -> bool:
        return not self.is_off and self.route.drafts_now


@dataclass
class AcceptanceMonitor:
    """Monitors acceptance by route; see the module.

    Args:
        settings (`MonitorSettings`, *optional*): Window, trials and pauses.
        times (`StepTimes`, *optional*): Measured before, in place of measuring while serving. Without them one step in
            64 does not draft, so that the time of plain steps is known.
        low_acceptance (`float` or `dict[str, float]`, *optional*): Threshold of the draft acceptance rate, for all
            routes or by route; falling below it and recovering are logged, and reported to the callbacks.
        on_event (`list[Callable[[RouteEvent], None]]`, *optional*): Called at every change, in the thread that decodes.
            An exception they raise is logged and goes no further.
        clock (`Callable[[], float]`, *optional*): Seconds, of which only differences count.

    Raises:
        DFlowError: A threshold is not a rate.
    """

    settings: MonitorSettings = field(default_factory=MonitorSettings)
    times: StepTimes | None = None
    low_acceptance: float | Mapping[str, float] | None = None
    on_event: Sequence[Callable[[RouteEvent], Any]] = ()
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        given = self.low_acceptance
        rates = given.values() if isinstance(given, Mapping) else [given] if given is not None else []
        for rate in rates:
            if not isinstance(rate, int | float) or not 0 <= rate <= 1:
                raise DFlowError(f"low_acceptance={given}; give draft acceptance rates from 0 to 1")
        self._routes: dict[str, MonitoredRoute] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo) -> "AcceptanceMonitor":
        return self

    def route(self, name: str) -> MonitoredRoute:
        """The route `name`, made at the first call. Each keeps a window, so use few names: no user ids.

        Raises:
            DFlowError: The name is not a text that UTF-8 can encode, which Prometheus' format requires.
        """
        try:
            is_text = bool(str.encode(name, "utf-8"))
        except (TypeError, UnicodeEncodeError):
            is_text = False
        if not is_text:
            raise DFlowError(f"{name!r} is no name of a route; use a str that UTF-8 can encode, for example 'chat'")
        with self._lock:
            return self._routes.setdefault(name, MonitoredRoute(self, name))

    def figures(self) -> list[RouteFigures]:
        """Present figures of every route, by name."""
        with self._lock:
            routes = sorted(self._routes.values(), key=lambda route: route.name)
        return [route.figures() for route in routes]

    def threshold_of(self, route: str) -> float | None:
        """The acceptance rate below which `route` is reported."""
        given = self.low_acceptance
        return given.get(route) if isinstance(given, Mapping) else given

    def tell(self, events: Sequence[RouteEvent]) -> None:
        """Log events, and hand them to the callbacks."""
        for event in events:
            stops_drafting = event.kind == PLAIN and event.figures.state == DRAFTING  # not a trial in vain
            level = logging.WARNING if stops_drafting or event.kind == LOW else logging.INFO
            logger.log(level, "%s", event)
            for callback in self.on_event:
                try:
                    callback(event)
                except Exception:  # a broken alert must not stop decoding
                    logger.exception("A callback failed on %s of route %r.", event.kind, event.figures.route)

    def prometheus_text(self) -> str:
        """All routes in Prometheus' text format, version 0.0.4, for the body of a `/metrics` answer."""
        return prometheus_text(self.figures())
