"""`hf-dflow bench run`: every strategy by turns, alone and in batches, each counted as it decodes."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from batches import following, padded, plain_ids, prompt, target_of
from kit import (
    HIDDEN_SIZE,
    HostileDrafter,
    OracleDrafter,
    PatternDrafter,
    assert_not_vacuous,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)
from rich.console import Console
from typer.testing import CliRunner

from hf_dflow.bench import answers, comparison
from hf_dflow.bench.answers import Plan, answer_all
from hf_dflow.bench.conditions import MUST_AGREE
from hf_dflow.bench.figures import as_record, is_identical
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import Contestant, Mode, classic_contestant, decode, decode_rows
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import Prompt, read_prompts, select
from hf_dflow.cli import app
from hf_dflow.console import UNBOUNDED, show
from hf_dflow.errors import DFlowError

GREEDY, BLOCK, TOKEN = Mode(), Mode(1.0, "block"), Mode(1.0, "token")
ROWS, LONG = [0, 1, 3], 24


def inputs_of(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def measured():
    """Two prompts of two tasks, every strategy, greedily and sampled; and who decoded when."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    assistant = tiny_target(vocab_size=pair.target.config.vocab_size, num_hidden_layers=1, dtype=torch.float32)
    contestants = comparison.contestants_of(pair, comparison.STRATEGIES, assistant)
    order, warmed, honest = [], [], answers.decode_rows

    def recorded(target, inputs, contestant, mode, max_new_tokens, *seed):
        if max_new_tokens > answers.WARM_UP_TOKENS:
            order.append((mode.name, contestant.name))
        elif not order:
            warmed.append((mode.name, contestant.name))
        return honest(target, inputs, contestant, mode, max_new_tokens, *seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "decode_rows", recorded)
        prompts = select(read_prompts(TINY_PROMPTS), [], 1)[:2]
        record = comparison.run(
            pair, contestants, [GREEDY, TOKEN], prompts, output_tokens=13, repeats=2, with_memory=False
        )
    return record, order, warmed


def test_every_strategy_writes_the_targets_text(measured):
    """Bug: a strategy that is measured on another text, or one that quietly decodes plainly."""
    record, *_ = measured
    assert record["identity"]["compared_with_plain"] == 2
    assert record["identity"]["identical_to_plain"] == dict.fromkeys(comparison.STRATEGIES, 2)
    counts = record["modes"]["T=0"]["all"]["contestants"]
    assert set(counts) == set(comparison.STRATEGIES)
    assert counts["dflow"]["tokens_per_step"]["value"] > 2
    assert counts["dflash"]["tokens_per_step"]["value"] == counts["transformers_dflash"]["tokens_per_step"]["value"]
    assert all(one["num_spec_steps"] for name, one in counts.items() if name != "prompt_lookup")
    assert counts["dflow"]["wasted_ratio"] == pytest.approx(1 - counts["dflow"]["draft_acceptance_rate"])
    times = record["modes"]["T=0"]["latency"]
    assert times["plain"]["target_forwards_per_token"] == 1.0
    assert times["dflow"]["target_forwards_per_token"] < 0.5
    sampled = record["modes"]["T=1, token verification"]["all"]["contestants"]
    failing = record["modes"]["T=1, token verification"]["not_run"]  # in some releases of transformers
    assert set(sampled) == set(comparison.STRATEGIES) - set(failing) and set(failing) <= {"transformers_dflash"}
    assert failing or sampled["transformers_dflash"]["tokens_per_step"]["value"] > 1.5


def test_strategies_take_turns(measured):
    """Bug: one strategy after the other, so that a busy minute is blamed on one of them."""
    _, order, warmed = measured
    assert set(order) <= set(warmed)  # everybody had a call that does not count
    greedy = [name for mode, name in order if mode == "T=0"]
    turn = len(comparison.STRATEGIES) + 1
    turns = [greedy[i : i + turn] for i in range(0, len(greedy), turn)]
    assert len(turns) == 4 and all(len(set(one)) == turn for one in turns)  # 2 prompts, 2 repeats
    assert len({one[0] for one in turns}) > 1  # who begins changes


def test_repeats_are_for_times_alone(measured):
    """Bug: counts of a prompt that was decoded twice weigh twice, or times of the first turn only."""
    record, *_ = measured
    assert record["modes"]["T=0"]["all"]["prompts"] == 2
    assert len([row for row in record["rows"] if row["mode"] == "T=0"]) == 2
    assert record["modes"]["T=0"]["latency"]["dflow"]["requests"] == 4


