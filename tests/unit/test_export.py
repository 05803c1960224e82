"""Our drafters in others' layouts: read there with the same numbers, and back here without a bit lost."""

import copy
import json

import dflash_oracle as zlab
import pytest
import speculators_oracle as speculators
import torch
from dflash_oracle import DFLASH2, NUM_TARGET_LAYERS, WINDOW, block_ids, features_of
from kit import prompt_of
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, DFlowDrafterConfig, DrafterConfigError, DrafterWeightsError, cli
from hf_dflow.checkpoints.export import export_drafter

TOLERANCE = 1e-5
CONTEXT = 30
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
TO_DFLASH = {
    "full": {},
    "full, causal": {"full_is_causal": True},
    "sliding, causal": {**SLIDING, "sliding_is_causal": True, "window_is_inclusive": False},
    "sliding, seen from both sides": SLIDING,
    "scales": zlab.SCALES,
    "DFlash 2": {**DFLASH2, **SLIDING, "sliding_is_causal": True},
}
TO_SPECULATORS = {
    "full": {},
    "sliding": {**SLIDING, "window_from_anchor": True, "sliding_is_causal": True},
    "sliding, not causal": {**SLIDING, "window_from_anchor": True},
    "reduced vocabulary": {"draft_vocab_size": len(speculators.DRAFT_VOCAB), "output_head": "own"},
    "from the anchor": {"sample_from_anchor": True, "generation_defaults": {"num_draft_tokens": 3}},
    "DFlash 2": {**DFLASH2, **SLIDING, "window_from_anchor": True},
}


@pytest.fixture(scope="module")
def target():
    return zlab.tiny_target(seed=7)


def make(target, relay=True, **overrides):
    """A random drafter with all its weights away from their initial values."""
    fields = {
        **zlab.SIZES,
        **zlab.DRAFT_CONFIG,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": NUM_TARGET_LAYERS,
        "target_name": "org/target",
        "use_relay": relay,
    }
    drafter = DFlowDrafter(DFlowDrafterConfig(**{**fields, **overrides})).eval()
    zlab.randomize(drafter, 3)
    if drafter.draft_token_ids is not None:
        drafter.set_draft_vocabulary(torch.tensor(speculators.DRAFT_VOCAB), target.lm_head.weight)
    return drafter


def assert_same(drafter, folder):
    """`folder` gives `drafter` back, configuration and weights, bit by bit."""
    again = DFlowDrafter.from_pretrained(folder)
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(theirs[name], value) for name, value in mine.items())
    for key in DFlowDrafterConfig.__annotations__:
        assert getattr(again.config, key) == getattr(drafter.config, key), key
    return again


