"""The gain against what the probe saw: points come from the right records, and the picture is drawn."""

import json

import pytest
from commands import invoke

from experiments import gain_curve
from hf_dflow.errors import DFlowError


def figure(value):
    return {"value": value, "interval_95": [value - 0.1, value + 0.1]}


def probed(rescue):
    return {"re_convergence": 0.6, "rescue_rate": rescue, "largest_gain": rescue / 2, "tokens_per_step": 9.0}


def lab(tasks):
    entries = {
        task: {
            "probe": probed(rescue),
            "dflash": {"tokens_per_step": figure(3.0)},
            "dflow": {"gain_over_dflash": figure(gain)},
            "pairs": {"dflow over multi_round": {"gain": figure(gain / 2)}},
        }
        for task, (rescue, gain) in tasks.items()
    }
    whole = {"probe": probed(0.3), "dflash": {"tokens_per_step": figure(2.0)}, "tasks": {}}
    whole["dflow"] = {"gain_over_dflash": figure(0.2)}
    more = {"text": whole, "more updates": {"dflash": whole["dflash"], "probe": whole["probe"], "tasks": {}}}
    return {"corpora": {"records": {**whole, "tasks": entries}, **more}}


def evaluation(gain):
    group = {
        "contestants": {"dflash": {"tokens_per_step": figure(1.6)}},
        "differences": {
            "dflow - dflash": {"gain": figure(gain), "difference": figure(9.0)},
            "multi_round - dflow": {"gain": figure(0.25)},
        },
    }
    return {"modes": {"T=0": {"by_task": {"chat": group, "unprobed": group}}}}


def probe(rescue):
    return {"by_task": {"chat": {key: figure(value) for key, value in probed(rescue).items()}, "all": {}}}


def follow(*arguments):
    return invoke(gain_curve.main, *arguments)


def test_points_of_both_kinds_of_records_become_one_picture(tmp_path):
    """Bug: a difference is read as a gain, the probe's tokens per step as the evaluation's, or a task without probe."""
    files = {"lab": lab({"easy": (0.2, 0.1), "hard": (0.5, 0.4)}), "eval": evaluation(0.02), "probe": probe(0.1)}
    for name, record in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    pair = f"real={tmp_path}/eval.json,{tmp_path}/probe.json"
    result = follow(tmp_path / "curve.json", "--lab", tmp_path / "lab.json", "--pair", pair)
    assert result.exit_code == 0, (result.output, result.exception)
    record = json.loads((tmp_path / "curve.json").read_text())
    found = [
        (one["pair"], one["task"], one["rescue_rate"], one["dflash_tokens_per_step"], one["gain"])
        for one in record["points"]
    ]
    assert found == [
        ("records", "easy", 0.2, 3.0, 0.1),
        ("records", "hard", 0.5, 3.0, 0.4),
        ("text", "held-out text", 0.3, 2.0, 0.2),
        ("real", "chat", 0.1, 1.6, 0.02),
    ]
    assert [one["relay_gain"] for one in record["points"]] == [0.05, 0.2, None, pytest.approx(-0.2)]
    low, high = record["points"][-1]["relay_interval_95"]
    assert (low, high) == (pytest.approx(1 / 1.35 - 1), pytest.approx(1 / 1.15 - 1)), "the other over the one"
    assert record["correlation_with_gain"]["rescue_rate"] > 0.99
    assert 0.9 < record["correlation_with_relay_gain"]["rescue_rate"] < 1.0
    assert record["correlation_with_gain"]["re_convergence"] is None, "the same in all: no correlation, and no NaN"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "| real, chat | 60.0% | 10.0% | 5.0% | 1.60 | +2.0% [-8.0%, +12.0%] | -20.0% [-25.9%, -13.0%] |"
        in result.output
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "0 points make no curve"),
        (("--pair", "real=a.json"), "give NAME=EVALUATION.json,PROBE.json"),
        (("--lab", "missing.json"), "missing.json: no JSON record"),
        (("--lab", "other.json"), "other.json: not a record of the kind"),
    ],
)
def test_what_gives_no_curve_is_said(tmp_path, options, words):
    """Bug: an empty picture, or a traceback about a key."""
    (tmp_path / "other.json").write_text('{"corpora": {"records": {"tasks": {"easy": {}}}}}')
    options = [str(tmp_path / one) if one == "other.json" else one for one in options]
    error = follow(tmp_path / "curve.json", *options).exception
    assert isinstance(error, DFlowError) and words in str(error)
    assert not (tmp_path / "curve.json").exists()


def test_a_picture_is_not_written_over_its_record(tmp_path):
    """Bug: asked for curve.png, the figures are written there first and then the picture over them."""
    assert "ends in .json" in str(follow(tmp_path / "curve.png").exception)
    assert follow(tmp_path / "missing" / "curve.json").exit_code == 2


def test_records_without_a_common_task_are_refused():
    """Bug: a pair vanishes from the picture and nobody is told."""
    with pytest.raises(DFlowError, match="share no task"):
        gain_curve.pair_points("real", evaluation(0.1), {"by_task": {"code": {}}})


@pytest.mark.parametrize("name", ["dflow - multi_round", "multi_round - dflow"])
def test_either_difference_gives_the_relays_gain(name):
    """Bug: an evaluation that named its contestants in the other order has no relay's gain, and nobody is told."""
    record = evaluation(0.1)
    differences = record["modes"]["T=0"]["by_task"]["chat"]["differences"]
    del differences["multi_round - dflow"]
    differences[name] = {"gain": figure(0.25)}
    (point,) = gain_curve.pair_points("real", record, probe(0.1))
    assert point.relay_gain == pytest.approx(0.25 if name.startswith("dflow") else -0.2)
