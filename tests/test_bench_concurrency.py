"""Prompts that are decoded together: the same texts and counts as alone, times counted once, and nobody left unsaid."""

import json
from types import SimpleNamespace

import pytest
import torch
from batches import LENGTHS, following, padded, prompt, said, target_of
from kit import HIDDEN_SIZE, PatternDrafter, assert_not_vacuous, tiny_target

from experiments.tables import strategies_of
from hf_dflow import AcceptanceStatistics
from hf_dflow.bench import evaluation, latency, suite
from hf_dflow.bench.evaluation import Answer, Plan, batches_of
from hf_dflow.bench.latency import of_answers
from hf_dflow.bench.runners import Contestant, Mode, Pair, Run, classic_contestant, decode, decode_rows
from hf_dflow.bench.workloads import Prompt

ROWS, LONG = [0, 1, 3], 24
PATTERN = [3, 0, 2]


def pattern_drafter(rows):
    return following(PatternDrafter, rows, LONG, block_size=8, pattern=PATTERN)


class RowPair(Pair):
    """Its prompts are rows of `batches`, by number."""

    def encode(self, text):
        ids = prompt(int(text))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def row_pair():
    return RowPair(target_of(), pattern_drafter(ROWS), SimpleNamespace(pad_token_id=0), "tiny")


@pytest.fixture(scope="module")
def measured():
    """Three prompts, two at a time: the second call holds one new prompt, and the first over again."""
    pair = row_pair()
    small = classic_contestant("assisted", tiny_target("llama", seed=5, attention="sdpa"), 7)
    contestants = [
        Contestant("dflash", pair.drafter, use_relay=False),
        small,
        Contestant("prompt_lookup", lookup_tokens=3),
    ]
    prompts = [Prompt("chat", str(row)) for row in ROWS]
    return suite.run(pair, contestants, [Mode()], prompts, output_tokens=LONG, concurrency=2)


def test_rows_of_a_call_are_those_alone():
    """Bug: padding counted as text, a row with its neighbour's counts, or a batch that was decoded one by one."""
    ids, mask = padded([prompt(row) for row in ROWS])
    inputs = {"input_ids": ids, "attention_mask": mask}
    runs = decode_rows(target_of(), inputs, Contestant("dflash", pattern_drafter(ROWS), False), Mode(), LONG)
    plain = decode_rows(target_of(), inputs, Contestant("plain"), Mode(), LONG)
    for place, row in enumerate(ROWS):
        alone = {"input_ids": prompt(row), "attention_mask": torch.ones_like(prompt(row))}
        single = decode(target_of(), alone, Contestant("dflash", pattern_drafter([row]), False), Mode(), LONG)
        assert runs[place].new_tokens == plain[place].new_tokens == single.new_tokens == said(row, LONG)
        assert runs[place].statistics.per_step_accepted == single.statistics.per_step_accepted
        assert_not_vacuous(runs[place].statistics)
        assert runs[place].target_forwards < 2 * single.target_forwards
        assert (runs[place].batch_size, runs[place].call_tokens) == (3, 3 * LONG)
    assert plain[0].target_forwards == LONG and plain[0].own_target_forwards == LONG / 3


def test_a_row_ends_at_its_own_eos():
    """Bug: the padding behind a row that ended early passes for its text, and for throughput."""
    eos = said(0, LONG)[4]
    target = target_of()
    ids, mask = padded([prompt(row) for row in ROWS])
    target.generation_config.eos_token_id = eos
    try:
        runs = decode_rows(target, {"input_ids": ids, "attention_mask": mask}, Contestant("plain"), Mode(), LONG)
    finally:
        target.generation_config.eos_token_id = None
    assert [run.new_tokens for run in runs] == [said(row, LONG, eos=(eos,)) for row in ROWS]
    assert len(runs[0].new_tokens) <= 5 and runs[0].call_tokens == sum(len(run.new_tokens) for run in runs)


def test_batches_are_full_and_of_one_task():
    """Bug: a last batch of one prompt under the name of four at a time, tasks mixed in a call, or a prompt lost."""
    prompts = [Prompt(task, f"{task} {i}") for i in range(5) for task in ("chat", "code") if task == "chat" or i < 2]
    found = batches_of(prompts, 4)
    assert [len(batch) for batch in found] == [4, 4, 4]
    assert [{one.task for one in batch} for batch in found] == [{"chat"}, {"code"}, {"chat"}]
    assert {one for batch in found for one in batch} == set(prompts)
    assert [one.text for one in found[2]] == ["chat 4", "chat 0", "chat 1", "chat 2"]


def test_what_cannot_batch_says_so(measured):
    """Bug: a strategy that is missing from the table, so that a reader thinks it was never asked for."""
    found = measured["modes"]["T=0"]
    assert set(found["not_run"]) == {"assisted", "prompt_lookup"}
    assert all("one sequence at a time" in reason for reason in found["not_run"].values())
    assert set(found["all"]["contestants"]) == {"dflash"} and set(found["latency"]) == {"plain", "dflash"}
    assert "| T=0 | assisted | not run: transformers' assisted generation takes one" in strategies_of(measured)
    assert "batches of 2 at a time" in strategies_of(measured)