@pytest.mark.parametrize("name", TO_DFLASH)
@torch.no_grad()
def test_zlabs_reader_computes_the_same(name, tmp_path, target):
    """Bug: a window or causality told wrongly, a scale left out, a key that z-lab's reader takes from elsewhere."""
    dflash = pytest.importorskip("dflash.model")
    drafter = make(target, **TO_DFLASH[name])
    lines = export_drafter(drafter, tmp_path / "theirs", "dflash")
    reader = dflash.DFlash2DraftModel if name == "DFlash 2" else dflash.DFlashDraftModel
    theirs, report = reader.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + zlab.BLOCK_SIZE)[None]
    expected = zlab.oracle_hidden(theirs.eval(), target, block_ids(), features, positions)
    embeds = drafter.embed(block_ids(), target.get_input_embeddings())
    hidden = drafter(embeds, features, position_ids=positions).last_hidden_state
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)
    ours, logits = drafter.compute_logits(hidden, target.lm_head), theirs.compute_logits(expected, target.lm_head)
    torch.testing.assert_close(ours, logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same(drafter, tmp_path / "theirs")
    settings = json.loads(lines[0].split("'")[1])
    assert settings == {"method": "dflash", "model": str(tmp_path / "theirs"), "num_speculative_tokens": 3}
    assert lines[1].endswith(f"{tmp_path / 'theirs'} --speculative-num-draft-tokens 4")


@pytest.mark.parametrize("name", TO_SPECULATORS)
@torch.no_grad()
def test_speculators_reader_computes_the_same(name, tmp_path, target):
    """Bug: layers named by our ids, ids where differences belong, a block of one row too few."""
    kind, reader = ("dflash2", "DFlash2DraftModel") if name == "DFlash 2" else ("dflash", "DFlashDraftModel")
    module = speculators.load_speculators(kind)
    target.save_pretrained(tmp_path / "target")
    drafter = make(target, target_name=str(tmp_path / "target"), **TO_SPECULATORS[name])
    export_drafter(drafter, tmp_path / "theirs", "speculators")
    theirs = getattr(module, reader).from_pretrained(tmp_path / "theirs").eval().double()
    theirs.config.transformer_layer_config._attn_implementation = "eager"
    theirs._create_mask_fn = speculators.eager_mask()
    assert theirs.target_layer_ids == [i + 1 for i in zlab.TARGET_LAYER_IDS]
    assert_same(drafter, tmp_path / "theirs")
    drafter, target = drafter.double(), copy.deepcopy(target).double()
    token_ids, features = prompt_of(40), features_of(40).double()
    for anchor in (WINDOW - 1, 30):
        their_hidden, expected = speculators.oracle_block(theirs, token_ids, features, anchor)
        embeds = drafter.embed(block_ids(int(token_ids[0, anchor])), target.get_input_embeddings())
        hidden = drafter(embeds, features[:, :anchor]).last_hidden_state
        found = drafter.compute_logits(hidden, target.lm_head)[0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    if kind == "dflash2":
        previous = torch.tensor([9])
        ids, scores = theirs.candidate_selector.select(expected[2:3], their_hidden[2:3], previous)
        chosen = drafter.candidate_selector.candidates(hidden[:, 2:3], found[None, 2:3]).logits(0, previous, 64)
        torch.testing.assert_close(chosen[0, ids[0]], scores[0], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("to", ["dflash", "speculators"])
def test_what_a_layout_lacks_is_kept_aside(to, tmp_path, target):
    """Bug: relay or correction in a file that the server loads and stumbles over, or lost."""
    corrected = make(target, correction_intermediate_size=8, correction_top_k=3)
    export_drafter(corrected, tmp_path / "corrected", to)
    assert_same(corrected, tmp_path / "corrected")
    without_relay = DFlowDrafter.from_pretrained(tmp_path / "corrected", use_relay=False)
    assert without_relay.relay is None and without_relay.causal_correction is not None
    plain = make(target, relay=False, correction_intermediate_size=8, correction_top_k=3)
    export_drafter(plain, tmp_path / "correction alone", to)
    assert_same(plain, tmp_path / "correction alone")
    export_drafter(make(target), tmp_path / "with", to)
    export_drafter(make(target, relay=False), tmp_path / "without", to)
    assert {file.name for file in (tmp_path / "with").glob("*.safetensors")} == {"model.safetensors"}
    assert (tmp_path / "with" / "hf_dflow" / "parts.safetensors").exists()
    assert not (tmp_path / "without" / "hf_dflow").exists()
    assert DFlowDrafter.from_pretrained(tmp_path / "with", use_relay=False).relay is None
    assert DFlowDrafter.from_pretrained(tmp_path / "without").relay is None
    (tmp_path / "with" / "hf_dflow" / "parts.safetensors").unlink()
    with pytest.raises(DrafterWeightsError, match=r"parts\.safetensors"):
        DFlowDrafter.from_pretrained(tmp_path / "with")


@pytest.mark.parametrize(
    "overrides",
    [{}, {"correction_intermediate_size": 8, "correction_top_k": 3}, {"relay_norm_affine": True}, {"use_relay": False}],
    ids=["relay", "relay and correction", "relay with an affine norm", "neither"],
)
def test_the_layout_for_vllm_holds_everything(overrides, tmp_path, target):
    """Bug: stock vLLM draws the drafter without its relay and says nothing, or a part or a field gets lost."""
    drafter = make(target, **overrides)
    [line] = export_drafter(drafter, tmp_path / "served", "vllm")
    assert json.loads((tmp_path / "served/config.json").read_text())["architectures"] == ["DFlashDFlowDraftModel"]
    assert sorted(file.name for file in (tmp_path / "served").iterdir()) == ["config.json", "model.safetensors"]
    assert_same(drafter, tmp_path / "served")
    without = DFlowDrafter.from_pretrained(tmp_path / "served", use_relay=False)
    assert without.relay is None
    settings = json.loads(line.split("'")[1])
    assert settings == {"method": "dflash", "model": str(tmp_path / "served"), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "to, overrides, named",
    [
        ("vllm", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("vllm", {"output_head": "own"}, "head of its own"),
        ("vllm", {"output_multiplier": 2.0}, "scaled or capped"),
        ("vllm", {"final_logit_softcapping": 30.0}, "scaled or capped"),
        ("vllm", {"input_embedding_scale": 2.0}, "embeddings are scaled"),
        ("vllm", {"conv_kernel_size": 2, "conv_group_size": 8}, "DFlash 2"),
        ("dflash", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("dflash", {"input_embedding": "target"}, "input_embedding='raw'"),
        ("dflash", {"output_head": "own"}, "head of its own"),
        ("dflash", {**SLIDING, "window_from_anchor": True}, "from the anchor"),
        ("dflash", {"conv_kernel_size": 2, "conv_group_size": 8}, "not both"),
        ("dflash", {"num_target_layers": None}, "num_target_layers"),
        ("dflash", {"vocab_size": None}, "vocab_size"),
        ("speculators", SLIDING, "from each row"),
        ("speculators", {"output_multiplier": 2.0}, "logits"),
        ("speculators", {"selector_rank": 6, "selector_top_k": 5}, "not both"),
        ("gguf", {}, "use one of vllm, dflash, speculators"),
    ],
)
def test_what_a_layout_cannot_express_is_refused(to, overrides, named, tmp_path, target):
    """Bug: a drafter written as something else than it is, which drafts badly there without any error."""
    with pytest.raises(DrafterConfigError, match=named):
        export_drafter(make(target, **overrides), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, target):
    """Bug: the command writes into a folder that holds something, or does not say what to pass to the servers."""
    make(target).save_pretrained(tmp_path / "ours")
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "dflash"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0 and "--speculative-config" in done.output and "Kept aside: relay." in done.output
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 2 and "not empty" in again.output + again.stderr
