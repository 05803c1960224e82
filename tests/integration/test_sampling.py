"""Sampling through `generate`: runs, limits that equal greedy decoding, seeds, and the loop's accept rule."""

from types import SimpleNamespace

import kit
import pytest
import torch
from law import PLAIN
from transformers import LogitsProcessorList, set_seed

from hf_dflow import DFlowGenerationConfig
from hf_dflow.generation.processors import PathProcessor
from hf_dflow.generation.step import Proposal, TargetForward
from hf_dflow.generation.uniforms import Uniforms
from hf_dflow.generation.verification import Verifier

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def target():
    return kit.tiny_target("llama")


def sample(target, drafter, prompt, **options):
    config = DFlowGenerationConfig(
        **{**PLAIN, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "pad_token_id": 0, **options}
    )
    return target.generate(prompt, assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_runs_with_and_without_processors(target, rule, temperature, block_size):
    """Bug (A2): sampling crashes when no logits processor is active, or a dimension is squeezed for some block."""
    prompt = kit.prompt_of(7)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, NEW_TOKENS, block_size=block_size)
    output = sample(target, drafter, prompt, verification=rule, temperature=temperature, output_scores=True)
    assert output.sequences.shape == (1, 7 + NEW_TOKENS)
    assert torch.equal(output.sequences[:, :7], prompt)
    assert int(output.sequences.min()) >= 0 and int(output.sequences.max()) < kit.VOCAB_SIZE
    assert [score.shape for score in output.scores] == [(1, kit.VOCAB_SIZE)] * NEW_TOKENS
    assert output.statistics.verification == rule and output.statistics.lossless


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 1e-4}])
@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_the_cold_limit_is_greedy(target, rule, options, block_size):
    """Bug (A2): a temperature or top-k that reaches only one of draft and target."""
    prompt = kit.prompt_of(7, seed=3)
    pattern = [1, 0] if block_size == 2 else [2, 0, min(7, block_size - 1), 1]
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, block_size=block_size, pattern=pattern)
    greedy = kit.plain_greedy(target, prompt, NEW_TOKENS)
    output = sample(target, drafter, prompt, verification=rule, **options)
    assert torch.equal(output.sequences, greedy)
    if block_size != 3:  # where two drafts are a full block
        kit.assert_not_vacuous(output.statistics)
    assert 0 < output.statistics.draft_acceptance_rate < 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_acceptance_rate_of_one_token(rule):
    """Bug (A3): uniforms that are constant, or a denominator that is not the draft's: acceptance 1, or 0.1, not 1/9."""
    rows = 20_000
    generator = torch.Generator().manual_seed(0)
    draft_law, target_law = torch.tensor([0.9, 0.06, 0.04]).log(), torch.tensor([0.1, 0.3, 0.6]).log()
    block = Proposal(
        token_ids=torch.zeros(rows, 1, dtype=torch.long),
        logits=draft_law.expand(rows, 1, 3),
        is_finite=torch.ones(rows, dtype=torch.bool),
        lengths=(1,) * rows,
    )
    row = SimpleNamespace(path=PathProcessor(LogitsProcessorList()), acceptance_processors=[])
    uniforms = torch.rand(rows, 2, generator=generator, dtype=torch.float64)
    verification = Verifier(rule, "torch", lambda row, new_ids, scores: False)(
        [row] * rows,
        TargetForward(None, target_law.expand(rows, 2, 3), torch.zeros(rows, 2, 1), block),
        Uniforms(torch.empty(rows, 1), uniforms),
    )
    is_accepted = verification.accepted_length.bool()
    assert 0.10 < is_accepted.double().mean() < 0.122
    bonus = torch.bincount(verification.bonus_ids[~is_accepted], minlength=3) / (~is_accepted).sum()
    assert bonus[0] == 0  # the residual of a token that was drafted too often is nothing
    assert abs(bonus[1] - 0.24 / 0.8) < 0.015


def test_seeds(target):
    """Bug (B5): draws that ignore the global generator, or all come from one fixed state."""
    prompt = kit.prompt_of(7)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, NEW_TOKENS)

    def with_seed(seed):
        set_seed(seed)
        return tuple(sample(target, drafter, prompt, max_new_tokens=6).sequences[0].tolist())

    assert with_seed(0) == with_seed(0)
    assert len({with_seed(seed) for seed in range(20)}) > 1


def test_greedy_leaves_the_generator_alone(target):
    """Bug (B5): greedy decoding that draws random numbers changes whatever the user samples next."""
    prompt = kit.prompt_of(7)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=[2, 0])
    texts = []
    for seed in range(2):
        set_seed(seed)
        before = torch.get_rng_state()
        texts.append(kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS).sequences)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*texts)
