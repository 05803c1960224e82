"""Figures in the text of documents are those of committed records, and records hold what they depend on."""

import json
import re
from pathlib import Path

import pytest

from experiments import gain_curve
from experiments.common import RESULTS, ROOT
from experiments.lab.report import as_markdown, read_results, summarise, summarise_tasks
from experiments.tables import BLOCK, DRAFTER_KINDS, LAB_CORPORA, PROMPT_SETS, documents, lab_record, record
from hf_dflow.hub.cards import MACHINE_PATHS

DOCUMENTS = documents([ROOT / "README.md", ROOT / "docs", ROOT / "model_cards"])
NO_CORRECTION = "no correction"  # the DFlash drafter without its causal correction
WITH_INTERVAL = re.compile(
    r"([-+]?\d+\.?\d*%?)(?: [a-z ]+)? \[(?:95% interval )?([-+]?\d[\d.]*%?), ([-+]?\d[\d.]*%?)\]"
)
FORMS = (".0%", ".1%", ".2%", ".1f", ".2f", ".3f")


def words_of(*paths: Path) -> str:
    return " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in paths)


def figures_in(value):
    """`(value, low, high)` of every figure with an interval in a record."""
    if isinstance(value, dict):
        single = [value[key] for key in ("value", "median_ratio") if key in value]
        interval = value.get("interval_95") or value.get("median_ratio_95")
        if single and interval:
            yield (single[0], *interval)
        for part in value.values():
            yield from figures_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from figures_in(part)


@pytest.fixture(scope="module")
def recorded():
    """Every figure of every record, as it may be printed."""
    known = set()
    for path in RESULTS.rglob("*.json"):
        for figure in figures_in(json.loads(path.read_text(encoding="utf-8"))):
            known |= {tuple(f"{number:{sign}{form}}" for number in figure) for form in FORMS for sign in ("", "+")}
    return known


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_intervals_in_prose_are_measured_ones(path, recorded):
    """Bug: new runs are committed and a text still argues from the old ones, or a figure was mistyped."""
    text = " ".join(BLOCK.sub("", path.read_text(encoding="utf-8")).split())
    unknown = [match[0] for match in WITH_INTERVAL.finditer(text) if match.groups() not in recorded]
    assert not unknown, f"{path.name}: no record holds {unknown}"


def test_records_of_the_real_pair_hold_what_they_depend_on():
    """Bug: a figure without its target, drafter, length or software; a private text in a committed file."""
    for name, (_, label) in PROMPT_SETS.items():
        found = record(name)
        conditions, greedy = found["conditions"], found["modes"]["T=0"]["all"]
        assert {"versions", "cpu", "target", "drafter", "block_size", "max_new_tokens"} <= conditions.keys()
        assert greedy["prompts"] == len(found["rows"]) == conditions["prompts"]
        assert label.startswith(str(conditions["prompts"]))
        assert "sharegpt" not in {row["task"] for row in found["rows"] if "prompt" in row}
        assert greedy["contestants"].keys() - {NO_CORRECTION} == set(DRAFTER_KINDS)


@pytest.mark.parametrize(
    "name", [*PROMPT_SETS, "decisions-tree", "decisions-mixture", "decisions-mixture-lab", "decisions-together"]
)
def test_greedy_texts_of_a_record_are_all_the_same(name):
    """Bug: a way to decode is praised though its text was another."""
    found = record(name)
    assert found["identity"]["identical_to_each_other"] == found["conditions"]["prompts"]


def test_servers_were_measured_under_one_load():
    """Bug: rows of one table under different loads, one without its conditions, or a path of the machine."""
    records = record("endpoints")
    assert {(one["acceptance"] is None, one["conditions"]["concurrency"]) for one in records} == {
        (is_silent, concurrency) for is_silent in (True, False) for concurrency in (1, 2)
    }
    for one in records:
        assert {"server", "target", "output_tokens", "prompts_sha256", "decoding"} <= one["conditions"].keys()
        assert not MACHINE_PATHS.search(json.dumps(one)) and "prompt" not in one
    assert len({one["conditions"]["prompts_sha256"] for one in records}) == 1


@pytest.mark.parametrize("corpus", LAB_CORPORA)
def test_a_lab_record_is_that_of_its_runs(tmp_path, corpus):
    """Bug: figures that the committed runs do not give, or a drafter that changed a text."""
    runs = RESULTS / f"lab-{corpus}-runs"
    lines = (runs / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["recipe"]["updates"] == 1200]
    (tmp_path / "results.jsonl").write_text("\n".join(kept), encoding="utf-8")
    made = summarise(read_results(tmp_path))
    made |= {"tasks": summarise_tasks(runs / "tasks.jsonl"), "sampled": summarise_tasks(runs / "sampled.jsonl")}
    assert as_markdown(made) == as_markdown(lab_record(corpus))
    right, compared = made["texts_identical"].split(" of ")
    assert right == compared