def test_all_of_it_is_printed_with_its_conditions(measured):
    """H2, H4: one convention of the two, a note that is only in the JSON, or a figure without its conditions."""
    record, out = measured[0], io.StringIO()
    show(comparison.present(record), Console(file=out, width=UNBOUNDED))
    text, conditions = out.getvalue(), record["conditions"]
    assert "tokens/step: emitted tokens of drafting steps over these steps" in text
    for key in (*MUST_AGREE, "workload"):
        assert f"{key}: {conditions[key]}" in text, key
    assert conditions["dtype"] == "float32" and conditions["quantization"] == "none"
    assert conditions["block_size"] == 8 and conditions["modes"] == [GREEDY.name, TOKEN.name]
    counts = record["modes"]["T=0"]["all"]["contestants"]["dflow"]
    line = next(line for line in text.splitlines() if line.split()[:2] == ["all", "dflow"])
    assert f"{counts['mean_accepted_length']:.2f}" in line and f"{counts['accepted_length_std']:.2f}" in line
    assert f"{counts['wasted_ratio']:.1%}" in line
    assert "speculation is not helping with prompt_lookup" in text
    assert "Greedy texts equal to the target's own, of 2: " in text and "dflow 2" in text
    json.dumps(record)


@pytest.mark.parametrize(("kind", "tokens_per_step"), [(OracleDrafter, 8.0), (HostileDrafter, 1.0)])
def test_both_conventions(kind, tokens_per_step):
    """H2: the bonus counted twice or not at all, and speculation that is silently of no use."""
    target, ids = tiny_target(), prompt_of(9)
    run = decode(target, inputs_of(ids), Contestant("dflow", scripted(kind, target, ids, 41)), GREEDY, 41)
    assert run.statistics.tokens_per_step == tokens_per_step == run.statistics.mean_accepted_length + 1


@pytest.mark.parametrize("mode", [GREEDY, TOKEN])
def test_steps_of_assisted_generation_are_counted(target, mode):
    """Bug: the prompt counts as drafts, the first step is lost, or the target's own token counts as a draft."""
    ids = prompt_of(9)
    twin = classic_contestant("twin", tiny_target("llama"), 7)
    run = decode(target, inputs_of(ids), twin, mode, 20)
    if not mode.temperature:
        assert run.new_tokens == plain_greedy(target, ids, 20)[0, 9:].tolist()
    # A draft model that is the target itself: all drafts are right, and the last step has room for fewer.
    assert run.statistics.per_step_drafted == [7, 7, 3]
    assert run.statistics.per_step_accepted == [7, 7, 3]
    assert run.statistics.num_output_tokens == len(run.new_tokens) == 20
    assert run.statistics.num_target_forwards == run.target_forwards == 3
    assert run.statistics.num_draft_forwards == 17
    stranger = classic_contestant("stranger", tiny_target("llama", seed=5), 7)
    other = decode(target, inputs_of(ids), stranger, mode, 20)
    # The last token may have no room for a draft: a forward, but no step.
    assert other.target_forwards - len(other.statistics.per_step_drafted) in (0, 1)
    assert other.target_forwards == other.statistics.num_target_forwards > 3
    assert set(other.statistics.per_step_drafted[:4]) == {7}
    assert sum(other.statistics.per_step_accepted) + other.target_forwards == 20


def test_options_reach_the_loop():
    """Bug: T = 1 decodes greedily or with the target's own top-k, or both rules are one."""
    target = tiny_target("llama")
    target.generation_config.top_k = 1
    contestant = Contestant("dflow", tiny_drafter(target, 8), use_relay=True)
    runs = [decode(target, inputs_of(prompt_of(6)), contestant, mode, 24, seed=3) for mode in (GREEDY, BLOCK, TOKEN)]
    target.generation_config.top_k = 50
    assert [run.statistics.verification for run in runs] == ["greedy", "block", "token"]
    assert runs[1].new_tokens != runs[0].new_tokens != runs[2].new_tokens
    again, other = (decode(target, inputs_of(prompt_of(6)), contestant, BLOCK, 24, seed=s).new_tokens for s in (3, 4))
    assert again == runs[1].new_tokens != other


