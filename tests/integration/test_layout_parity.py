"""Relay off: tokens and accepted lengths of transformers' own DFlash loop, PyPI's `dflash` and `speculators`."""

import copy
import time

import dflash_oracle as zlab
import pytest
import speculators_oracle as speculators
import torch
from dflash_oracle import MASK_TOKEN_ID, TARGET_LAYER_IDS
from kit import ROPE, WINDOW, assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from layouts import TYPES, learned, write_native
from memorize import memorize
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_dflow.checkpoints.dflash import DFlash2Layout
from hf_dflow.checkpoints.native import NativeLayout
from hf_dflow.generation._compat import capture_features

NEW_TOKENS, BLOCK_SIZE = 40, 6  # past the window from the first block on, whose context alone is longer
PROMPT_LENGTH = 2 * WINDOW
SLACK = BLOCK_SIZE + 1  # near the length limit the loops cut their blocks differently; steps there are not compared
ROUNDING = 1e-5
ZLAB = {
    **{("DFlashDraftModel", name): fields for name, fields in zlab.VARIANTS.items()},
    ("DFlash2DraftModel", "full"): {},
    ("DFlash2DraftModel", "mixed, causal"): zlab.MIXED_SLIDING,
    ("DFlash2DraftModel", "sliding, not causal"): {**zlab.PURE_SLIDING, "is_causal": False},
    ("DFlash2DraftModel", "scales"): {"draft_config": zlab.SCALES},
    ("DFlash2DraftModel", "one tap, one channel"): {"draft_config": {"conv_kernel_size": 1, "conv_group_size": 1}},
}


@pytest.fixture
def native_lengths(monkeypatch):
    """Accepted lengths of transformers' loop, which records none: what it tells its candidate generator each step."""
    lengths = []
    monkeypatch.setattr(
        DFlashTokenCandidateGenerator,
        "update_candidate_strategy",
        lambda self, input_ids, scores, num_matches: lengths.append(int(num_matches)),
    )
    return lengths


@pytest.fixture(scope="module")
def qwen():
    """A target for z-lab's and vLLM's drafters. Most random ones repeat one token for ever, which no drafter misses."""
    target = zlab.tiny_target(seed=7).double()
    with torch.no_grad():
        target.lm_head.weight[MASK_TOKEN_ID] *= 0.01  # no loop of theirs keeps the mask from being proposed
    return target


def pair_of(family: str, layers: str):
    """A target, its prompt and text, and a drafter without relay that knows most of that text."""
    target, prompt = tiny_target(family), prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + SLACK)
    drafter = tiny_drafter(target, BLOCK_SIZE, relay=None, layer_types=TYPES[layers], sliding_window=WINDOW)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    return target, prompt, text[:, : PROMPT_LENGTH + NEW_TOKENS], drafter


def decode_natively(target, prompt, assistant):
    return target.generate(
        prompt, assistant_model=assistant, speculation_type="dflash", do_sample=False, max_new_tokens=NEW_TOKENS
    )


def comparable(lengths: list[int]) -> list[int]:
    """The steps that end with at least a block of room left."""
    kept, num_tokens = [], 1  # the prefill's token
    for length in lengths:
        num_tokens += length + 1
        if num_tokens > NEW_TOKENS - SLACK:
            break
        kept.append(length)
    assert len(kept) > 5
    return kept


def assert_same_steps(output, text, lengths: list[int]) -> None:
    assert torch.equal(output.sequences, text)
    assert_not_vacuous(output.statistics)
    assert comparable(output.statistics.per_step_accepted) == comparable(lengths)


def natively_named(drafter) -> dict[str, torch.Tensor]:
    names = {ours: theirs for theirs, ours in NativeLayout.renamed.items()}
    return {names.get(name, name): value for name, value in drafter.state_dict().items()}


# -- transformers' loop


@pytest.mark.parametrize("layers", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_same_as_the_native_loop_with_the_same_drafter(family, layers, native_lengths):
    """Bug: features of other layers, positions shifted by one, a cache cropped to the wrong row: all of them still give
    the right text, only with other accepted lengths."""
    target, prompt, text, drafter = pair_of(family, layers)
    assert torch.equal(decode_natively(target, prompt, drafter), text)
    assert_same_steps(dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS), text, native_lengths[1:])


