"""The benchmarks' own arithmetic: wrong figures look as plausible as right ones."""

import numpy as np
import pytest
import torch

from hf_dflow import AcceptanceStatistics
from hf_dflow.bench import comparison, figures, intervals
from hf_dflow.bench.answers import Answer
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.strategies import Mode, Run
from hf_dflow.bench.workloads import Prompt

GREEDY, BLOCK = Mode(), Mode(1.0, "block")


def statistics(accepted, drafted=7):
    record = AcceptanceStatistics()
    record.record(drafted=0, accepted=0, emitted=1)
    for count in accepted:
        record.record(drafted=drafted, accepted=count, emitted=count + 1)
    return record


def answer(task, dflash, dflow, text="text", plain_seconds=None, seed=0, mode=GREEDY, seconds=1.0):
    runs = {}
    for name, accepted in (("dflow", dflow), ("dflash", dflash)):
        record = statistics(accepted)
        tokens = list(range(record.num_output_tokens))
        runs[name] = Run(tokens, 1 + len(accepted), seconds, record, first_token_seconds=0.1)
    if plain_seconds is not None:
        longest = list(max((run.new_tokens for run in runs.values()), key=len))
        runs["plain"] = Run(longest, len(longest), plain_seconds, first_token_seconds=0.1)
    return Answer(Prompt(task, text), mode, seed, runs)


def tokens_per_step(found, contestant):
    return found["contestants"][contestant]["tokens_per_step"]["value"]


def test_bootstrap_interval_covers_a_known_one():
    """Bug: standard error of a single item, percentiles of the wrong tail, or members drawn in place of groups."""
    values = np.random.default_rng(1).normal(size=400)
    low, high = intervals.bootstrap_interval(len(values), lambda chosen: float(values[chosen].mean()))
    half = 1.96 * values.std() / 20
    expected = pytest.approx([values.mean() - half, values.mean() + half], abs=0.02)
    assert [low, high] == expected
    mean = intervals.figure(intervals.resampled_sums(values[None])[0] / 400, 400)
    assert mean["value"] == pytest.approx(values.mean())
    assert mean["interval_95"] == expected
    more = [("a", 0.5), ("a", 0.7), *((name, 1.0) for name in "bcde")]
    median = intervals.grouped_median(more)
    assert median["value"] == 1.0 and median["interval_95"] == pytest.approx([0.7, 1.0]) and median["n"] == 5
    assert intervals.with_interval(median) == "1.00 [0.70, 1.00]"


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_no_interval_below_five_prompts(count):
    """N17: one prompt that is printed as 1.12 [1.12, 1.12], a 95% interval."""
    found = figures.figures([answer("chat", [1, 2], [2, 2], str(i), plain_seconds=1.0) for i in range(count)], "dflash")
    times = figures.times_of([answer("chat", [1], [2], str(i), plain_seconds=1.0) for i in range(count)])
    shown = [
        found["contestants"]["dflow"]["tokens_per_step"],
        found["contestants"]["dflow"]["speed_up"],
        found["differences"]["dflow - dflash"]["gain"],
        times["dflow"]["speed_up"],
        times["dflow"]["median_latency"],
    ]
    assert [entry["n"] for entry in shown] == [count] * len(shown)
    assert all((entry["interval_95"] is None) == (count < 5) for entry in shown)
    assert all((f"(n={count})" in intervals.with_interval(entry)) == (count < 5) for entry in shown)


def test_pooled_tokens_per_step_weigh_steps_not_prompts():
    """Bug: a mean of means, which lets a two-step answer count as much as a long one."""
    found = figures.figures([answer("chat", [0] * 9, [0] * 9, "a"), answer("chat", [3], [3], "b")], "dflash")
    assert found["prompts"] == 2
    assert tokens_per_step(found, "dflash") == pytest.approx(1.3)


