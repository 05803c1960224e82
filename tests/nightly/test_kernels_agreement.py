"""The Triton kernels decide as the reference does, on the same uniforms: interpreted, no GPU needed."""

from dataclasses import replace

import kernel_kit
import pytest
import torch
from kernel_kit import random_inputs, verify

from experiments.kernel_agreement import compare_decisions

pytestmark = kernel_kit.ignore_numpy_warnings

LAWS = ("dense", "point mass", "mixed")
CONFIGS = [(rule, law) for rule in ("token", "block") for law in LAWS] + [("greedy", "dense")]
ROWS = 10_000
MAX_EXCLUDED = ROWS // 1000
MAX_ERROR = 5e-6  # of a float32 ratio of two softmax probabilities
SMALL_VOCABULARIES = (2, 3, 17, 64, 65, 127, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def agreement(inputs, **tiles):
    return compare_decisions(verify(inputs, "triton", **tiles), inputs)


def test_ten_thousand_random_rows():
    """Bug: any slip in offsets, splits, ragged lengths, normalisers, weights, residuals or the draw; also a scratch or
    output entry that is read before it is written (all start as NaN)."""
    cases = [(*config, vocab) for vocab in SMALL_VOCABULARIES for config in CONFIGS]
    per_case = -(-ROWS // len(cases))
    rows = excluded = 0
    for seed, (rule, law, vocab) in enumerate(cases):
        inputs = random_inputs(
            seed,
            batch=per_case,
            num_drafts=1 + seed % 16,
            vocab=vocab,
            rule=rule,
            law=law,
            dtype=DTYPES[seed % 3],
        )
        # Several splits from V = 64 on, or few programs, so that a split has several tiles; 64 rows to a program.
        found = agreement(inputs, block=32, rows=64, programs=1 if seed % 2 else 10**6)
        assert found.wrong_rows == [], f"{rule}, {law}, V = {vocab}: rows {found.wrong_rows[:5]}"
        assert found.largest_error < MAX_ERROR, f"{rule}, {law}, V = {vocab}"
        rows, excluded = rows + found.num_rows, excluded + found.num_excluded
    assert rows >= ROWS and excluded <= MAX_EXCLUDED
    print(f"{rows} rows, {excluded} excluded")


LARGE = [("block", "dense"), ("token", "dense"), ("block", "point mass"), ("greedy", "dense"), ("token", "mixed")]


@pytest.mark.parametrize(("rule", "law"), LARGE)
def test_a_large_vocabulary(rule, law):
    """Bug: sums over 38 tiles that drift, or a draw that lands in the wrong tile (V = 151,936, a GPU's tiles)."""
    seed = LARGE.index((rule, law))
    inputs = random_inputs(seed, batch=4, num_drafts=2, vocab=151_936, rule=rule, law=law, spread=6.0)
    found = agreement(inputs, block=4096, rows=4)
    assert found.wrong_rows == [] and found.num_excluded == 0


def test_the_judge_sees_a_wrong_decision():
    """Control: were every difference excused, the tests above could not fail."""
    inputs = random_inputs(3, batch=64, num_drafts=3, vocab=20, rule="block")
    decision = verify(replace(inputs, uniforms=inputs.uniforms.roll(1, 0)), "triton", rows=64)
    assert len(compare_decisions(decision, inputs).wrong_rows) > 20
