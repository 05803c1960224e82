"""`hf-dflow bench sweep`: the fastest setting wins, by condition and task, and is written where it pays."""

import json

import pytest
from typer.testing import CliRunner

from hf_dflow import DFlowGenerationConfig
from hf_dflow.bench import sweep as bench
from hf_dflow.bench.sweep import Point, best
from hf_dflow.cli import app


def point(task, size, rate, *, temperature=0.0, rule=None, plain=10.0, length=64, concurrency=1, n=9, spread=0.05):
    ratio = rate / plain
    speed_up = {"value": ratio, "interval_95": [ratio - spread, ratio + spread] if n >= 5 else None, "n": n}
    return Point(task, temperature, length, concurrency, size, rule, rate, plain, 2.0, 1.5, speed_up)


def test_the_fastest_setting_of_each_task():
    """Bug: one setting for all tasks, the longest block in place of the fastest, or conditions that are mixed."""
    points = [point("chat", 2, 12.0), point("chat", 8, 11.0), point("code", 2, 12.0), point("code", 8, 20.0)]
    points += [
        point("chat", 4, 9.0, temperature=1.0, rule="block"),
        point("chat", 8, 8.0, temperature=1.0, rule="token"),
    ]
    points += [point("chat", 8, 30.0, length=256), point("chat", 4, 40.0, plain=50.0, concurrency=8)]
    found = {(one["task"], one["temperature"], one["output_tokens"], one["concurrency"]): one for one in best(points)}
    assert len(found) == 5
    assert found["chat", 0.0, 64, 1]["generation_defaults"] == {"num_draft_tokens": 1}
    assert found["code", 0.0, 64, 1]["generation_defaults"] == {"num_draft_tokens": 7}
    assert found["code", 0.0, 64, 1]["speed_up"]["value"] == 2.0 and found["code", 0.0, 64, 1]["use_drafter"]
    sampled = found["chat", 1.0, 64, 1]
    assert sampled["generation_defaults"] == {"num_draft_tokens": 3, "verification": "block"}
    assert not sampled["use_drafter"]  # 9 tokens a second against 10
    assert found["chat", 0.0, 256, 1]["generation_defaults"] == {"num_draft_tokens": 7}
    assert not found["chat", 0.0, 64, 8]["use_drafter"]  # a full batch needs no drafter


@pytest.mark.parametrize(
    ("rate", "options", "verdict", "words"),
    [
        (20.0, {}, True, "yes"),
        (20.0, {"n": 2}, None, "fewer than 5 prompts"),
        (20.0, {"spread": 1.2}, None, "the interval holds 1"),
        (9.0, {"spread": 0.3}, None, "the interval holds 1"),
        (9.0, {}, False, "plain decoding is faster"),
    ],
)
def test_a_recommendation_needs_an_interval(tmp_path, rate, options, verdict, words):
    """N17: "use the drafter: yes" from two prompts, or a no that is as little shown."""
    record = {"points": [], "best": best([point("chat", 4, rate, **options)]), "left_out": {}, "conditions": []}
    assert record["best"][0]["use_drafter"] is verdict
    (row,) = bench.present(record).tables[0].rows
    assert words in row[-1] and str(options.get("n", 9)) in row
    assert len(bench.write(record, tmp_path)) == (verdict is True)


def test_defaults_are_files_that_generate_takes(tmp_path):
    """Bug: defaults that nothing can load, a losing drafter switched on, or those of an older sweep left there."""
    points = [point("Mail & chat", 4, 20.0, temperature=0.7, rule="token"), point("code", 8, 9.0)]
    record = {"points": [], "best": best(points), "left_out": {}, "conditions": []}
    stale = tmp_path / bench.file_name(record["best"][1])
    stale.write_text("{}")
    (path,) = bench.write(record, tmp_path)
    assert not stale.exists() and json.loads((tmp_path / bench.RECORD).read_text())["files"] == [path.name]
    config = DFlowGenerationConfig.from_pretrained(tmp_path, path.name)
    assert config.speculation_type == "dflow" and config.num_draft_tokens == 3 and config.verification == "token"
    assert config.do_sample is True and config.temperature == 0.7 and config.top_k == 0
    assert path.name == "mail-chat-e9689c-t0.7-64-tokens-1-at-a-time.json"


def test_every_task_has_a_file_of_its_own():
    """Bug: the settings of one task overwritten by another's whose name has the same Latin letters, or none."""
    condition = {"temperature": 0.0, "output_tokens": 8, "concurrency": 1}
    tasks = ["C++", "C#", "c", "日本", "中文", "a b", "a-b", "a_b", "A b"]
    names = {bench.file_name({"task": task, **condition}) for task in tasks}
    assert len(names) == len(tasks) and all(name.isascii() and "/" not in name for name in names)


