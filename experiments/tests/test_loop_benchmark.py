"""The loop benchmark's own arithmetic: a wrong time looks as plausible as a right one."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit import tiny_drafter, tiny_target

from experiments import loop
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.workloads import Prompt
from hf_dflow.generation.stopping import StopPlan


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("llama")
    return Pair(target, tiny_drafter(target), None, "tiny")


@pytest.fixture
def inputs():
    ids = torch.tensor([[5, 9, 2, 7]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_both_loops_are_timed_on_the_same_work(pair, inputs):
    """Bug: the loops get different lengths, the relay stays on in ours, or the prompt's forward counts as a step."""
    ours, theirs = (loop.time_loop(pair, inputs, name, 16) for name in loop.LOOPS)
    assert ours.new_tokens == theirs.new_tokens
    assert len(ours.new_tokens) == 16
    assert ours.steps == theirs.steps
    assert 2 <= ours.steps <= 15


def test_time_is_split_between_forwards_and_the_loop(pair, inputs, monkeypatch):
    """Bug: the prompt's forward counts as a step, or a forward is missed (and blamed on the loop) or counted twice."""
    clock = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def takes(owner, name, seconds):
        honest, calls = getattr(owner, name), itertools.count()

        def slowed(*args, **kwargs):
            clock[0] += seconds(next(calls))
            return honest(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowed)

    takes(pair.target.model, "forward", lambda call: 1.0 if call else 1000.0)
    takes(pair.target.get_output_embeddings(), "forward", lambda call: 8.0)  # the target's forward, and the drafter's
    takes(pair.drafter.layers[0], "forward", lambda call: 32.0)
    takes(pair.drafter.fc, "forward", lambda call: 64.0)  # the prompt's features, and every step's but the last
    takes(StopPlan, "clip", lambda call: 0.25)  # the loop's own work, after the prompt's forward and each step's
    timing = loop.time_loop(pair, inputs, "hf_dflow", 8, loop.Stopwatch())
    assert timing.steps >= 2
    drafts = timing.steps - 1  # nothing is accepted, and the last step has room for one token
    assert timing.forward_seconds == timing.steps * (1.0 + 8.0 + 64.0) + drafts * (8.0 + 32.0)
    assert timing.seconds - timing.forward_seconds == (timing.steps + 1) * 0.25
    assert timing.own_seconds_per_step == (timing.steps + 1) * 0.25 / timing.steps
    assert timing.seconds_per_step == timing.seconds / timing.steps


def test_watching_leaves_the_models_as_they_were(pair, inputs):
    """Bug: timers pile up from call to call, or a later save finds wrapped methods."""
    loop.time_loop(pair, inputs, "hf_dflow", 4, loop.Stopwatch())
    assert "forward" not in vars(pair.target)
    assert not set(loop.DRAFT_WORK) & set(vars(pair.drafter))
    assert not pair.target._forward_hooks


def test_loop_verdict_needs_both_goals_and_the_same_text():
    """Bug: PASS although the interval's upper end, the own time, or the text misses the goal."""
    theirs = loop.Timing([1, 2, 3], 2, 1.0, 0.0)

    def verdict(seconds, own, text=(1, 2, 3)):
        ours = loop.Timing(list(text), 2, seconds, 0.0)
        result = loop.PromptResult(Prompt("chat", "text"), [{"hf_dflow": ours, "transformers": theirs}] * 4)
        result.watched = [replace(ours, forward_seconds=seconds - 2 * own)]
        return loop.as_record([result])

    assert verdict(1.0, 0.004)["passed"]
    assert not verdict(1.04, 0.004)["passed"]
    assert not verdict(1.0, 0.006)["passed"]
    assert not verdict(1.0, 0.004, (1, 2, 4))["passed"]
    record = verdict(1.02, 0.004)
    assert record["median_ratio"] == pytest.approx(1.02)
    assert record["own_milliseconds_per_step"] == pytest.approx(4.0)
    assert record["tokens_per_step"] == 1.0  # two of the three tokens came from two steps
