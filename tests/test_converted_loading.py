"""Loading each published layout: no pickle, one commit, no guessed key (SCENARIOS.md F2 to F4)."""

import shutil
import socket

import pytest
import torch
from converted import KEYS, KINDS, MASK_TOKEN_ID, edit, scale_weights, write
from kit import dflow_greedy, plain_greedy, prompt_of, tiny_target
from safetensors.torch import load_file
from test_loading import NEW, OLD, Payload

from hf_dflow import DFlowDrafter, DrafterConfigError, DrafterWeightsError

PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth")


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="module", params=KINDS)
def original(request, target, tmp_path_factory):
    """A layout's name and a folder in it, which no test changes."""
    path = tmp_path_factory.mktemp("original") / request.param
    write(request.param, path, target)
    return request.param, path


@pytest.fixture
def folder(original, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(original[1], tmp_path / "drafter")


def test_pickles_are_never_opened(folder, tmp_path):
    """F2: code that runs in whoever loads a published drafter, out of its weights or of what lies beside them."""
    marker = tmp_path / "executed"
    for name in PICKLES:
        torch.save(Payload(marker), folder / name)
    drafter = DFlowDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "saved")
    suffixes = {file.suffix for file in (tmp_path / "saved").rglob("*") if file.is_file()}
    assert suffixes <= {".json", ".safetensors", ".md", ".py", ".txt"}
    (folder / "model.safetensors").unlink()
    for keywords in ({}, {"use_safetensors": False}):
        with pytest.raises(DrafterWeightsError, match="safetensors"):
            DFlowDrafter.from_pretrained(folder, **keywords)
    assert not marker.exists()
    torch.load(folder / PICKLES[0], weights_only=False)
    assert marker.exists(), "the payload was live"


def test_one_commit_offline(original, tmp_path, monkeypatch):
    """F3: the weights of one commit under the configuration of another, and a look-up that needs the network."""

    def refuse(*args, **kwargs):
        pytest.fail("asked the network")

    repository = tmp_path / "models--org--drafter"
    for commit, factor in ((OLD, 2.0), (NEW, 3.0)):
        copied = shutil.copytree(original[1], repository / "snapshots" / commit)
        scale_weights(copied, factor)
        if commit == OLD:
            edit(copied, KEYS[original[0]]["block size"], 3)
            if original[0].startswith("speculators"):
                edit(copied, "speculators_config", None)  # which says how many drafts a block of the other size has
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(NEW)
    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    first = DFlowDrafter.from_pretrained(original[1]).fc.weight
    for options, factor, block_size in (({"revision": OLD}, 2.0, 3), ({}, 3.0, 4)):
        drafter = DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, local_files_only=True, **options)
        assert drafter.config.block_size == block_size
        assert torch.equal(drafter.fc.weight, first * factor)
        assert drafter.config._commit_hash == options.get("revision", NEW)


@pytest.mark.parametrize("what", ["block size", "mask token", "tapped layers"])
def test_each_key_is_needed(original, folder, what):
    """F4: a guess in the place of a key, which only drafts badly."""
    key = KEYS[original[0]][what]
    edit(folder, key, None)
    refused(folder, key.split(".")[-1])


def test_layer_types_are_needed_where_layers_slide(original, folder):
    """F4, C6: full attention in the place of a window, or the other way round."""
    kind = original[0]
    edit(folder, KEYS[kind]["layer types"], ["sliding_attention", "chunked_attention"])
    refused(folder, "chunked_attention")
    edit(folder, KEYS[kind]["layer types"], ["sliding_attention"])
    refused(folder, "layer_types")
    edit(folder, KEYS[kind]["layer types"], None)
    if kind.startswith(
        "speculators"
    ):  # what it leaves out has its class's default: sliding from a given layer on, so none
        assert DFlowDrafter.from_pretrained(folder).config.layer_types == ["full_attention"] * 2
    else:
        refused(folder, "layer_types")


@pytest.mark.parametrize("token_id", [64, -1])
def test_a_mask_token_without_a_row(original, folder, token_id, target):
    """F4: an index error in the middle of a call, or a mask embedding that is no row of the table."""
    edit(folder, KEYS[original[0]]["mask token"], token_id)
    if original[0] == "transformers" and token_id > 0:  # the file says nothing of the vocabulary: the target does
        drafter = DFlowDrafter.from_pretrained(folder)
        with pytest.raises(ValueError, match="mask_token_id 64"):
            dflow_greedy(target, drafter, prompt_of(5), max_new_tokens=4)
    else:
        refused(folder, "mask_token_id")


def test_a_mask_token_that_ends_texts_is_told(original, folder):
    """F4: a drafter that can never propose the end of a text, and nobody knows."""
    edit(folder, KEYS[original[0]]["end of text"], MASK_TOKEN_ID)
    with pytest.warns(UserWarning, match="eos_token_id"):
        DFlowDrafter.from_pretrained(folder)


def test_a_drafter_in_half_the_targets_width(original, folder, target):
    """F3: a drafter that takes the target's number format, or a text that depends on it."""
    drafter = DFlowDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16 and DFlowDrafter.from_pretrained(folder).dtype == torch.float32
    text = dflow_greedy(target, drafter, prompt_of(9), max_new_tokens=12).sequences
    assert torch.equal(text, plain_greedy(target, prompt_of(9), 12))


def test_rotary_scaling_by_its_older_name(tmp_path, target):
    """F4: a scaling that older releases of transformers wrote beside the base, left out without a word."""
    write("speculators", tmp_path, target)
    edit(tmp_path, "transformer_layer_config.rope_parameters", None)
    edit(tmp_path, "transformer_layer_config.rope_theta", 5e5)
    edit(tmp_path, "transformer_layer_config.rope_scaling", {"rope_type": "linear", "factor": 4.0})
    rope = DFlowDrafter.from_pretrained(tmp_path).config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


def refused(folder, words) -> None:
    """Before the weights are read, naming the key and the file."""
    assert load_file(folder / "model.safetensors")
    with pytest.raises(DrafterConfigError, match=words) as error:
        DFlowDrafter.from_pretrained(folder)
    assert f"{folder}/config.json" in str(error.value)
