"""What is refused is refused by name, in one line, before the target computes anything."""

import re

import kit
import pytest
import torch
from transformers import Cache, Gemma3nForCausalLM, Gemma3nTextConfig, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

import hf_dflow
from hf_dflow import DFlowDecoder, DFlowGenerationConfig, PairMismatchError, UnsupportedGenerationError

# Options of generate, and the word that the error must contain.
OPTIONS = {
    "num_beams": ({"num_beams": 2}, "num_beams"),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, "num_beams"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
    "early exit": ({"assistant_early_exit": 2}, "assistant_early_exit"),
    "multi-token prediction": ({"use_mtp": True}, "use_mtp"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
    "token healing": ({"token_healing": True}, "token_healing"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "offloaded static cache": ({"cache_implementation": "offloaded_static"}, "cache_implementation"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "cache_implementation"),
    "quantized cache": ({"cache_implementation": "quantized"}, "cache_implementation"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "streamed batch": ({"inputs": kit.prompt_of(6).repeat(2, 1), "streamer": kit.RecordingStreamer()}, "batch of 2"),
    "tensors of a batch": ({"inputs": kit.prompt_of(6).repeat(2, 1), "labels": torch.zeros(2, 6)}, "labels"),
    "tensors in chunks": ({"prefill_chunk_size": 2, "labels": torch.zeros(1, 6)}, "labels"),
    "chunks of nothing": ({"prefill_chunk_size": 0}, "prefill_chunk_size=0"),
    "seeds": ({"generation_config": {"do_sample": True, "seeds": [1, 2]}}, "seeds"),
    "relay": ({"generation_config": {"use_relay": True}}, "use_relay"),
    "rule": ({"generation_config": {"verification": "tree"}}, "verification"),
    "too many drafts": ({"generation_config": {"num_draft_tokens": 4}}, "num_draft_tokens"),
    "threshold": ({"generation_config": {"acceptance_threshold": 0.0}}, "acceptance_threshold"),
    "relaxed block": ({"generation_config": {"acceptance_threshold": 0.5, "verification": "block"}}, "block"),
}
# Modes that transformers moved to the Hub: it says so itself, also with an assistant.
MOVED = {
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive|penalty_alpha"),
    "constrained beams": ({"force_words_ids": [[3]]}, "Constrained|force_words_ids"),
    "constraints": ({"constraints": [1]}, "Constrained|constraints"),
    "beam groups": ({"num_beams": 2, "num_beam_groups": 2}, "Group|num_beams"),
    "diverse beams": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "Group|num_beams"),
}
# A callable custom_generate is not shown synced_gpus; the others want a package or a tokenizer before that.
NOT_CUSTOM = ("synced_gpus", "quantized cache", "token healing", "streamed batch")


DOORS = {
    "seam": lambda drafter: {"assistant_model": drafter, "speculation_type": "dflow"},
    "custom_generate": lambda drafter: {"custom_generate": DFlowDecoder(drafter)},
}
CASES = [("seam", name) for name in (*OPTIONS, *MOVED)]
CASES += [("custom_generate", name) for name in OPTIONS if name not in NOT_CUSTOM]
CASES += [("custom_generate", "contrastive search")]


@pytest.fixture
def counted():
    """A target, a drafter without relay, and the calls of the target's inner model."""
    target, calls = kit.tiny_target(), []
    target.model.register_forward_pre_hook(lambda *_: calls.append("model"))
    return target, kit.tiny_drafter(target, 4, relay=None), calls


def arguments_of(options: dict) -> dict:
    options = {"inputs": kit.prompt_of(6), "max_new_tokens": 4, **options}
    if isinstance(options.get("generation_config"), dict):
        options["generation_config"] = DFlowGenerationConfig(
            pad_token_id=0, max_new_tokens=options.pop("max_new_tokens"), **options["generation_config"]
        )
    return options


def assert_refused(target, calls, word, error=UnsupportedGenerationError, **arguments) -> str:
    """By name, in one line, and before anything is computed."""
    with pytest.raises(error) as caught:
        target.generate(**arguments)
    message = str(caught.value)
    assert re.search(word, message) and "\n" not in message and len(message) < 400, message
    assert calls == []
    return message


@pytest.mark.parametrize(("door", "name"), CASES)
def test_options(counted, door, name):
    """An option that silently decodes in another way, or is noticed after the prefill; checks that live in the seam
    only, so that a decoder handed to `custom_generate` passes them by; a mode that transformers itself refuses, let
    through by the seam."""
    target, drafter, calls = counted
    options, word = {**OPTIONS, **MOVED}[name]
    error = ValueError if name in MOVED and door == "seam" else UnsupportedGenerationError
    assert_refused(target, calls, word, error, **DOORS[door](drafter), **arguments_of(options))


@pytest.mark.parametrize("door", DOORS)
def test_the_same_call_without_the_option_decodes(counted, door):
    """Guards the test above: a fixture under which everything is refused would make it vacuous."""
    target, drafter, calls = counted
    target.generate(**DOORS[door](drafter), **arguments_of({}))
    assert calls


def test_embeddings_as_input(counted):
    """Drafts anchored at tokens that nobody gave."""
    target, drafter, calls = counted
    embeds = target.get_input_embeddings()(kit.prompt_of(6))
    for inputs in ({}, {"input_ids": kit.prompt_of(6)}):
        assert_refused(target, calls, "inputs_embeds", **inputs, inputs_embeds=embeds, **DOORS["seam"](drafter))


def test_a_cache_that_cannot_be_cropped(counted):
    """A cache object of the caller's that never gives rejected rows back."""
    target, drafter, calls = counted
    cache = Cache(layer_class_to_replicate=DynamicLayer)  # of a class that nobody knows
    options = {"input_ids": kit.prompt_of(6), "past_key_values": cache}
    assert_refused(target, calls, "uses Cache", **options, **DOORS["seam"](drafter))


def test_missing_and_foreign_assistants(counted):
    """The flag without a drafter (plain decoding in disguise), and a drafter without the flag."""
    target, drafter, calls = counted
    foreign = {
        "needs a drafter": {"speculation_type": "dflow"},
        "LlamaForCausalLM": {"speculation_type": "dflow", "assistant_model": kit.shared_target(seed=1)},
        'speculation_type="dflow"': {"assistant_model": drafter},
        '"dflash"': {"assistant_model": drafter, "speculation_type": "no such type"},
    }
    for word, arguments in foreign.items():
        assert_refused(target, calls, word, input_ids=kit.prompt_of(6), **arguments)


def test_encoder_decoder():
    """A refusal that comes after the encoder has run."""
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0)
    target, calls = T5ForConditionalGeneration(config).eval(), []
    target.encoder.register_forward_pre_hook(lambda *_: calls.append("encoder"))
    arguments = DOORS["seam"](kit.shared_drafter())
    assert_refused(target, calls, "T5ForConditionalGeneration", input_ids=kit.prompt_of(6), **arguments)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "made_for, has, wants",
    [
        ({"hidden_size": 40, "target_hidden_size": 40}, "32", "40"),
        ({"target_layer_ids": [0, 4], "num_target_layers": None}, "4 layers", "layer 4"),
        ({"num_target_layers": 6}, "4 layers", "6 layers"),
        ({"vocab_size": 72, "mask_token_id": kit.VOCAB_SIZE}, "64 embedding rows", "64"),
    ],
)
def test_drafters_of_another_target(counted, door, made_for, has, wants):
    """A pair whose shapes clash in the middle of a block, or do not clash and only accept nothing."""
    target, _, calls = counted
    arguments = DOORS[door](kit.tiny_drafter(target, 4, relay=None, **made_for))
    message = assert_refused(target, calls, has, PairMismatchError, input_ids=kit.prompt_of(6), **arguments)
    assert wants in message