@pytest.mark.parametrize("layers", TYPES)
def test_same_as_the_native_loop_with_a_native_drafter(layers, native_lengths):
    """Bug: a window that reaches further or less far than the native format's `|q - k| <= W`, in the loop and in
    `forward` with the native cache, which keeps W - 1 past rows."""
    target, prompt, text, drafter = pair_of("llama", layers)
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "max_position_embeddings sliding_window layer_types hidden_act block_size mask_token_id target_layer_ids"
    )
    fields = {key: getattr(drafter.config, key) for key in same.split()}
    muse = MuseGlimmerAssistantModel._from_config(
        MuseGlimmerAssistantConfig(**fields, rope_parameters=dict(ROPE)), attn_implementation="eager"
    )
    muse.load_state_dict(natively_named(drafter))
    muse = muse.to(drafter.dtype).eval()
    calls = {"muse": [], "ours": []}
    for name, model in (("muse", muse), ("ours", drafter)):
        model.register_forward_hook(
            lambda module, args, output, calls=calls[name]: calls.append(output.last_hidden_state)
        )
    assert torch.equal(decode_natively(target, prompt, muse), text)
    lengths = list(native_lengths)
    native_lengths.clear()
    assert torch.equal(decode_natively(target, prompt, drafter), text)
    assert native_lengths == lengths
    assert len(calls["muse"]) == len(calls["ours"]) > 5
    in_loop, inner = [], drafter.draft_hidden
    drafter.draft_hidden = lambda *args: in_loop.append(inner(*args)) or in_loop[-1]
    ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert_same_steps(ours, text, lengths[1:])
    compared = len(comparable(lengths[1:]))
    for mine, count in ((calls["ours"], len(calls["ours"])), (in_loop, compared)):
        for i in range(count):
            assert (calls["muse"][i] - mine[i]).abs().max() < ROUNDING * calls["muse"][i].abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_same_as_the_native_loop_with_a_converted_drafter(layers, family, tmp_path, native_lengths):
    """Bug: the raw embedding where the target scales it, a cap that the native loop does not apply."""
    target, prompt = tiny_target(family), prompt_of(PROMPT_LENGTH)
    theirs = write_native(tmp_path, target, layers, block_size=BLOCK_SIZE).double()
    text = plain_greedy(target, prompt, NEW_TOKENS + SLACK)
    drafter = learned(tmp_path, target, text, PROMPT_LENGTH)
    theirs.load_state_dict(natively_named(drafter))
    assert torch.equal(decode_natively(target, prompt, theirs), text[:, :-SLACK])
    ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert_same_steps(ours, text[:, :-SLACK], native_lengths[1:])


def test_the_window_matters_here():
    """Guards the tests above: with a window of one more or one less the drafts must come out differently."""
    target, prompt, _, drafter = pair_of("llama", "sliding")
    first_blocks = []
    for window in (WINDOW - 1, WINDOW, WINDOW + 1):
        other, recorded = copy.deepcopy(drafter), []
        other.config.sliding_window = window
        inner = other.draft_hidden
        other.draft_hidden = lambda *args, inner=inner, recorded=recorded: recorded.append(inner(*args)) or recorded[-1]
        dflow_greedy(target, other, prompt, max_new_tokens=4)
        first_blocks.append(recorded[0])
    narrow, right, wide = first_blocks
    assert (narrow - right).abs().max() > 1e-3 < (wide - right).abs().max()


def test_a_silent_relay_changes_nothing():
    """Bug: a converted checkpoint that is not exactly that DFlash, and an off switch that leaves something on."""
    target, prompt, text, plain_drafter = pair_of("llama", "mixed")
    expected = dflow_greedy(target, plain_drafter, prompt, max_new_tokens=NEW_TOKENS).statistics.per_step_accepted
    for relay in ("zero", "random"):
        drafter = tiny_drafter(target, BLOCK_SIZE, relay=relay, layer_types=TYPES["mixed"], sliding_window=WINDOW)
        drafter.load_state_dict(plain_drafter.state_dict(), strict=False)
        if relay == "random":
            live = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
            assert live.statistics.per_step_accepted != expected  # its weights do matter
            drafter.config.generation_defaults = {"use_relay": False}
        ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
        assert torch.equal(ours.sequences, text) and ours.statistics.per_step_accepted == expected