def test_the_command_line_of_a_whole_sweep(tmp_path, monkeypatch):
    """Bug: a list that does not reach the loop, a block size that ends the sweep, or defaults that are not written."""
    options = "--block-size 2,8,16 --verification token,block --temperature 0,1 --output-tokens 2,9"
    options += " --concurrency 1,2 --tiny --per-task 1"
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "sweep", *options.split(), "--task", "unknown to the drafter"])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    measured = {
        (one["temperature"], one["setting"]["verification"], one["output_tokens"], one["concurrency"],
         one["setting"]["block_size"])
        for one in record["points"]
    }  # fmt: skip
    rules = [(0.0, None), (1.0, "token"), (1.0, "block")]
    assert measured == {(*rule, n, c, size) for rule in rules for n in (2, 9) for c in (1, 2) for size in (2, 8)}
    assert record["left_out"] == {"16": "this drafter drafts blocks of 8 at most"}
    assert "block 16 not run" in result.output and "block 16 was not run: this drafter drafts" in result.output
    assert {one["task"] for one in record["best"]} == {"all", "unknown to the drafter"}
    steps = {
        one["setting"]["block_size"]: one["tokens_per_step"]
        for one in record["points"]
        if (one["output_tokens"], one["temperature"], one["concurrency"]) == (9, 0.0, 2)
    }
    assert 1.0 <= steps[2] <= 2.0 < steps[8]  # a block size reaches the loop
    assert (
        record["conditions"][0]["workload"]
        == "tiny_prompts.json; tasks: unknown to the drafter; 1 of each task at most"
    )
    assert [one["concurrency"] for one in record["conditions"][:4]] == [1, 2, 1, 2]
    for name in record["files"]:
        assert DFlowGenerationConfig.from_pretrained(tmp_path / "sweep", name).num_draft_tokens in (1, 3, 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--block-size 16", "2 … 8"),
        ("--block-size 1,4", "2 … 8"),
        ("--concurrency 0", "1 or more"),
        ("--output-tokens 8,0", "1 or more"),
        ("--temperature 0,-1", "--temperature"),
        ("--verification tokens", "--verification"),
        ("--block-size two", "numbers"),
    ],
)
def test_impossible_lists_are_refused_before_anything_is_measured(tmp_path, options, words):
    """Bug: an hour of measuring that ends at the last combination."""
    result = CliRunner().invoke(app, ["bench", "sweep", "--tiny", "--output", str(tmp_path / "s"), *options.split()])
    assert result.exit_code == 2 and words in result.output and not (tmp_path / "s").exists()


def test_a_sweep_that_is_interrupted_keeps_what_was_finished(tmp_path, monkeypatch):
    """N18: Ctrl-C in the second condition of a sweep that leaves nothing of the first; N19: no --json, and a record
    that bench report refuses."""
    honest, calls = bench.comparison.run, []

    def interrupted(*given, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(*given, **options)

    monkeypatch.setattr(bench.comparison, "run", interrupted)
    out, copy = tmp_path / "s", tmp_path / "copy.json"
    options = ["--tiny", "--per-task", "1", "--block-size", "2", "--output-tokens", "4,6,8"]
    result = CliRunner().invoke(app, ["bench", "sweep", *options, "--output", str(out), "--json", str(copy)])
    assert result.exit_code == 130 and f"Wrote {out / 'sweep.json'}" in result.output, result.output
    for path in (out / "sweep.json", copy):
        record = json.loads(path.read_text())
        assert record["interrupted"] and {entry["output_tokens"] for entry in record["points"]} == {4}
    report = CliRunner().invoke(app, ["bench", "report", str(copy), "--allow-open", "--html", str(tmp_path / "r.html")])
    assert report.exit_code == 0, report.output
    assert "the fastest setting" in (tmp_path / "r.html").read_text()


def test_a_record_from_before_intervals_can_still_be_read(tmp_path):
    """Bug: `bench report` calls a sweep's own record of an earlier release no record, or believes its "yes"."""
    entry = {
        "task": "chat",
        "temperature": 0.0,
        "output_tokens": 64,
        "concurrency": 1,
        "generation_defaults": {"num_draft_tokens": 3},
        "tokens_per_step": 2.0,
        "speed_up": 1.25,
        "use_drafter": True,
    }
    path, html = tmp_path / "sweep.json", tmp_path / "report.html"
    path.write_text(json.dumps({"points": [], "best": [entry], "left_out": {}, "conditions": []}))
    done = CliRunner().invoke(app, ["bench", "report", str(path), "--html", str(html), "--allow-open"])
    assert done.exit_code == 0, done.output
    assert "1.25" in html.read_text() and "recorded without an interval" in html.read_text()
