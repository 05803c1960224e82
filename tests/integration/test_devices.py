"""Target and drafter on different devices: on a GPU, or on the device that tests/pretended_device.py makes up.

Where nothing but the place differs, the text must not: what is said on the CPU is the oracle.
"""

import os
from functools import cache

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from batches import padded
from internals import STATIC_IS_CROPPABLE
from kit import NudgedDrafter, assert_not_vacuous, prompt_of, tiny_drafter, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dflow import AcceptanceMonitor, DFlowDrafter, DFlowGenerationConfig

DEVICE = os.environ.get("HF_DFLOW_TEST_DEVICE", "cuda")
IS_GPU = DEVICE == "cuda"
pytestmark = pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a GPU")

NEW_TOKENS, SLACK = 14, 8
PROMPTS = [prompt_of(length, seed=length) for length in (3, 12, 1)]
PLACES = [(DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, DEVICE)]
COSTS = {"draft": 0.3, "verify": [1 + i / 9 for i in range(8)]}
ALONE = "tree"  # features with this word are for one sequence
CHANGE_THE_TEXT = ("repetition_penalty", "no_repeat_ngram_size", "logits_processor", "eos_token_id", "min_new_tokens")


class Own(LogitsProcessor):
    """A kind that no list knows, with a tensor of its own on the scores' device."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(scores.shape[-1], device=scores.device) % 3


FEATURES = {
    "greedy": lambda: {},
    "everything collected": lambda: {
        "output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True,
    },
    "ends": lambda: {"eos_token_id": [5, 9, 17], "min_new_tokens": 4},
    "penalty": lambda: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "processor of unknown kind": lambda: {"logits_processor": LogitsProcessorList([Own()])},
    "static cache": lambda: {"cache_implementation": "static"},
    "prompt in chunks": lambda: {"prefill_chunk_size": 5},
    "no relay": lambda: {"use_relay": False},
    "fewer drafts": lambda: {"num_draft_tokens": 3},
    "lengths": lambda: {"adaptive_length": True, "step_costs": COSTS},
    "lengths by measured costs": lambda: {"adaptive_length": True},
    "mixture": lambda: {"stale_mixture": True},
    "relaxed": lambda: {"acceptance_threshold": 0.05},
    "monitor": lambda: {"monitor": AcceptanceMonitor().route("devices")},
    "tree": lambda: {"tree_budget": 12},
    "tree by measured costs": lambda: {"tree_budget": "auto"},
    "block verification": lambda: {"do_sample": True, "top_k": 0},
    "token verification": lambda: {"do_sample": True, "top_k": 0, "verification": "token", "seeds": None},
    "warpers": lambda: {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 30, "output_scores": True},
    "sampled with a mixture": lambda: {"do_sample": True, "top_k": 0, "stale_mixture": True, "verification": "token"},
    "sampled with lengths": lambda: {
        "do_sample": True, "adaptive_length": True, "step_costs": COSTS,
    },
}  # fmt: skip
if not STATIC_IS_CROPPABLE:
    del FEATURES["static cache"]
SPLIT = ("greedy", "everything collected", "static cache", "mixture", "tree", "token verification")
DRAFTERS = {
    "correction": {"correction_intermediate_size": 16, "correction_top_k": 40},
    "DFlash2": {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 40},
    "own embedding and head": {"input_embedding": "own", "output_head": "own"},
    "reduced vocabulary": {"output_head": "own", "draft_vocab_size": 40},
    "sliding layer": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
    "no anchor slot": {"sample_from_anchor": True},
    "norm with weights": {"relay_norm_affine": True, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
}


@cache
def target_on(device: str):
    return tiny_target("llama", attention="sdpa").to(device)


def plain_texts(**options) -> list[tuple[torch.Tensor, int]]:
    """What plain decoding says to each prompt, longer than asked for, and how long the prompt is."""
    actual = []
    for one in PROMPTS:
        text = target_on("cpu").generate(one, max_new_tokens=NEW_TOKENS + SLACK, do_sample=False, **options)
        actual.append((text, one.shape[1]))
    return actual


usual_texts = cache(plain_texts)


def decoded(target_device: str, drafter_device: str, fields: dict, make_options, rows: int, target=None, mask_at=None):
    """The output of a call for the first prompts, which lie on the target's device."""
    target = target or target_on(target_device)
    options = make_options()
    # A drafter with parts of its own is not scripted: sampled drafts of random laws are accepted now and then.
    drafter_class = DFlowDrafter if fields else NudgedDrafter
    drafter = tiny_drafter(target_on("cpu"), 8, drafter_class=drafter_class, **fields)
    if drafter.config.draft_vocab_size is not None:
        token_ids = torch.arange(drafter.config.draft_vocab_size)
        drafter.set_draft_vocabulary(token_ids, target_on("cpu").get_output_embeddings().weight)
    if not fields:
        changes = {name: value for name, value in options.items() if name in CHANGE_THE_TEXT}
        drafter.follow_rows((plain_texts(**changes) if changes else usual_texts())[:rows])
    drafter = drafter.to(drafter_device)
    given = {"logits_processor": options.pop("logits_processor")} if "logits_processor" in options else {}
    config = DFlowGenerationConfig(
        **{"return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        | options
    )
    ids, mask = padded(PROMPTS[:rows])
    ids, mask = ids.to(target_device), mask.to(mask_at or target_device)
    torch.manual_seed(0)
    output = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config, **given)
    assert output.sequences.device == ids.device
    return output


