"""`hf-dflow cost`, against bills that a person can write on paper."""

import math

import pytest
from typer.testing import CliRunner

from hf_dflow.bench.cost import HOURS_A_MONTH, Hosted, SelfHosted, break_even, compare
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

OWN = SelfHosted(gpu_price_per_hour=2.0, plain_tps=1000.0, drafting_tps=2000.0, utilisation=0.5)


def test_price_of_a_million_tokens():
    """Bug: idle hours that cost nothing, or a gain that raises the price."""
    assert OWN.price_per_million(drafting=False) == pytest.approx(2.0 / (3600 * 1000 * 0.5) * 1e6)  # 1.1111
    assert OWN.price_per_million(drafting=True) == pytest.approx(OWN.price_per_million(drafting=False) / 2)


def test_measured_factors_and_routing():
    """Bug: rates averaged as rates: half of the tokens at 100 a second and half at 400 are 160, not 250."""
    own = SelfHosted(2.0, 50.0, 100.0, 1.0, batching_factor=2.0, routed_share=0.5, routed_tps=400.0)
    assert own.throughput(drafting=False) == pytest.approx(1 / (0.5 / 100 + 0.5 / 400))  # 160
    assert own.throughput(drafting=True) == pytest.approx(1 / (0.5 / 200 + 0.5 / 400))


@pytest.mark.parametrize("overhead", [0.0, 500.0, 20_000.0])
@pytest.mark.parametrize("price", [1.2, 1.5, 2.5, 8.0])
def test_break_even_is_where_the_bills_meet(price, overhead):
    """Bug: a volume that one server cannot write, operations left out, or a second server that is free."""
    own = SelfHosted(2.0, 1000.0, 2000.0, 0.5, overhead_per_month=overhead)
    found = break_even(price, own, drafting=False)
    capacity = own.tokens_a_month(drafting=False)

    def is_cheaper(tokens):
        return own.cost_of_month(tokens, drafting=False) <= price * tokens / 1e6 * (1 + 1e-9)

    assert is_cheaper(found.first) and not is_cheaper(found.first * 0.999)
    edges = [n * capacity * (1 + 1e-7) for n in range(1, 200)]
    assert not any(is_cheaper(tokens) for tokens in edges if tokens < found.first)
    assert is_cheaper(found.for_good)
    assert all(is_cheaper(tokens) for tokens in edges if tokens > found.for_good)
    assert found.first == found.for_good or any(
        not is_cheaper(tokens) for tokens in edges if found.first < tokens < found.for_good
    )


def test_break_even_by_hand():
    """Bug: the month in hours, or millions, off by a factor that the test above shares."""
    found = break_even(4.0, OWN, drafting=False)
    assert HOURS_A_MONTH == 730.5
    assert found.first == pytest.approx(2.0 * 730.5 / 4.0 * 1e6)  # 1461 a month at 4 a million: 365.25 million tokens
    assert break_even(1.0, OWN, drafting=False) is None  # 1.11 a million in full use
    assert break_even(1.0, OWN, drafting=True) is not None


def test_who_keeps_the_gain():
    """Bug: a gain promised to somebody who pays per token."""
    per_token = compare(Hosted(hosted_per_million=4.0), OWN, monthly_tokens=1e9)
    assert per_token["plain"]["hosted_per_million"] == per_token["drafting"]["hosted_per_million"] == 4.0
    assert "provider keeps" in per_token["who_keeps_the_gain"]["hosted"]
    assert per_token["plain"]["month"]["hosted"] == 4000.0
    assert per_token["plain"]["month"]["own"] == 1461.0  # a server writes 1.31 billion in half the hours
    assert OWN.cost_of_month(2e9, drafting=False) == 2 * 1461.0
    per_second = compare(Hosted(hosted_per_second=0.001, hosted_plain_tps=100.0, hosted_drafting_tps=125.0), OWN)
    assert per_second["plain"]["hosted_per_million"] == pytest.approx(10.0)
    assert per_second["drafting"]["hosted_per_million"] == pytest.approx(8.0)
    assert "-20.0%" in per_second["who_keeps_the_gain"]["hosted"]
    assert "-50.0%" in per_second["who_keeps_the_gain"]["self-hosted"]
    slower = compare(Hosted(hosted_per_million=4.0), SelfHosted(2.0, 1000.0, 800.0, 0.5))
    assert "+25.0%" in slower["who_keeps_the_gain"]["self-hosted"]  # a loss is said as one
    unknown = compare(Hosted(hosted_per_second=0.001, hosted_plain_tps=100.0), OWN)
    assert unknown["drafting"]["hosted_per_million"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SelfHosted(0, 1, 1, 0.5),
        lambda: SelfHosted(1, 1, 1, 1.5),
        lambda: SelfHosted(1, 1, 1, 50),
        lambda: SelfHosted(1, math.nan, 1, 0.5),
        lambda: SelfHosted(1, 1, 1, 0.5, routed_share=0.2),
        lambda: SelfHosted(1, 1, 1, 0.5, caching_factor=0),
        lambda: Hosted(),
        lambda: Hosted(hosted_per_million=1, hosted_per_second=1),
        lambda: Hosted(hosted_per_second=1),
        lambda: compare(Hosted(hosted_per_million=1), OWN, monthly_tokens=-1),
    ],
)
def test_what_is_no_price_is_refused(wrong):
    """Bug: 50 for 50%, a share without a rate, or a price that nobody gave."""
    with pytest.raises(DFlowError, match=r"give|needs"):
        wrong()


def test_command(tmp_path):
    """Bug: options that reach the wrong field."""
    own = ["--gpu-price-per-hour", "2", "--plain-tps", "1000", "--drafting-tps", "2000", "--utilisation", "0.5"]
    out = tmp_path / "cost.json"
    hosted = ["--hosted-per-million", "4", "--monthly-tokens", "1e9", "--batching-factor", "2", "--json", str(out)]
    result = CliRunner().invoke(app, ["cost", *own, *hosted])
    assert result.exit_code == 0, result.output
    assert "182,625,000" not in result.output and "365,250,000" in result.output
    assert "provider keeps" in result.output
    refused = CliRunner().invoke(app, ["cost", *own])
    assert refused.exit_code == 2 and "either per million" in refused.output