def test_plan_runs_what_it_says(target):
    """Bug: plain decoding, which costs most, runs on every prompt; a classic model is asked for block verification."""
    drafter = tiny_drafter(target, 8, drafter_class=PatternDrafter)
    drafter.pattern = [3, 0, 2]
    drafter.follow(plain_greedy(target, prompt_of(6), 40), 6)
    contestants = [Contestant("dflash", drafter, False), classic_contestant("classic", tiny_target("llama", seed=5), 7)]
    plan = Plan(contestants, [GREEDY, BLOCK, TOKEN], 12, seeds=[0, 1], check_identity=1)
    prompts = [Prompt("chat", "one"), Prompt("chat", "two"), Prompt("chat", "three")]
    asked = []
    found = answer_all(
        target, lambda _: inputs_of(prompt_of(6)), enumerate(prompts), plan, lambda: asked.append(1) or len(asked) == 2
    )
    assert [(one.prompt.text, one.mode.name, one.seed, sorted(one.runs)) for one in found[:6]] == [
        ("one", "T=0", 0, ["classic", "dflash", "plain"]),
        ("one", "T=1, block verification", 0, ["dflash"]),
        ("one", "T=1, block verification", 1, ["dflash"]),
        ("one", "T=1, token verification", 0, ["classic", "dflash"]),
        ("one", "T=1, token verification", 1, ["classic", "dflash"]),
        ("two", "T=0", 0, ["classic", "dflash"]),
    ]
    assert {one.prompt.text for one in found} == {"one", "two"}, "whole prompts until it is over"
    assert [next(iter(found[i].runs)) for i in (0, 5)] == ["dflash", "classic"], "who begins changes"
    texts = [one.runs["dflash"].new_tokens for one in found if one.mode == BLOCK]
    assert len(set(map(tuple, texts))) == 4, "prompts and seeds draw numbers of their own"
    record = as_record(found, "dflash")
    assert is_identical(record)
    assert 1.5 < record["modes"]["T=0"]["all"]["contestants"]["dflash"]["tokens_per_step"]["value"] < 3.0


def pattern_drafter(rows):
    return following(PatternDrafter, rows, LONG, block_size=8, pattern=[3, 0, 2])


class RowPair(Pair):
    """Its prompts are rows of `batches`, by number."""

    def encode(self, text):
        return inputs_of(prompt(int(text)))


@pytest.fixture(scope="module")
def row_pair():
    return RowPair(target_of(), pattern_drafter(ROWS), SimpleNamespace(pad_token_id=0), "tiny")


@pytest.fixture(scope="module")
def batched(row_pair):
    """Three prompts, two at a time: the second call holds one new prompt, and the first over again."""
    contestants = [
        Contestant("dflash", row_pair.drafter, use_relay=False),
        classic_contestant("assisted", tiny_target("llama", seed=5, attention="sdpa"), 7),
        Contestant("prompt_lookup", lookup_tokens=3),
    ]
    prompts = [Prompt("chat", str(row)) for row in ROWS]
    return comparison.run(row_pair, contestants, [GREEDY], prompts, output_tokens=LONG, concurrency=2)


def test_rows_of_a_call_are_those_alone():
    """Bug: padding counted as text, a row with its neighbour's counts, or a batch that was decoded one by one."""
    ids, mask = padded([prompt(row) for row in ROWS])
    inputs = {"input_ids": ids, "attention_mask": mask}
    runs = decode_rows(target_of(), inputs, Contestant("dflash", pattern_drafter(ROWS), False), GREEDY, LONG)
    plain = decode_rows(target_of(), inputs, Contestant("plain"), GREEDY, LONG)
    for place, row in enumerate(ROWS):
        contestant = Contestant("dflash", pattern_drafter([row]), False)
        single = decode(target_of(), inputs_of(prompt(row)), contestant, GREEDY, LONG)
        assert runs[place].new_tokens == plain[place].new_tokens == single.new_tokens == plain_ids(row, LONG)
        assert runs[place].statistics.per_step_accepted == single.statistics.per_step_accepted
        assert_not_vacuous(runs[place].statistics)
        assert runs[place].target_forwards < 2 * single.target_forwards
        assert (runs[place].batch_size, runs[place].call_tokens) == (3, 3 * LONG)
    assert plain[0].target_forwards == LONG and plain[0].own_target_forwards == LONG / 3


