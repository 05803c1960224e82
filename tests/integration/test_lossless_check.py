"""The user's own check tells rounding from a fault."""

import copy
from types import SimpleNamespace

import pytest
import torch
from kit import OracleDrafter, PatternDrafter, assert_not_vacuous, plain_greedy, prompt_of, scripted, tiny_target
from transformers.cache_utils import DynamicLayer

from hf_dflow.bench.lossless import FAULT, IDENTICAL, NEAR_TIE, compare_with_plain
from hf_dflow.generation.step import Emission

NEW_TOKENS, MARGIN = 40, 0.1
PATTERN = [7, 2, 0, 3, 5, 1]


def _pair(dtype=torch.float64, **overrides):
    target, prompt = tiny_target("llama", dtype=dtype, **overrides), prompt_of(9)
    return target, scripted(PatternDrafter, target, prompt, NEW_TOKENS, pattern=PATTERN), prompt


def leave_a_row(monkeypatch):
    """Crops that take one rejected row less out of the cache."""
    honest = DynamicLayer.crop
    monkeypatch.setattr(DynamicLayer, "crop", lambda layer, length: honest(layer, length + 1) if length < -1 else None)


def test_float64_is_identical():
    """Catches a comparer that reports differences where there are none, or compares a call with itself."""
    target, drafter, prompt = _pair()
    report = compare_with_plain(target, drafter, prompt, NEW_TOKENS, margin=MARGIN)
    assert report.identical and report.verdict == IDENTICAL == str(report)
    assert_not_vacuous(report.statistics)


def test_processors_and_padding_are_taken_into_account():
    """Catches a comparer that drops keyword arguments or the mask."""
    target, _, prompt = _pair()
    inputs = {
        "input_ids": torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1),
        "attention_mask": torch.tensor([[0] * 3 + [1] * prompt.shape[1]]),
    }
    drafter = scripted(OracleDrafter, target, prompt, NEW_TOKENS)
    kwargs = {"repetition_penalty": 1.3}
    drafter.follow(plain_greedy(target, prompt, NEW_TOKENS + 8, **kwargs), prompt.shape[1])
    report = compare_with_plain(target, drafter, inputs, NEW_TOKENS, **kwargs)
    assert report.identical
    assert report.statistics.mean_accepted_length > 2


def test_a_broken_rollback_is_a_fault(monkeypatch):
    """Catches a comparer that excuses a state bug: here one rejected row stays in the target's cache."""
    target, drafter, prompt = _pair()
    leave_a_row(monkeypatch)
    report = compare_with_plain(target, drafter, prompt, NEW_TOKENS, margin=MARGIN)
    assert not report.identical and report.verdict == FAULT
    assert report.gap > MARGIN and report.gap >= report.margin > 0
    assert report.plain_token == int(plain_greedy(target, prompt, NEW_TOKENS)[0, prompt.shape[1] + report.position])
    assert FAULT in str(report) and str(report.plain_token) in str(report)


def test_a_fault_at_a_processed_row_is_measured_on_processed_logits(monkeypatch):
    """Catches a margin read from raw logits: there the banned token would look like the better one."""
    target, _, prompt = _pair()
    banned = int(plain_greedy(target, prompt, 1)[0, -1])
    drafter = scripted(OracleDrafter, target, prompt, NEW_TOKENS)

    def emit_banned(decoder, plan, rows, model_kwargs):
        sequences = torch.cat([rows[0].ids, torch.full((1, NEW_TOKENS), banned)], dim=1)
        return SimpleNamespace(sequences=sequences, statistics=SimpleNamespace(lossless=True))

    monkeypatch.setattr("hf_dflow.generation.decoder.DFlowDecoder._decode", emit_banned)
    report = compare_with_plain(target, drafter, prompt, NEW_TOKENS, suppress_tokens=[banned])
    assert report.verdict == FAULT and report.position == 0 and report.gap == float("inf")


def test_an_early_end_is_a_fault(monkeypatch):
    """Catches a comparer that stops looking where the shorter text ends."""
    target, drafter, prompt = _pair()
    monkeypatch.setattr(
        "hf_dflow.generation.stopping.StopPlan.clip",
        lambda plan, index, row, new_tokens, draft_ids, verification: Emission(
            verification.bonus_ids[None], new_tokens[-1:], 0, is_last=True
        ),
    )
    report = compare_with_plain(target, drafter, prompt, NEW_TOKENS)
    assert not report.identical and report.verdict == FAULT and report.position == 1 and report.margin is None


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_differs_at_near_ties_only(seed):
    """Catches a state bug that only low precision shows; rounding may flip a tie, and the bound says how wide."""
    target, drafter, prompt = _pair(torch.bfloat16, vocab_size=64)
    prompt = prompt_of(11, seed)
    drafter.follow(plain_greedy(target, prompt, NEW_TOKENS + 8), prompt.shape[1])
    report = compare_with_plain(target, drafter, prompt, NEW_TOKENS, margin=MARGIN)
    assert report.verdict in (IDENTICAL, NEAR_TIE), str(report)
    assert report.identical or report.gap <= MARGIN


def test_near_tie_is_told_from_fault_by_the_gap(monkeypatch):
    """Catches a verdict that ignores the bound: the same difference is a near tie under a generous one."""
    target, drafter, prompt = _pair()
    leave_a_row(monkeypatch)
    fault = compare_with_plain(target, drafter, prompt, NEW_TOKENS, margin=MARGIN)
    assert compare_with_plain(target, drafter, prompt, NEW_TOKENS, margin=fault.gap + 1e-9).verdict == NEAR_TIE


def test_refusals(monkeypatch):
    """Catches a comparison where no single right text exists."""
    target, drafter, prompt = _pair()
    with pytest.raises(ValueError, match="greedy"):
        compare_with_plain(target, drafter, prompt, 4, do_sample=True)
    with pytest.raises(ValueError, match="one sequence"):
        compare_with_plain(target, drafter, prompt.repeat(2, 1), 4)
    relaxed = copy.deepcopy(target.generation_config)
    relaxed.acceptance_threshold = 0.5
    with pytest.raises(ValueError, match="relaxed"):
        compare_with_plain(target, drafter, prompt, 4, generation_config=relaxed)
