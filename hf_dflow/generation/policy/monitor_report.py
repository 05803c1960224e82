"""Figures and events of monitored routes, and Prometheus' text format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

DRAFTING, PLAIN, PROBING = "drafting", "plain", "probing"  # what a route does
LOW, RECOVERED = "low_acceptance", "acceptance_recovered"  # other kinds of events


@dataclass(frozen=True)
class RouteFigures:
    """A route at one moment. Rates are those of the window, `None` where it is empty; counts are of all time."""

    route: str
    state: str  # "drafting", "plain" or "probing"
    draft_acceptance_rate: float | None
    tokens_per_step: float | None
    break_even: float | None  # tokens per step; None until both kinds of steps were measured
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_steps: int
    num_plain_steps: int
    num_switches: int  # to plain decoding
    low_acceptance: float | None = None  # the threshold that was set for it
    num_output_tokens: int = 0  # of all steps, the prefill's not counted
    num_target_forwards: int = 0  # each sequence's own, with drafts or without, the prefill not counted

    @property
    def tokens_per_target_forward(self) -> float | None:
        """Of all time, steps without drafts included, so that not drafting does not flatter; `None` without any."""
        return self.num_output_tokens / self.num_target_forwards if self.num_target_forwards else None


@dataclass(frozen=True)
class RouteEvent:
    """A change of a route, as callbacks get it; as text it is a line for a log.

    Args:
        kind (`str`): The state that the route enters ("drafting", "plain", "probing"), or "low_acceptance" and
            "acceptance_recovered" where a threshold was set.
        figures (`RouteFigures`): Of the route, just before the change.
    """

    kind: str
    figures: RouteFigures

    def __str__(self) -> str:
        figures = self.figures
        acceptance = "no drafts yet"
        if figures.tokens_per_step is not None and figures.draft_acceptance_rate is not None:
            acceptance = (
                f"{figures.tokens_per_step:.2f} tokens per step, {figures.draft_acceptance_rate:.1%} of drafts accepted"
            )
        limit = ""
        if figures.break_even is not None:
            limit = f"; drafting pays from {figures.break_even:.2f} tokens per step"
        change = {
            PLAIN: "decodes plainly",
            PROBING: "tries drafting again",
            DRAFTING: "drafts again",
            LOW: "accepts less than its threshold",
            RECOVERED: "is above its threshold again",
        }[self.kind]
        return f"Route {figures.route!r} {change}: {acceptance}{limit}."


EXPORTED: tuple[tuple[str, str, str, Callable[[RouteFigures], float | None]], ...] = (
    ("draft_tokens_total", "counter", "Drafts verified.", lambda route: route.num_draft_tokens),
    ("accepted_draft_tokens_total", "counter", "Drafts accepted.", lambda route: route.num_accepted_draft_tokens),
    ("spec_steps_total", "counter", "Steps with drafts, each sequence's own.", lambda route: route.num_spec_steps),
    ("plain_steps_total", "counter", "Steps without drafts.", lambda route: route.num_plain_steps),
    ("switches_to_plain_total", "counter", "Times that drafting was switched off.", lambda route: route.num_switches),
    ("drafting", "gauge", "1 while the route drafts, 0 while it decodes plainly or tries.",
     lambda route: route.state == DRAFTING),
    ("draft_acceptance_rate", "gauge", "Accepted over drafted, last steps.", lambda route: route.draft_acceptance_rate),
    ("low_acceptance_threshold", "gauge", "Acceptance rate that is reported.", lambda route: route.low_acceptance),
    ("output_tokens_total", "counter", "Tokens of all steps, drafted or not.", lambda route: route.num_output_tokens),
    ("target_forwards_total", "counter", "Target forwards, each sequence's own.",
     lambda route: route.num_target_forwards),
    ("tokens_per_step", "gauge", "Emitted tokens a step with drafts, last steps.", lambda route: route.tokens_per_step),
    ("break_even_tokens_per_step", "gauge", "From which drafting pays.", lambda route: route.break_even),
)  # fmt: skip


def prometheus_text(figures: Sequence[RouteFigures]) -> str:
    """Routes in Prometheus' text format, version 0.0.4."""
    lines = []
    for name, kind, meaning, read in EXPORTED:
        lines += [f"# HELP hf_dflow_{name} {meaning}", f"# TYPE hf_dflow_{name} {kind}"]
        for route in figures:
            if (value := read(route)) is not None:
                lines.append(f'hf_dflow_{name}{{route="{_escaped(route.route)}"}} {float(value)}')
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
