"""Grouped attention: the same answers as the model's own attention, and nothing left changed."""

import pytest
import torch
from kit import tiny_target

from hf_dflow.training import answers as module
from hf_dflow.training.answers import GROUPED, grouped_attention

PROMPTS = torch.tensor([[0, 0, 0, 5, 9, 2], [7, 3, 8, 1, 4, 6], [0, 11, 12, 13, 14, 15]])


@pytest.fixture
def folded_calls(monkeypatch):
    """How often a step was folded: a decode that never takes the fast path would make every test here pass."""
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, *args, **kwargs):
        if query.shape[1] == key.shape[1] and query.shape[2] > 1 and key.shape[2] > PROMPTS.shape[1]:
            calls.append(query.shape)
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(module.torch.nn.functional, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding"])
@pytest.mark.parametrize("is_padded", [True, False])
def test_greedy_answers_are_those_of_sdpa(family, is_padded, folded_calls):
    """Bug: heads folded onto the wrong key head, the padding mask lost, or a window's mask cut wrongly."""
    target = tiny_target(family, dtype=torch.float32, attention="sdpa")
    mask = (PROMPTS != 0).long() if is_padded else torch.ones_like(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = target.generate(PROMPTS, **options)
    folded_calls.clear()  # releases with this trick of their own count as well
    with grouped_attention(target):
        grouped = target.generate(PROMPTS, **options)
    assert torch.equal(plain.sequences, grouped.sequences)
    assert len(folded_calls) == 23 * target.config.num_hidden_layers
    torch.testing.assert_close(torch.stack(plain.logits), torch.stack(grouped.logits), atol=1e-4, rtol=1e-4)


def test_a_model_with_its_own_attention_keeps_it():
    """Bug: a soft-capped or eager model is switched to sdpa's sums, and its answers are another model's."""
    target = tiny_target("gemma", dtype=torch.float32, attention="eager")
    with grouped_attention(target):
        assert target.config._attn_implementation == "eager"


def test_the_model_is_as_before_even_after_an_error():
    """Bug: a model used for training after its answers keeps the decode-only attention."""
    target = tiny_target("llama", dtype=torch.float32, attention="sdpa")
    with pytest.raises(KeyboardInterrupt), grouped_attention(target):
        assert target.config._attn_implementation == GROUPED
        raise KeyboardInterrupt
    assert target.config._attn_implementation == "sdpa"


def test_masks_and_caps_of_single_heads_go_the_usual_way():
    """Bug: a per-head mask is broadcast over the wrong heads, or a position bias is dropped."""
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.num_key_value_groups, layer.is_causal = 2, True
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 4, 1, 5) > 0.4
    mask[..., 0] = True
    output, _ = module.grouped_attention_forward(layer, query, key, value, mask)
    for head in range(4):
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, [head]], key[:, [head // 2]], value[:, [head // 2]], attn_mask=mask[:, [head]]
        )
        torch.testing.assert_close(output[:, :, head], alone[:, 0])
