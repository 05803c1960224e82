"""`hf-dflow cost`: a hosted bill against your own server, from prices that you give and throughput that you measured.

A gain in speed lowers the cost of a token only where the bill counts seconds; billed per token, the provider keeps it.
"""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from hf_dflow.console import Presentation, Remark, ResultTable
from hf_dflow.errors import DFlowError

HOURS_A_MONTH = 365.25 * 24 / 12
MILLION = 1e6
SIDES = {"plain": False, "drafting": True}


def _check(owner: Any, *, above: tuple[str, ...] = (), may_be_zero: tuple[str, ...] = ()) -> None:
    """Refuse fields that are no finite numbers above 0 (or from 0); `None` passes."""
    for name in (*above, *may_be_zero):
        value, bounds = getattr(owner, name), "from 0" if name in may_be_zero else "above 0"
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if value is not None and (not is_number or value < 0 or (value == 0 and name in above)):
            raise DFlowError(f"{name}={value}; give a number {bounds}")


@dataclass(frozen=True)
class SelfHosted:
    """Your own GPU server; rates are measured output tokens a second of all requests together."""

    gpu_price_per_hour: Annotated[float, typer.Option(help="Of your server's GPUs together.")]
    plain_tps: Annotated[float, typer.Option(help="Measured output tokens a second of your server, no drafter.")]
    drafting_tps: Annotated[float, typer.Option(help="The same with the drafter.")]
    utilisation: Annotated[float, typer.Option(help="Share of the paid hours that serve, above 0 to 1.")]
    overhead_per_month: Annotated[float, typer.Option(help="Operations of your own server.")] = 0.0
    batching_factor: Annotated[float | None, typer.Option(help="Measured gain of continuous batching.")] = None
    caching_factor: Annotated[float | None, typer.Option(help="Measured gain of prefix caching.")] = None
    routed_share: Annotated[float, typer.Option(help="Measured share of tokens that a smaller model writes.")] = 0.0
    routed_tps: Annotated[float | None, typer.Option(help="Measured output tokens a second of that model.")] = None

    def __post_init__(self):
        rates = ("gpu_price_per_hour", "plain_tps", "drafting_tps", "utilisation", "routed_tps")
        _check(self, above=(*rates, "batching_factor", "caching_factor"))
        _check(self, may_be_zero=("overhead_per_month", "routed_share"))
        for name in ("utilisation", "routed_share"):
            if getattr(self, name) > 1:
                raise DFlowError(f"{name}={getattr(self, name)}; give a share, at most 1")
        if self.routed_share and self.routed_tps is None:
            raise DFlowError(f"routed_share={self.routed_share} without routed_tps; give that model's throughput")

    @property
    def factors(self) -> dict[str, float]:
        """Measured gains of throughput that the `*_tps` do not include."""
        named = {"continuous batching": self.batching_factor, "prefix caching": self.caching_factor}
        return {name: factor for name, factor in named.items() if factor is not None}

    def throughput(self, *, drafting: bool) -> float:
        """Output tokens a second while serving, with all factors; routing averages seconds per token, not rates."""
        large = (self.drafting_tps if drafting else self.plain_tps) * math.prod(self.factors.values())
        routed = self.routed_share / self.routed_tps if self.routed_share and self.routed_tps else 0.0
        return 1 / ((1 - self.routed_share) / large + routed)

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
    """A provider's bill, per million output tokens or per second of a dedicated deployment."""

    hosted_per_million: Annotated[float | None, typer.Option(help="Hosted price of a million output tokens.")] = None
    hosted_per_second: Annotated[float | None, typer.Option(help="Or hosted price of a second.")] = None
    hosted_plain_tps: Annotated[float | None, typer.Option(help="Measured there, no drafter.")] = None
    hosted_drafting_tps: Annotated[float | None, typer.Option(help="Measured there, with a drafter.")] = None

    def __post_init__(self):
        _check(self, above=("hosted_per_million", "hosted_per_second", "hosted_plain_tps", "hosted_drafting_tps"))
        if (self.hosted_per_million is None) == (self.hosted_per_second is None):
            raise DFlowError("give the hosted price either per million output tokens or per second")
        if self.hosted_per_second is not None and self.hosted_plain_tps is None:
            raise DFlowError("a hosted price per second needs the measured output tokens a second: hosted_plain_tps")

    @property
    def unit(self) -> str:
        return "token" if self.hosted_per_second is None else "second"

    def price_per_million(self, *, drafting: bool) -> float | None:
        """Price of a million output tokens; `None` where the throughput was not measured."""
        if self.hosted_per_second is None:
            return self.hosted_per_million
        tps = self.hosted_drafting_tps if drafting else self.hosted_plain_tps
        return None if tps is None else self.hosted_per_second / tps * MILLION


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
    """The comparison for JSON: both sides without and with a drafter.

    Args:
        monthly_tokens (`float`, *optional*): The volume at which a month's bills are compared.
    """
    if monthly_tokens is not None and not 0 < monthly_tokens < math.inf:
        raise DFlowError(f"monthly_tokens={monthly_tokens}; give a number above 0")
    record: dict[str, Any] = {"billing_unit": hosted.unit, "speed_up_own": own.drafting_tps / own.plain_tps}
    for name, drafting in SIDES.items():
        million = hosted.price_per_million(drafting=drafting)
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
    plain, drafted = (own.price_per_million(drafting=drafting) for drafting in SIDES.values())
    record["who_keeps_the_gain"] = {
        "hosted": _who_keeps_the_hosted_gain(hosted),
        "self-hosted": f"paid per hour: you keep it, a token costs {drafted / plain - 1:+.1%}",
    }
    record["inputs"] = {"hosted": asdict(hosted), "own": {**asdict(own), "factors": own.factors}}
    return record


def _who_keeps_the_hosted_gain(hosted: Hosted) -> str:
    if hosted.unit == "token":
        return "billed per token: the price of a token stays, so the provider keeps what drafting saves"
    if hosted.hosted_drafting_tps is None or hosted.hosted_plain_tps is None:
        return "billed per second: you would keep the gain; measure tokens a second with a drafter there"
    change = hosted.hosted_plain_tps / hosted.hosted_drafting_tps - 1
    return f"billed per second: you keep it, a token costs {change:+.1%}"


def present(record: dict[str, Any]) -> Presentation:
    """The comparison as a table, without a drafter and with one."""
    sides = [record[name] for name in SIDES]
    lines = {
        "hosted_per_million": ("hosted, a million output tokens", "{:,.4f}"),
        "own_per_million": ("self-hosted, a million output tokens (no operations)", "{:,.4f}"),
        "own_tokens_a_second": ("self-hosted, output tokens a second", "{:,.1f}"),
        "own_tokens_a_month_and_server": ("self-hosted, tokens a month and server", "{:,.0f}"),
        "break_even_tokens_a_month": ("break-even, output tokens a month", "{:,.0f}"),
        "break_even_for_good": ("… and for good, whatever servers it takes", "{:,.0f}"),
    }
    rows = []
    for key, (title, form) in lines.items():
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
    table = ResultTable("all prices in the currency that was given", ("",), ("without drafter", "with drafter"), rows)
    remarks = [Remark(f"{payer}: {sentence}") for payer, sentence in record["who_keeps_the_gain"].items()]
    return Presentation("Cost", [table], remarks)
