"""The figures that README and card print are those of the committed records."""

import json
from pathlib import Path

import pytest

from experiments import gain_curve
from experiments.lab.report import as_markdown, read_results, summarise, summarise_tasks
from hf_dflow.hub.cards import MACHINE_PATHS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *(ROOT / "model_cards").glob("smollm2*.md")]
EVALUATIONS = {
    "eval-chat": "24 held-out ShareGPT prompts",
    "eval-training-kinds": "16 held out, kinds seen in training",
    "eval-other-kinds": "24 of other wording, six tasks",
    "eval-human-eval": "12 of HumanEval",
}
BASELINES = {
    "dflash-equal": "DFlash, as many updates",
    "dflow": "DFlow, as many updates",
    "autoregressive": "autoregressive, as many updates",
    "bundled, relay off": "the bundled drafter (5,400 updates, causal correction), relay off",
    "bundled": "the bundled drafter",
}
NO_CORRECTION = "no correction"  # the DFlash drafter without its causal correction
KINDS = ("dflash", "multi_round", "dflow, relay off", "dflow")
LAB_CORPORA = ("airports", "characters", "source-code", "documentation")


def evaluation(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def with_interval(figure, form):
    low, high = figure["interval_95"]
    return f"{figure['value']:{form}} [{low:{form}}, {high:{form}}]"


def row_of(record, label):
    group = record["modes"]["T=0"]["all"]
    found = [group["contestants"][name] for name in ("dflash", "dflow")]
    identity = record["identity"]
    cells = [
        label,
        *(with_interval(one["tokens_per_step"], ".2f") for one in found),
        with_interval(group["differences"]["dflow - dflash"]["gain"], "+.1%"),
        " / ".join(f"{one['accepted_length_std']:.2f}" for one in found),
        " / ".join(f"{one['draft_acceptance_rate']:.1%}" for one in found),
        " / ".join(f"{one['target_forwards_per_token']:.2f}" for one in found),
        f"{min(identity['identical_to_plain'].values())} of {identity['compared_with_plain']}",
    ]
    return "| " + " | ".join(cells) + " |"


def ablation_row(name):
    """One kind of drafter: tokens per step on each set of prompts."""
    groups = [evaluation(record)["modes"]["T=0"]["all"]["contestants"] for record in EVALUATIONS]
    return f"| {name} | " + " | ".join(with_interval(one[name]["tokens_per_step"], ".2f") for one in groups) + " |"


def sampled_row(mode):
    group = evaluation("eval-sampled")["modes"][mode]["all"]
    steps = [with_interval(group["contestants"][name]["tokens_per_step"], ".2f") for name in ("dflash", "dflow")]
    return (
        "| " + " | ".join([mode, *steps, with_interval(group["differences"]["dflow - dflash"]["gain"], "+.1%")]) + " |"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_printed_figures_are_the_measured_ones(document):
    """Bug: a new drafter's record is committed and the tables still praise the old one, or a figure was mistyped."""
    text = " ".join(document.read_text(encoding="utf-8").split())
    for name, label in EVALUATIONS.items():
        record = evaluation(name)
        assert label.startswith(str(record["conditions"]["prompts"]))
        assert record["identity"]["identical_to_each_other"] == record["conditions"]["prompts"]
        assert row_of(record, label) in text
    for mode in ("T=1, token verification", "T=1, block verification"):
        assert sampled_row(mode) in text
    for name in KINDS:
        assert ablation_row(name) in text
    without = evaluation("eval-chat")["modes"]["T=0"]["all"]["contestants"][NO_CORRECTION]
    assert with_interval(without["tokens_per_step"], ".2f") in text
    speed = evaluation("eval-seconds")["modes"]["T=0"]["all"]["contestants"]["dflow"]["speed_up"]
    assert with_interval(speed, ".2f") in text


def test_records_say_what_they_depend_on():
    """Bug: a figure without its target, drafter, length or software; or a private text in a committed file."""
    for name in EVALUATIONS:
        record = evaluation(name)
        assert {"versions", "cpu", "target", "drafter", "block_size", "max_new_tokens"} <= record["conditions"].keys()
        assert record["modes"]["T=0"]["all"]["prompts"] == len(record["rows"]) == record["conditions"]["prompts"]
        assert "sharegpt" not in {row["task"] for row in record["rows"] if "prompt" in row}
        assert record["modes"]["T=0"]["all"]["contestants"].keys() - {NO_CORRECTION} == set(KINDS)


def endpoint_row(record):
    """One line of the table in docs/serve.md."""
    load, times, drafts = record["all"], record["all"]["latency"], record["acceptance"]
    conditions = record["conditions"]
    cells = [conditions["server"].split(",")[0], str(conditions["concurrency"])]
    cells.append(f"{load['outcomes'].get('ok', 0)} of {load['requests']}")
    cells += [f"{times['latency_seconds'][key]:.1f}" for key in ("p50", "p95")]
    cells += [f"{times['first_token_seconds']['p50']:.1f}", f"{load['effective_tps_with_bonus']:.1f}"]
    if drafts is None:
        cells += ["–", "–"]
    else:
        cells += [f"{drafts['tokens_per_step']:.2f}", f"{drafts['draft_acceptance_rate']:.1%}"]
    return f"| {' | '.join(cells)} |"


def test_servers_were_measured_as_printed():
    """Bug: a table of other runs, one without its conditions, or a path of the machine that measured."""
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    records = evaluation("endpoints")
    assert {(one["acceptance"] is None, one["conditions"]["concurrency"]) for one in records} == {
        (is_silent, concurrency) for is_silent in (True, False) for concurrency in (1, 2)
    }
    for one in records:
        assert endpoint_row(one) in text
        assert {"server", "target", "output_tokens", "prompts_sha256", "decoding"} <= one["conditions"].keys()
        assert not MACHINE_PATHS.search(json.dumps(one)) and "prompt" not in one
    assert len({one["conditions"]["prompts_sha256"] for one in records}) == 1


def test_the_classic_baseline_is_printed_as_measured():
    """Bug: a speed or a length of another run, or drafters that change places."""
    text = (ROOT / "docs" / "experiments" / "relay.md").read_text(encoding="utf-8")
    found = evaluation("eval-autoregressive")["modes"]["T=0"]["all"]
    for name, label in BASELINES.items():
        one = found["contestants"][name]
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
        assert with_interval(one["tokens_per_step"], ".2f") in row and with_interval(one["speed_up"], ".2f") in row
    gain = found["differences"]["autoregressive - dflash-equal"]["gain"]
    assert f"{gain['value']:.1%} [{gain['interval_95'][0]:.1%}, {gain['interval_95'][1]:.1%}]" in " ".join(text.split())


def test_the_experiment_prints_the_measured_tables():
    """Bug: new runs are committed and the document still argues from the old ones."""
    text = (ROOT / "docs" / "experiments" / "relay.md").read_text(encoding="utf-8")
    corpora = evaluation("lab-airports")["corpora"]
    for name in LAB_CORPORA:
        record = evaluation(f"lab-{name}")["corpora"][f"{name}-b8"]
        for line in as_markdown(record).splitlines():
            assert line in text
        right, asked = record["texts_identical"].split(" of ")
        assert right == asked and f"{right} of {asked}" in text
        probe = (record["probe"][one] for one in ("re_convergence", "rescue_rate", "rescue_rate_top5", "largest_gain"))
        cells = [name, *(f"{one:.1%}" for one in probe), f"{record['dflash']['tokens_per_step']['value']:.2f}"]
        assert f"| {' | '.join(cells)} |" in text
    assert "reaches 3.30" in text and corpora["airports-b8-3600-updates"]["dflash"]["tokens_per_step_by_seed"] == [
        pytest.approx(3.30, abs=0.005)
    ]


@pytest.mark.parametrize(
    ("corpus", "words"), [("source-code", "held-out pieces is"), ("documentation", "held-out loss")]
)
def test_the_targets_loss_is_the_recorded_one(corpus, words):
    """Bug: a loss from memory."""
    text = " ".join((ROOT / "docs" / "experiments" / "relay.md").read_text(encoding="utf-8").split())
    assert f"{words} {evaluation(f'lab-{corpus}-runs/target')['held_out_loss']:.2f} ([its record]" in text


@pytest.mark.parametrize("corpus", LAB_CORPORA)
def test_the_experiment_is_the_runs(tmp_path, corpus):
    """Bug: figures that the committed runs do not give."""
    runs = ROOT / "docs" / "results" / f"lab-{corpus}-runs"
    lines = (runs / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["recipe"]["updates"] == 1200]
    (tmp_path / "results.jsonl").write_text("\n".join(kept), encoding="utf-8")
    made = summarise(read_results(tmp_path))
    made |= {"tasks": summarise_tasks(runs / "tasks.jsonl"), "sampled": summarise_tasks(runs / "sampled.jsonl")}
    assert as_markdown(made) == as_markdown(evaluation(f"lab-{corpus}")["corpora"][f"{corpus}-b8"])


def test_the_gain_curve_is_that_of_the_records():
    """Bug: new figures are committed and the picture, its table or its correlations are still of the old ones."""
    points = [point for name in LAB_CORPORA for point in gain_curve.lab_points(evaluation(f"lab-{name}"))]
    points += gain_curve.pair_points("SmolLM2", evaluation("eval-other-kinds"), evaluation("probe-other-kinds"))
    record = evaluation("gain-curve")
    for gain in ("gain", "relay_gain"):
        assert [one[gain] for one in record["points"]] == [getattr(point, gain) for point in points]
    text = (ROOT / "docs" / "experiments" / "relay.md").read_text(encoding="utf-8")
    assert gain_curve.as_markdown(points) in text
    ours, of_relay = (gain_curve.correlations(points, of) for of in ("gain", "relay_gain"))
    for axis in gain_curve.AXES:
        assert f" | {ours[axis]:.2f} | {of_relay[axis]:.2f} |" in text


def test_what_an_update_costs_is_what_the_runs_took():
    """Bug: the cost of the relay's updates is argued from runs that no log holds."""
    text = " ".join((ROOT / "docs" / "experiments" / "relay.md").read_text(encoding="utf-8").split())
    for kind in ("dflash", "multi_round", "dflow"):
        lines = (
            (ROOT / "docs" / "results" / "real-pair-runs" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        )
        found = [record["seconds_per_update"] for record in map(json.loads, lines) if "seconds_per_update" in record]
        assert len(found) == 20 and f"{kind} {sum(found) / len(found):.1f} s" in text


def decision_rows(group):
    """Each way to decode: tokens per step, target forwards per token, and the gain over the first way."""
    names = list(group["contestants"])
    for name in names:
        found = group["contestants"][name]
        gain = "" if name == names[0] else with_interval(group["differences"][f"{name} - {names[0]}"]["gain"], "+.1%")
        steps = with_interval(found["tokens_per_step"], ".2f")
        yield f"| {name} | {steps} | {found['target_forwards_per_token']:.2f} | {gain} |"


def test_what_the_decisions_are_worth_is_measured():
    """Bug: a switch praised for figures that no record holds, or whose greedy text was not the target's."""
    text = (ROOT / "docs" / "experiments" / "decisions.md").read_text(encoding="utf-8")
    for name in ("tree", "mixture", "mixture-lab"):
        record = evaluation(f"decisions-{name}")
        assert record["identity"]["identical_to_each_other"] == record["conditions"]["prompts"]
        for groups in record["modes"].values():
            for row in decision_rows(groups["all"]):
                assert row in text
    groups = evaluation("decisions-length")["modes"]["T=0"]
    found = groups["modelled_seconds_per_token"]
    for task, seconds in found["by_task"].items():
        assert length_row(task, seconds, found["plain"]) in text
    other = evaluation("decisions-calibration-greedy-sharegpt")["modes"]["T=0"]["calibration"]
    assert f"the greedy error is {other['expected_calibration_error']:.1%}" in " ".join(text.split())
    for kind in ("greedy", "sampled"):
        (groups,) = evaluation(f"decisions-calibration-{kind}")["modes"].values()
        found = groups["calibration"]
        error, chance = found["expected_calibration_error"], found["error_by_chance"]
        assert f"{error:.1%} over {found['drafts']:,} judged drafts (chance: {chance:.1%})" in " ".join(text.split())


@pytest.mark.parametrize(
    "name", ["decisions-together", "decisions-together-dflash", "decisions-together-dflash-sampled"]
)
def test_switches_are_printed_as_measured(name):
    """Bug: a switch's cost or speed of another run, or of another drafter."""
    text = (ROOT / "docs" / "experiments" / "decisions.md").read_text(encoding="utf-8")
    record = evaluation(name)
    if "T=0" in record["modes"]:
        assert record["identity"]["identical_to_each_other"] == record["conditions"]["prompts"]
    for groups in record["modes"].values():
        by_task = groups["modelled_seconds_per_token"]["by_task"]
        for switches, found in groups["all"]["contestants"].items():
            cells = [switches, *(with_interval(found[key], ".2f") for key in ("tokens_per_step", "speed_up"))]
            tasks = ["all", *(task for task in by_task if task != "all")]
            row = " | ".join([*cells, *(f"{1e3 * by_task[task][switches]:.0f}" for task in tasks)])
            assert f"| {row} |" in text


def test_the_advice_gives_the_tree_what_it_measured():
    """Bug: a page of advice that still argues from the costs of an earlier record."""
    text = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| tree by costs |"))
    groups = evaluation("decisions-together")["modes"]["T=0"]
    found, costs = groups["all"]["contestants"], groups["modelled_seconds_per_token"]
    assert with_interval(found["tree"]["tokens_per_step"], ".2f") in row
    assert f"the chain has {found['none']['tokens_per_step']['value']:.2f}" in row
    assert f"by the clock {found['tree']['speed_up']['value']:.2f} of its speed" in row
    tree, plain = 1e3 * costs["by_task"]["all"]["tree"], 1e3 * costs["plain"]
    assert f"{tree:.0f} ms a token where plain has {plain:.0f}" in row
    cheaper = [task for task, seconds in costs["by_task"].items() if seconds["tree"] < costs["plain"]]
    assert cheaper == ["chat", "code", "math"] and "less than plain on chat, code and math alone" in row


def test_the_bundled_drafter_holds_what_was_fitted():
    """Bug: numbers that no record gives, or that were fitted on prompts that figures are measured on."""
    folder = ROOT / "hf_dflow" / "drafters" / "smollm2-135m-instruct-b8"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["fitted_decisions"]
    texts, six_tasks = evaluation("calibrate"), evaluation("calibrate-six-tasks")
    assert config["mixture"] == texts["fitted_decisions"]["mixture"]
    for name in ("calibration", "row_precision"):
        assert config[name] == six_tasks["fitted_decisions"][name]
    assert texts["conditions"]["skipped_prompts"] == six_tasks["conditions"]["skipped_prompts"] == 24


def test_what_the_mixture_costs_is_measured():
    """Bug: an overhead of another run, or of a run without conditions."""
    text = " ".join((ROOT / "docs" / "experiments" / "decisions.md").read_text(encoding="utf-8").split())
    for name in ("mixture-time", "mixture-time-lab"):
        record = evaluation(name)
        assert with_interval(record["share"], ".1%") in text
        assert record["weights"] == "learned" and record["conditions"]["threads"] == 1
    taken = evaluation("mixture-time")["milliseconds_per_step"]
    assert f"{taken['mixture']:.1f} of {taken['all']:.0f} ms a step" in text


def length_row(task, seconds, plain):
    """Milliseconds a token by the cost of forwards: plain, each fixed length, adaptive, and its gain over the best."""
    fixed = {name: value for name, value in seconds.items() if name.endswith("drafts")}
    cells = [f"{1e3 * value:.0f}" for value in (plain, *fixed.values(), seconds["adaptive"])]
    return f"| {task} | " + " | ".join([*cells, f"{min(fixed.values()) / seconds['adaptive'] - 1:+.1%}"]) + " |"


def test_the_learning_curve_prints_the_measured_figures():
    """Bug: the advice on short blocks argues from figures that no record holds."""
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    for found in evaluation("eval-curve")["modes"]["T=0"]["all"]["contestants"].values():
        first, second = [*found["acceptance_rate_per_position"], 0][:2]
        assert f"| {with_interval(found['tokens_per_step'], '.2f')} | {first:.1%} | {second:.1%} |" in text
