"""The batch benchmark's own arithmetic: a wrong ratio looks as plausible as a right one."""

from types import SimpleNamespace

import pytest
from kit import prompt_of, tiny_drafter, tiny_target

from experiments import batch
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.workloads import Prompt

PROMPTS = [Prompt("chat", "x" * length) for length in (3, 9, 5)]


class TinyPair(Pair):
    def encode(self, prompt):
        return {"input_ids": prompt_of(len(prompt))}


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("llama", attention="sdpa")
    return TinyPair(target, tiny_drafter(target), SimpleNamespace(pad_token_id=0), "tiny")


def test_figures_by_hand(pair, monkeypatch):
    """Bug: warm-up counted, one row's time taken for all, or padding counted as text."""
    clock = [0.0]
    monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def tick(*_):
        clock[0] += 1.0

    handle = pair.target.register_forward_hook(tick)
    try:
        record = batch.measure(pair, PROMPTS, 2, 12)
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


def test_a_batch_that_is_too_slow_fails(pair, monkeypatch):
    """Bug: a goal that is printed and not looked at."""
    monkeypatch.setattr(batch, "MAX_TIME_RATIO", 1e-9)
    assert batch.measure(pair, PROMPTS[:2], 1, 4)["passed"] is False
