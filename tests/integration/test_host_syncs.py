"""One wait for the device in a step, whatever is collected: each further one costs a pipeline bubble on a GPU."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hybrids import hybrid
from kit import PatternDrafter, decode, dflow_greedy, plain_greedy, prompt_of, scripted, shared_target, tiny_drafter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList

import hf_dflow

PACKAGE = str(Path(hf_dflow.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
METHODS = ("item", "tolist", "numpy", "cpu", "nonzero", "unique", "__array__", "__contains__")
METHODS += ("__bool__", "__int__", "__float__", "__index__")
WAITING_OPS = ("nonzero", "_local_scalar_dense", "is_nonzero", "masked_select", "unique", "_unique2", "equal")
ALLOWED_PER_STEP = 1


def _caller() -> str | None:
    """Place in hf_dflow that waits: the innermost frame outside torch, if it is ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(TORCH):
            return f"{Path(name).name}:{frame.f_lineno}" if name.startswith(PACKAGE) else None
        frame = frame.f_back
    return None


class WaitingOps(TorchDispatchMode):
    """Ops whose result's size or value the host must know, boolean indexing among them."""

    def __init__(self, waits: Counter):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if (name in WAITING_OPS or by_mask) and (caller := _caller()):
            self.waits[caller, name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """Counts (place, method) of every wait that hf_dflow itself causes."""
    counted = Counter()
    for name in METHODS:
        original = getattr(torch.Tensor, name)

        def counting(self, *args, original=original, name=name, **kwargs):
            if caller := _caller():
                counted[caller, name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counting)
    return counted


def _waits_and_steps(waits: Counter, call) -> tuple[Counter, int]:
    """What one call adds to `waits`, and its target forwards."""
    waits.clear()
    with WaitingOps(waits):
        statistics = call()
    # One wait is seen as a method and again as the op below it.
    by_place = Counter()
    for (place, _), count in waits.items():
        by_place[place] = max(by_place[place], count)
    return by_place, statistics.num_target_forwards


EVERYTHING = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "eos_token_id": [62, 61],
}
SETTINGS = {
    "greedy": {"do_sample": False},
    "greedy, everything collected": {"do_sample": False, **EVERYTHING},
    "block verification": {"do_sample": True, "top_k": 0},
    "token verification": {"do_sample": True, "verification": "token"},
    "warpers": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 30},
    "prefix processors": {"do_sample": True, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_p": 0.01},
    "sampled, everything collected": {"do_sample": True, **EVERYTHING},
    "no relay": {"do_sample": False, "use_relay": False},
    "mixture": {"do_sample": False, "stale_mixture": True},
}
BATCHES = ("greedy", "block verification", "prefix processors", "no relay", "mixture")


@pytest.mark.parametrize(("name", "rows"), [(name, 1) for name in SETTINGS] + [(name, 3) for name in BATCHES])
def test_one_wait_in_a_step(waits, name, rows):
    """A value read on the host (`.item()`, a mask index, a truth value) in a line of the loop; in a batch, a wait for
    each row, and one for the rows' lengths, holes or ends."""
    target = shared_target(attention="sdpa" if rows > 1 else "eager")
    prompts = torch.cat([prompt_of(9, seed) for seed in range(rows)])

    def call(new_tokens):
        torch.manual_seed(0)
        return decode(target, tiny_drafter(target, 6), prompts, new_tokens, **SETTINGS[name]).statistics

    short, short_steps = _waits_and_steps(waits, lambda: call(6))
    long, long_steps = _waits_and_steps(waits, lambda: call(24))
    assert long_steps > short_steps + 10
    added = long - short
    # The one wait is seen, so the counter works.
    assert 0 < sum(added.values()) <= ALLOWED_PER_STEP * (long_steps - short_steps), added


@pytest.mark.parametrize("rows", [1, 3])
def test_one_wait_in_a_step_with_recurrent_layers(waits, rows):
    """A wait for the accepted lengths before the states advance, or for each group of rows."""
    target = hybrid("qwen3_5_text")
    prompts = torch.cat([prompt_of(9, seed) for seed in range(rows)])
    texts = [(plain_greedy(target, prompt[None], 60), 9) for prompt in prompts]
    drafter = tiny_drafter(target, 6, drafter_class=PatternDrafter).follow_rows(texts)
    drafter.pattern, drafter.offset = [3, 0, 1, 5], 1

    def call(new_tokens):
        return decode(target, drafter, prompts, new_tokens, pad_token_id=0).statistics

    short, short_steps = _waits_and_steps(waits, lambda: call(6))
    long, long_steps = _waits_and_steps(waits, lambda: call(40))
    added = long - short
    assert long_steps > short_steps + 8
    assert 0 < sum(added.values()) <= ALLOWED_PER_STEP * (long_steps - short_steps), added


def test_accepted_lengths_and_results_change_nothing(waits):
    """A wait for each accepted draft, and statistics that ask the device once more."""
    target, prompt = shared_target(), prompt_of(9)
    drafter = scripted(PatternDrafter, target, prompt, 40, pattern=[5, 1, 0, 3])
    counts = set()
    for return_dict in (True, False):
        for pattern in ([5, 1, 0, 3], [0]):
            drafter.pattern, forwards = pattern, []
            handle = target.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(1))

            def call(return_dict=return_dict):
                dflow_greedy(target, drafter, prompt, max_new_tokens=40, return_dict_in_generate=return_dict)
                return hf_dflow.AcceptanceStatistics()

            by_place, _ = _waits_and_steps(waits, call)
            handle.remove()
            counts.add(sum(by_place.values()) - len(forwards))
    assert len(counts) == 1, counts  # what a call costs beyond one wait for each target forward


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_the_counter_counts(waits):
    """Guards the tests above: judging rows one by one waits for each row, which must show."""
    target, prompt = shared_target(), prompt_of(9)
    drafter = scripted(PatternDrafter, target, prompt, 40, pattern=[5])
    processors = LogitsProcessorList([Own()])
    by_place, forwards = _waits_and_steps(
        waits, lambda: decode(target, drafter, prompt, 40, logits_processor=processors).statistics
    )
    assert sum(by_place.values()) > 3 * forwards
