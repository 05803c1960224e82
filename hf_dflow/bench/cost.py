"""`hf-dflow cost`: a hosted bill against your own server, from prices that you give and throughput that you measured.

A gain in speed lowers the cost of a token only where the bill counts seconds; billed per token, the provider keeps it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dflow.console import Presentation, Remark, ResultTable
from hf_dflow.errors import DFlowError

HOURS_A_MONTH = 365.25 * 24 / 12
MILLION = 1e6


def _check_number(
    name: str, value: float | None, low: float = 0.0, high: float = math.inf, *, open_low: bool = True
) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not is_number or value > high or (value <= low if open_low else value < low):
        bounds = f"above {low:g}" if open_low else f"from {low:g}"
        raise DFlowError(f"{name}={value}; give a number {bounds}" + ("" if high == math.inf else f" to {high:g}"))


@dataclass(frozen=True)
class SelfHosted:
    """Your own GPU server.

    Args:
        gpu_price_per_hour (`float`): Of all its GPUs together, in any currency.
        plain_tps, drafting_tps (`float`): Measured output tokens a second, of all requests together, without and with a
            drafter.
        utilisation (`float`): Share of the paid hours that serve, above 0 to 1.
        overhead_per_month (`float`, *optional*, defaults to 0): Operations: people, storage, monitoring.
        factors (`dict[str, float]`, *optional*): Measured gains of throughput that the `*_tps` do not include.
        routed_share (`float`, *optional*, defaults to 0): Measured share of output tokens that a smaller model serves.
        routed_tps (`float`, *optional*): That model's measured output tokens a second on the same server.

    Raises:
        DFlowError: A value that is no price, rate or share.
    """

    gpu_price_per_hour: float
    plain_tps: float
    drafting_tps: float
    utilisation: float
    overhead_per_month: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    routed_share: float = 0.0
    routed_tps: float | None = None

    def __post_init__(self):
        _check_number("gpu_price_per_hour", self.gpu_price_per_hour)
        _check_number("plain_tps", self.plain_tps)
        _check_number("drafting_tps", self.drafting_tps)
        _check_number("utilisation", self.utilisation, high=1.0)
        _check_number("overhead_per_month", self.overhead_per_month, open_low=False)
        _check_number("routed_share", self.routed_share, high=1.0, open_low=False)
        _check_number("routed_tps", self.routed_tps)
        for name, factor in self.factors.items():
            _check_number(name, factor)
        if self.routed_share and self.routed_tps is None:
            raise DFlowError(f"routed_share={self.routed_share} without routed_tps; give that model's throughput")

    def throughput(self, *, drafting: bool) -> float:
        """Output tokens a second while serving, with all factors; routing averages seconds per token, not rates."""
        large = (self.drafting_tps if drafting else self.plain_tps) * math.prod(self.factors.values())
        seconds = (1 - self.routed_share) / large
        if self.routed_share and self.routed_tps:
            seconds += self.routed_share / self.routed_tps
        return 1 / seconds

    def price_per_million(self, *, drafting: bool) -> float:
        """Price of a million output tokens, operations not included."""
        tokens_an_hour = 3600 * self.throughput(drafting=drafting) * self.utilisation
        return self.gpu_price_per_hour / tokens_an_hour * MILLION

    def tokens_a_month(self, *, drafting: bool) -> float:
        """Output tokens that one server can write in a month."""
        return 3600 * HOURS_A_MONTH * self.throughput(drafting=drafting) * self.utilisation

    def cost_of_month(self, tokens: float, *, drafting: bool) -> float:
        """Cost of `tokens` output tokens on as many servers as they need, each paid for the whole month."""
        servers = max(1, math.ceil(tokens / self.tokens_a_month(drafting=drafting) - 1e-9))
        return servers * self.gpu_price_per_hour * HOURS_A_MONTH + self.overhead_per_month


@dataclass(frozen=True)
class Hosted:
    """A provider's bill, per token or per second.

    Args:
        price_per_million (`float`, *optional*): Of output tokens.
        price_per_second (`float`, *optional*): Of a dedicated deployment.
        plain_tps, drafting_tps (`float`, *optional*): Measured output tokens a second there; needed per second.

    Raises:
        DFlowError: No price, two of them, or seconds without what they yield.
    """

    price_per_million: float | None = None
    price_per_second: float | None = None
    plain_tps: float | None = None
    drafting_tps: float | None = None

    def __post_init__(self):
        for name in ("price_per_million", "price_per_second", "plain_tps", "drafting_tps"):
            _check_number(name, getattr(self, name))
        if (self.price_per_million is None) == (self.price_per_second is None):
            raise DFlowError("give the hosted price either per million output tokens or per second")
        if self.price_per_second is not None and self.plain_tps is None:
            raise DFlowError("a hosted price per second needs the measured output tokens a second there: plain_tps")

    @property
    def unit(self) -> str:
        return "token" if self.price_per_second is None else "second"

    def effective_price_per_million(self, *, drafting: bool) -> float | None:
        """Price of a million output tokens; `None` where the throughput was not measured."""
        if self.price_per_second is None:
            return self.price_per_million
        tps = self.drafting_tps if drafting else self.plain_tps
        return None if tps is None else self.price_per_second / tps * MILLION


@dataclass(frozen=True)
class BreakEven:
    """Output tokens a month at which your own servers cost as much as the hosted bill.

    Servers are paid by the month, so their cost is a staircase: just past a full server, the hosted bill may be the
    lower one again.
    """

    first: float  # the smallest volume at which your own servers are cheaper
    for_good: float  # from this volume on they stay cheaper


def break_even(hosted_million: float, own: SelfHosted, *, drafting: bool) -> BreakEven | None:
    """Where the two bills are equal; `None` if even a fully used server costs more than the same tokens hosted."""
    capacity, price = own.tokens_a_month(drafting=drafting), hosted_million / MILLION
    # What a server and operations cost, as hosted tokens for the same money.
    server, overhead = own.gpu_price_per_hour * HOURS_A_MONTH / price, own.overhead_per_month / price
    gain = capacity - server
    if gain <= 0:
        return None
    # n servers cost n * server + overhead, and write n * capacity: n >= overhead / gain is the first that pays at all.
    first = max(1, math.ceil(overhead / gain - 1e-9))
    # n + 1 servers pay off if the tokens of n already cover them; `last` is the largest n for which they do not.
    last = max(1, math.ceil((overhead + capacity) / gain - 1e-9) - 1)
    return BreakEven(first * server + overhead, last * server + overhead)


def compare(hosted: Hosted, own: SelfHosted, monthly_tokens: float | None = None) -> dict[str, Any]:
    """All figures of the comparison; see [`present`].

    Args:
        monthly_tokens (`float`, *optional*): The volume at which a month's bills are compared.
    """
    _check_number("monthly_tokens", monthly_tokens)
    record: dict[str, Any] = {"billing_unit": hosted.unit, "speed_up_own": own.drafting_tps / own.plain_tps}
    for name, drafting in (("plain", False), ("drafting", True)):
        million = hosted.effective_price_per_million(drafting=drafting)
        meets_at = None if million is None else break_even(million, own, drafting=drafting)
        record[name] = {
            "hosted_per_million": million,
            "own_per_million": own.price_per_million(drafting=drafting),
            "own_tokens_a_second": own.throughput(drafting=drafting),
            "own_tokens_a_month_and_server": own.tokens_a_month(drafting=drafting),
            "break_even_tokens_a_month": meets_at and meets_at.first,
            "break_even_for_good": meets_at and meets_at.for_good,
        }
        if monthly_tokens is not None:
            record[name]["month"] = {
                "tokens": monthly_tokens,
                "hosted": None if million is None else million * monthly_tokens / MILLION,
                "own": own.cost_of_month(monthly_tokens, drafting=drafting),
            }
    record["who_keeps_the_gain"] = who_keeps_the_gain(hosted, own)
    return record


def who_keeps_the_gain(hosted: Hosted, own: SelfHosted) -> dict[str, str]:
    """What drafting does to the hosted bill and to one's own, as sentences."""
    plain, drafting = own.price_per_million(drafting=False), own.price_per_million(drafting=True)
    if hosted.unit == "token":
        theirs = "billed per token: the price of a token stays, so the provider keeps what drafting saves"
    elif hosted.drafting_tps is None:
        theirs = "billed per second: you would keep the gain; measure tokens a second with a drafter there"
    else:
        change = hosted.plain_tps / hosted.drafting_tps - 1 if hosted.plain_tps else 0.0
        theirs = f"billed per second: you keep it, a token costs {change:+.1%}"
    return {"hosted": theirs, "self-hosted": f"paid per hour: you keep it, a token costs {drafting / plain - 1:+.1%}"}