def test_differences_are_paired_and_to_the_baseline():
    """Bug: contestants are resampled apart, so that the spread between prompts hides a constant gain."""
    answers = [answer("chat", [count] * 10, [count + 1] * 10, str(count)) for count in (0, 1, 2, 3, 4, 5)]
    found = figures.figures(answers, "dflash")
    assert list(found["contestants"]) == ["dflash", "dflow"]
    difference = found["differences"]["dflow - dflash"]
    assert difference["difference"]["value"] == pytest.approx(1.0)
    assert difference["difference"]["interval_95"] == pytest.approx([1.0, 1.0])
    assert difference["gain"]["value"] == pytest.approx(4.5 / 3.5 - 1)
    low, high = found["contestants"]["dflow"]["tokens_per_step"]["interval_95"]
    assert low < 4.0 < 5.0 < high


def test_seeds_of_a_prompt_are_one_item_of_the_bootstrap():
    """Bug: every seed counts as a prompt, and seeds that show nothing new narrow the interval; or one seed wins."""
    once = [answer("chat", [i] * 4, [i] * 4, str(i), mode=BLOCK) for i in range(4)]
    thrice = [answer("chat", [i] * 4, [i] * 4, str(i), seed=s, mode=BLOCK) for i in range(4) for s in range(3)]
    narrow, wide = (figures.figures(answers, "dflash") for answers in (thrice, once))
    assert narrow["prompts"] == 4
    for key in ("tokens_per_step", "accepted_length_std"):
        assert narrow["contestants"]["dflow"][key] == wide["contestants"]["dflow"][key]
    varied = [answer("chat", [s], [5 * s], seed=s, mode=BLOCK) for s in range(2)]
    assert tokens_per_step(figures.figures(varied, "dflash"), "dflow") == 3.5


def test_every_mode_and_task_has_its_own_figures():
    """Bug: tasks or modes are mixed up, or the spread is that of prompts."""
    answers = [answer("chat", [1], [2]), answer("code", [3], [5]), answer("chat", [0], [7], mode=BLOCK)]
    record = figures.as_record(answers, "dflash")
    assert list(record["modes"]) == ["T=0", "T=1, block verification"]
    greedy = record["modes"]["T=0"]
    assert [tokens_per_step(greedy["by_task"][task], "dflow") for task in ("chat", "code")] == [3.0, 6.0]
    assert tokens_per_step(greedy["all"], "dflow") == 4.5
    assert greedy["tokens_per_step_std_over_tasks"] == {"dflash": 1.0, "dflow": 1.5}
    counts = greedy["all"]["contestants"]["dflow"]
    assert counts["acceptance_rate_per_position"] == [1, 1, 0.5, 0.5, 0.5, 0, 0]
    assert counts["draft_acceptance_rate"] == 0.5
    assert counts["accepted_length_std"] == 1.5
    assert counts["target_forwards_per_token"] == pytest.approx(4 / 11)
    assert record["rows"][1]["runs"]["dflow"] == {
        "new_tokens": 7,
        "accepted": 5,
        "steps": 1,
        "emitted": 6,
        "drafted": 7,
        "offered": 7,
        "target_forwards": 2,
        "seconds": 1.0,
    }


def test_speed_is_compared_by_token_and_on_the_same_prompts():
    """Bug: sampled answers of different lengths are compared by the second, or the ratio is turned over."""
    found = figures.figures([answer("chat", [1, 1], [4, 5], plain_seconds=6.0)], "dflash")
    assert found["plain_seconds_per_token"] == pytest.approx(0.5)  # 12 tokens
    assert found["contestants"]["dflow"]["speed_up"]["value"] == pytest.approx(6.0)
    assert found["contestants"]["dflash"]["speed_up"]["value"] == pytest.approx(0.5 / (1 / 5))


def test_any_difference_of_greedy_text_is_seen():
    """Bug: one changed text among many goes unnoticed, or texts that nobody compared count as identical."""
    answers = [answer("chat", [2], [2], "a", plain_seconds=1.0), answer("chat", [2], [2], "b")]
    record = figures.as_record(answers, "dflash")
    assert record["identity"] == {
        "compared_with_plain": 1,
        "identical_to_plain": {"dflow": 1, "dflash": 1},
        "compared_with_each_other": 2,
        "identical_to_each_other": 2,
    }
    assert figures.is_identical(record)
    answers[0].runs["plain"].new_tokens[-1] += 1
    assert not figures.is_identical(figures.as_record(answers, "dflash"))
    answers[0].runs.pop("plain")
    assert figures.is_identical(figures.as_record(answers, "dflash"))
    answers[1].runs["dflow"].new_tokens[-1] += 1
    assert not figures.is_identical(figures.as_record(answers, "dflash"))


