"""Runs in this process and endpoints in one table and one chart, and only where they carried the same load."""

import copy
import json
from pathlib import Path

import pytest
from openai_server import serving
from typer.testing import CliRunner

from hf_dflow.bench import compare
from hf_dflow.bench.checklist import Evidence
from hf_dflow.bench.endpoint import RequestResult
from hf_dflow.bench.endpoint_report import summarise_load
from hf_dflow.bench.html import render
from hf_dflow.bench.workloads import Prompt
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

RUN = json.loads((Path(__file__).parent.parent / "docs/results/bench.json").read_text(encoding="utf-8"))
ACCEPTANCE = {"tokens_per_step": 2.5, "draft_acceptance_rate": 0.4}


def endpoint_record(mode="T=0", failed=0, **conditions):
    """Two tasks, one answer each, of 10 tokens in 2 and 4 seconds; the whole load took 4."""
    results = [
        RequestResult(Prompt(task, task), "ok", "", seconds, 0.5, 10, True)
        for task, seconds in (("chat", 2.0), ("code", 4.0))
    ]
    results += [RequestResult(Prompt("chat", f"{i}"), "cut", "broke") for i in range(failed)]
    load = {key: RUN["conditions"][key] for key in compare.LOAD}
    by_task = {
        task: summarise_load([one for one in results if one.prompt.task == task], 4.0) for task in ("chat", "code")
    }
    return {
        "all": summarise_load(results, 4.0),
        "by_task": by_task,
        "acceptance": ACCEPTANCE,
        "conditions": {**load, "engine": "endpoint", "target": "served", "modes": [mode], **conditions},
    }


def run_with(**conditions):
    return {**RUN, "conditions": {**RUN["conditions"], **conditions}}


def test_both_kinds_stand_in_one_list():
    """Bug: seconds under another name, a task's share of the throughput as its rate, or a row lost."""
    found = compare.entries([RUN, endpoint_record()], ["here.json", "there.json"])
    at_zero = [one for one in found if one.temperature == "T=0" and one.task == "all"]
    assert [one.strategy for one in at_zero] == [*RUN["modes"]["T=0"]["latency"], "endpoint served"]
    mine = at_zero[-1]
    assert (mine.source, mine.tokens_per_second, mine.tokens_per_step, mine.acceptance) == ("there", 5.0, 2.5, 0.4)
    assert (mine.p50, mine.first_token) == (3.0, 0.5) and mine.seconds_per_token == pytest.approx((1.5 + 3.5) / 18)
    chat = next(one for one in found if one.source == "there" and one.task == "chat")
    assert chat.p50 == 2.0 and chat.tokens_per_second is None and chat.tokens_per_step is None
    dflow = next(one for one in at_zero if one.strategy == "dflow")
    assert dflow.p95 == RUN["modes"]["T=0"]["latency"]["dflow"]["latency_seconds"]["p95"]
    assert dflow.tokens_per_step == RUN["modes"]["T=0"]["all"]["contestants"]["dflow"]["tokens_per_step"]["value"]
    assert at_zero[0].tokens_per_step == 1.0 and at_zero[0].acceptance is None
    sampled = {one.strategy for one in found if one.temperature == "T=1"}
    assert {"dflow, token verification", "dflow, block verification"} <= sampled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts_sha256": "other"}, "prompts: "),
        ({"output_tokens": 64}, "output tokens: 32 / 64"),
        ({"concurrency": 8}, "concurrency: 1 / 8"),
        ({"modes": ["T=0.7"]}, "temperature: T=0, T=1 / T=0.7"),
    ],
)
def test_other_loads_are_refused(change, words):
    """Bug: eight requests at a time against one, 64 tokens against 32, greedy against sampled, in one chart."""
    records, names = [RUN, endpoint_record()], ["a", "b"]
    compare.refuse_other_loads(records, names)
    compare.refuse_other_loads([RUN, endpoint_record(mode="T=1")], names)
    with pytest.raises(DFlowError, match="different conditions") as caught:
        compare.refuse_other_loads([RUN, endpoint_record(**change)], names)
    assert words in str(caught.value)
    with pytest.raises(DFlowError, match="different conditions"):
        compare.refuse_other_loads([endpoint_record(), endpoint_record(**change)], names)


