"""The static-cache benchmark's own arithmetic, with a clock of its own."""

from types import SimpleNamespace

import pytest
import torch

from experiments import static_cache
from hf_dflow.generation._compat import STATIC_IS_CROPPABLE


def test_figures_by_hand(monkeypatch):
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
