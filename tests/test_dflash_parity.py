"""Relay off: the same tokens and accepted lengths as transformers' own DFlash loop and as PyPI's `dflash`."""

import copy
import time

import dflash_oracle as zlab
import pytest
import torch
from kit import ROPE, WINDOW, assert_not_vacuous, plain_greedy, prompt_of, tiny_drafter, tiny_target
from memorize import memorize
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_dflow import DFlowDrafter

NEW_TOKENS, BLOCK_SIZE = 40, 6  # past the window from the first block on, whose context alone is longer
PROMPT_LENGTH = 2 * WINDOW
SLACK = BLOCK_SIZE + 1  # near the length limit the loops cut their blocks differently; steps there are not compared
ROUNDING = 1e-5
LAYERS = {
    "full": ["full_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
    "mixed": ["sliding_attention", "full_attention"],
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


def _pair(family: str, layers: str, **overrides):
    """A target, its prompt and text, and a drafter without relay that knows most of that text."""
    target, prompt = tiny_target(family), prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + SLACK)
    drafter = tiny_drafter(
        target, BLOCK_SIZE, relay=None, layer_types=LAYERS[layers], sliding_window=WINDOW, **overrides
    )
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    return target, prompt, text[:, : PROMPT_LENGTH + NEW_TOKENS], drafter


def _ours(target, prompt, drafter, max_new_tokens=NEW_TOKENS, **kwargs):
    return target.generate(
        prompt,
        assistant_model=drafter,
        speculation_type="dflow",
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **kwargs,
    )


def _native(target, prompt, assistant):
    return target.generate(
        prompt, assistant_model=assistant, speculation_type="dflash", do_sample=False, max_new_tokens=NEW_TOKENS
    )


def _until(lengths: list[int], budget: int) -> list[int]:
    """The steps that end with at least a block of room left."""
    kept, used = [], 1  # the prefill's token
    for length in lengths:
        used += length + 1
        if used > budget - SLACK:
            break
        kept.append(length)
    assert len(kept) > 5
    return kept


def _as_muse(drafter: DFlowDrafter) -> MuseGlimmerAssistantModel:
    """A drafter of transformers' own, with the same weights."""
    config = drafter.config
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "max_position_embeddings sliding_window layer_types hidden_act block_size mask_token_id target_layer_ids"
    )
    fields = {key: getattr(config, key) for key in same.split()}
    muse = MuseGlimmerAssistantModel._from_config(
        MuseGlimmerAssistantConfig(**fields, rope_parameters=dict(ROPE)), attn_implementation="eager"
    )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    muse.load_state_dict({renamed.get(name, name): value for name, value in drafter.state_dict().items()})
    return muse.to(drafter.dtype).eval()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_same_as_the_native_loop_with_the_same_drafter(family, layers, native_lengths):
    """Catches features of other layers, positions shifted by one, a cache cropped to the wrong row: all of them still
    give the right text, only with other accepted lengths."""
    target, prompt, text, drafter = _pair(family, layers)
    ours = _ours(target, prompt, drafter)
    native = _native(target, prompt, drafter)
    assert torch.equal(ours.sequences, text) and torch.equal(native, text)
    assert_not_vacuous(ours.statistics)
    assert _until(ours.statistics.per_step_accepted, NEW_TOKENS) == _until(native_lengths[1:], NEW_TOKENS)


@pytest.mark.parametrize("layers", LAYERS)
def test_same_as_the_native_loop_with_a_native_drafter(layers, native_lengths):
    """Catches a window that reaches further or less far than the native format's `|q - k| <= W`, in the loop and in
    `forward` with the native cache, which keeps W - 1 past rows."""
    target, prompt, text, drafter = _pair("llama", layers)
    muse, calls = _as_muse(drafter), {}
    for name, model in (("muse", muse), ("ours", drafter)):
        calls[name] = []
        model.register_forward_hook(
            lambda module, args, output, calls=calls[name]: calls.append(output.last_hidden_state)
        )
    assert torch.equal(_native(target, prompt, muse), text)
    lengths = list(native_lengths)
    native_lengths.clear()
    assert torch.equal(_native(target, prompt, drafter), text)
    assert native_lengths == lengths
    assert len(calls["muse"]) == len(calls["ours"]) > 5
    for theirs, mine in zip(calls["muse"], calls["ours"], strict=True):
        assert (theirs - mine).abs().max() < ROUNDING * theirs.abs().max()
    in_loop, inner = [], drafter.draft_hidden
    drafter.draft_hidden = lambda *args: in_loop.append(inner(*args)) or in_loop[-1]
    ours = _ours(target, prompt, drafter)
    assert_not_vacuous(ours.statistics)
    compared = _until(ours.statistics.per_step_accepted, NEW_TOKENS)
    assert compared == _until(lengths[1:], NEW_TOKENS)
    for theirs, mine in zip(calls["muse"], in_loop[: len(compared)], strict=False):
        assert (theirs - mine).abs().max() < ROUNDING * theirs.abs().max()


