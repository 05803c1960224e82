"""What a drafter is loaded from: one commit, read with the caller's own access; safetensors only, no key guessed."""

import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError
from kit import MASK_TOKEN_ID, OracleDrafter, dflow_greedy, plain_greedy, prompt_of, scripted, tiny_drafter, tiny_target
from safetensors.torch import load_file

from hf_dflow import DFlowDrafter, DrafterConfigError

OLD, NEW = "a" * 40, "b" * 40
ACCESS = {"token": "hf_mine", "revision": OLD, "force_download": False}
REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rope_parameters", "layer_types", "block_size", "mask_token_id", "target_layer_ids",
)  # fmt: skip


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json, or remove those that are `None`."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def hub(tmp_path):
    """A hub cache with two commits of one drafter, which differ in a key of the configuration and in weights."""
    repository = tmp_path / "models--org--drafter"
    for commit, seed in ((OLD, 1), (NEW, 2)):
        drafter = tiny_drafter(tiny_target(), seed=seed, output_multiplier=float(seed))
        drafter.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(NEW)
    return tmp_path


# -- safetensors only (F2)


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (type(self.marker).touch, (self.marker,))


def test_pickles_beside_the_weights_are_never_opened(folder, tmp_path):
    """F2: a training state, or a pickled twin of the weights, that runs code in whoever loads the drafter."""
    marker = tmp_path / "executed"
    (folder / "training").mkdir()
    names = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "training/state.pt", "scheduler.pt", "rng.pth")
    for name in names:
        torch.save(Payload(marker), folder / name)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(DFlowDrafter.from_pretrained(folder).fc.weight, stored["fc.weight"])
    assert not marker.exists()
    torch.load(folder / names[0], weights_only=False)
    assert marker.exists()  # the payload was live


def test_what_is_pushed_is_safetensors(monkeypatch):
    """F2: a pickle among the files of a published drafter."""
    pushed = []

    def upload(self, *, folder_path, **kwargs):
        pushed.extend(file.name for file in folder_path.rglob("*") if file.is_file())

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    tiny_drafter(tiny_target()).push_to_hub("org/drafter")
    assert {"config.json", "model.safetensors"} <= set(pushed)
    assert {Path(name).suffix for name in pushed} <= {".json", ".safetensors", ".md", ".py", ".txt"}


# -- one commit, the caller's access, no network unasked (F3)


@pytest.mark.parametrize("status", [401, 403])
def test_gated_repository(monkeypatch, status):
    """F3: a stack of HTTP errors, from which nobody learns that access must be asked for and a token given."""

    def refuse(*args, **kwargs):
        response = httpx.Response(status, request=httpx.Request("GET", "https://example.org/config.json"))
        raise GatedRepoError("Access to model org/drafter is restricted.", response=response)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)
    with pytest.raises(OSError, match="gated") as error:
        DFlowDrafter.from_pretrained("org/drafter")
    assert "org/drafter" in str(error.value) and "token" in str(error.value)


def test_one_commit_for_configuration_and_weights(hub):
    """F3: a revision that one of the look-ups drops: the weights of one commit under the configuration of another."""
    for commit, options, seed in ((OLD, {"revision": OLD}, 1), (NEW, {}, 2)):
        drafter = DFlowDrafter.from_pretrained("org/drafter", cache_dir=hub, local_files_only=True, **options)
        stored = load_file(hub / "models--org--drafter/snapshots" / commit / "model.safetensors")
        assert drafter.config.output_multiplier == seed
        assert torch.equal(drafter.fc.weight, stored["fc.weight"])


def test_every_look_up_gets_the_callers_access(hub, tmp_path, monkeypatch):
    """F3: a token, a cache or a revision that reaches the configuration and not the weights; the target's, if any."""
    asked, place = [], f"models--org--drafter/snapshots/{OLD}"

    def download(repo_id, filename, **kwargs):
        held = tmp_path / "own" / place / filename
        if held.exists() and kwargs["revision"] == OLD:  # a commit never changes, so the client asks nobody
            return str(held)
        asked.append((repo_id, filename, {key: kwargs.get(key) for key in (*ACCESS, "cache_dir")}))
        if not (hub / place / filename).exists():
            raise EntryNotFoundError(filename)
        held.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(hub / place / filename, held)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_target")
    drafter = DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path / "own", **ACCESS)
    assert drafter.config.output_multiplier == 1.0
    assert {name for _, name, _ in asked} >= {"config.json", "model.safetensors"}
    expected = {**ACCESS, "cache_dir": tmp_path / "own"}
    for repository, name, given in asked:
        given["cache_dir"] = Path(given["cache_dir"])
        assert (repository, given) == ("org/drafter", expected), name