def test_runs_of_this_process_must_agree_in_everything():
    """Bug: the endpoint's lenient rule for two runs of which we know all; or one that states nothing."""
    names = ["a", "b", "c"]
    with pytest.raises(DFlowError, match="dtype"):
        compare.refuse_other_loads([RUN, endpoint_record(), run_with(dtype="bfloat16")], names)
    compare.refuse_other_loads([RUN, run_with(dtype="bfloat16")], names[:2], except_for=["dtype"])
    silent = copy.deepcopy(endpoint_record())
    del silent["conditions"]["concurrency"]
    with pytest.raises(DFlowError, match="concurrency: 1 / 'not stated'"):
        compare.refuse_other_loads([RUN, silent], names[:2])


def test_notes_say_what_the_table_cannot():
    """Bug: failures that make an endpoint look fast, or a temperature that only one side has."""
    told = " ".join(compare.notes([RUN, endpoint_record(failed=2)], ["here", "there"]))
    assert "there: 2 cut, not in its times" in told
    assert "T=1: only in here" in told


def test_a_load_without_answers():
    """Bug: an endpoint that answered nothing ends in a traceback, or gets the best times of all."""
    dead = endpoint_record()
    dead["all"] = summarise_load([RequestResult(Prompt("chat", "a"), "cut", "broke")], 4.0)
    dead["by_task"] = {"chat": dead["all"]}
    dead["acceptance"] = None
    one = compare.entries([dead], ["dead"])[-1]
    assert compare.cells(one) == [compare.NONE] * len(compare.MEASURES)


def test_command_draws_both(tmp_path):
    """Bug: an endpoint's record that the report leaves out, or one chart for each."""
    (tmp_path / "here.json").write_text(json.dumps(RUN))
    (tmp_path / "there.json").write_text(json.dumps(endpoint_record()))
    files = [str(tmp_path / "here.json"), str(tmp_path / "there.json")]
    html, png = tmp_path / "out.html", tmp_path / "out.png"
    result = CliRunner().invoke(
        app, ["bench", "report", *files, "--html", str(html), "--plot", str(png), "--allow-open"]
    )
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if "endpoint served" in line and " all " in line)
    assert all(figure in line for figure in ("there", "5.0", "3.00", "2.50", "40.0%"))
    text = html.read_text(encoding="utf-8")
    assert "Side by side" in text and text.count("data:image/png;base64,") == 2
    assert text.index("Side by side") < text.index("endpoint served") < text.index("Rollout checklist")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    (tmp_path / "there.json").write_text(json.dumps(endpoint_record(concurrency=4)))
    refused = CliRunner().invoke(app, ["bench", "report", *files, "--html", str(tmp_path / "no.html")])
    assert refused.exit_code == 2 and "concurrency: 1 / 4" in refused.output and not (tmp_path / "no.html").exists()


def test_batches_and_memory_stand_in_the_report():
    """Bug: a strategy that was not run, or its reason, missing from the HTML; memory that is only in the JSON."""
    record = copy.deepcopy(RUN)
    record["modes"]["T=0"]["not_run"] = {"assisted": "takes <one> sequence"}
    record["modes"]["T=0"]["peak_memory"] = {"plain": {"weight_bytes": 1234567, "call_bytes": 89, "how": "so"}}
    text = render(Evidence(runs=[record]), with_plots=False)
    assert "takes &lt;one&gt; sequence" in text and "<td>1,234,567</td><td>89</td>" in text


def test_a_run_and_a_load_that_were_really_measured(tmp_path):
    """Bug: two commands that call the same condition by different names, so that their records never meet."""
    prompts, here, there = (tmp_path / name for name in ("own.jsonl", "here.json", "there.json"))
    prompts.write_text('{"prompt": "ok 1", "task": "chat"}\n{"prompt": "ok 2", "task": "chat"}\n')
    load = ["--jsonl", str(prompts), "--output-tokens", "4", "--concurrency", "2"]
    measured = CliRunner().invoke(
        app, ["bench", "run", "--tiny", "--strategy", "dflash", *load, "--json", str(here), "--dtype", "float64"]
    )
    assert measured.exit_code == 0, measured.output
    with serving() as server:
        options = ["--endpoint", server.url, "--model", "tiny", *load, "--json", str(there)]
        loaded = CliRunner().invoke(app, ["bench", "endpoint", *options])
    assert loaded.exit_code == 0, loaded.output
    result = CliRunner().invoke(app, ["bench", "report", str(here), str(there), "--allow-open"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("T=0 ") or " all " in line]
    assert {"here", "there"} <= {word for row in rows for word in row}
    for record in (here, there):
        assert json.loads(record.read_text())["conditions"]["workload"] == "own.jsonl"
