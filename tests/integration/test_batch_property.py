"""Random batches: each row equals a call for it alone.

80 cases, or as many as HF_DFLOW_CASES says (`make test-nightly`: 2,000).
"""

import os
from dataclasses import dataclass

from batches import padded, target_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import VOCAB_SIZE, NudgedDrafter, PatternDrafter, decode, plain_greedy, prompt_of, tiny_drafter

CASES = int(os.environ.get("HF_DFLOW_CASES", "80"))
FAMILIES = ("llama", "gpt2", "qwen3")
PROCESSORS = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": list(range(0, VOCAB_SIZE, 5))},
    {"min_new_tokens": 6},
    {"bad_words_ids": [[3, 4], [7]], "sequence_bias": [[[5], 2.0]]},
    {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(1, 63) if (t + int(ids[-1])) % 4]},
)
SEEN = {"several": 0, "partial": 0, "ended": 0}  # what all cases together must have shown


@dataclass
class Case:
    family: str
    lengths: list[int]
    seeds: list[int]
    new_tokens: int
    block_size: int
    num_eos: int
    processors: dict
    is_scripted: bool
    pattern: list[int]
    do_sample: bool
    verification: str


cases = st.builds(
    Case,
    family=st.sampled_from(FAMILIES),
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seeds=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    new_tokens=st.integers(1, 14),
    block_size=st.sampled_from((2, 4, 6)),
    num_eos=st.integers(0, 3),
    processors=st.sampled_from(PROCESSORS),
    is_scripted=st.booleans(),
    pattern=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    do_sample=st.booleans(),
    verification=st.sampled_from(("token", "block")),
)


def drafter_for(case: Case, texts):
    drafter_class = PatternDrafter if case.is_scripted else NudgedDrafter
    drafter = tiny_drafter(target_of(case.family), case.block_size, drafter_class=drafter_class)
    drafter.pattern, drafter.nudge = case.pattern, 2.0
    return drafter.follow_rows(texts)


def run(case: Case, ids, mask, texts, seeds, eos):
    return decode(
        target_of(case.family),
        drafter_for(case, texts),
        ids,
        case.new_tokens,
        attention_mask=mask,
        do_sample=case.do_sample,
        top_k=0,
        temperature=0.1 if case.do_sample else None,
        verification=None if "prefix_allowed_tokens_fn" in case.processors else case.verification,
        seeds=seeds,
        eos_token_id=eos or None,
        **case.processors,
    )


@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(cases)
def check(case: Case):
    target = target_of(case.family)
    prompts = [prompt_of(length, seed) for length, seed in zip(case.lengths, case.seeds, strict=False)]
    texts = [(plain_greedy(target, one, case.new_tokens + 6), one.shape[1]) for one in prompts]
    width = max(case.lengths)
    eos = sorted({int(text[0, -2 - i]) for (text, _), i in zip(texts, range(case.num_eos), strict=False)})
    ids, mask = padded(prompts)
    output = run(case, ids, mask, texts, case.seeds[: len(prompts)], eos)
    longest = 0
    for i in range(len(prompts)):
        # The row's own call has the row's own padding: processors that read the prefix see it in a batch too.
        alone = run(case, ids[i : i + 1], mask[i : i + 1], texts[i : i + 1], case.seeds[i : i + 1], eos)
        new = alone.sequences[0, width:].tolist()
        longest = max(longest, len(new))
        assert output.sequences[i, width:].tolist() == new + [0] * (output.sequences.shape[1] - width - len(new))
        ours, own = output.statistics.per_row[i], alone.statistics
        assert (ours.per_step_accepted, ours.per_step_drafted) == (own.per_step_accepted, own.per_step_drafted)
        assert ours.num_target_forwards == own.num_target_forwards
        pairs = list(zip(own.per_step_accepted, own.per_step_drafted, strict=True))
        SEEN["several"] += any(accepted >= 2 for accepted, _ in pairs)
        SEEN["partial"] += any(0 < accepted < drafted for accepted, drafted in pairs[:-1])
        SEEN["ended"] += len(new) < case.new_tokens
    assert output.sequences.shape[1] == width + longest


def test_rows_equal_single_runs():
    """Whatever couples rows: caches, masks, positions, limits, processors, random numbers, ends."""
    check()
    assert min(SEEN.values()) > CASES / 20, SEEN
