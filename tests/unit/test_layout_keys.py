"""No guessed key (F4): what a config.json lacks, contradicts or does not know is refused by name, in every layout.

A default in the place of a key would make a drafter of another block, base or layer, which runs and only drafts badly.
"""

import json
import shutil

import pytest
from dflash_oracle import DFLASH2, MIXED_SLIDING, SCALES, VOCAB_SIZE, make_dflash_folder
from kit import dflow_greedy, prompt_of, shared_target
from layouts import BLOCK_SIZE, DRAFT_KEYS, LAYER_KEYS, LAYOUTS, MASK_TOKEN_ID, TAPS, edit, original
from safetensors.torch import load_file

from hf_dflow import DFlowDrafter, DFlowDrafterConfig, DrafterConfigError, DrafterWeightsError

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "max_position_embeddings")  # fmt: skip
REQUIRED = {
    "dflow": (*SIZES, "rope_parameters", "layer_types"),
    "dflash": (*SIZES, "num_key_value_heads", "head_dim", "layer_types"),
    "dflash2": [f"dflash_config.{key}" for key in DFLASH2],
    "speculators": ("draft_vocab_size", "transformer_layer_config"),
    "speculators2": tuple(DFLASH2),
    "transformers": ("rope_parameters", "layer_types", "head_dim"),
}
CORRECTION = {"correction_intermediate_size": 16, "correction_top_k": 4}
NESTED, LAYERS = "dflash_config.", "transformer_layer_config."
WITHOUT_WINDOW = dict.fromkeys(("layer_types", "use_sliding_window", "sliding_window"))
# Layout, what is changed in its config.json (None: removed), and the word that the error must contain.
IMPOSSIBLE = [
    ("dflow", {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ("dflow", {"sliding_window": None}, "sliding_window"),
    ("dflow", {"block_size": 1}, "block_size"),
    ("dflow", {"target_layer_ids": [0, 4]}, "target_layer_ids"),
    ("dflow", {"input_embedding": "shared"}, "input_embedding"),
    ("dflow", {"target_layer_ids": 2}, "target_layer_ids"),
    ("dflow", {"sliding_window": "8"}, "sliding_window"),
    ("dflow", {"use_relay": "no"}, "true or false"),
    ("dflow", {"rms_norm_eps": True}, "rms_norm_eps"),
    ("dflow", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("dflow", {"format_version": 2}, "format_version 2 is newer"),
    ("dflow", {"correction_top_k": 4}, "give two whole numbers from 1, or none"),
    ("dflow", {**CORRECTION, "correction_top_k": 0}, "give two whole numbers from 1, or none"),
    ("dflow", {**CORRECTION, "selector_rank": 2, "selector_top_k": 2}, "does not go with 'selector_rank'"),
    ("dflow", {**CORRECTION, "final_logit_softcapping": 30.0}, "does not go with 'final_logit_softcapping'"),
    ("dflash", {"rope_parameters": None}, "rope_theta"),
    ("dflash", {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ("dflash", {"sliding_window": None}, "sliding_window"),
    ("dflash", {"use_sliding_window": None}, "use_sliding_window"),
    ("dflash", {f"{NESTED}block_size": "4"}, "block_size"),
    ("dflash", {f"{NESTED}target_layer_ids": 2}, "target_layer_ids"),
    ("dflash", {f"{NESTED}final_logit_softcapping": "on"}, "final_logit_softcapping"),
    ("dflash", {"block_size": 8}, "block_size"),  # contradicts dflash_config
    ("dflash", {"num_target_layers": 2}, "target_layer_ids"),
    ("dflash", {**WITHOUT_WINDOW, "num_hidden_layers": 10**12}, "num_hidden_layers"),  # a list of that length
    ("dflash", {"layer_types": "full_attention"}, "layer_types"),
    ("dflash", {"is_causal": "no"}, "is_causal"),
    ("dflash", {f"{NESTED}causal": False}, "causal"),  # another server's key
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size"),
    ("dflash", {f"{NESTED}conv_kernel_size": 2, f"{NESTED}selector_rank": 8}, "conv_kernel_size"),
    ("dflash", {f"{NESTED}projector_type": "domino"}, "projector_type"),
    ("dflash", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("dflash", {"model_type": "llama"}, "llama"),
    ("dflash", {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 2]}, "entry 0"),
    ("speculators", {"transformer_layer_config": {"model_type": "no-such"}}, "no-such"),
    ("speculators", {"draft_vocab_size": 8}, "d2t"),
    ("speculators", {f"{LAYERS}layer_types": None, f"{LAYERS}num_hidden_layers": 10**12}, "num_hidden_layers"),
    ("speculators", {"speculators_model_type": "dspark"}, "dspark"),
    ("speculators", {"speculators_model_type": "xpress"}, "xpress"),
    ("speculators", {"speculators_model_type": "peagle"}, "peagle"),
    ("speculators", {"speculators_model_type": "dflash2"}, "conv_kernel_size"),
    ("speculators", {"selector_rank": 6}, "selector_rank"),
    ("speculators", {"embed_scale": 2.0}, "embed_scale"),
]


@pytest.fixture
def copy_of(tmp_path):
    """A function that copies a layout's folder, to be edited."""
    return lambda kind, **fields: shutil.copytree(original(kind, **fields), tmp_path / "drafter")


def refused(folder, words) -> None:
    """The key and the file are named, although the weights are there."""
    assert load_file(folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=words) as error:
        DFlowDrafter.from_pretrained(folder)
    assert isinstance(error.value, ValueError) and f"{folder}/config.json" in str(error.value)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_each_key_is_needed(kind, copy_of):
    folder = copy_of(kind)
    text = (folder / "config.json").read_text()
    draft_keys = [f"{DRAFT_KEYS[kind]}{key}" for key in ("block_size", "mask_token_id")]
    for key in (*draft_keys, TAPS[kind], *REQUIRED[kind]):
        edit(folder, {key: None})
        refused(folder, key.split(".")[-1])
        (folder / "config.json").write_text(text)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_each_key_is_needed_at_top_level(key, tmp_path):
    make_dflash_folder(tmp_path, nested=False)
    edit(tmp_path, {key: None})
    refused(tmp_path, key)


@pytest.mark.parametrize(("kind", "changes", "words"), IMPOSSIBLE, ids=str)
def test_impossible_values_are_named(kind, changes, words, copy_of):
    """F4: an index error in the middle of a call, or a sibling format that loads and drafts nonsense."""
    folder = copy_of(kind)
    edit(folder, changes)
    refused(folder, words)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layer_types_are_needed_where_layers_slide(kind, copy_of):
    """F4, C6: full attention in the place of a window, or the other way round."""
    folder, key = copy_of(kind), f"{LAYER_KEYS[kind]}layer_types"
    edit(folder, {key: ["sliding_attention", "chunked_attention"]})
    refused(folder, "chunked_attention")
    edit(folder, {key: ["sliding_attention"]})
    refused(folder, "layer_types")
    edit(folder, {key: None})
    if kind.startswith("speculators"):  # what it omits has its class's default, and so has no sliding layer
        assert DFlowDrafter.from_pretrained(folder).config.layer_types == ["full_attention"] * 2
    else:
        refused(folder, "layer_types")


def test_absent_layer_types_without_a_window_mean_full_attention(copy_of):
    folder = copy_of("dflash", layers="full")
    edit(folder, {"layer_types": None})
    assert DFlowDrafter.from_pretrained(folder).config.layer_types == ["full_attention"] * 2


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_mask_token_without_a_row(kind, token_id, copy_of):
    """F4: a mask embedding that is no row of the table."""
    folder = copy_of(kind)
    edit(folder, {f"{DRAFT_KEYS[kind]}mask_token_id": token_id})
    if kind == "transformers" and token_id > 0:  # the file does not give the vocabulary: the target does
        drafter = DFlowDrafter.from_pretrained(folder)
        with pytest.raises(ValueError, match="mask_token_id 64"):
            dflow_greedy(shared_target(dtype=drafter.dtype), drafter, prompt_of(5), max_new_tokens=4)
    else:
        refused(folder, "mask_token_id")


@pytest.mark.parametrize("tokens", [{"eos_token_id": MASK_TOKEN_ID}, {"eos_token_id": [3, MASK_TOKEN_ID]},
                                    {"pad_token_id": MASK_TOKEN_ID}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_mask_token_with_another_meaning_warns(kind, tokens, copy_of):
    """F4: a drafter that can never propose the end of a text, and nobody knows."""
    folder = copy_of(kind)
    edit(folder, {f"{LAYER_KEYS[kind]}{key}": value for key, value in tokens.items()})
    with pytest.warns(UserWarning, match=next(iter(tokens))):
        DFlowDrafter.from_pretrained(folder)


def test_a_width_that_the_file_does_not_have(copy_of):
    folder = copy_of("transformers")
    edit(folder, {"intermediate_size": 10**9})
    with pytest.raises(DrafterWeightsError, match="wrong shape"):
        DFlowDrafter.from_pretrained(folder)


def test_a_missing_key_can_be_given_as_keyword(copy_of):
    folder = copy_of("dflash")
    edit(folder, {"dflash_config.block_size": None})
    assert DFlowDrafter.from_pretrained(folder, block_size=BLOCK_SIZE).config.block_size == BLOCK_SIZE


# -- where a layout has two ways to say the same


def test_flat_nested_and_old_rope_keys_are_the_same_drafter(tmp_path):
    configs = []
    for i, nested in enumerate((True, False, False)):
        make_dflash_folder(tmp_path / str(i), nested=nested, draft_config=SCALES, **MIXED_SLIDING)
        if i == 2:
            edit(tmp_path / "2", {"rope_parameters": None, "rope_theta": 5e5, "torch_dtype": "float32", "dtype": None})
        config = DFlowDrafter.from_pretrained(tmp_path / str(i)).config
        configs.append({name: getattr(config, name) for name in (*DFlowDrafterConfig.__annotations__, "dtype")})
    assert configs[0] == configs[1] == configs[2]


def test_rotary_scaling_by_its_older_name(copy_of):
    """F4: a scaling that older releases of transformers wrote beside the base, left out without a word."""
    folder = copy_of("speculators")
    old = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    edit(folder, {f"transformer_layer_config.{key}": value for key, value in old.items()})
    rope = DFlowDrafter.from_pretrained(folder).config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


def test_dflash2_of_speculators_is_bidirectional_by_default(copy_of):
    """Bug: the default of its elder, under which later slots of a block are hidden from earlier ones."""
    folder = copy_of("speculators2", layers="sliding")
    edit(folder, {"sliding_window_non_causal": None})
    assert DFlowDrafter.from_pretrained(folder).config.sliding_is_causal is False


def test_a_recorded_number_of_drafts_becomes_the_default(copy_of):
    """Bug: a drafter that its makers run with fewer tokens drafts whole blocks here."""
    folder = copy_of("speculators")
    settings = json.loads((folder / "config.json").read_text())["speculators_config"]
    settings["proposal_methods"][0]["speculative_tokens"] = 2
    settings["verifier"]["name_or_path"] = "org/target"
    edit(folder, {"speculators_config": settings})
    config = DFlowDrafter.from_pretrained(folder).config
    assert config.generation_defaults == {"num_draft_tokens": 2} and config.target_name == "org/target"