def test_no_network_with_local_files_only(hub, monkeypatch):
    """F3: offline machines that wait for a time-out, or tell the hub what they load."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network here")

    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which conftest.py sets for all tests
    # The hub's client asks once a day who its callers are, whatever they load.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    options = {"cache_dir": hub, "revision": OLD}
    drafter = DFlowDrafter.from_pretrained("org/drafter", local_files_only=True, **options)
    assert drafter.config.output_multiplier == 1.0 and attempts == []
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    DFlowDrafter.from_pretrained("org/drafter", **options)
    assert attempts == []  # a commit never changes
    DFlowDrafter.from_pretrained("org/drafter", cache_dir=hub)
    assert attempts  # without the option it would have asked


def test_a_commit_that_is_not_here_is_not_replaced_by_another(hub):
    """F3: the newest commit in the place of the pinned one."""
    shutil.rmtree(hub / "models--org--drafter/snapshots" / OLD)
    with pytest.raises(OSError):
        DFlowDrafter.from_pretrained("org/drafter", cache_dir=hub, revision=OLD, local_files_only=True)


def test_the_drafter_has_its_own_number_format(folder):
    """F3: a drafter that inherits how the target was loaded."""
    before = torch.get_default_dtype()
    target = tiny_target(dtype=torch.float32)
    stored, narrow = DFlowDrafter.from_pretrained(folder), DFlowDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert (stored.dtype, narrow.dtype, target.dtype) == (torch.float64, torch.bfloat16, torch.float32)
    assert torch.get_default_dtype() == before
    for drafter in (stored, narrow):
        text = dflow_greedy(target, drafter, prompt_of(5), max_new_tokens=12).sequences
        assert torch.equal(text, plain_greedy(target, prompt_of(5), 12))


# -- no guessed key (F4)


@pytest.mark.parametrize("key", REQUIRED)
def test_each_key_is_needed(folder, key):
    """F4: a default in the place of a key: a drafter of another block, base or layer, that only drafts badly."""
    edit(folder, **{key: None})
    with pytest.raises(DrafterConfigError, match=key) as error:
        DFlowDrafter.from_pretrained(folder)
    assert isinstance(error.value, ValueError) and f"{folder}/config.json" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["full_attention", "chunked"]}, "chunked"),
        ({"mask_token_id": 64}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"target_layer_ids": [0, 4]}, "target_layer_ids"),
        ({"input_embedding": "shared"}, "input_embedding"),
    ],
    ids=str,
)
def test_impossible_values_are_named(folder, changes, words):
    """F4: an index error in the middle of a call, or a mask embedding that is no row of the table."""
    edit(folder, **changes)
    with pytest.raises(DrafterConfigError, match=words) as error:
        DFlowDrafter.from_pretrained(folder)
    assert f"{folder}/config.json" in str(error.value)


@pytest.mark.parametrize("tokens", [{"eos_token_id": [3, MASK_TOKEN_ID]}, {"pad_token_id": MASK_TOKEN_ID}], ids=str)
def test_a_mask_token_with_another_meaning_is_told(folder, tokens):
    """F4: a drafter that can never propose the end of a text, and nobody knows."""
    edit(folder, **tokens)
    with pytest.warns(UserWarning, match=next(iter(tokens))):
        DFlowDrafter.from_pretrained(folder)


def test_format_of_a_later_release(folder):
    """F4: keys of a format that this release does not know, ignored."""
    edit(folder, format_version=2)
    with pytest.raises(DrafterConfigError, match="format_version 2 is newer"):
        DFlowDrafter.from_pretrained(folder)


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_mask_token_is_never_drafted(do_sample):
    """F4: the token that the drafter says of a masked slot is the mask itself, and a target that may say it agrees."""

    class LovesMasks(OracleDrafter):
        def scripted_logits(self, logits, right, *, slot, step):
            logits = super().scripted_logits(logits, right, slot=slot, step=step)
            logits[MASK_TOKEN_ID] = 50.0
            return logits

    target, prompt = tiny_target(), prompt_of(9)
    drafter = scripted(LovesMasks, target, prompt, 24)
    options = {"max_new_tokens": 24, "return_dict_in_generate": True, "do_sample": do_sample, "top_k": 0}
    torch.manual_seed(0)
    output = target.generate(
        prompt, assistant_model=drafter, speculation_type="dflow", temperature=0.1 if do_sample else None, **options
    )
    assert MASK_TOKEN_ID not in output.sequences[0, 9:].tolist()
    assert max(output.statistics.per_step_accepted) >= 2
    assert do_sample or set(output.statistics.per_step_accepted[:-1]) == {7}