def test_states_that_are_not_one_vector_a_token_are_refused():
    """Gemma3n's four-dimensional states failing deep inside the drafter."""
    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=[48] * 4, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        altup_num_inputs=2, laurel_rank=4, num_kv_shared_layers=2, layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    target = Gemma3nForCausalLM(config).eval()
    with pytest.raises(UnsupportedGenerationError, match="dimensions"):
        kit.dflow_greedy(target, kit.tiny_drafter(kit.shared_target(), 8).float(), kit.prompt_of(6), max_new_tokens=4)


TIMES = {"draft": 1.0, "verify": [1.0] * 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acceptance_processors", hf_dflow.AcceptanceThreshold(0.5)),
        ("acceptance_processors", [object()]),
        *(("acceptance_threshold", value) for value in ("0.5", 0.0, True)),
        *(("num_draft_tokens", value) for value in (True, 8)),
        ("verification", "tree"),
        ("tree_budget", True),
        *(("stale_mixture", value) for value in (0.0, 1.5, "on", float("nan"), -0.1)),
        *(("step_costs", {**TIMES, "verify": verify}) for verify in ([1.0, 2.0], [0.0] * 8, ["1"] * 8, 1.0, None)),
        *(("step_costs", value) for value in ({"draft": 1.0}, {**TIMES, "draft": -1.0}, 5)),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int | float | dict) else type(value).__name__,
)
def test_impossible_option_values_are_refused_at_construction(name, value):
    """A raw TypeError, a division by zero or a NaN in the middle of a text; or a value that is taken for another."""
    with pytest.raises(UnsupportedGenerationError, match=name):
        DFlowDecoder(kit.shared_drafter(), adaptive_length=True, **{name: value})
