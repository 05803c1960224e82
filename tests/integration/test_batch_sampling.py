"""Sampled rows of a batch: each draws from a generator of its own, so that its neighbours do not matter."""

import pytest
import torch
from batches import padded
from kit import assert_not_vacuous
from law import three_token_drafter, three_token_target
from transformers import set_seed

from hf_dflow import DFlowGenerationConfig, UnsupportedGenerationError

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
    fields = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    config = DFlowGenerationConfig(**{**fields, "return_dict_in_generate": True, "seeds": seeds, **options})
    ids, mask = padded([PROMPTS[row] for row in rows], width)
    return pair[0].generate(ids, attention_mask=mask, assistant_model=pair[1], generation_config=config)


def said(output, row: int) -> list[int]:
    return output.sequences[row, -NEW_TOKENS:].tolist()


@pytest.mark.parametrize("law", LAWS)
def test_a_row_says_the_same_with_its_seed(pair, law):
    """B5: numbers drawn for the batch as a whole: a row's text changes with its place or with its neighbours."""
    seeds = [5, 2**62 + 1, 5]
    output = sample(pair, ROWS, seeds, **LAWS[law])
    turned = sample(pair, ROWS[::-1], seeds[::-1], **LAWS[law])
    for row in ROWS:
        alone = sample(pair, [row], [seeds[row]], width=WIDTH, **LAWS[law])  # with its padding: processors may read it
        expected = (said(alone, 0), alone.statistics.per_step_accepted)
        for found, at in ((output, row), (turned, 2 - row)):
            assert (said(found, at), found.statistics.per_row[at].per_step_accepted) == expected
    assert_not_vacuous(output.statistics)
    assert said(output, 0) != said(output, 2)
    if law == "adaptive":
        assert len({length for one in output.statistics.per_row for length in one.per_step_drafted[:-3]}) > 1


@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_blocks_of_any_length_without_processors(pair, block_size, temperature):
    """A2: a dimension squeezed away for some block, batch or empty list of processors; more drafts than a row has."""
    target = pair[0]
    sized = target, three_token_drafter(target, block_size)
    output = sample(sized, ROWS, [1, 2, 3], temperature=temperature, output_scores=True)
    assert output.sequences.shape == (3, WIDTH + NEW_TOKENS)
    assert torch.equal(output.sequences[:, :WIDTH], padded(PROMPTS)[0])
    assert int(output.sequences.min()) >= 0 and int(output.sequences.max()) < 3
    assert [score.shape for score in output.scores] == [(3, 3)] * NEW_TOKENS
    assert max(output.statistics.per_step_drafted) == block_size - 1
    assert 0 < output.statistics.draft_acceptance_rate < 1
    for row in ROWS:
        alone = sample(sized, [row], [row + 1], temperature=temperature)
        assert said(output, row) == said(alone, 0)


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
    assert said(sample(pair, [0]), 0) == said(output, 0)


def test_greedy_batches_leave_the_generator_alone(pair):
    """B5: seeds drawn where nothing is sampled."""
    before = torch.get_rng_state()
    sample(pair, ROWS, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_return_sequences_are_rows_of_their_own(pair):
    """I4: identical rows, or rows of two prompts mixed up."""
    seeds = list(range(9))
    output = sample(pair, ROWS, seeds, num_return_sequences=3)
    assert output.sequences.shape == (9, WIDTH + NEW_TOKENS) and len(output.statistics.per_row) == 9
    assert len({tuple(said(output, row)) for row in range(9)}) == 9
    for row, seed in enumerate(seeds):
        assert said(output, row) == said(sample(pair, [row // 3], [seed]), 0)


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4], [1, 2, -1], [1, 2, 3.0], 7])
def test_seeds_that_do_not_fit(pair, seeds):
    """Seeds that are repeated, dropped or rounded."""
    with pytest.raises(UnsupportedGenerationError, match="seeds"):
        sample(pair, ROWS, seeds)
