"""Targets whose embedding, head or states have other widths or numbers than their configuration says, and prompts of no
tokens: refused in words before the target computes anything."""

import pytest
import torch
from kit import plain_greedy, prompt_of, tiny_drafter, tiny_target
from trainer_kit import tiny_training
from transformers import AutoModelForCausalLM, LongcatFlashConfig, OPTConfig, RemBertConfig

from hf_dflow import DFlowDecoder, DFlowError, PairMismatchError, UnsupportedGenerationError
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.start import resolve

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": None}
COMMON |= {"eos_token_id": None, "max_position_embeddings": 64}


def narrow_embedding():
    """As in opt-350m."""
    return OPTConfig(**COMMON, num_hidden_layers=4, ffn_dim=48, word_embed_proj_dim=16)


def wide_head():
    return RemBertConfig(
        **COMMON, num_hidden_layers=4, intermediate_size=48, input_embedding_size=32, output_embedding_size=48,
        is_decoder=True,
    )  # fmt: skip


def two_layers_in_one():
    return LongcatFlashConfig(
        **COMMON, num_layers=2, head_dim=8, ffn_hidden_size=48, expert_ffn_hidden_size=16, q_lora_rank=16,
        kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, zero_expert_num=2,
        moe_topk=2,
    )  # fmt: skip


OPT, REMBERT, LONGCAT = narrow_embedding, wide_head, two_layers_in_one
OWN = {"input_embedding": "own", "output_head": "own"}
PAIRS = {
    "embedding read by row": (OPT, {"output_head": "own"}, "input embeddings of width 16 for states of width 32"),
    "embedding called": (OPT, {"input_embedding": "target", "output_head": "own"}, "input embeddings of width 16"),
    "narrow head": (OPT, {"input_embedding": "own"}, "an LM head that reads 16 features"),
    "wide head": (REMBERT, {}, "an LM head that reads 48 features"),
    "fewer states than layers": (LONGCAT, {"target_layer_ids": [0, 2]}, "2 layers whose states it returns"),
}


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config()).eval().requires_grad_(False)


@pytest.mark.parametrize("way", ["flag", "custom_generate"])
@pytest.mark.parametrize("case", PAIRS)
def test_widths_and_numbers_that_do_not_fit_are_refused_before_any_forward(case, way, monkeypatch):
    """N4: a bare RuntimeError or IndexError out of torch.cat or a matrix product, after the prompt was computed."""
    config, fields, message = PAIRS[case]
    target = build(config)
    drafter = tiny_drafter(target, **{"target_layer_ids": [0, 1], **fields})
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("computed"))
    arguments = {"assistant_model": drafter, "speculation_type": "dflow"}
    if way == "custom_generate":
        arguments = {"custom_generate": DFlowDecoder(drafter)}
    with pytest.raises(PairMismatchError, match=message):
        target.generate(prompt_of(5), max_new_tokens=4, do_sample=False, **arguments)


def test_a_drafter_with_embedding_and_head_of_its_own_fits_a_narrow_embedding():
    """N4: a refusal by the target's shape though the drafter reads neither of the two."""
    target, prompt = build(OPT), prompt_of(5)
    drafter = tiny_drafter(target, target_layer_ids=[0, 1], **OWN)
    text = target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter, speculation_type="dflow")
    assert text.equal(plain_greedy(target, prompt, 8))


def test_states_of_another_width_than_the_others_are_named():
    """N4: a bare error of torch.cat where the last state is the projected one."""
    target = build(OPT)
    drafter = tiny_drafter(target, target_layer_ids=[0, 3], **OWN)
    with pytest.raises(UnsupportedGenerationError, match=r"layers \[0, 3\].* widths \[32, 16\]"):
        target.generate(prompt_of(5), max_new_tokens=4, assistant_model=drafter, speculation_type="dflow")
    row = TrainingRow([1, 2, 3, 4], 2, "prompt", 0.0)
    with pytest.raises(DFlowError, match=r"layers \[0, 3\].* widths \[32, 16\]"):
        LiveFeatures([row], target, [0, 3])[0]
    with pytest.raises(DFlowError, match="the states of 2 layers"):
        LiveFeatures([row], build(LONGCAT), [0, 2])[0]


@pytest.mark.parametrize(("config", "message"), [(OPT, "embeddings of width 16"), (REMBERT, "head that reads 48")])
def test_no_drafter_is_trained_for_a_target_it_would_not_fit(config, message):
    """N4: the target's states are computed for hours, for a drafter that cannot read them."""
    training = tiny_training(target_layer_ids=None, initialise_from_target=False)
    with pytest.raises(DFlowError, match=f"no new drafter fits this target, which has .*{message}"):
        resolve(training, build(config), torch.arange(1, 60))


def test_only_layers_that_return_states_are_tapped():
    """N4: training taps layers by the configuration's number, of which half return no states."""
    target = build(LONGCAT)
    assert target.config.num_hidden_layers == 4
    training = tiny_training(target_layer_ids=None, initialise_from_target=False)
    assert resolve(training, target, torch.arange(1, 60)).target_layer_ids == [1]
    with pytest.raises(DFlowError, match="this target has the layers 0 … 1"):
        resolve(tiny_training(target_layer_ids=[0, 3]), target, torch.arange(1, 60))


@pytest.mark.parametrize("way", ["flag", "custom_generate"])
@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_a_prompt_of_no_tokens_is_refused_in_words(shape, way, monkeypatch):
    """N4: "range() arg 3 must not be zero"."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("computed"))
    arguments = {"assistant_model": drafter, "speculation_type": "dflow"}
    if way == "custom_generate":
        arguments = {"custom_generate": DFlowDecoder(drafter)}
    with pytest.raises(UnsupportedGenerationError, match="at least one token, got input_ids of the shape") as refusal:
        target.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=4, do_sample=False, **arguments)
    assert str(shape) in str(refusal.value)
