"""transformers' own DFlash assistants as drafters: the same states, text and accepted lengths as in their own loop."""

import inspect
import json

import pytest
import torch
from kit import MASK_TOKEN_ID, ROPE, WINDOW, assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_target
from memorize import memorize
from test_dflash_parity import BLOCK_SIZE, NEW_TOKENS, PROMPT_LENGTH, SLACK, _native, _until, native_lengths  # noqa: F401
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from hf_dflow import DFlowDrafter, DrafterConfigError, DrafterWeightsError

TOLERANCE = 1e-5
LAYERS = {"sliding": ["sliding_attention"] * 2, "mixed": ["sliding_attention", "full_attention"]}


def make_folder(path, target, layers: str, **overrides):
    """Write a random assistant for `target` to `path` and return it."""
    text_config = target.config.get_text_config()
    fields = {
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "layer_types": LAYERS[layers],
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [0, text_config.num_hidden_layers - 2],
        "rope_parameters": dict(ROPE),
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = MuseGlimmerAssistantConfig(**{**fields, **overrides}, initializer_range=0.3)
        assistant = MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").eval()
    assistant.save_pretrained(path)
    return assistant


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_states_equal_theirs(layers, tmp_path):
    """Bug: a window of one less, causal sliding layers as in z-lab's format, a renamed weight left out."""
    target = tiny_target(dtype=torch.float32)
    theirs = make_folder(tmp_path, target, layers)
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation="eager")
    features = torch.randn(1, 3 * WINDOW, 2 * theirs.config.hidden_size, generator=torch.Generator().manual_seed(2))
    block = torch.tensor([[5] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    embeds = drafter.embed(block, target.get_input_embeddings())
    cache = DFlashCache(config=theirs.config)
    cache.set_previous_accepted_tokens(features.shape[1])  # as their loop does: the masks are made from it
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"
    expected = theirs(noise_embeds=embeds, context_hidden_states=features, **{name: cache}).last_hidden_state
    torch.testing.assert_close(drafter(embeds, features).last_hidden_state, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert drafter.config.vocab_size is None and drafter.config.input_embedding == "target"


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("layers", LAYERS)
def test_accepted_lengths_equal_the_native_loops(layers, family, tmp_path, native_lengths):  # noqa: F811
    """Bug: the raw embedding where the target scales it, a cap that the native loop does not apply."""
    target, prompt = tiny_target(family), prompt_of(PROMPT_LENGTH)
    theirs = make_folder(tmp_path, target, layers).double()
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation="eager").double()
    text = plain_greedy(target, prompt, NEW_TOKENS + SLACK)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    back = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({back.get(name, name): value for name, value in drafter.state_dict().items()})
    native = _native(target, prompt, theirs)
    ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(ours.sequences, native) and torch.equal(native, text[:, :-SLACK])
    assert_not_vacuous(ours.statistics)
    assert _until(ours.statistics.per_step_accepted, NEW_TOKENS) == _until(native_lengths[1:], NEW_TOKENS)


def test_a_relay_on_top_and_the_way_back(tmp_path):
    """Bug: a drafter without a vocabulary of its own that cannot be saved, or takes no relay."""
    target, prompt = tiny_target(), prompt_of(PROMPT_LENGTH)
    make_folder(tmp_path / "theirs", target, "mixed")
    drafter = DFlowDrafter.from_pretrained(tmp_path / "theirs", use_relay=True)
    drafter.save_pretrained(tmp_path / "ours")
    loaded = DFlowDrafter.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(value, drafter.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert loaded.relay is not None and loaded.config.vocab_size is None
    drafts = loaded.double()
    out = dflow_greedy(target, drafts, prompt, max_new_tokens=12)
    assert torch.equal(out.sequences, plain_greedy(target, prompt, 12))


@pytest.mark.parametrize("key", ["rope_parameters", "layer_types", "mask_token_id", "block_size", "head_dim"])
def test_a_missing_key_is_named(key, tmp_path):
    make_folder(tmp_path, tiny_target(), "mixed")
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in raw.items() if name != key}))
    with pytest.raises(DrafterConfigError, match=key):
        DFlowDrafter.from_pretrained(tmp_path)


def test_a_width_that_the_file_does_not_have(tmp_path):
    make_folder(tmp_path, tiny_target(), "mixed")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 10**9}))
    with pytest.raises(DrafterWeightsError, match="wrong shape"):
        DFlowDrafter.from_pretrained(tmp_path)