def test_the_window_matters_here():
    """Guards the tests above: with a window of one more or one less the drafts must come out differently."""
    target, prompt, _, drafter = _pair("llama", "sliding")
    found = []
    for window in (WINDOW - 1, WINDOW, WINDOW + 1):
        other = copy.deepcopy(drafter)
        other.config.sliding_window = window
        recorded = []
        inner = other.draft_hidden
        other.draft_hidden = lambda *args, inner=inner, recorded=recorded: recorded.append(inner(*args)) or recorded[-1]
        _ours(target, prompt, other, max_new_tokens=4)
        found.append(recorded[0])
    assert (found[0] - found[1]).abs().max() > 1e-3 < (found[2] - found[1]).abs().max()


@pytest.mark.parametrize("setting", ["no relay weights", "relay at zero", "relay off"])
def test_a_relay_that_says_nothing_changes_nothing(setting):
    """Catches a converted checkpoint that is not exactly that DFlash, and an off switch that leaves something on."""
    target, prompt, text, plain_drafter = _pair("llama", "mixed")
    expected = _ours(target, prompt, plain_drafter).statistics.per_step_accepted
    relay = {"no relay weights": None, "relay at zero": "zero", "relay off": "random"}[setting]
    drafter = tiny_drafter(target, BLOCK_SIZE, relay=relay, layer_types=LAYERS["mixed"], sliding_window=WINDOW)
    drafter.load_state_dict(plain_drafter.state_dict(), strict=False)
    if setting == "relay off":
        assert _ours(target, prompt, drafter).statistics.per_step_accepted != expected  # its weights do matter
        drafter.config.generation_defaults = {"use_relay": False}
    ours = _ours(target, prompt, drafter)
    assert torch.equal(ours.sequences, text)
    assert ours.statistics.per_step_accepted == expected


# -- z-lab's package


@pytest.mark.parametrize("variant", zlab.VARIANTS)
def test_same_accepted_lengths_as_dflash_generate(variant, tmp_path, monkeypatch):
    """Catches anything of the format that the loop applies otherwise than z-lab's reader: causal sliding layers, the
    window (`q - k < W`), scales, soft-cap, rope, and rows crossing the window between steps."""
    dflash = pytest.importorskip("dflash.model")
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)
    # Most of these random targets repeat one token for ever, which a drafter cannot get wrong; this one does not.
    target, prompt = zlab.tiny_target(seed=7).double(), prompt_of(PROMPT_LENGTH)
    with torch.no_grad():
        target.lm_head.weight[zlab.MASK_TOKEN_ID] *= 0.01  # no loop of theirs keeps the mask from being proposed
    oracle = zlab.make_dflash_folder(tmp_path, **zlab.VARIANTS[variant]).double()
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    text = plain_greedy(target, prompt, NEW_TOKENS + SLACK)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    oracle.load_state_dict(drafter.state_dict())
    theirs = dflash.dflash_generate(oracle, target, prompt, NEW_TOKENS, None, return_stats=True)
    ours = _ours(target, prompt, drafter)
    assert_not_vacuous(ours.statistics)
    assert torch.equal(ours.sequences, theirs.output_ids) and torch.equal(ours.sequences, text[:, :-SLACK])
    produced = [length - 1 for length in theirs.acceptance_lengths]  # theirs counts the bonus token
    assert _until(ours.statistics.per_step_accepted, NEW_TOKENS) == _until(produced, NEW_TOKENS)
