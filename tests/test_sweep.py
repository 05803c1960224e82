"""`hf-dflow bench sweep`: the fastest setting wins, by condition and task, and a drafter that never pays is said to."""

import json

from typer.testing import CliRunner

from hf_dflow.bench.sweep import Point, Setting, best
from hf_dflow.cli import app


def point(task, size, rate, *, temperature=0.0, rule=None, plain=10.0, length=64):
    return Point(task, temperature, length, Setting(size, rule), rate, plain, 2.0)


def test_the_fastest_setting_of_each_task():
    """Bug: one setting for all tasks, the longest block in place of the fastest, or conditions that are mixed."""
    points = [point("chat", 2, 12.0), point("chat", 8, 11.0), point("code", 2, 12.0), point("code", 8, 20.0)]
    points += [
        point("chat", 4, 9.0, temperature=1.0, rule="block"),
        point("chat", 8, 8.0, temperature=1.0, rule="token"),
    ]
    points += [point("chat", 8, 30.0, length=256)]
    found = {(one["task"], one["temperature"], one["output_tokens"]): one for one in best(points)}
    assert len(found) == 4
    assert found["chat", 0.0, 64]["generation_defaults"] == {"num_draft_tokens": 1}
    assert found["code", 0.0, 64]["generation_defaults"] == {"num_draft_tokens": 7}
    assert found["code", 0.0, 64]["speed_up"] == 2.0 and found["code", 0.0, 64]["use_drafter"]
    sampled = found["chat", 1.0, 64]
    assert sampled["generation_defaults"] == {"num_draft_tokens": 3, "verification": "block"}
    assert not sampled["use_drafter"]  # 9 tokens a second against 10
    assert found["chat", 0.0, 256]["generation_defaults"] == {"num_draft_tokens": 7}


def test_command(tmp_path):
    """Bug: a block size that does not reach the loop, so that all of them measure the same."""
    out = tmp_path / "sweep.json"
    options = ["--tiny", "--block-size", "2,8", "--output-tokens", "16", "--per-task", "1"]
    result = CliRunner().invoke(app, ["bench", "sweep", str(out), *options])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    steps = {one["setting"]["block_size"]: one["tokens_per_step"] for one in record["points"] if one["task"] == "all"}
    assert 1.0 <= steps[2] <= 2.0 < steps[8]
    assert {one["task"] for one in record["best"]} >= {"all", "unknown to the drafter"}
    assert record["best"][0]["generation_defaults"]["num_draft_tokens"] in (1, 7)
    refused = CliRunner().invoke(app, ["bench", "sweep", str(out), "--tiny", "--block-size", "16"])
    assert refused.exit_code == 2 and "2 … 8" in refused.output