def present(record: dict[str, Any]) -> Presentation:
    """The comparison as a table, without a drafter and with one."""
    sides = [record["plain"], record["drafting"]]
    lines = [
        ("hosted, a million output tokens", "hosted_per_million", "{:,.4f}"),
        ("self-hosted, a million output tokens (no operations)", "own_per_million", "{:,.4f}"),
        ("self-hosted, output tokens a second", "own_tokens_a_second", "{:,.1f}"),
        ("self-hosted, tokens a month and server", "own_tokens_a_month_and_server", "{:,.0f}"),
        ("break-even, output tokens a month", "break_even_tokens_a_month", "{:,.0f}"),
        ("… and for good, whatever servers it takes", "break_even_for_good", "{:,.0f}"),
    ]
    rows = []
    for title, key, form in lines:
        cells = []
        for side in sides:
            is_never = key.startswith("break_even") and side["hosted_per_million"] is not None
            missing = "never" if is_never else "not measured"
            cells.append(missing if side[key] is None else form.format(side[key]))
        rows.append([title, *cells])
    if "month" in record["plain"]:
        for payer in ("hosted", "own"):
            costs = [side["month"][payer] for side in sides]
            title = f"a month of {record['plain']['month']['tokens']:,.0f} tokens, {payer}"
            rows.append([title, *("not measured" if cost is None else f"{cost:,.2f}" for cost in costs)])
    title = "all prices in the currency that was given"
    return Presentation(
        "Cost",
        [ResultTable(title, ("",), ("without drafter", "with drafter"), rows)],
        [Remark(f"{payer}: {sentence}") for payer, sentence in record["who_keeps_the_gain"].items()],
    )
