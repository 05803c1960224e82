"""Each layout computes the numbers of its makers' own code, window by window and scale by scale."""

import copy
import inspect

import dflash_oracle as zlab
import pytest
import speculators_oracle as speculators
import torch
from dflash_oracle import BLOCK_SIZE, DFLASH2, MASK_TOKEN_ID, VOCAB_SIZE, block_ids, features_of
from kit import ROPE, prompt_of, shared_target, tiny_drafter, tiny_target
from layouts import KINDS, REACH, WINDOW, original, write_native
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.cache_utils import DFlashCache

from hf_dflow import DFlowDrafter

TOLERANCE = 1e-5  # float32, other order of the same sums
CONTEXT = 30  # well past the window of 8
DFLASH2_VARIANTS = {
    "full": {},
    "mixed, causal": zlab.MIXED_SLIDING,
    "sliding, not causal": {**zlab.PURE_SLIDING, "is_causal": False},
    "scales": {"draft_config": zlab.SCALES},
    "one tap, one channel": {"draft_config": {"conv_kernel_size": 1, "conv_group_size": 1}},
    "flat": {"nested": False},
}


@pytest.fixture(scope="module")
def target():
    return zlab.tiny_target(seed=7)


@torch.no_grad()
def hidden_of(drafter, target, features, block=None, positions=None, cache=None):
    embeds = drafter.embed(block_ids() if block is None else block, target.get_input_embeddings())
    return drafter(embeds, features, position_ids=positions, cache=cache).last_hidden_state


@torch.no_grad()
def logits_of(drafter, target, features):
    return drafter.compute_logits(hidden_of(drafter, target, features), target.lm_head)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def assert_all_differ(outputs):
    for i, output in enumerate(outputs):
        assert all((output - other).abs().max() > 0.01 for other in outputs[:i])


# -- z-lab's DFlash v1


@pytest.mark.parametrize("variant", zlab.VARIANTS)
@torch.no_grad()
def test_one_call_and_calls_with_caches_equal_dflash(variant, tmp_path, target):
    """Bug: a window measured from the wrong end once the cache has dropped rows, and rows of old blocks kept."""
    oracle = zlab.make_dflash_folder(tmp_path, **zlab.VARIANTS[variant])
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + BLOCK_SIZE)[None]
    theirs = zlab.oracle_hidden(oracle, target, block_ids(), features, positions)
    for attention in ("eager", "sdpa"):
        drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation=attention)
        assert drafter.relay is None and not drafter.training
        assert_close(hidden_of(drafter, target, features, positions=positions), theirs)
        assert_close(logits_of(drafter, target, features), oracle.compute_logits(theirs, target.lm_head))

    caches, start = [DynamicCache(config=model.config) for model in (oracle, drafter)], 0
    for cache in caches:
        cache.activate_past_recording()
    for step, num_new in enumerate((5, 1, 4, 9, 2, 1, 4, 4)):
        positions = torch.arange(start, start + num_new + BLOCK_SIZE)[None]
        rows, block = features[:, start : start + num_new], block_ids(anchor=step)
        theirs = zlab.oracle_hidden(oracle, target, block, rows, positions, caches[0])
        assert_close(hidden_of(drafter, target, rows, block, positions, caches[1]), theirs)
        start += num_new
        assert_close(hidden_of(drafter, target, features[:, :start], block), theirs)  # no cache at all
        for cache in caches:
            cache.crop(-(cache.get_seq_length() - start))
    assert start == CONTEXT


def test_variants_of_dflash_differ_from_each_other(tmp_path, target):
    """Guards the test above: a setting that neither side applies would compare nothing."""
    outputs = []
    for i, (name, variant) in enumerate(zlab.VARIANTS.items()):
        if name not in ("scales, flat", "two layers, flat"):
            zlab.make_dflash_folder(tmp_path / str(i), **variant)
            outputs.append(logits_of(DFlowDrafter.from_pretrained(tmp_path / str(i)), target, features_of(CONTEXT)))
    assert_all_differ(outputs)


