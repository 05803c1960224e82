"""Sampling through `generate`: each row draws from a generator of its own, and the limits equal greedy decoding.

The law of what is sampled: test_sampling_law.py.
"""

import kit
import pytest
import torch
from batches import padded
from kit import SAMPLED, assert_not_vacuous, decode, plain_greedy, scripted
from law import fixed_law_drafter, fixed_law_target, three_token_drafter, three_token_target
from transformers import set_seed

from hf_dflow import UnsupportedGenerationError

NEW_TOKENS = 20
# Three tokens and a random drafter: about half of what is drafted is accepted.
PROMPTS = [torch.tensor([one]) for one in ([1, 2, 1, 1], [2], [1, 2, 2, 1, 1, 2, 1])]
WIDTH = 7
ROWS = range(3)
LAWS = {
    "block": {"verification": "block"},
    "token": {"verification": "token"},
    "warped": {"temperature": 0.6, "top_p": 0.9},
    "processed": {"repetition_penalty": 1.2},
    "relaxed": {"acceptance_threshold": 0.35},
    "mixed": {"stale_mixture": True},
    "adaptive": {"adaptive_length": True, "step_costs": {"draft": 0.1, "verify": [1.0, 1.3, 1.5, 1.8]}},
}


@pytest.fixture(scope="module")
def pair():
    target = three_token_target()
    target.set_attn_implementation("sdpa")  # an eager float64 mask makes padding NaN
    return target, three_token_drafter(target, 4)


def sample(pair, rows, seeds=None, width=0, **options):
    ids, mask = padded([PROMPTS[row] for row in rows], width)
    options = {"do_sample": True, "top_k": 0, "seeds": seeds, **options}
    return decode(*pair, ids, NEW_TOKENS, attention_mask=mask, **options)


def sampled_ids(output, row: int) -> list[int]:
    return output.sequences[row, -NEW_TOKENS:].tolist()


@pytest.mark.parametrize("law", LAWS)
def test_a_row_says_the_same_with_its_seed(pair, law):
    """B5: numbers drawn for the batch as a whole: a row's text changes with its place or with its neighbours."""
    seeds = [5, 2**62 + 1, 5]
    output = sample(pair, ROWS, seeds, **LAWS[law])
    turned = sample(pair, ROWS[::-1], seeds[::-1], **LAWS[law])
    for row in ROWS:
        alone = sample(pair, [row], [seeds[row]], width=WIDTH, **LAWS[law])  # with its padding: processors may read it
        expected = (sampled_ids(alone, 0), alone.statistics.per_step_accepted)
        for actual, at in ((output, row), (turned, 2 - row)):
            assert (sampled_ids(actual, at), actual.statistics.per_row[at].per_step_accepted) == expected
    assert_not_vacuous(output.statistics)
    assert sampled_ids(output, 0) != sampled_ids(output, 2)
    if law == "adaptive":
        assert len({length for one in output.statistics.per_row for length in one.per_step_drafted[:-3]}) > 1


@pytest.mark.parametrize(
    ("block_size", "temperature", "rule"),
    [
        (2, 0.3, "token"),
        (2, 1.0, "block"),
        (3, 1.5, "token"),
        (3, 1.0, "block"),
        (16, 1.0, "token"),
        (16, 1.5, "block"),
    ],
)
def test_blocks_of_any_length_with_and_without_processors(pair, block_size, temperature, rule):
    """A2: a dimension squeezed away for some block, batch or empty list of processors; more drafts than a row has."""
    sized = pair[0], three_token_drafter(pair[0], block_size)
    options = {"temperature": temperature, "verification": rule}
    output = sample(sized, ROWS, [1, 2, 3], output_scores=True, **options)
    assert output.statistics.verification == rule and output.statistics.lossless
    assert output.sequences.shape == (3, WIDTH + NEW_TOKENS)
    assert torch.equal(output.sequences[:, :WIDTH], padded(PROMPTS)[0])
    assert int(output.sequences.min()) >= 0 and int(output.sequences.max()) < 3
    assert [score.shape for score in output.scores] == [(3, 3)] * NEW_TOKENS
    assert max(output.statistics.per_step_drafted) == block_size - 1
    assert 0 < output.statistics.draft_acceptance_rate < 1
    for row in ROWS:
        alone = sample(sized, [row], [row + 1], **options)
        assert sampled_ids(output, row) == sampled_ids(alone, 0)


