"""The fast loop against the slow reference: same uniforms, same tokens, same accepted lengths."""

import pytest
import torch
from restless import restless_pair

from hf_dflow import DFlowGenerationConfig
from hf_dflow.generation import decoder
from hf_dflow.generation.uniforms import Uniforms
from hf_dflow.reference import reference_generate

NEW_TOKENS = 60


@pytest.fixture(scope="module")
def pair():
    return restless_pair()


def fast(pair, monkeypatch, uniforms=None, **options):
    """Tokens and accepted lengths of the fast loop, fed with `uniforms`."""
    target, drafter = pair

    def scripted(generators, lengths, device):
        if generators[0] is None:
            return None
        (num_drafts,) = lengths
        drawn = torch.tensor([[next(uniforms) for _ in range(2 * num_drafts + 1)]], dtype=torch.float64)
        return Uniforms(drawn[:, :num_drafts], drawn[:, num_drafts:])

    monkeypatch.setattr(decoder, "draw_uniforms", scripted)
    config = DFlowGenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=uniforms is not None, return_dict_in_generate=True, top_k=0, **options
    )
    output = target.generate(torch.tensor([[1, 5, 2]]), generation_config=config, assistant_model=drafter)
    return output.sequences[0].tolist(), output.statistics.per_step_accepted


@pytest.mark.parametrize("use_relay", [True, False])
@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_greedy_loop_is_the_reference(pair, monkeypatch, use_relay, num_draft_tokens):
    """Catches: cache, position, window, alignment and crop bugs that only cost acceptance, which no text shows."""
    expected = reference_generate(*pair, [1, 5, 2], NEW_TOKENS, use_relay=use_relay, num_draft_tokens=num_draft_tokens)
    tokens, accepted = fast(pair, monkeypatch, use_relay=use_relay, num_draft_tokens=num_draft_tokens)
    assert tokens == expected.token_ids
    assert accepted == expected.accepted_lengths
    assert max(accepted) >= 2 and 0 in accepted


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_sampling_loop_is_the_reference(pair, monkeypatch, rule, seed):
    """Catches: a uniform used twice or for the wrong draft, and every bug above on sampled paths."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(2000, generator=generator, dtype=torch.float64).tolist()
    expected = reference_generate(*pair, [1, 5, 2], NEW_TOKENS, rule=rule, temperature=2.0, uniforms=iter(numbers))
    tokens, accepted = fast(pair, monkeypatch, iter(numbers), verification=rule, temperature=2.0)
    assert tokens == expected.token_ids
    assert accepted == expected.accepted_lengths
    assert max(accepted) >= 2 and 0 < sum(accepted) < 4 * len(accepted)


def test_relay_changes_the_reference(pair):
    """Catches: a comparison of two loops in which the relay does nothing."""
    with_relay = reference_generate(*pair, [1, 5, 2], NEW_TOKENS)
    without = reference_generate(*pair, [1, 5, 2], NEW_TOKENS, use_relay=False)
    assert with_relay.token_ids == without.token_ids
    assert with_relay.accepted_lengths != without.accepted_lengths
