"""`hf-dflow bench run`: all strategies by turns, figures that are right, and conditions that cannot be mixed."""

import io
import json
from pathlib import Path

import pytest
import torch
from kit import HostileDrafter, OracleDrafter, prompt_of, scripted, tiny_target
from rich.console import Console
from typer.testing import CliRunner

from experiments.draft_model import new_draft_model
from hf_dflow import AcceptanceStatistics
from hf_dflow.bench import evaluation, run_view, suite
from hf_dflow.bench.conditions import MUST_AGREE, differences, refuse_unequal
from hf_dflow.bench.evaluation import Answer
from hf_dflow.bench.latency import Timed, of_answers, summarise
from hf_dflow.bench.runners import Contestant, Mode, Run, decode, load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import Prompt, jsonl_prompts, read_prompts, select
from hf_dflow.cli import app
from hf_dflow.console import UNBOUNDED
from hf_dflow.errors import DFlowError

ROOT = Path(__file__).parent.parent
MODES = [Mode(), Mode(1.0, "token")]


@pytest.fixture(scope="module")
def measured():
    """Two prompts of two tasks, every strategy, greedily and sampled; and who decoded when."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    assistant = new_draft_model(pair.target, 1).eval()
    contestants = suite.contestants_of(pair, suite.STRATEGIES, assistant)
    order, warmed, honest = [], [], evaluation.decode_rows

    def noted(target, inputs, contestant, mode, max_new_tokens, *seed):
        if max_new_tokens > evaluation.WARM_UP_TOKENS:
            order.append((mode.name, contestant.name))
        elif not order:
            warmed.append((mode.name, contestant.name))
        return honest(target, inputs, contestant, mode, max_new_tokens, *seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "decode_rows", noted)
        prompts = select(read_prompts(TINY_PROMPTS), [], 1)[:2]
        record = suite.run(pair, contestants, MODES, prompts, output_tokens=16, repeats=2)
    return record, order, warmed


def test_every_strategy_writes_the_targets_text(measured):
    """Bug: a strategy that is measured on another text, or one that quietly decodes plainly."""
    record, *_ = measured
    identity = record["identity"]
    assert identity["compared_with_plain"] == 2
    assert identity["identical_to_plain"] == dict.fromkeys(suite.STRATEGIES, 2)
    found = record["modes"]["T=0"]["all"]["contestants"]
    assert set(found) == set(suite.STRATEGIES)
    assert found["dflow"]["tokens_per_step"]["value"] > 2
    assert found["dflash"]["tokens_per_step"]["value"] == found["transformers_dflash"]["tokens_per_step"]["value"]
    assert all(one["num_spec_steps"] for name, one in found.items() if name != "prompt_lookup")
    assert found["dflow"]["wasted_ratio"] == pytest.approx(1 - found["dflow"]["draft_acceptance_rate"])
    times = record["modes"]["T=0"]["latency"]
    assert times["plain"]["target_forwards_per_token"] == 1.0
    assert times["dflow"]["target_forwards_per_token"] < 0.5
    sampled = record["modes"]["T=1, token verification"]["all"]["contestants"]
    failing = record["modes"]["T=1, token verification"]["not_run"]  # in some releases of transformers
    assert set(sampled) == set(suite.STRATEGIES) - set(failing) and set(failing) <= {"transformers_dflash"}
    assert failing or sampled["transformers_dflash"]["tokens_per_step"]["value"] > 1.5


def test_strategies_take_turns(measured):
    """Bug: one strategy after the other, so that a busy minute is blamed on one of them."""
    _, order, warmed = measured
    assert set(order) <= set(warmed)  # everybody had a call that does not count
    greedy = [name for mode, name in order if mode == "T=0"]
    turn = len(suite.STRATEGIES) + 1
    turns = [greedy[i : i + turn] for i in range(0, len(greedy), turn)]
    assert len(turns) == 4 and all(len(set(one)) == turn for one in turns)  # 2 prompts, 2 repeats
    assert len({one[0] for one in turns}) > 1  # who begins changes


def test_repeats_are_for_times_alone(measured):
    """Bug: counts of a prompt that was decoded twice weigh twice, or times of the first turn only."""
    record, *_ = measured
    assert record["modes"]["T=0"]["all"]["prompts"] == 2
    assert len([row for row in record["rows"] if row["mode"] == "T=0"]) == 2
    assert record["modes"]["T=0"]["latency"]["dflow"]["requests"] == 4


def test_conditions_stand_with_the_figures(measured):
    """H4: a number without target, dtype, quantization, template, thinking, temperature, prompts or block size."""
    conditions = measured[0]["conditions"]
    assert not set(MUST_AGREE) - set(conditions)
    assert conditions["dtype"] == "float32" and conditions["quantization"] == "none"
    assert conditions["block_size"] == 8 and conditions["modes"] == [mode.name for mode in MODES]
    json.dumps(measured[0])


def test_results_of_other_conditions_are_not_compared(measured):
    """Bug: 48 tokens against 256, or bfloat16 against float32, side by side in one chart."""
    record = measured[0]
    refuse_unequal([record, record], ["a", "b"])
    for key in MUST_AGREE:
        other = {**record, "conditions": {**record["conditions"], key: "something else"}}
        with pytest.raises(DFlowError, match=f"different conditions.*{key}: "):
            refuse_unequal([record, other], ["a", "b"])
        refuse_unequal([record, other], ["a", "b"], except_for=[key])
    silent = {key: value for key, value in record["conditions"].items() if key != "dtype"}
    assert set(differences(silent, silent)) == {"dtype"}  # what nobody stated is not known to agree


def test_all_of_it_is_printed(measured):
    """H2, H4: one convention of the two, a note that is only in the JSON, or a table without its conditions."""
    out = io.StringIO()
    run_view.show(measured[0], Console(file=out, width=UNBOUNDED))
    text = out.getvalue()
    for words in ("tokens/step counts the bonus, accepted drafts (the mean accepted length) does not", "peak memory"):
        assert words in text
    said = measured[0]["conditions"]
    for key in (*MUST_AGREE, "workload"):
        assert f"{key}: {said[key]}" in text, key
    counts = measured[0]["modes"]["T=0"]["all"]["contestants"]["dflow"]
    line = next(line for line in text.splitlines() if line.split()[:2] == ["all", "dflow"])
    for form, key in (
        ("{:.2f}", "mean_accepted_length"),
        ("{:.1%}", "wasted_ratio"),
        ("{:.2f}", "accepted_length_std"),
    ):
        assert form.format(counts[key]) in line
    assert "speculation is not helping with prompt_lookup" in text
    assert "Greedy texts equal to the target's own, of 2: " in text and "dflow 2" in text


def made_answer(text, seconds, *, plain=1.0, accepted=2):
    statistics = AcceptanceStatistics()
    statistics.record(drafted=0, accepted=0, emitted=1)
    for _ in range(3):
        statistics.record(drafted=4, accepted=accepted, emitted=accepted + 1)
    tokens = list(range(statistics.num_output_tokens))
    runs = {
        "dflow": Run(tokens, 4, seconds, statistics, 0.1),
        "plain": Run(tokens, len(tokens), plain, first_token_seconds=0.1),
    }
    return Answer(Prompt("chat", text), Mode(), 0, runs)


def test_times_by_hand():
    """Bug: throughput of drafts for that of tokens, the first token in the time per token, or ratios upside down."""
    answers = [made_answer("a", 0.5), made_answer("a", 0.7), made_answer("b", 1.0)]
    found = of_answers(answers)["dflow"]
    assert found["effective_tps"] == pytest.approx(18 / 2.2)  # 6 accepted drafts each
    assert found["effective_tps_with_bonus"] == pytest.approx(30 / 2.2)  # 10 tokens each
    assert found["seconds_per_output_token"]["p50"] == pytest.approx(0.6 / 9)
    assert found["latency_seconds"]["p50"] == 0.7
    assert found["speed_up"]["value"] == pytest.approx(1 / 0.7)
    assert found["target_forwards_per_token"] == pytest.approx(0.4)
    low, high = found["median_latency"]["interval_95"]
    assert low == pytest.approx(0.6) and high == pytest.approx(1.0)  # whole prompts are drawn
    lonely = summarise([Timed("a", 1.0, 1.0, 1)])
    assert lonely["seconds_per_output_token"] is None


@pytest.mark.parametrize(("kind", "tokens_per_step"), [(OracleDrafter, 8.0), (HostileDrafter, 1.0)])
def test_both_conventions(kind, tokens_per_step):
    """H2: the bonus counted twice or not at all, and speculation that is silently of no use."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = scripted(kind, target, prompt, 41)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    runs = {"dflow": decode(target, inputs, Contestant("dflow", drafter), Mode(), 41)}
    statistics = runs["dflow"].statistics
    assert statistics.tokens_per_step == tokens_per_step == statistics.mean_accepted_length + 1
    notes = suite.notes([Answer(Prompt("chat", "a"), Mode(), 0, runs)])
    assert bool(notes) == (kind is HostileDrafter)
    assert not notes or "speculation is not helping with dflow: 1.00 tokens per step" in notes[0]


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


def test_ones_own_lines(tmp_path):
    """Bug: a line without a prompt that becomes the prompt "None"."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "one", "task": "mail"}\n\n{"prompt": "two"}\n')
    assert jsonl_prompts(path) == [Prompt("mail", "one"), Prompt("own", "two")]
    for wrong in ('{"text": "one"}', '{"prompt": ""}', "[1]", "{", '{"prompt": 3}', ""):
        path.write_text(wrong + "\n")
        with pytest.raises(DFlowError, match=r"own\.jsonl"):
            jsonl_prompts(path)
    with pytest.raises(DFlowError, match="there are mail"):
        select([Prompt("mail", "one")], ["chat"], None)