def test_a_row_ends_at_its_own_eos(monkeypatch):
    """Bug: the padding behind a row that ended early passes for its text, and for throughput."""
    eos = plain_ids(0, LONG)[4]
    target = target_of()
    ids, mask = padded([prompt(row) for row in ROWS])
    monkeypatch.setattr(target.generation_config, "eos_token_id", eos)
    runs = decode_rows(target, {"input_ids": ids, "attention_mask": mask}, Contestant("plain"), GREEDY, LONG)
    assert [run.new_tokens for run in runs] == [plain_ids(row, LONG, eos=(eos,)) for row in ROWS]
    assert len(runs[0].new_tokens) <= 5 and runs[0].call_tokens == sum(len(run.new_tokens) for run in runs)


def test_what_cannot_batch_says_so(batched):
    """Bug: a strategy that is missing from the table, so that a reader thinks it was never asked for."""
    measured = batched["modes"]["T=0"]
    assert set(measured["not_run"]) == {"assisted", "prompt_lookup"}
    assert all("one sequence at a time" in reason for reason in measured["not_run"].values())
    assert set(measured["all"]["contestants"]) == {"dflash"} and set(measured["latency"]) == {"plain", "dflash"}
    shown = comparison.present(batched)
    assert any(row[:3] == ["all", "assisted", "not run"] for row in shown.tables[0].rows)
    drafts = shown.tables[0]
    for row in drafts.rows:  # N17: the number of prompts under "tokens/step", and tokens per step under "prompts"
        cells = dict(zip([*drafts.keys, *drafts.measures], row, strict=True))
        if cells["prompts"] != "not run":
            assert cells["prompts"] == str(comparison.parts_of(measured)[row[0]]["prompts"])
    assert any("assisted was not run: transformers' assisted" in remark.text for remark in shown.remarks)


def test_prompts_are_counted_once_and_conditions_say_how_many_at_a_time(batched):
    """Bug: a prompt that fills a batch up counts twice, or a batch passes for single requests."""
    conditions, measured = batched["conditions"], batched["modes"]["T=0"]
    assert conditions["concurrency"] == 2 and conditions["prompts"] == 3 and conditions["prompts_left_out"] == 0
    assert "batch of 2" in conditions["measuring"]
    assert measured["all"]["prompts"] == 3 and len(batched["rows"]) == 3
    assert batched["identity"]["identical_to_plain"] == {"dflash": 3}
    assert measured["latency"]["dflash"]["requests"] == 4  # two calls of two
    assert measured["latency"]["plain"]["target_forwards_per_token"] == 0.5
    assert 1.5 < measured["all"]["contestants"]["dflash"]["tokens_per_step"]["value"] < 4
    json.dumps(batched)


def test_memory_of_each_strategy(batched):
    """Bug: one figure for the whole process, weights that a strategy does not need, or a strategy without any."""
    peaks = batched["modes"]["T=0"]["peak_memory"]
    assert set(peaks) == {"plain", "dflash"}
    assert peaks["dflash"]["weight_bytes"] > peaks["plain"]["weight_bytes"] > HIDDEN_SIZE**2 * 8
    assert batched["conditions"]["peak_memory"] == peaks["plain"]["how"]
    assert all(peak["call_bytes"] is None or peak["call_bytes"] >= 0 for peak in peaks.values())
    (table,) = [table for table in comparison.present(batched).tables if "peak memory" in table.title]
    assert [row[:2] for row in table.rows] == [
        *([name, f"{peak['weight_bytes'] / 2**20:.1f}"] for name, peak in peaks.items()),
        ["assisted", "not run"],
        ["prompt_lookup", "not run"],
    ]


def test_a_loop_that_fails_in_this_release_says_so(row_pair, monkeypatch):
    """Bug: another project's fault ends the whole run, or its strategy is gone without a word; ours is hidden alike."""
    honest, failing = answers.decode_rows, {"theirs"}

    def sometimes(target, inputs, contestant, *rest):
        if contestant.name in failing:
            raise IndexError("too many\nindices")
        return honest(target, inputs, contestant, *rest)

    monkeypatch.setattr(answers, "decode_rows", sometimes)
    target, inputs = row_pair.target, row_pair.encode("0")
    theirs = Contestant("theirs", row_pair.drafter, is_their_loop=True)
    contestants = [theirs, Contestant("ours", row_pair.drafter, False)]
    not_run = answers.warm_up(target, inputs, Plan(contestants, [TOKEN, BLOCK], 4, with_plain=True))
    assert set(not_run["T=1, token verification"]) == {"theirs"}
    assert "fails: IndexError: too many indices" in not_run["T=1, token verification"]["theirs"]
    assert "token by token" in not_run["T=1, block verification"]["theirs"]
    plan = Plan(contestants, [TOKEN], 4)
    (answer,) = answers.answer_prompts(target, inputs, [Prompt("chat", "0")], 0, plan, not_run)
    assert set(answer.runs) == {"ours"}
    failing.add("ours")
    with pytest.raises(IndexError):
        answers.warm_up(target, inputs, plan)


