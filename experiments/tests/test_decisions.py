"""The benchmark of the feedback's own decisions, on the tiny pair."""

import json

import pytest
from commands import invoke

from experiments import decisions
from hf_dflow.bench.answers import Answer
from hf_dflow.bench.strategies import Mode, Run
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import Prompt
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.statistics import AcceptanceStatistics


def run(tmp_path, what, *options, texts_of_a_task=1):
    prompts = json.loads(TINY_PROMPTS.read_text())
    few = tmp_path / "few.json"
    few.write_text(json.dumps({task: texts[:texts_of_a_task] for task, texts in prompts.items()}))
    pair = ["--target", str(TINY_TARGET), "--drafter", str(TINY_DRAFTER), "--prompts", str(few)]
    output = tmp_path / "record.json"
    done = invoke(decisions.main, what, *pair, "--json", output, "--max-new-tokens 24", *options)
    return done, json.loads(output.read_text()) if output.exists() else None


def test_lengths_compete_with_fixed_ones_under_the_same_costs(tmp_path):
    """Bug: a comparison with one fixed length alone, or costs that differ among the contestants."""
    done, record = run(tmp_path, "length", "--fixed", "2", "--fixed", "7")
    assert done.exit_code == 0, done.output
    groups = record["modes"]["T=0"]
    assert list(groups["all"]["contestants"]) == ["2 drafts", "7 drafts", "adaptive", "adaptive, mixture"]
    found = groups["modelled_seconds_per_token"]["by_task"]
    assert found.keys() == {*groups["by_task"], "all"}
    assert all(value > 0 for task in found.values() for value in task.values())
    assert len(record["conditions"]["step_costs"]["verify"]) == 8
    assert groups["calibration"]["drafts"] > 20 and "calibration error" in done.output


def test_mixtures_with_relay_and_without(tmp_path):
    """Bug: the mixture measured on top of the relay only, where its gain on a stock drafter is the question."""
    done, record = run(tmp_path, "mixture", "--temperature", "0", "--temperature", "1", "--verification", "token")
    assert done.exit_code == 0, done.output
    names = {"dflash", "dflash, mixture", "dflash, mixture 0.1", "dflow", "dflow, mixture", "dflow, mixture 0.1"}
    assert all(groups["all"]["contestants"].keys() == names for groups in record["modes"].values())
    assert set(record["modes"]) == {"T=0", "T=1, token verification"}


def test_trees_beside_the_chain(tmp_path):
    """Bug: a budget that does not reach the loop."""
    done, record = run(tmp_path, "tree")
    assert done.exit_code == 0, done.output
    found = record["modes"]["T=0"]["all"]["contestants"]
    rates = [found[name]["draft_acceptance_rate"] for name in ("tree of 8", "tree of 16", "tree of 32")]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[2]


def answer(**statistics):
    counts = AcceptanceStatistics(**statistics)
    return Answer(Prompt("task", "text"), Mode(), 0, {"x": Run([], 0, 0.0, counts)})


def test_calibration_by_hand():
    """Bug: bins that average away opposite errors, or weigh all bins alike."""
    predictions = [(0.95, True)] * 6 + [(0.95, False)] * 2 + [(0.25, True)] * 2
    found = decisions.calibration([answer(predictions=predictions)], "x")
    assert found["drafts"] == 10
    assert found["expected_calibration_error"] == pytest.approx((8 * 0.2 + 2 * 0.75) / 10)
    assert decisions.calibration([answer()], "x") is None


def test_the_error_that_chance_shows():
    """Bug: an error by chance that does not shrink with more drafts, or that counts wrong predictions as chance."""
    few, many = ([(0.7, index % 10 < 7) for index in range(count)] for count in (20, 2000))
    found = [decisions.calibration([answer(predictions=predictions)], "x") for predictions in (few, many)]
    assert all(one["expected_calibration_error"] == pytest.approx(0.0, abs=1e-9) for one in found)
    assert 0.05 < found[0]["error_by_chance"] < 0.12 and found[1]["error_by_chance"] < 0.012
    wrong = decisions.calibration([answer(predictions=[(0.7, index % 10 < 2) for index in range(2000)])], "x")
    assert wrong["expected_calibration_error"] == pytest.approx(0.5) and wrong["error_by_chance"] < 0.012


def test_modelled_seconds_by_hand():
    """Bug: a step's draft or the forwards without drafts left out of the price."""
    one = answer(
        per_step_drafted=[2, 1], per_step_accepted=[2, 0], num_target_forwards=5, num_draft_forwards=3,
        num_output_tokens=7,
    )  # fmt: skip
    costs = StepCosts(0.5, (1.0, 2.0, 4.0))
    assert decisions.modelled_seconds([one], "x", costs) == pytest.approx((3 * 0.5 + 4.0 + 2.0 + 2 * 1.0) / 7)


def test_switches_alone_and_together(tmp_path, monkeypatch):
    """Bug: trees asked to sample, a plan without the target alone, a tree's nodes left out of the price."""
    dear = StepCosts(0.3, tuple(1.0 + 0.25 * n for n in range(65)))  # what is measured depends on the machine's mood
    monkeypatch.setattr(decisions, "step_costs", lambda *_: dear)
    done, record = run(
        tmp_path, "together", "--temperature", "0", "--temperature", "1", "--verification", "block", texts_of_a_task=2
    )
    assert done.exit_code == 0, done.output
    chains = ["none", "mixture", "length", "mixture, length"]
    greedy, sampled = record["modes"]["T=0"], record["modes"]["T=1, block verification"]
    assert list(greedy["all"]["contestants"]) == [*chains, "tree", "mixture, tree"]
    assert list(sampled["all"]["contestants"]) == chains
    assert "speed_up" in greedy["all"]["contestants"]["tree"]
    assert greedy["modelled_seconds_per_token"]["by_task"]["all"].keys() == greedy["all"]["contestants"].keys()
    assert len(record["conditions"]["step_costs"]["verify"]) == 65
    rates = {name: one["draft_acceptance_rate"] for name, one in greedy["all"]["contestants"].items()}
    assert len({rates["none"], rates["length"], rates["tree"]}) == 3, "each decides for itself what is verified"


def test_calibration_judges_every_draft(tmp_path):
    """Bug: a curve of the drafts alone that were thought likely, or no picture."""
    done, record = run(tmp_path, "calibration", "--plot", str(tmp_path / "curve.png"))
    assert done.exit_code == 0, done.output
    groups = record["modes"]["T=0"]
    found = groups["all"]["contestants"]["adaptive"]
    assert groups["calibration"]["drafts"] > found["num_spec_steps"]
    lowest = groups["calibration"]["bins"][0]
    assert lowest["predicted"] < 0.3 and sum(one["drafts"] for one in groups["calibration"]["bins"]) > 30
    assert (tmp_path / "curve.png").stat().st_size > 5000
    done, _ = run(tmp_path, "tree", "--plot", str(tmp_path / "curve.png"))
    assert done.exit_code != 0


def test_what_does_not_exist_is_refused_at_once(tmp_path):
    """Bug: minutes of decoding before a wrong word is noticed."""
    for options in (["forest"], ["length", "--fixed", "9"], ["tree", "--temperature", "1"]):
        done, record = run(tmp_path, *options)
        assert done.exit_code != 0 and record is None