def test_padded_target_vocabulary_is_cut():
    """Bug: padded ids of the target that the drafter proposes."""
    drafter, padded = DFlowDrafter.from_pretrained(original("dflash")), zlab.tiny_target(vocab_size=VOCAB_SIZE + 8)
    logits = logits_of(drafter, padded, features_of(CONTEXT))
    expected = padded.lm_head(hidden_of(drafter, padded, features_of(CONTEXT)))
    assert expected.shape[-1] == VOCAB_SIZE + 8
    assert_close(logits, expected[..., :VOCAB_SIZE])


# -- z-lab's DFlash 2


@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
@torch.no_grad()
def test_states_and_choices_equal_dflash2(name, tmp_path, target):
    """Bug: a kernel applied to the wrong side or tap, context sent through it, a selector fed with the wrong token."""
    theirs = zlab.make_dflash2_folder(tmp_path, **DFLASH2_VARIANTS[name])
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + BLOCK_SIZE)[None]
    expected = zlab.oracle_hidden(theirs, target, block_ids(), features, positions)
    hidden = hidden_of(drafter, target, features, positions=positions)
    assert_close(hidden, expected)
    logits = drafter.compute_logits(hidden[:, 1:], target.lm_head)
    path, candidate_ids, _ = theirs.propose(expected[:, 1:], block_ids()[:, 0], target.lm_head, 0.0)
    candidates = drafter.candidate_selector.candidates(hidden[:, 1:], logits)
    previous = block_ids()[:, 0]
    for slot in range(BLOCK_SIZE - 1):
        chosen = candidates.logits(slot, previous, VOCAB_SIZE)
        assert set(chosen[0].isfinite().nonzero()[:, 0].tolist()) == set(candidate_ids[0, slot].tolist())
        assert int(chosen.argmax()) == int(path[0, slot])
        previous = path[:, slot]


def test_each_convolution_matters(target):
    """Guards the test above: convolutions that neither side applies."""
    drafter = DFlowDrafter.from_pretrained(original("dflash2")).requires_grad_(False)
    before = hidden_of(drafter, target, features_of(CONTEXT))
    for layer in drafter.layers:
        for convolution in (layer.attention_conv, layer.mlp_conv):
            kernel = convolution.base_kernel.clone()
            convolution.base_kernel[1, 2] += 0.3  # the farthest tap, after the sublayer
            assert (hidden_of(drafter, target, features_of(CONTEXT)) - before).abs().max() > 1e-3
            convolution.base_kernel.copy_(kernel)