def test_prompts_are_counted_once_and_conditions_say_how_many_at_a_time(measured):
    """Bug: a prompt that fills a batch up counts twice, or a batch passes for single requests."""
    conditions, found = measured["conditions"], measured["modes"]["T=0"]
    assert conditions["concurrency"] == 2 and conditions["prompts"] == 3 and conditions["prompts_left_out"] == 0
    assert "batch of 2" in conditions["measuring"]
    assert found["all"]["prompts"] == 3 and len(measured["rows"]) == 3
    assert measured["identity"]["identical_to_plain"] == {"dflash": 3}
    assert found["latency"]["dflash"]["requests"] == 4  # two calls of two
    assert found["latency"]["plain"]["target_forwards_per_token"] == 0.5
    assert 1.5 < found["all"]["contestants"]["dflash"]["tokens_per_step"]["value"] < 4
    json.dumps(measured)


def test_memory_of_each_strategy(measured):
    """Bug: one figure for the whole process, weights that a strategy does not need, or a strategy without any."""
    found = measured["modes"]["T=0"]["peak_memory"]
    assert set(found) == {"plain", "dflash"}
    assert found["dflash"]["weight_bytes"] > found["plain"]["weight_bytes"] > HIDDEN_SIZE**2 * 8
    assert measured["conditions"]["peak_memory"] == found["plain"]["how"]
    assert all(one["call_bytes"] is None or one["call_bytes"] >= 0 for one in found.values())


def row_answer(text, batch, tokens, seconds, plain_seconds, call_tokens):
    statistics = AcceptanceStatistics()
    for _ in range(tokens // 2):
        statistics.record(drafted=3, accepted=1, emitted=2)
    runs = {
        "dflow": Run(list(range(tokens)), 6, seconds, statistics, 0.1, 2, call_tokens),
        "plain": Run(list(range(16 - tokens)), 12, plain_seconds, first_token_seconds=0.1, batch_size=2,
                     call_tokens=call_tokens),
    }  # fmt: skip
    return Answer(Prompt("chat", text), Mode(), 0, runs, batch)


def test_times_of_a_batch_by_hand(monkeypatch):
    """Bug: the seconds of a call added up once for each of its rows, or a speed-up of rows instead of calls."""
    drawn = set()
    honest = latency.bootstrap_interval
    monkeypatch.setattr(
        latency, "bootstrap_interval", lambda count, *rest, **more: drawn.add(count) or honest(count, *rest, **more)
    )
    answers = [row_answer("a", "a b", 4, 2.0, 3.0, 16), row_answer("b", "a b", 12, 2.0, 3.0, 16)]
    answers += [row_answer("c", "c d", 8, 4.0, 4.0, 16), row_answer("d", "c d", 8, 4.0, 4.0, 16)]
    found = of_answers(answers)["dflow"]
    assert found["effective_tps_with_bonus"] == pytest.approx(32 / 6)
    assert found["effective_tps"] == pytest.approx(16 / 6)
    assert found["target_forwards_per_token"] == pytest.approx(12 / 32)
    assert found["latency_seconds"]["p95"] == pytest.approx(4.0)  # a row waits for its call
    assert found["speed_up"]["value"] == pytest.approx(1.25)  # 1.5 and 1, each call once
    assert drawn == {2}  # intervals draw two calls, not four rows
    counts = evaluation.figures(answers, "dflow")
    assert counts["contestants"]["dflow"]["seconds_per_token"] == pytest.approx(6 / 32)
    assert counts["plain_seconds_per_token"] == pytest.approx(7 / 32)


def test_a_loop_that_fails_in_this_release_says_so(monkeypatch):
    """Bug: another project's fault ends the whole run, or its strategy is gone without a word; ours is hidden alike."""
    honest, failing = evaluation.decode_rows, {"theirs"}

    def sometimes(target, inputs, contestant, *rest):
        if contestant.name in failing:
            raise IndexError("too many\nindices")
        return honest(target, inputs, contestant, *rest)

    monkeypatch.setattr(evaluation, "decode_rows", sometimes)
    pair = row_pair()
    theirs, ours = Contestant("theirs", pair.drafter, is_their_loop=True), Contestant("ours", pair.drafter, False)
    plan = Plan([theirs, ours], [Mode(1.0, "token"), Mode(1.0, "block")], 4, with_plain=True)
    found = evaluation.warm_up(pair.target, pair.encode("0"), plan)
    assert set(found["T=1, token verification"]) == {"theirs"}
    assert "fails: IndexError: too many indices" in found["T=1, token verification"]["theirs"]
    assert "token by token" in found["T=1, block verification"]["theirs"]
    (answer,) = evaluation.answer_prompts(
        pair.target, pair.encode("0"), [Prompt("chat", "0")], 0, Plan([theirs, ours], plan.modes[:1], 4), found
    )
    assert set(answer.runs) == {"ours"}
    failing.add("ours")
    with pytest.raises(IndexError):
        evaluation.warm_up(pair.target, pair.encode("0"), plan)
    assert LENGTHS[0] == pair.encode("0")["input_ids"].shape[1]
