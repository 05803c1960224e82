"""Records side by side and in the report: only what carried the same load, ticked from data, escaped, nothing lost."""

import copy
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflow import AcceptanceMonitor, StepTimes
from hf_dflow.bench import conditions, cost, side_by_side
from hf_dflow.bench.checklist import Evidence, checklist
from hf_dflow.bench.endpoint import RequestResult
from hf_dflow.bench.endpoint_record import summarise_load
from hf_dflow.bench.report import render
from hf_dflow.bench.workloads import Prompt
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

RUN = json.loads((Path(__file__).parents[2] / "docs/results/bench.json").read_text(encoding="utf-8"))
PLAN_BYTES = dict.fromkeys(
    ("target_weights", "target_cache_row", "drafter_weights", "drafter_cache_row", "holes_row",
     "verification_buffers_row", "relay_buffers_row", "prefill_buffers_row"), 5 * 2**20,
)  # fmt: skip
PLAN = {
    "bytes": PLAN_BYTES,
    "available_bytes": 2**30,
    "largest_batch": {"plain": 9, "drafting": 4},
    "conditions": {"dtype": "x"},
}
FACTORS = {"batching_factor": 2.0, "caching_factor": 1.1}
ROUTED = {**FACTORS, "routed_share": 0.3, "routed_tps": 500.0}


def run_with(**changed):
    return {**RUN, "conditions": {**RUN["conditions"], **changed}}


def endpoint_record(mode="T=0", failed=0, **changed):
    """Two tasks, one answer each, of 10 tokens in 2 and 4 seconds; the whole load took 4."""
    results = [
        RequestResult(
            Prompt(task, task), "ok", "", seconds, 0.5, 10, 1, 10, last_token_seconds=seconds, is_counted_by_server=True
        )
        for task, seconds in (("chat", 2.0), ("code", 4.0))
    ]
    results += [RequestResult(Prompt("chat", f"{i}"), "cut", "broke") for i in range(failed)]
    load = {key: RUN["conditions"][key] for key in conditions.LOAD}
    tasks = {task: [result for result in results if result.prompt.task == task] for task in ("chat", "code")}
    return {
        "all": summarise_load(results, 4.0),
        "by_task": {task: summarise_load(group, 4.0) for task, group in tasks.items()},
        "acceptance": {
            "tokens_per_step": 2.5,
            "draft_acceptance_rate": 0.4,
            "mean_accepted_length": 1.5,
            "wasted_ratio": 0.6,
        },
        "conditions": {**load, "engine": "endpoint", "target": "served", "modes": [mode], **changed},
    }


def cost_record(**own):
    return cost.compare(cost.Hosted(hosted_per_million=4.0), cost.SelfHosted(2.0, 100.0, 200.0, 0.5, **own))


def monitored(**options):
    monitor = AcceptanceMonitor(times=StepTimes(0, 1, 1), **options)
    monitor.route("chat").end_step([4], [1])
    return monitor.prometheus_text()


def with_assisted():
    record = copy.deepcopy(RUN)
    mode = next(iter(record["modes"].values()))
    mode["all"]["contestants"]["assisted"] = mode["all"]["contestants"]["dflash"]
    mode["latency"]["assisted"] = mode["latency"]["dflash"]
    return record


def runs(record):
    return {"runs": {"run": record}}


def costs(**own):
    return {"costs": {"cost": cost_record(**own)}}