def check(name: str, fields: dict, make_options, places: list[tuple[str, str]]) -> None:
    """The call on each of `places`, against the same on the CPU."""
    rows = 1 if ALONE in name else 3
    expected = decoded("cpu", "cpu", fields, make_options, rows)
    if "length" not in name:  # which may well verify single drafts
        assert_not_vacuous(expected.statistics)
    for place in places:
        actual = decoded(*place, fields, make_options, rows)
        if "measured" in name or (IS_GPU and make_options().get("do_sample")):
            continue  # what is measured, and a GPU's random numbers, are its own
        assert actual.sequences.tolist() == expected.sequences.tolist()
        assert actual.statistics.per_step_accepted == expected.statistics.per_step_accepted


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_on_two_devices(name):
    """C10: tensors, masks or random numbers made on the wrong device."""
    check(name, {}, FEATURES[name], PLACES if name == "greedy" else PLACES[:2])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_on_two_devices(name):
    """C10: the same in what only some drafters have."""
    check(name, DRAFTERS[name], lambda: {"do_sample": True, "top_k": 0, "temperature": 4.0}, PLACES[:2])
    for place in PLACES[:2]:
        decoded(*place, DRAFTERS[name], FEATURES["tree"], 1)


def test_a_single_sequence():
    """C10: what a batch does otherwise."""
    expected = decoded("cpu", "cpu", {}, dict, 1)
    assert_not_vacuous(expected.statistics)
    for place in PLACES:
        assert decoded(*place, {}, dict, 1).sequences.tolist() == expected.sequences.tolist()


def test_split_target():
    """C10: tapped states of layers that live on another device than the head."""
    if torch.get_device_module(DEVICE).device_count() < 2:
        pytest.skip("needs two devices")
    first, second = (torch.device(DEVICE, index) for index in range(2))
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    places |= {f"model.layers.{i}": first if i < 2 else second for i in range(4)}
    target = dispatch_model(tiny_target("llama", attention="sdpa"), places, main_device=first)
    for name in filter(FEATURES.__contains__, SPLIT):
        if IS_GPU and FEATURES[name]().get("do_sample"):
            continue
        expected = decoded("cpu", "cpu", {}, FEATURES[name], 1)
        for drafter_device in (second, "cpu"):
            actual = decoded(DEVICE, drafter_device, {}, FEATURES[name], 1, target=target)
            assert_not_vacuous(actual.statistics)
            assert actual.sequences.tolist() == expected.sequences.tolist()
    expected = decoded("cpu", "cpu", {}, dict, 3)
    # The target's own hooks bring together what is given on two devices.
    for ids_at, mask_at in ((first, first), (first, "cpu"), ("cpu", first)):
        actual = decoded(ids_at, second, {}, dict, 3, target=target, mask_at=mask_at)
        assert_not_vacuous(actual.statistics)
        assert actual.sequences.tolist() == expected.sequences.tolist()


def test_offloaded_target():
    """C10: a weight that accelerate brings to the device for a call alone, beside a drafter there or not."""
    expected = decoded("cpu", "cpu", {}, dict, 3)
    target = cpu_offload(tiny_target("llama", attention="sdpa"), execution_device=torch.device(DEVICE, 0))
    for drafter_device in (DEVICE, "cpu"):
        actual = decoded(DEVICE, drafter_device, {}, dict, 3, target=target)
        assert_not_vacuous(actual.statistics)
        assert actual.sequences.tolist() == expected.sequences.tolist()
