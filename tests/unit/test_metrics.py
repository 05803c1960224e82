"""The `evaluate` modules: loaded offline, and equal to what a person computes with a pencil."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflow import AcceptanceStatistics, metrics
from hf_dflow.errors import DFlowError

ACCEPTED, DRAFTED = [3, 0, 2, 3, 1], [3, 3, 3, 3, 2]  # 9 of 14 drafts
TASKS = ["code", "code", "chat", "code", "chat"]

CHILD = """
import json, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import evaluate
from hf_dflow import metrics
accepted, drafted, tasks = json.loads(sys.stdin.read())
say = {name: evaluate.load(metrics.folder(name)) for name in metrics.METRICS}
steps = {"accepted": accepted, "drafted": drafted}
found = {
    "counts": say["acceptance"].compute(**steps),
    "timed": say["acceptance"].compute(**steps, wall_seconds=2.0),
    "cut": say["acceptance"].compute(
        **steps, wall_seconds=2.0, emitted=[4, 1, 3, 3, 2], offered=[3, 3, 3, 3, 1], output_tokens=14, target_forwards=7
    ),
    "cut_position": say["acceptance_per_position"].compute(**steps, positions=[3, 3, 3, 3, 1]),
    "clipped": say["acceptance"].compute(**steps, wall_seconds=2.0, output_tokens=13),
    "position": say["acceptance_per_position"].compute(**steps),
    "spread": say["accepted_length_spread"].compute(**steps, tasks=tasks),
}
for kept, tried in zip(accepted, drafted):
    say["acceptance"].add(accepted=kept, drafted=tried)
found["added"] = say["acceptance"].compute()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All modules in a process of its own, which has no cache and no network."""
    pytest.importorskip("evaluate")
    home = str(tmp_path_factory.mktemp("home"))
    # evaluate.load of an earlier test puts its own cache of modules on the path, where the child would look first.
    paths = os.pathsep.join(path for path in sys.path if path and not Path(path, "evaluate_modules").exists())
    environment = {**os.environ, "HF_HOME": home, "HF_EVALUATE_OFFLINE": "1", "PYTHONPATH": paths}
    given = json.dumps([ACCEPTED, DRAFTED, TASKS])
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=given, env=environment, cwd=home, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_acceptance_by_hand(found):
    """Bug: the bonus counted as accepted, or ratios averaged over steps instead of pooled."""
    counts = found["counts"]
    assert counts == pytest.approx(
        {
            "accept_rate": 9 / 14,
            "wasted_ratio": 5 / 14,
            "mean_accepted_length": 1.8,
            "mean_acceptance_length": 2.8,
            "tokens_per_step": 2.8,
            "num_spec_steps": 5,
            "num_draft_tokens": 14,
            "num_accepted_draft_tokens": 9,
        }
    )
    assert found["added"] == counts  # one step after the other


def test_throughput_with_and_without_the_bonus(found):
    """Bug: one of the two conventions under the other's name, or a clipped last step counted whole."""
    assert found["timed"]["effective_tps"] == 4.5
    assert found["timed"]["effective_tps_with_bonus"] == 7.0  # 9 drafts and 5 bonus tokens
    assert found["clipped"]["effective_tps_with_bonus"] == 6.5
    assert found["clipped"]["effective_tps"] == 4.5
    assert "effective_tps" not in found["counts"]


def test_a_step_that_the_end_of_a_text_cut(found):
    """N24: a step counted whole, or drafts behind the end counted as rejected."""
    cut = found["cut"]
    assert cut["tokens_per_step"] == 13 / 5 and cut["mean_acceptance_length"] == 2.8
    assert cut["accept_rate"] == 9 / 13 and cut["wasted_ratio"] == 5 / 14
    assert cut["tokens_per_target_forward"] == 2.0 and cut["effective_tps_with_bonus"] == 7.0
    assert found["cut_position"]["acceptance_rate_per_position"] == pytest.approx([4 / 5, 3 / 4, 2 / 4])


@pytest.mark.parametrize(
    "lists", [{"emitted": [1]}, {"emitted": [3, 0]}, {"emitted": [5, 1]}, {"offered": [4, 3]}, {"positions": [2, 3]}]
)
def test_steps_of_which_something_was_cut_that_no_run_has(lists):
    """N24: lists of different lengths, or tokens and judged drafts that contradict the accepted ones."""
    with pytest.raises(DFlowError, match="give"):
        metrics.statistics_of([3, 0], [3, 3], **lists)


def test_positions_by_hand(found):
    """Bug: unconditional and conditional rates mixed up; N24: a position counted for steps that did not draft it."""
    position = found["position"]
    assert position["acceptance_rate_per_position"] == pytest.approx([4 / 5, 3 / 5, 2 / 4])
    # Of 5 steps 4 accepted the first; of these 4 three the second; of these 3 two the third.
    assert position["conditional_acceptance_rate_per_position"] == pytest.approx([4 / 5, 3 / 4, 2 / 3])
    assert position["acceptance_histogram"] == [1, 1, 1, 2]


def test_spread_by_hand(found):
    """Bug: the sample's deviation, or long tasks that count more than short ones."""
    spread = found["spread"]
    assert spread["accepted_length_std"] == pytest.approx((6.8 / 5) ** 0.5)  # squares 1.44, 3.24, 0.04, 1.44, 0.64
    assert spread["mean_accepted_length_by_task"] == {"code": 2.0, "chat": 1.5}
    assert spread["accepted_length_std_by_task"] == pytest.approx({"code": 2**0.5, "chat": 0.5})
    assert spread["accepted_length_std_over_tasks"] == 0.25


def test_report_of_three_totals():
    """Bug: a wasted ratio of 0.21999…, or throughput of drafts instead of accepted ones."""
    report = metrics.report_acceptance(1_000_000, 780_000, 600)
    assert report == {"accept_rate": 0.78, "effective_tps": 1300.0, "wasted_ratio": 0.22}
    assert metrics.report_acceptance(10, 0, 2.0) == {"accept_rate": 0.0, "effective_tps": 0.0, "wasted_ratio": 1.0}


@pytest.mark.parametrize("totals", [(0, 0, 1.0), (3, 4, 1.0), (3, -1, 1.0), (3, 1, 0.0), (3, 1, float("nan"))])
def test_totals_that_no_run_has(totals):
    """Bug: a division by zero, or an acceptance above 1 that looks like a good result."""
    with pytest.raises(DFlowError, match="give"):
        metrics.report_acceptance(*totals)


@pytest.mark.parametrize("steps", [([], []), ([1], [1, 2]), ([2], [1]), ([-1], [1]), ([0], [0])])
def test_steps_that_no_run_has(steps):
    """Bug: accepted lengths with the bonus counted pass for those without it."""
    with pytest.raises(DFlowError, match="give"):
        metrics.statistics_of(*steps)


def test_a_position_that_no_step_reached():
    """Bug: 0 / 0, or a rate of 0 for what was never tried."""
    statistics = AcceptanceStatistics(per_step_accepted=[0, 0], per_step_drafted=[3, 1])
    assert statistics.conditional_acceptance_rate_per_position == [0.0, None, None]
    assert AcceptanceStatistics().conditional_acceptance_rate_per_position == []


def test_unknown_metrics_are_named():
    """Bug: a misspelt name becomes a look-up on the Hub."""
    with pytest.raises(DFlowError, match="acceptance_per_position"):
        metrics.folder("accept")
