"""The time benchmarks' own arithmetic: a wrong time looks as plausible as a right one."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from commands import invoke
from kit import prompt_of, tiny_drafter, tiny_target

from experiments import batch, loop, mixture_time, static_cache
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import Prompt, read_prompts
from hf_dflow.errors import DFlowError
from hf_dflow.generation._compat import STATIC_IS_CROPPABLE
from hf_dflow.generation.stopping import StopPlan

# -- the loop


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


# -- batches


PROMPTS = [Prompt("chat", "x" * length) for length in (3, 9, 5)]


class TinyPair(Pair):
    def encode(self, prompt):
        return {"input_ids": prompt_of(len(prompt))}


@pytest.fixture(scope="module")
def batch_pair():
    target = tiny_target("llama", attention="sdpa")
    return TinyPair(target, tiny_drafter(target), SimpleNamespace(pad_token_id=0), "tiny")


def test_batch_figures_by_hand(batch_pair, monkeypatch):
    """Bug: warm-up counted, one row's time taken for all, or padding counted as text."""
    clock = [0.0]
    monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def tick(*_):
        clock[0] += 1.0

    handle = batch_pair.target.register_forward_hook(tick)
    try:
        record = batch.measure(batch_pair, PROMPTS, 2, 12)
    finally:
        handle.remove()
    forwards = record["target_forwards"]
    assert record["seconds_batch"] == forwards["batch"] <= 12
    assert record["seconds_alone"] == forwards["alone"] > 2 * forwards["batch"]
    assert record["ratios"] == [forwards["batch"] / forwards["alone"]] * 2
    assert record["rows_with_the_same_text"] == 3 and record["new_tokens"] == 36
    assert record["passed"] is True
    held = record["target_cache_bytes"]
    assert held["column_of_a_row"] == 2 * 4 * 2 * 8 * 8  # keys and values, layers, heads, width, float64
    assert (9 + 10) * held["column_of_a_row"] <= held["row_at_its_widest"] <= (9 + 12) / 0.75 * held["column_of_a_row"]


def test_a_batch_that_is_too_slow_fails(batch_pair, monkeypatch):
    """Bug: a goal that is printed and not looked at."""
    monkeypatch.setattr(batch, "MAX_TIME_RATIO", 1e-9)
    assert batch.measure(batch_pair, PROMPTS[:2], 1, 4)["passed"] is False


# -- static caches


def test_static_cache_figures_by_hand(monkeypatch):
    """Bug: compile time counted among the steps, ratios upside down, or a gain that is earned back before it costs."""
    seconds = {"dynamic": 0.004, "static": 0.005, "static, compiled": 0.003}
    calls = []

    def decode(target, drafter, prompt, way, mode):
        calls.append(way)
        is_first = way == "static, compiled" and calls.count(way) == 1
        return seconds[way] + (2.0 if is_first else 0.0), [1, 2]

    monkeypatch.setattr(static_cache, "decode", decode)
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=50), device=torch.device("cpu"))
    record = static_cache.measure(target, None, 3, "default")
    assert record["milliseconds_per_step"] == pytest.approx({way: 1e3 * value for way, value in seconds.items()})
    assert record["compiled_over"]["dynamic"]["median_ratio"] == pytest.approx(0.75)
    assert record["compiled_over"]["static"]["interval_95"] == pytest.approx([0.6, 0.6])
    assert record["seconds_of_compiling"] == pytest.approx(64.0)
    assert record["steps_until_compiling_pays"] == pytest.approx(64_000, abs=1) and record["same_text"]
    seconds["static, compiled"] = 0.006
    assert static_cache.measure(target, None, 3, "default")["steps_until_compiling_pays"] is None


@pytest.mark.skipif(not STATIC_IS_CROPPABLE, reason="this transformers cannot crop static caches")
def test_each_way_decodes_as_it_says(monkeypatch):
    """Bug: three names for one and the same way."""
    target, drafter = static_cache.random_pair(64, 4, 64, 4)
    asked = []
    monkeypatch.setattr(target, "get_compiled_call", lambda config: asked.append(config) or target, raising=False)
    prompt = torch.randint(1, 63, (1, 8))
    texts = [static_cache.decode(target, drafter, prompt, way, "default")[1] for way in static_cache.WAYS]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == static_cache.NEW_TOKENS
    assert len(asked) == 1 and asked[0].mode == "default"


# -- the mixture


def test_the_share_is_of_a_run_with_the_mixture(monkeypatch):
    """Bug: the share of a run in which nothing was mixed, or of calls that are left out."""
    pair, prompts = load_pair(str(TINY_TARGET), str(TINY_DRAFTER)), read_prompts(TINY_PROMPTS)[:2]
    record = mixture_time.measure(pair, prompts, 24)
    steps = 0
    for number, prompt in enumerate(prompts):
        mixed = Contestant("mixed", pair.drafter, options={"stale_mixture": True})
        steps += len(
            decode(pair.target, pair.encode(prompt.text), mixed, Mode(), 24, number).statistics.per_step_drafted
        )
    assert record["steps"] == steps and record["weights"] == "online" and record["prompts"] == 2
    low, high = record["share"]["interval_95"]
    assert 0 < low <= record["share"]["value"] <= high < 0.9
    taken = record["milliseconds_per_step"]
    assert taken["mixture"] / taken["all"] == pytest.approx(record["share"]["value"])
    slow = mixture_time.StaleMixture.adjust_draft_logits

    def slower(self, draft_logits, feedback):
        sum(range(300_000))
        return slow(self, draft_logits, feedback)

    monkeypatch.setattr(mixture_time.StaleMixture, "adjust_draft_logits", slower)
    assert mixture_time.measure(pair, prompts, 24)["share"]["value"] > 1.3 * record["share"]["value"]


def test_the_mixtures_time_is_printed_and_written(tmp_path):
    """Bug: figures without conditions, or a run of one token whose share of nothing is written as a number."""
    given = ["--target", str(TINY_TARGET), "--drafter", str(TINY_DRAFTER), "--prompts", str(TINY_PROMPTS)]
    out = tmp_path / "time.json"
    refused = invoke(mixture_time.main, *given, "--max-new-tokens 1")
    assert refused.exit_code == 2 and "max-new-tokens" in refused.output
    few = tmp_path / "few.json"
    few.write_text(json.dumps({"own": [read_prompts(TINY_PROMPTS)[0].text]}))
    given[-1] = str(few)
    done = invoke(mixture_time.main, *given, "--max-new-tokens 12 --json", out)
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads(out.read_text())
    assert record["conditions"]["max_new_tokens"] == 12 and f"{record['share']['value']:.2%}" in done.output


def test_nothing_drafted_is_no_share(monkeypatch):
    """Bug: a division by no steps."""
    monkeypatch.setattr(mixture_time, "decode", lambda *given: None)
    pair = load_pair(str(TINY_TARGET), str(TINY_DRAFTER))
    with pytest.raises(DFlowError, match="no step drafted"):
        mixture_time.measure(pair, read_prompts(TINY_PROMPTS)[:1], 4)
