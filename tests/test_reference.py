"""The fast loop against the slow reference: same uniforms, same tokens, same accepted lengths."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dflow import DFlowDrafter, DFlowDrafterConfig, DFlowGenerationConfig
from hf_dflow.generation import decoder
from hf_dflow.generation.uniforms import Uniforms
from hf_dflow.reference import reference_generate

VOCAB, NEW_TOKENS = 8, 60  # few tokens: a random drafter is right often enough to accept and to be rejected


def restless_pair(seed: int = 8, **overrides):
    """A target of few tokens and a random drafter with a live relay: right often enough, wrong often enough."""
    torch.manual_seed(seed)  # 8 is one of the pairs whose greedy run accepts two and more, with relay and without
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.5,  # restless continuations: a small one repeats a token that a random drafter never says
        attn_implementation="eager",
    )
    target = LlamaForCausalLM(config).double().eval()
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "block_size": 5,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2],
        "initializer_range": 0.5,
    }
    drafter_config = DFlowDrafterConfig(**{**fields, **overrides})
    drafter = DFlowDrafter(drafter_config).double().eval()
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.3)
    return target, drafter


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
