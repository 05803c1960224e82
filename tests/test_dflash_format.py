"""Checkpoints in z-lab's layout: same numbers as their own code, no guessed key, no unpickled byte."""

import json
import shutil

import dflash_oracle as tiny
import pytest
import torch
from dflash_oracle import (
    BLOCK_SIZE,
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    block_ids,
    edit_config,
    features_of,
    make_dflash_folder,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, DynamicCache, Qwen3Config

from hf_dflow import DFlowDrafter, DFlowDrafterConfig
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError

TOLERANCE = 1e-5  # float32, other order of the same sums
CONTEXT = 30  # well past the window of 8
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target()


@pytest.fixture
def folder(tmp_path):
    make_dflash_folder(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def own_folder(tmp_path):
    tiny.make_own_folder(tmp_path / "own")
    return tmp_path / "own"


@torch.no_grad()
def our_hidden(drafter, target, block, features, positions=None, cache=None):
    embeds = drafter.embed(block, target.get_input_embeddings())
    return drafter(embeds, features, position_ids=positions, cache=cache).last_hidden_state


@torch.no_grad()
def our_logits(drafter, target, features):
    return drafter.compute_logits(our_hidden(drafter, target, block_ids(), features), target.lm_head)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


# -- same numbers as the format's own code


@pytest.mark.parametrize("variant", tiny.VARIANTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_long_call_equals_dflash(variant, attention, tmp_path, target):
    oracle = make_dflash_folder(tmp_path, **tiny.VARIANTS[variant])
    drafter = DFlowDrafter.from_pretrained(tmp_path, attn_implementation=attention)
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + BLOCK_SIZE)[None]
    theirs = tiny.oracle_hidden(oracle, target, block_ids(), features, positions)
    close(our_hidden(drafter, target, block_ids(), features, positions), theirs)
    with torch.no_grad():
        close(our_logits(drafter, target, features), oracle.compute_logits(theirs, target.lm_head))
    assert drafter.relay is None and not drafter.training


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_consecutive_calls_with_caches_equal_dflash(variant, tmp_path, target):
    """Catches a window measured from the wrong end once the cache has dropped rows, and rows of old blocks kept."""
    oracle = make_dflash_folder(tmp_path, **tiny.VARIANTS[variant])
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    features, start = features_of(CONTEXT), 0
    caches = [DynamicCache(config=model.config) for model in (oracle, drafter)]
    for cache in caches:
        cache.activate_past_recording()
    for step, new in enumerate((5, 1, 4, 9, 2, 1, 4, 4)):
        positions = torch.arange(start, start + new + BLOCK_SIZE)[None]
        rows, block = features[:, start : start + new], block_ids(anchor=step)
        theirs = tiny.oracle_hidden(oracle, target, block, rows, positions, caches[0])
        close(our_hidden(drafter, target, block, rows, positions, caches[1]), theirs)
        start += new
        close(our_hidden(drafter, target, block, features[:, :start]), theirs)  # no cache at all
        for cache in caches:
            cache.crop(-(cache.get_seq_length() - start))
    assert start == CONTEXT


def test_variants_differ_from_each_other(tmp_path, target):
    """Catches a setting that neither side applies, so that the comparisons above would compare nothing."""
    outputs = []
    for i, (name, variant) in enumerate(tiny.VARIANTS.items()):
        if name not in ("scales, flat", "two layers, flat"):
            make_dflash_folder(tmp_path / str(i), **variant)
            outputs.append(our_logits(DFlowDrafter.from_pretrained(tmp_path / str(i)), target, features_of(CONTEXT)))
    for i, one in enumerate(outputs):
        assert all((one - other).abs().max() > 0.01 for other in outputs[:i])


def test_flat_nested_and_old_rope_keys_are_the_same_drafter(tmp_path, target):
    drafters = []
    for nested in (True, False):
        make_dflash_folder(tmp_path / str(nested), nested=nested, draft_config=tiny.SCALES, **tiny.MIXED_SLIDING)
        drafters.append(DFlowDrafter.from_pretrained(tmp_path / str(nested)))
    edit_config(tmp_path / "False", rope_parameters=None, rope_theta=5e5, torch_dtype="float32", dtype=None)
    drafters.append(DFlowDrafter.from_pretrained(tmp_path / "False"))
    logits = [our_logits(drafter, target, features_of(CONTEXT)) for drafter in drafters]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    names = DFlowDrafterConfig.__annotations__
    configs = [{name: getattr(drafter.config, name) for name in names} for drafter in drafters]
    assert configs[0] == configs[1] == configs[2]


def test_tokens_outside_the_window_do_not_matter(tmp_path, target):
    make_dflash_folder(tmp_path, **tiny.PURE_SLIDING)
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    features = features_of(CONTEXT)
    logits = our_logits(drafter, target, features)
    first_visible = CONTEXT - tiny.WINDOW + 1  # of the anchor at position CONTEXT, the query that sees furthest back
    changed = features.clone()
    changed[:, :first_visible] = features_of(first_visible, seed=7)
    assert torch.equal(our_logits(drafter, target, changed), logits)
    changed[:, first_visible] += 1
    assert not torch.equal(our_logits(drafter, target, changed), logits)


def test_padded_target_vocabulary_is_cut(tmp_path):
    oracle, padded = make_dflash_folder(tmp_path), tiny.tiny_target(vocab_size=VOCAB_SIZE + 8)
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + BLOCK_SIZE)[None]
    with torch.no_grad():
        theirs = oracle.compute_logits(
            tiny.oracle_hidden(oracle, padded, block_ids(), features, positions), padded.lm_head
        )
    assert theirs.shape[-1] == VOCAB_SIZE + 8
    close(our_logits(drafter, padded, features), theirs[..., :VOCAB_SIZE])


# -- no guessed configuration


@pytest.mark.parametrize("case", tiny.BROKEN_CONFIGS)
def test_missing_or_impossible_key_is_named(case, tmp_path):
    make_dflash_folder(tmp_path, nested="flat" not in case, **tiny.MIXED_SLIDING)
    changes, named = tiny.BROKEN_CONFIGS[case]
    edit_config(tmp_path, **changes)
    with pytest.raises(DrafterConfigError) as error:
        DFlowDrafter.from_pretrained(tmp_path)
    assert named in str(error.value) and f"{tmp_path}/config.json" in str(error.value)


def test_absent_layer_types_without_window_mean_full_attention(folder):
    edit_config(folder, layer_types=None)
    assert DFlowDrafter.from_pretrained(folder).config.layer_types == ["full_attention"] * 3


def test_a_missing_key_can_be_given_as_keyword(folder):
    edit_config(folder, dflash_config={"block_size": None})
    assert DFlowDrafter.from_pretrained(folder, block_size=BLOCK_SIZE).config.block_size == BLOCK_SIZE


@pytest.mark.parametrize("tokens", [{"eos_token_id": [3, MASK_TOKEN_ID]}, {"pad_token_id": MASK_TOKEN_ID}])
def test_mask_token_that_is_also_special_warns(tokens, folder):
    edit_config(folder, **tokens)
    with pytest.warns(UserWarning, match=next(iter(tokens))):
        DFlowDrafter.from_pretrained(folder)


def test_foreign_config_object_is_refused(folder):
    with pytest.raises(DrafterConfigError, match="Qwen3Config"):
        DFlowDrafter.from_pretrained(folder, config=Qwen3Config())


# -- weights: safetensors only, all of them, in the right shape


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).touch, (self.marker,))