def test_a_run_or_plot_of_nothing_is_refused(row_pair, tmp_path):
    """Bug: a load that nobody can decode, or a time that is over, found out by a division by 0 at the end."""
    lookup, prompts = [Contestant("prompt_lookup", lookup_tokens=3)], [Prompt("task", "0")]
    with pytest.raises(DFlowError, match="one sequence at a time"):
        comparison.run(row_pair, lookup, [GREEDY], prompts, output_tokens=4, concurrency=2)
    with pytest.raises(DFlowError, match="--minutes"):
        comparison.run(row_pair, lookup, [GREEDY], prompts, output_tokens=2, minutes=0.0, with_memory=False)
    with pytest.raises(DFlowError, match="nothing to plot"):
        comparison.plot({"modes": {"T=0": {"all": {"contestants": {}}, "by_task": {}}}}, tmp_path / "plot.png")


def test_command_writes_record_and_plot(tmp_path):
    """Bug: options that are not passed on, or a plot that is drawn of nothing."""
    out, png = tmp_path / "bench.json", tmp_path / "bench.png"
    few = ["--strategy", "dflow", "--strategy", "dflash", "--output-tokens", "12", "--per-task", "1"]
    chosen = ["--task", "unknown to the drafter", "--no-thinking", "--json", str(out), "--plot", str(png)]
    result = CliRunner().invoke(app, ["bench", "run", "--tiny", *few, *chosen])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["conditions"]["prompts"] == 1 and record["conditions"]["thinking"] is False
    assert record["conditions"]["tasks"] == ["unknown to the drafter"]
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    refused = CliRunner().invoke(app, ["bench", "run", "--tiny", "--strategy", "assisted"])
    assert refused.exit_code == 2 and "--assistant" in refused.output


def interrupting(monkeypatch, after):
    """Let Ctrl-C come after so many finished calls of a run."""
    honest, calls = comparison.answer_all, []

    def answer_all(*given, **options):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(1)
        return honest(*given, **options)

    monkeypatch.setattr(comparison, "answer_all", answer_all)


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_keeps_its_finished_prompts(tmp_path, monkeypatch, after):
    """N18: Ctrl-C in a run after finished prompts that leaves no file, or a file that looks complete."""
    interrupting(monkeypatch, after)
    out, png = tmp_path / "run.json", tmp_path / "run.png"
    options = ["--strategy", "dflow", "--per-task", "2", "--output-tokens", "4", "--json", str(out), "--plot", str(png)]
    result = CliRunner().invoke(app, ["bench", "run", "--tiny", *options])
    assert result.exit_code == 130 and "interrupted" in result.output
    assert f"Wrote {out}" in result.output and f"Wrote {png}" in result.output
    record = json.loads(out.read_text())
    assert record["interrupted"] and record["conditions"]["prompts"] == after == len(record["rows"])


def test_a_run_is_written_as_it_goes(tmp_path, monkeypatch):
    """N18: a run whose machine goes down leaves nothing; or half a file, written over the one before."""
    monkeypatch.setattr(comparison, "KEEP_SECONDS", 0.0)
    out, kept = tmp_path / "run.json", []
    honest = comparison.answer_all

    def answer_all(*given, **options):
        kept.append(json.loads(out.read_text()) if out.exists() else None)
        return honest(*given, **options)

    monkeypatch.setattr(comparison, "answer_all", answer_all)
    options = ["--strategy", "dflow", "--per-task", "1", "--output-tokens", "4", "--json", str(out)]
    assert CliRunner().invoke(app, ["bench", "run", "--tiny", *options]).exit_code == 0
    assert kept[0] is None and kept[1]["interrupted"] and kept[1]["conditions"]["prompts"] == 1
    assert not json.loads(out.read_text())["interrupted"] and [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("command", ["run --tiny", "report no.json"])
def test_a_plot_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch, command):
    """N18: matplotlib missed after all the measuring."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("hf_dflow.bench.options.PairOptions.load", lambda self: pytest.fail("it ran"))
    result = CliRunner().invoke(app, ["bench", *command.split(), "--plot", str(tmp_path / "plot.png")])
    assert result.exit_code == 2 and "needs matplotlib" in result.output, (result.output, result.exception)