def test_seeds_of_a_batch_follow_from_the_global_one(pair):
    """B5: `set_seed` that does not decide, or rows that all draw the same numbers."""
    set_seed(3)
    first = int(torch.randint(2**62, ()))
    set_seed(3)
    output = sample(pair, ROWS)
    assert torch.equal(output.sequences, sample(pair, ROWS, [first, first + 1, first + 2]).sequences)
    set_seed(3)
    assert torch.equal(output.sequences, sample(pair, ROWS).sequences)
    assert not torch.equal(output.sequences, sample(pair, ROWS).sequences)
    set_seed(3)
    assert sampled_ids(sample(pair, [0]), 0) == sampled_ids(output, 0)


def test_return_sequences_are_rows_of_their_own(pair):
    """I4: identical rows, or rows of two prompts mixed up."""
    seeds = list(range(9))
    output = sample(pair, ROWS, seeds, num_return_sequences=3)
    assert output.sequences.shape == (9, WIDTH + NEW_TOKENS) and len(output.statistics.per_row) == 9
    assert len({tuple(sampled_ids(output, row)) for row in range(9)}) == 9
    for row, seed in enumerate(seeds):
        assert sampled_ids(output, row) == sampled_ids(sample(pair, [row // 3], [seed]), 0)


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4], [1, 2, -1], [1, 2, 3.0], 7])
def test_seeds_that_do_not_fit(pair, seeds):
    """Seeds that are repeated, dropped or rounded."""
    with pytest.raises(UnsupportedGenerationError, match="seeds"):
        sample(pair, ROWS, seeds)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("block_size", "options"), [(2, {"top_k": 1}), (3, {"temperature": 1e-4}), (16, {"top_k": 1, "temperature": 1e-4})]
)
def test_the_cold_limit_is_greedy(target, rule, options, block_size):
    """A2: a temperature or top-k that reaches only one of draft and target."""
    prompt, new_tokens = kit.prompt_of(7, seed=3), 16
    pattern = [1, 0] if block_size == 2 else [2, 0, min(7, block_size - 1), 1]
    drafter = scripted(kit.PatternDrafter, target, prompt, new_tokens, block_size=block_size, pattern=pattern)
    output = decode(target, drafter, prompt, new_tokens, verification=rule, **{**SAMPLED, **options})
    assert torch.equal(output.sequences, plain_greedy(target, prompt, new_tokens))
    if block_size != 3:  # where two drafts are a full block
        assert_not_vacuous(output.statistics)
    assert 0 < output.statistics.draft_acceptance_rate < 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_acceptance_rate_of_two_known_laws(rule):
    """A3: uniforms that are constant, or a denominator that is not the draft's: another rate than the sum of
    min(p, q), or another mean of the tokens."""
    draft_law, target_law, rows, new_tokens = [0.9, 0.06, 0.04], [0.1, 0.3, 0.6], 64, 50
    target = fixed_law_target(target_law)
    drafter = fixed_law_drafter(target, draft_law, block_size=2)
    prompts = torch.ones(rows, 2, dtype=torch.long)
    options = {"verification": rule, "seeds": list(range(rows))}
    output = decode(target, drafter, prompts, new_tokens, **{**SAMPLED, **options})
    statistics = output.statistics
    assert statistics.num_draft_tokens > 2000
    assert abs(statistics.draft_acceptance_rate - 0.2) < 0.035  # 0.1 + 0.06 + 0.04, four deviations
    frequencies = torch.bincount(output.sequences[:, 2:].flatten(), minlength=3) / (rows * new_tokens)
    torch.testing.assert_close(frequencies, torch.tensor(target_law), atol=0.035, rtol=0)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_laws_accept_everything(rule):
    """E2: p = q up to rounding rejects, and then draws from a residual that is nothing but rounding."""
    target = fixed_law_target([0.2, 0.3, 0.5])
    law = target(torch.tensor([[1]])).logits[0, -1].float().softmax(-1).tolist()
    drafter = fixed_law_drafter(target, law, block_size=3)
    prompts = torch.ones(3, 2, dtype=torch.long)
    output = decode(target, drafter, prompts, 60, verification=rule, seeds=[0, 1, 2], **SAMPLED)
    assert output.statistics.draft_acceptance_rate == 1.0