def test_times_by_hand():
    """Bug: throughput of drafts for that of tokens, the first token in the time per token, or ratios upside down."""
    requests = (("a", 0.5), ("a", 0.7), ("b", 1.0))
    answers = [answer("chat", [2] * 3, [2] * 3, text, plain_seconds=1.0, seconds=s) for text, s in requests]
    times = figures.times_of(answers)["dflow"]
    assert times["effective_tps"] == pytest.approx(18 / 2.2)  # 6 accepted drafts each
    assert times["effective_tps_with_bonus"] == pytest.approx(30 / 2.2)  # 10 tokens each
    assert times["seconds_per_output_token"]["p50"] == pytest.approx(0.6 / 9)
    assert times["latency_seconds"]["p50"] == 0.7
    assert times["speed_up"]["value"] == pytest.approx(1 / 0.7)
    assert times["target_forwards_per_token"] == pytest.approx(0.4)
    assert times["median_latency"]["n"] == 2  # whole prompts are drawn
    assert figures.latencies([figures.Timed("a", 1.0, 1.0, 1)])["seconds_per_output_token"] is None


def answer_in_batch(text, batch, tokens, seconds, plain_seconds):
    record = AcceptanceStatistics()
    for _ in range(tokens // 2):
        record.record(drafted=3, accepted=1, emitted=2)
    shared = {"batch_size": 2, "call_tokens": 16, "first_token_seconds": 0.1}
    runs = {
        "dflow": Run(list(range(tokens)), 6, seconds, record, **shared),
        "plain": Run(list(range(16 - tokens)), 12, plain_seconds, **shared),
    }
    return Answer(Prompt("chat", text), GREEDY, 0, runs, batch)


def test_times_of_a_batch_by_hand():
    """Bug: the seconds of a call added up once for each of its rows, or a speed-up of rows instead of calls."""
    answers = [answer_in_batch("a", "a b", 4, 2.0, 3.0), answer_in_batch("b", "a b", 12, 2.0, 3.0)]
    answers += [answer_in_batch("c", "c d", 8, 4.0, 4.0), answer_in_batch("d", "c d", 8, 4.0, 4.0)]
    times = figures.times_of(answers)["dflow"]
    assert times["effective_tps_with_bonus"] == pytest.approx(32 / 6)
    assert times["effective_tps"] == pytest.approx(16 / 6)
    assert times["target_forwards_per_token"] == pytest.approx(12 / 32)
    assert times["latency_seconds"]["p95"] == pytest.approx(4.0)  # a row waits for its call
    assert times["speed_up"]["value"] == pytest.approx(1.25)  # 1.5 and 1, each call once
    assert times["speed_up"]["n"] == 2  # intervals draw two calls, not four rows
    counts = figures.figures(answers, "dflow")
    assert counts["contestants"]["dflow"]["seconds_per_token"] == pytest.approx(6 / 32)
    assert counts["plain_seconds_per_token"] == pytest.approx(7 / 32)


@pytest.mark.parametrize("accepted", [7, 0])
def test_speculation_that_does_not_help_is_noted(accepted):
    """Bug: a drafter of no use that only a careful reader of the table notices."""
    notes = comparison.notes([answer("chat", [accepted] * 5, [accepted] * 5)])
    assert [note.split(": ")[-1] for note in notes] == ([] if accepted else ["1.00 tokens per step"] * 2)
    assert all("speculation is not helping with dfl" in note for note in notes)


def test_conditions_name_what_a_figure_depends_on():
    """Bug: a figure without its versions or threads."""
    conditions = run_conditions(max_new_tokens=3)
    assert conditions["versions"].keys() == {"hf_dflow", "torch", "transformers", "python"}
    assert conditions["threads"] == torch.get_num_threads()
    assert conditions["cpu"]
    assert conditions["max_new_tokens"] == 3