def test_both_names_of_the_codebooks_load(tmp_path):
    """Bug: only one of the two spellings loads, the published or the one that dflash itself writes."""
    zlab.make_dflash2_folder(tmp_path / "published")
    zlab.make_dflash_folder(tmp_path / "saved", draft_class="DFlash2DraftModel", draft_config=DFLASH2)
    published, saved = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("published", "saved"))
    assert published != saved
    first, second = (DFlowDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("published", "saved"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# -- vLLM's speculators


def block_logits(drafter, target, token_ids, features, anchor):
    """Logits `[L, vocab]` of the block at position `anchor` of `token_ids` `[1, T]`."""
    hidden = hidden_of(drafter, target, features[:, :anchor], block_ids(int(token_ids[0, anchor])))
    return drafter.compute_logits(hidden, target.lm_head)[0]


@pytest.mark.parametrize("name", speculators.VARIANTS)
def test_logits_equal_speculators(name, tmp_path, target):
    """Bug: layers tapped one off, a window measured from each row, `d2t` read as ids, another head or embedding."""
    target = copy.deepcopy(target).double()
    theirs = speculators.make_folder(tmp_path, target, **speculators.VARIANTS[name]).double()
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    token_ids, features = prompt_of(40), features_of(40).double()
    for anchor in (1, WINDOW - 1, WINDOW, WINDOW + 1, CONTEXT):
        expected = speculators.oracle_block(theirs, token_ids, features, anchor)[1]
        assert_close(block_logits(drafter, target, token_ids, features, anchor), expected)
    assert drafter.config.target_layer_ids == zlab.TARGET_LAYER_IDS and drafter.relay is None


def test_variants_of_speculators_differ_from_each_other(tmp_path, target):
    """Guards the test above: a setting that neither side applies would compare nothing."""
    outputs = []
    names = ("full", "mixed", "sliding", "sliding, not causal", "own embedding", "dflash2", "dflash2, causal")
    for i, name in enumerate(names):
        speculators.make_folder(tmp_path / str(i), target, **speculators.VARIANTS[name])
        drafter = DFlowDrafter.from_pretrained(tmp_path / str(i))
        outputs.append(block_logits(drafter, target, prompt_of(40), features_of(40), CONTEXT))
    assert_all_differ(outputs)


# -- transformers' own


@pytest.mark.parametrize("layers", ["sliding", "mixed"])
@torch.no_grad()
def test_states_equal_the_native_assistant(layers, tmp_path):
    """Bug: a window of one less, causal sliding layers as in z-lab's format, a renamed weight left out."""
    target = tiny_target(dtype=torch.float32)
    theirs = write_native(tmp_path, target, layers)
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation="eager")
    features = features_of(3 * WINDOW)
    embeds = drafter.embed(block_ids(), target.get_input_embeddings())
    cache = DFlashCache(config=theirs.config)
    cache.set_previous_accepted_tokens(features.shape[1])  # as their loop does: the masks are made from it
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"
    expected = theirs(noise_embeds=embeds, context_hidden_states=features, **{name: cache}).last_hidden_state
    assert_close(drafter(embeds, features).last_hidden_state, expected)
    assert drafter.config.vocab_size is None and drafter.config.input_embedding == "target"
    assert drafter.config.rope_parameters == ROPE


# -- our own


@pytest.mark.parametrize("affine", [False, True])
@torch.no_grad()
def test_the_relay_by_hand(affine):
    """Bug: bonus and rejected token exchanged, scale and shift exchanged, a norm over the wrong axis."""
    drafter = tiny_drafter(shared_target(), relay_norm_affine=affine)
    relay, embedding = drafter.relay, shared_target().get_input_embeddings()
    if affine:
        relay.norm.weight.normal_(generator=torch.Generator().manual_seed(0))
    features, bonus, rejected = features_of(2).double(), torch.tensor([5]), torch.tensor([9])
    found = drafter.relay_additions(features, bonus, rejected, embedding)[0]
    for row, addition in zip(features[0], found, strict=True):
        state = drafter.fc(row)
        state = state / (state.square().mean() + 1e-6).sqrt()
        inner = relay.up_proj(torch.cat([embedding.weight[5], embedding.weight[9], state]))
        scale, shift = relay.down_proj(torch.nn.functional.silu(inner)).view(2, -1)
        normed = (state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt()
        expected = scale * (normed * relay.norm.weight if affine else normed) + shift
        torch.testing.assert_close(addition, expected, atol=1e-6, rtol=1e-6)  # transformers' norms are in float32


# -- all of them


@pytest.mark.parametrize("layers", ["sliding", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_window_ends_where_the_format_says(kind, layers):
    """C6: a window of one more or one less; for layers that all slide nothing beyond it may matter."""
    target = tiny_target(dtype=torch.float32)
    drafter = DFlowDrafter.from_pretrained(original(kind, layers), attn_implementation="eager")
    features = features_of(CONTEXT)

    def logits(changed: int | None = None):
        context = features.clone()
        if changed is not None:
            context[:, : changed + 1] += 3.0
        return logits_of(drafter, target, context)

    last = CONTEXT - REACH[kind]  # the anchor is at CONTEXT and sees farthest back
    assert torch.equal(logits(last - 1), logits()) == (layers == "sliding")
    assert (logits(last) - logits(last - 1))[:, 0].abs().max() > 1e-4
    assert drafter.config.mask_token_id == MASK_TOKEN_ID