UNSTATED = {**RUN, "conditions": {"output_tokens": 9, "concurrency": 1}}
NONE_FITS = {**PLAN, "largest_batch": {"plain": 9, "drafting": 0}}
TICKS = [
    ("long-output", runs(run_with(output_tokens=256)), runs(run_with(output_tokens=255))),
    ("long-output", runs(run_with(concurrency=4)), runs(RUN)),
    ("compared on one load", runs(with_assisted()), runs(RUN)),
    ("conditions fixed", runs(RUN), runs(UNSTATED)),
    ("p95 recorded", runs(RUN), {"plans": {"plan": PLAN}}),
    ("memory", {"plans": {"plan": PLAN}}, {"plans": {"plan": NONE_FITS}}),
    ("watched", {"monitor": monitored(low_acceptance=0.2)}, {"monitor": monitored()}),
    ("billing unit", costs(), runs(RUN)),
    ("licences", {"target_licence": "apache-2.0", "drafter_licence": "mit"}, {"target_licence": "mit"}),
    ("routing, batching", costs(**ROUTED), costs(**FACTORS)),
    ("canary", {"canary": "two weeks, bill down 9%"}, {"canary": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "done", "missing"), TICKS)
def test_an_item_is_ticked_by_its_data(text, done, missing):
    """Bug: an item that nothing ticks, or that anything does."""

    def item(evidence):
        (found,) = [item for item in checklist(Evidence(**evidence)) if text in item.text]
        return found

    assert item(done).is_done and item(done).evidence
    assert not item(missing).is_done and item(missing).evidence
    assert not item({}).is_done
    assert len(checklist(Evidence())) == 10


def test_both_kinds_stand_in_one_list():
    """Bug: seconds under another name, a task's share of the throughput as its rate, or a row lost."""
    entries = side_by_side.entries([RUN, endpoint_record()], ["here.json", "there.json"])
    greedy = [entry for entry in entries if entry.temperature == "T=0" and entry.task == "all"]
    assert [entry.strategy for entry in greedy] == [*RUN["modes"]["T=0"]["latency"], "endpoint served"]
    served = greedy[-1]
    assert (served.source, served.tokens_per_second, served.tokens_per_step) == ("there", 5.0, 2.5)
    assert (served.p50, served.first_token, served.acceptance) == (3.0, 0.5, 0.4)
    assert served.milliseconds_per_token == pytest.approx(1000 * (1.5 + 3.5) / 18)
    chat = next(entry for entry in entries if entry.source == "there" and entry.task == "chat")
    assert chat.p50 == 2.0 and chat.tokens_per_second is None and chat.tokens_per_step is None
    measured = RUN["modes"]["T=0"]
    dflow = next(entry for entry in greedy if entry.strategy == "dflow")
    assert dflow.p95 == measured["latency"]["dflow"]["latency_seconds"]["p95"]
    assert dflow.tokens_per_step == measured["all"]["contestants"]["dflow"]["tokens_per_step"]["value"]
    assert greedy[0].tokens_per_step == 1.0 and greedy[0].acceptance is None
    sampled = {entry.strategy for entry in entries if entry.temperature == "T=1"}
    assert {"dflow, token verification", "dflow, block verification"} <= sampled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts_sha256": "other"}, "prompts: "),
        ({"output_tokens": 64}, "output tokens: 32 / 64"),
        ({"concurrency": 8}, "concurrency: 1 / 8"),
        ({"modes": ["T=0.7"]}, "temperature: 'T=0, T=1' / 'T=0.7'"),
    ],
)
def test_other_loads_are_refused(change, words):
    """Bug: eight requests at a time against one, 64 tokens against 32, greedy against sampled, in one chart."""
    names = ["a", "b"]
    conditions.refuse_other_loads([RUN, endpoint_record()], names)
    conditions.refuse_other_loads([RUN, endpoint_record(mode="T=1")], names)
    with pytest.raises(DFlowError, match="different conditions") as caught:
        conditions.refuse_other_loads([RUN, endpoint_record(**change)], names)
    assert words in str(caught.value)
    with pytest.raises(DFlowError, match="different conditions"):
        conditions.refuse_other_loads([endpoint_record(), endpoint_record(**change)], names)


def test_runs_of_this_process_must_agree_in_everything():
    """Bug: bfloat16 against float32 in one chart, the endpoint's lenient rule for runs, or unstated taken for equal."""
    names = ["a", "b", "c"]
    conditions.refuse_unequal([RUN, RUN], names[:2])
    for key in conditions.MUST_AGREE:
        other = run_with(**{key: "something else"})
        with pytest.raises(DFlowError, match=f"different conditions.*{key}: "):
            conditions.refuse_unequal([RUN, other], names[:2])
        conditions.refuse_unequal([RUN, other], names[:2], except_for=[key])
    with pytest.raises(DFlowError, match="dtype"):
        conditions.refuse_other_loads([RUN, endpoint_record(), run_with(dtype="bfloat16")], names)
    conditions.refuse_other_loads([RUN, run_with(dtype="bfloat16")], names[:2], except_for=["dtype"])
    silent = endpoint_record()
    del silent["conditions"]["concurrency"]
    with pytest.raises(DFlowError, match="concurrency: 1 / 'not stated'"):
        conditions.refuse_other_loads([RUN, silent], names[:2])
    unstated = {key: value for key, value in RUN["conditions"].items() if key != "dtype"}
    assert set(conditions.differences(unstated, unstated)) == {"dtype"}


def test_notes_say_what_the_table_cannot():
    """Bug: failures that make an endpoint look fast, or a temperature that only one side has."""
    notes = " ".join(side_by_side.notes([RUN, endpoint_record(failed=2)], ["here", "there"]))
    assert "there: 2 cut, not in its times" in notes and "T=1: only in here" in notes


def test_a_load_without_answers():
    """Bug: an endpoint that answered nothing ends in a traceback, or gets the best times of all."""
    dead = endpoint_record()
    dead["all"] = summarise_load([RequestResult(Prompt("chat", "a"), "cut", "broke")], 4.0)
    dead |= {"by_task": {"chat": dead["all"]}, "acceptance": None}
    assert side_by_side.entries([dead], ["dead"])[-1].cells == ["–"] * len(side_by_side.MEASURES)
    assert "1 cut" in render(Evidence(endpoints={"dead": dead}), with_plots=False)