# -- z-lab's package


@pytest.mark.parametrize(("model", "variant"), ZLAB)
def test_same_accepted_lengths_as_dflash_generate(model, variant, tmp_path, monkeypatch, qwen):
    """Bug: whatever of the format the loop applies otherwise than z-lab's reader: causal sliding layers, the window
    (`q - k < W`), scales, soft-cap, rope, rows crossing the window between steps, the order of a selector's picks."""
    dflash = pytest.importorskip("dflash.model")
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)
    make = zlab.make_dflash_folder if model == "DFlashDraftModel" else zlab.make_dflash2_folder
    oracle, prompt = make(tmp_path, **ZLAB[model, variant]).double(), prompt_of(PROMPT_LENGTH)
    text = plain_greedy(qwen, prompt, NEW_TOKENS + SLACK)
    drafter = learned(tmp_path, qwen, text, PROMPT_LENGTH)
    oracle.load_state_dict(drafter.state_dict())
    theirs = dflash.dflash_generate(oracle, qwen, prompt, NEW_TOKENS, None, return_stats=True)
    assert torch.equal(theirs.output_ids, text[:, :-SLACK])
    ours = dflow_greedy(qwen, drafter, prompt, max_new_tokens=NEW_TOKENS)
    # Theirs counts the bonus token.
    assert_same_steps(ours, text[:, :-SLACK], [length - 1 for length in theirs.acceptance_lengths])


# -- vLLM's


def choose(theirs, logits, hidden, previous) -> int:
    """The token of a slot: the likeliest, or the one that their selector puts after `previous`."""
    if not hasattr(theirs, "candidate_selector"):
        return int(logits.argmax())
    ids, scores = theirs.candidate_selector.select(logits[None], hidden[None], torch.tensor([previous]))
    return int(ids[0, scores[0].argmax()])


@torch.no_grad()
def their_accepted_lengths(theirs, target, text) -> list[int]:
    """A loop of its own over their logits: at each anchor the longest prefix of their drafts that `text` confirms."""
    first = 0 if theirs.config.sample_from_anchor else 1
    states = capture_features(target(text, output_hidden_states=True).hidden_states, TARGET_LAYER_IDS)
    lengths, anchor = [], PROMPT_LENGTH
    while PROMPT_LENGTH + NEW_TOKENS - anchor > zlab.BLOCK_SIZE + 1:
        hidden, logits = (rows[first:] for rows in speculators.oracle_block(theirs, text, states, anchor))
        logits[:, MASK_TOKEN_ID] = -torch.inf
        accepted, token = 0, int(text[0, anchor])
        for i, slot in enumerate(logits):
            token = choose(theirs, slot, hidden[i], token)
            if token != int(text[0, anchor + 1 + i]):
                break
            accepted = i + 1
        lengths.append(accepted)
        anchor += accepted + 1
    return lengths


@pytest.mark.parametrize("name", speculators.VARIANTS)
def test_same_accepted_lengths_as_speculators(name, tmp_path, qwen):
    """Bug: drafts of the wrong rows (one too few or many where the anchor's row drafts), a cache cut too short."""
    theirs, prompt = speculators.make_folder(tmp_path, qwen, **speculators.VARIANTS[name]).double(), prompt_of(16)
    text = plain_greedy(qwen, prompt, NEW_TOKENS + SLACK)
    drafter = learned(tmp_path, qwen, text, PROMPT_LENGTH)
    names = {ours: name for name, ours in DFlash2Layout.renamed.items()}
    renamed = {names.get(key, key): value for key, value in drafter.state_dict().items() if key != "draft_token_ids"}
    missing, unexpected = theirs.load_state_dict(renamed, strict=False)
    assert not unexpected and not [key for key in missing if key.startswith(("layers", "fc", "norm", "hidden", "cand"))]
    ours = dflow_greedy(qwen, drafter, prompt, max_new_tokens=NEW_TOKENS)
    expected = their_accepted_lengths(theirs, qwen, text)
    assert_same_steps(ours, text[:, :-SLACK], expected)
    assert max(ours.statistics.per_step_drafted) == drafter.config.drafts_per_block