@pytest.mark.parametrize("layout", ["folder", "own_folder"])
def test_pickle_is_refused_unread(layout, request, tmp_path):
    path, marker = request.getfixturevalue(layout), tmp_path / "executed"
    (path / "model.safetensors").unlink()
    torch.save(Payload(marker), path / "pytorch_model.bin")
    for keywords in ({}, {"use_safetensors": False}):
        with pytest.raises(DrafterWeightsError, match="safetensors"):
            DFlowDrafter.from_pretrained(path, **keywords)
    assert not marker.exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)
    assert marker.exists()  # the payload was live


@pytest.mark.parametrize("kept", [4, 100, 3000])
def test_truncated_file_is_refused(kept, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DrafterWeightsError, match=str(folder)):
        DFlowDrafter.from_pretrained(folder)


@pytest.mark.parametrize("layout", ["folder", "own_folder"])
def test_missing_unexpected_and_misshapen_weights_are_listed(layout, request):
    path = request.getfixturevalue(layout)
    weights = load_file(path / "model.safetensors")
    del weights["layers.0.self_attn.q_norm.weight"]
    weights |= {"embed_tokens.weight": torch.zeros(2), "fc.weight": torch.zeros(3, 5)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterWeightsError) as error:
        DFlowDrafter.from_pretrained(path, ignore_mismatched_sizes=True)
    for part in ("q_norm.weight", "embed_tokens.weight", "fc.weight is (3, 5)"):
        assert part in str(error.value)