def test_report_is_one_file_that_holds_all():
    """Bug: a section that is left out, a file that needs the network, or text that becomes markup."""
    hostile = copy.deepcopy(run_with(target="<script>alert(1)</script>"))
    mode = hostile["modes"]["T=0"]
    mode["not_run"] = {"assisted": "takes <one> sequence"}
    mode["peak_memory"] = {"plain": {"weight_bytes": 3 * 2**20, "call_bytes": 2**19, "how": "so"}}
    names = ("tokens_per_step", "re_convergence", "rescue_rate", "rescue_rate_top5", "largest_gain")
    probe = {"by_task": {"chat": {name: {"value": 0.125, "interval_95": [0.125, 0.125]} for name in names}}}
    html = render(
        Evidence(
            runs={"run": hostile},
            plans={"plan": PLAN},
            costs={"cost": cost_record(**ROUTED)},
            probes={"probe": probe},
        )
    )
    assert "<script>" not in html and "&lt;script&gt;" in html and "takes &lt;one&gt; sequence" in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html) and "data:image/png;base64,iVBOR" in html
    assert "<td>3.0</td><td>0.5</td><td>3.5</td>" in html  # peak memory
    assert "12.5% [12.5%, 12.5%]" in html  # what the probe saw
    assert "4 with it" in html and "5.00 MiB" in html and "provider keeps" in html
    value = mode["all"]["contestants"]["dflow"]["tokens_per_step"]["value"]
    assert re.search(rf'<td class="key">dflow</td><td>\d+</td><td>{value:.2f} \[', html)
    assert html.index("Rollout checklist") > html.index("Cost") and html.count("☑") + html.count("☐") == 10


def test_records_of_another_kind_are_refused():
    """Bug: a traceback, or an empty report that looks finished."""
    with pytest.raises(DFlowError, match="nothing to report"):
        render(Evidence(canary="good"))
    with pytest.raises(DFlowError, match="not of the command"):
        render(Evidence(runs={"plan": PLAN}))


@pytest.fixture
def report(tmp_path):
    """`hf-dflow bench report` on records by file name, and its options."""

    def run(records, *options):
        paths = []
        for name, record in records.items():
            path = tmp_path / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(record if isinstance(record, str) else json.dumps(record))
            paths.append(str(path))
        return CliRunner().invoke(app, ["bench", "report", *paths, *map(str, options)])

    return run


def test_the_checklist_decides_the_exit_code(report, tmp_path):
    """Bug: open items that end with 0, or records of different conditions in one report."""
    records, html = {"a": RUN, "plan": PLAN}, tmp_path / "report.html"
    result = report(records, "--html", html)
    assert result.exit_code == 1, result.output
    assert "[x] memory counted" in result.output and "[ ] canary" in result.output
    assert "Rollout checklist" in html.read_text(encoding="utf-8")
    assert report(records, "--allow-open").exit_code == 0
    mixed = report({**records, "b": run_with(dtype="bfloat16")})
    assert mixed.exit_code == 2 and "different conditions" in mixed.output and "bfloat16" in mixed.output


def test_both_kinds_are_drawn(report, tmp_path):
    """Bug: an endpoint's record that the report leaves out, or one chart for each."""
    html, png = tmp_path / "out.html", tmp_path / "out.png"
    records = {"here": RUN, "there": endpoint_record()}
    result = report(records, "--html", html, "--plot", png, "--allow-open")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if "endpoint served" in line and " all " in line)
    assert all(figure in line for figure in ("there", "5.0", "3.00", "2.50", "40.0%"))
    text = html.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2
    assert text.index("Side by side") < text.index("endpoint served") < text.index("Rollout checklist")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    refused = report({"here": RUN, "there": endpoint_record(concurrency=4)}, "--html", tmp_path / "no.html")
    assert refused.exit_code == 2 and "concurrency: 1 / 4" in refused.output and not (tmp_path / "no.html").exists()


def test_records_that_a_report_cannot_use(report, tmp_path):
    """Bug: two files of one name in one row or bar, a record against itself, or a traceback for what is no record."""
    names = ["monday/run", "tuesday/run"]
    done = report({names[0]: RUN, names[1]: endpoint_record()}, "--allow-open")
    assert done.exit_code == 0 and all(str(tmp_path / name) in done.output for name in names), done.output
    twice = report({"a": RUN}, tmp_path / "a.json")
    assert twice.exit_code == 2 and "twice" in twice.output
    for text, words in (
        ('{"figures": 1}', "no record of bench run"),
        ("figures", "no JSON record"),
        ("[1]", "no record of this program"),
        ('{"by_task": 3}', "not of the command"),
    ):
        refused = report({"wrong": text})
        assert refused.exit_code == 2 and words in refused.output, text
    (tmp_path / "bytes.prom").write_bytes(b"\xff\xfe")
    unreadable = report({"a": RUN}, "--monitor", tmp_path / "bytes.prom")
    assert unreadable.exit_code == 2 and "bytes.prom" in unreadable.output