def test_the_gain_curve_is_that_of_its_records():
    """Bug: new figures are committed and the picture and its correlations are still of the old ones."""
    points = [point for corpus in LAB_CORPORA for point in gain_curve.lab_points(record(f"lab-{corpus}"))]
    points += gain_curve.pair_points("SmolLM2", record("eval-other-kinds"), record("probe-other-kinds"))
    committed = record("gain-curve")
    for gain in ("gain", "relay_gain"):
        assert [one[gain] for one in committed["points"]] == [getattr(point, gain) for point in points]
        assert committed[f"correlation_with_{gain}"] == pytest.approx(gain_curve.correlations(points, gain))


def test_the_bundled_drafter_holds_what_was_fitted():
    """Bug: numbers that no record gives, or that were fitted on prompts that figures are measured on."""
    folder = ROOT / "hf_dflow" / "drafters" / "smollm2-135m-instruct-b8"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["fitted_decisions"]
    texts, six_tasks = record("calibrate"), record("calibrate-six-tasks")
    assert config["mixture"] == texts["fitted_decisions"]["mixture"]
    for name in ("calibration", "row_precision"):
        assert config[name] == six_tasks["fitted_decisions"][name]
    assert texts["conditions"]["skipped_prompts"] == six_tasks["conditions"]["skipped_prompts"] == 24


def fragments():
    """Figures without an interval, as some document prints them."""
    for kind in ("greedy", "sampled"):
        (groups,) = record(f"decisions-calibration-{kind}")["modes"].values()
        found = groups["calibration"]
        error, chance = found["expected_calibration_error"], found["error_by_chance"]
        yield f"{error:.1%} over {found['drafts']:,} judged drafts (chance: {chance:.1%})"
    taken = record("mixture-time")["milliseconds_per_step"]
    yield f"{taken['mixture']:.1f} of {taken['all']:.0f} ms a step"
    together = record("decisions-together")["modes"]["T=0"]
    found, costs = together["all"]["contestants"], together["modelled_seconds_per_token"]
    by_task = costs["by_task"]
    cheaper = [task for task in by_task if by_task[task]["tree"] < costs["plain"]]
    yield f"the chain has {found['none']['tokens_per_step']['value']:.2f}"
    yield f"{1e3 * by_task['all']['tree']:.0f} ms a token where plain has {1e3 * costs['plain']:.0f}"
    yield f"less than plain on {', '.join(cheaper[:-1])} and {cheaper[-1]} alone"
    yield f"by the clock {found['tree']['speed_up']['value']:.2f} of its speed"
    trees = record("decisions-tree")["modes"]["T=0"]["all"]["contestants"]
    sizes = [f"{trees[f'tree of {size}']['tokens_per_step']['value']:.2f}" for size in (8, 32)]
    yield f"{' / '.join(sizes)} chat, where the chain has {trees['chain']['tokens_per_step']['value']:.2f}"
    static = record("bench-static-cache")
    yield f"{static['seconds_of_compiling']:.0f} s of compiling"
    yield f"{static['steps_until_compiling_pays']:,} steps"
    for corpus in ("source-code", "documentation"):
        yield f"{record(f'lab-{corpus}-runs/target')['held_out_loss']:.2f} ([its record]"
    longer = record("lab-airports")["corpora"]["airports-b8-3600-updates"]["dflash"]["tokens_per_step"]["value"]
    yield f"{longer:.2f} where DFlow"
    for kind in ("dflash", "multi_round", "dflow"):
        log = (RESULTS / "real-pair-runs" / f"{kind}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in log.splitlines()]
        seconds = [line["seconds_per_update"] for line in lines if "seconds_per_update" in line]
        yield f"{kind} {sum(seconds) / len(seconds):.1f} s"


@pytest.mark.parametrize("fragment", fragments())
def test_other_figures_are_measured_ones(fragment):
    """Bug: an error, a cost or a loss from memory."""
    assert fragment in words_of(*DOCUMENTS)


def test_the_relay_profile_is_that_of_the_published_target():
    """Bug: the figure comes from other sizes than the text says."""
    found = record("relay-profile")
    assert found["sizes"] == {"hidden": 2560, "drafts": 15, "batch": 1}
    assert round(1e3 * found["most_that_fusing_saves_seconds"]["eager"], 2) == 0.13
    assert round(100 * found["share_of_paper_step"]["eager"], 1) == 0.3
