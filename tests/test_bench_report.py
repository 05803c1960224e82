"""The report of one file: the checklist is ticked from data and nothing else; what comes from outside is escaped."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflow import AcceptanceMonitor, StepTimes
from hf_dflow.bench import cost
from hf_dflow.bench.checklist import Evidence, checklist
from hf_dflow.bench.html import render
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

RUN = json.loads((Path(__file__).parent.parent / "docs/results/bench.json").read_text(encoding="utf-8"))
PLAN = {"bytes": {"target_weights": 5}, "largest_batch": {"plain": 9, "drafting": 4}, "conditions": {"dtype": "x"}}
FACTORS = {"continuous batching": 2.0, "prefix caching": 1.1}


def cost_record(**own):
    server = cost.SelfHosted(2.0, 100.0, 200.0, 0.5, **own)
    hosted = cost.Hosted(price_per_million=4.0)
    return {**cost.compare(hosted, server), "inputs": {"hosted": vars(hosted), "own": vars(server)}}


def watched(**options):
    monitor = AcceptanceMonitor(times=StepTimes(0, 1, 1), **options)
    monitor.route("chat").end_step([4], [1])
    return monitor.prometheus_text()


def run_with(**conditions):
    return {**RUN, "conditions": {**RUN["conditions"], **conditions}}


def with_assisted():
    mode = next(iter(RUN["modes"]))
    found = json.loads(json.dumps(RUN))
    part = found["modes"][mode]["all"]["contestants"]
    part["assisted"] = part["dflash"]
    found["modes"][mode]["latency"]["assisted"] = found["modes"][mode]["latency"]["dflash"]
    return found


LICENCES = {"target": "apache-2.0", "drafter": "mit"}
ROUTED = {"factors": FACTORS, "routed_share": 0.3, "routed_tps": 500.0}
TICKS = [
    ("long-output", {"runs": [run_with(output_tokens=256)]}, {"runs": [run_with(output_tokens=255)]}),
    ("long-output", {"runs": [run_with(concurrency=4)]}, {"runs": [RUN]}),
    ("compared on one load", {"runs": [with_assisted()]}, {"runs": [RUN]}),
    ("conditions fixed", {"runs": [RUN]}, {"runs": [{**RUN, "conditions": {"output_tokens": 9, "concurrency": 1}}]}),
    ("p95 recorded", {"runs": [RUN]}, {"plans": [PLAN]}),
    ("memory", {"plans": [PLAN]}, {"plans": [{**PLAN, "largest_batch": {"plain": 9, "drafting": 0}}]}),
    ("watched", {"monitor": watched(low_acceptance=0.2)}, {"monitor": watched()}),
    ("billing unit", {"cost": cost_record()}, {"runs": [RUN]}),
    ("licences", {"licences": LICENCES}, {"licences": {"target": "mit"}}),
    ("routing, batching", {"cost": cost_record(**ROUTED)}, {"cost": cost_record(factors=FACTORS)}),
    ("canary", {"canary": "two weeks, bill down 9%"}, {"canary": ""}),
]


@pytest.mark.parametrize(("text", "done", "missing"), TICKS)
def test_an_item_is_ticked_by_its_data(text, done, missing):
    """Bug: an item that nothing ticks, or that anything does."""

    def item(given):
        (one,) = [item for item in checklist(Evidence(**given)) if text in item.text]
        return one

    assert item(done).is_done and item(done).evidence
    assert not item(missing).is_done and item(missing).evidence
    assert not item({}).is_done


def test_ten_items_all_open_without_data():
    """Bug: an item forgotten, or ticked by default."""
    items = checklist(Evidence())
    assert len(items) == 10 and not any(item.is_done for item in items)


def figure(value):
    return {"value": value, "interval_95": [value, value]}


PROBE_NAMES = ("tokens_per_step", "re_convergence", "rescue_rate", "rescue_rate_top5", "largest_gain")


def test_report_is_one_file_that_holds_all():
    """Bug: a section that is left out, a file that needs the network, or text that becomes markup."""
    hostile = run_with(target="<script>alert(1)</script>")
    probe = {"by_task": {"chat": {name: figure(0.125) for name in PROBE_NAMES}}}
    html = render(Evidence(runs=[hostile], plans=[PLAN], cost=cost_record(**ROUTED), probe=probe))
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "data:image/png;base64,iVBOR" in html
    assert "0.125 [0.125, 0.125]" in html  # what the probe saw
    assert "at most 4 sequences with the drafter" in html and "provider keeps" in html
    value = RUN["modes"]["T=0"]["all"]["contestants"]["dflow"]["tokens_per_step"]["value"]
    assert f"<td>dflow</td>\n<td>{value:.2f} [" in html
    assert html.index("Rollout checklist") > html.index("Cost")
    assert html.count("☑") + html.count("☐") == 10


def test_records_of_another_kind_are_refused():
    """Bug: a traceback, or an empty report that looks finished."""
    with pytest.raises(DFlowError, match="nothing to report"):
        render(Evidence(canary="good"))
    with pytest.raises(DFlowError, match="not of the command"):
        render(Evidence(runs=[PLAN]))


def test_command(tmp_path):
    """Bug: open items that end with 0, or records of different conditions in one report."""
    for name, record in (("a", RUN), ("b", run_with(dtype="bfloat16")), ("plan", PLAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    out = tmp_path / "report.html"
    options = [str(tmp_path / "a.json"), str(tmp_path / "plan.json"), "--html", str(out)]
    result = CliRunner().invoke(app, ["bench", "report", *options])
    assert result.exit_code == 1, result.output
    assert "[x] memory counted" in result.output and "[ ] canary" in result.output
    assert "Rollout checklist" in out.read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["bench", "report", *options, "--allow-open"]).exit_code == 0
    mixed = CliRunner().invoke(app, ["bench", "report", *options, str(tmp_path / "b.json")])
    assert mixed.exit_code == 2 and "different conditions" in mixed.output and "bfloat16" in mixed.output
    (tmp_path / "other.json").write_text('{"figures": 1}')
    (tmp_path / "none.json").write_text("figures")
    for wrong, said in (("other", "no record of bench run"), ("none", "no JSON record")):
        refused = CliRunner().invoke(app, ["bench", "report", str(tmp_path / f"{wrong}.json")])
        assert refused.exit_code == 2 and said in refused.output