def test_own_format_without_relay_weights_is_refused(own_folder):
    weights = load_file(own_folder / "model.safetensors")
    kept = {key: weight for key, weight in weights.items() if not key.startswith("relay.")}
    save_file(kept, own_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterWeightsError, match=r"relay\.down_proj\.weight"):
        DFlowDrafter.from_pretrained(own_folder)


# -- after conversion, and transformers' keywords


@pytest.mark.parametrize("use_relay", [False, True])
def test_round_trip_through_own_format_is_bit_equal(use_relay, tmp_path, target):
    make_dflash_folder(tmp_path / "theirs", draft_config=tiny.SCALES, **tiny.MIXED_SLIDING)
    drafter = DFlowDrafter.from_pretrained(tmp_path / "theirs", use_relay=use_relay)
    drafter.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["model_type"] == "dflow_drafter"
    files = {str(file.relative_to(tmp_path / "ours")) for file in (tmp_path / "ours").rglob("*") if file.is_file()}
    assert files == {
        "config.json",
        "model.safetensors",
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    logits = our_logits(drafter, target, features_of(CONTEXT))
    for loaded in (DFlowDrafter.from_pretrained(tmp_path / "ours"), AutoModel.from_pretrained(tmp_path / "ours")):
        assert isinstance(loaded, DFlowDrafter) and (loaded.relay is not None) == use_relay
        assert torch.equal(our_logits(loaded, target, features_of(CONTEXT)), logits)
    if use_relay:
        added = drafter.relay(torch.randn(1, 3, HIDDEN_SIZE), torch.randn(1, HIDDEN_SIZE), torch.randn(1, HIDDEN_SIZE))
        assert not added.any() and drafter.relay.up_proj.weight.any()


def test_dtype_device_map_and_loading_info(folder):
    drafter, report = DFlowDrafter.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16} and not report["missing_keys"]
    assert DFlowDrafter.from_pretrained(folder).dtype == torch.float32  # as stored
    with pytest.raises(TypeError, match="no_such_option"):
        DFlowDrafter.from_pretrained(folder, no_such_option=1)


def test_revision_reaches_config_and_weights(tmp_path):
    """Catches a look-up that drops the revision: the two commits differ in a configuration key and in weights."""
    old, new, repository = "a" * 40, "b" * 40, tmp_path / "models--org--drafter"
    for commit, seed in ((old, 1), (new, 2)):
        snapshot = repository / "snapshots" / commit
        make_dflash_folder(snapshot, seed=seed, draft_config={"output_multiplier": float(seed)})
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(new)
    for commit, revision, seed in ((old, {"revision": old}, 1), (new, {}, 2)):
        options = {"cache_dir": tmp_path, "local_files_only": True, **revision}
        drafter = DFlowDrafter.from_pretrained("org/drafter", **options)
        stored = load_file(repository / "snapshots" / commit / "model.safetensors")
        assert drafter.config.output_multiplier == seed and torch.equal(drafter.fc.weight, stored["fc.weight"])
    shutil.move(repository / "snapshots" / new / "model.safetensors", tmp_path / "elsewhere")
    with pytest.raises(DrafterWeightsError, match="org/drafter"):
        DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, local_files_only=True)
