"""From where a drafter is loaded, in every layout: safetensors only (F2), one commit with the caller's access (F3)."""

import shutil
import socket
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError
from layouts import DRAFT_KEYS, LAYOUTS, Payload, edit, original, scale_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

from hf_dflow import DFlowDrafter, DrafterConfigError, DrafterWeightsError

OLD, NEW = "a" * 40, "b" * 40
ACCESS = {"token": "hf_mine", "revision": OLD, "force_download": False}
PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "training/state.pt", "rng_state.pth")


@pytest.fixture(params=LAYOUTS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(original(kind), tmp_path / "drafter")


def commits(kind: str, cache: Path) -> Path:
    """The folder of a repository in a hub cache, with two commits of a drafter: other block size, other weights."""
    repository = cache / "models--org--drafter"
    for commit, factor in ((OLD, 2.0), (NEW, 3.0)):
        copied = shutil.copytree(original(kind), repository / "snapshots" / commit)
        scale_weights(copied, factor)
        if commit == OLD:
            edit(copied, {f"{DRAFT_KEYS[kind]}block_size": 3})
            if kind.startswith("speculators"):  # it says how many drafts a block of the other size has
                edit(copied, {"speculators_config": None})
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(NEW)
    return repository


def refuse_network(monkeypatch) -> list:
    attempts: list = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network here")

    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which conftest.py sets for all tests
    # The hub's client asks once a day who its callers are, whatever they load.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    return attempts


# -- safetensors only


def test_pickles_are_never_opened(folder, tmp_path):
    """F2: a training state, or a pickled twin of the weights, that runs code in whoever loads or saves the drafter."""
    marker = tmp_path / "executed"
    (folder / "training").mkdir()
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


def test_missing_unexpected_and_misshapen_weights_are_listed(folder):
    """Bug: transformers fills a missing weight in at random, or drops one that the file holds."""
    weights = load_file(folder / "model.safetensors")
    del weights["layers.0.self_attn.q_norm.weight"]
    name = next(name for name in weights if name.endswith("fc.weight"))
    weights |= {"no_such.weight": torch.zeros(2), name: torch.zeros(3, 5)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterWeightsError) as error:
        DFlowDrafter.from_pretrained(folder, ignore_mismatched_sizes=True)
    for part in ("q_norm.weight", "no_such.weight", "fc.weight is (3, 5)"):
        assert part in str(error.value)


def test_relay_weights_are_optional_in_other_layouts_only(tmp_path):
    """Bug: a drafter with a relay that was never in its file."""
    path = shutil.copytree(original("dflow"), tmp_path / "drafter")
    weights = load_file(path / "model.safetensors")
    kept = {key: weight for key, weight in weights.items() if not key.startswith("relay.")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterWeightsError, match=r"relay\.down_proj\.weight"):
        DFlowDrafter.from_pretrained(path)


def test_vocabulary_maps_that_contradict_each_other(tmp_path):
    """Bug: drafts under other tokens' names."""
    path = shutil.copytree(original("speculators", draft_vocab_size=12), tmp_path / "drafter")
    weights = load_file(path / "model.safetensors")
    weights["t2d"] = weights["t2d"].roll(1)
    save_file(weights, path / "model.safetensors")
    with pytest.raises(DrafterWeightsError, match="t2d"):
        DFlowDrafter.from_pretrained(path)


# -- one commit, the caller's access, no network unasked


@pytest.mark.parametrize("status", [401, 403])
def test_gated_repository(monkeypatch, status):
    """F3: a stack of HTTP errors, from which nobody learns that access must be requested and a token given."""

    def refuse(*args, **kwargs):
        response = httpx.Response(status, request=httpx.Request("GET", "https://example.org/config.json"))
        raise GatedRepoError("Access to model org/drafter is restricted.", response=response)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)
    with pytest.raises(OSError, match="gated") as error:
        DFlowDrafter.from_pretrained("org/drafter")
    assert "org/drafter" in str(error.value) and "token" in str(error.value)


def test_one_commit_and_no_network(kind, tmp_path, monkeypatch):
    """F3: the weights of one commit under the configuration of another; a look-up that waits for a time-out offline, or
    tells the hub what is loaded."""
    repository, attempts = commits(kind, tmp_path), refuse_network(monkeypatch)
    first = DFlowDrafter.from_pretrained(original(kind)).fc.weight
    for options, factor, block_size in (({"revision": OLD}, 2.0, 3), ({}, 3.0, 4)):
        drafter = DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, local_files_only=True, **options)
        assert drafter.config.block_size == block_size and torch.equal(drafter.fc.weight, first * factor)
        assert drafter.config._commit_hash == options.get("revision", NEW)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, revision=OLD)
    assert attempts == []  # a commit never changes
    DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path)
    assert attempts  # without the option it would have asked
    shutil.move(repository / "snapshots" / NEW / "model.safetensors", tmp_path / "elsewhere")
    with pytest.raises(DrafterWeightsError, match="org/drafter"):
        DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, local_files_only=True)
    shutil.rmtree(repository / "snapshots" / OLD)
    with pytest.raises(OSError):  # the newest commit does not replace the pinned one
        DFlowDrafter.from_pretrained("org/drafter", cache_dir=tmp_path, revision=OLD, local_files_only=True)


def test_every_look_up_gets_the_callers_access(tmp_path, monkeypatch):
    """F3: a token, a cache or a revision that reaches the configuration and not the weights, or the target's; a branch
    that moves between two look-ups."""
    requests, snapshot = [], f"models--org--drafter/snapshots/{OLD}"
    commits("dflow", tmp_path / "hub")

    def download(repo_id, filename, **kwargs):
        cached = Path(kwargs["cache_dir"]) / snapshot / filename
        if cached.exists() and kwargs["revision"] == OLD:  # a commit never changes, so the client asks nobody
            return str(cached)
        requests.append((repo_id, filename, {key: kwargs.get(key) for key in (*ACCESS, "cache_dir")}))
        if not (tmp_path / "hub" / snapshot / filename).exists():
            raise EntryNotFoundError(filename)
        cached.parent.mkdir(parents=True, exist_ok=True)
        (cached.parents[2] / "refs").mkdir(exist_ok=True)
        (cached.parents[2] / "refs/main").write_text(OLD)
        return shutil.copy(tmp_path / "hub" / snapshot / filename, cached)

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_target")
    for cache, access in ((tmp_path / "pinned", ACCESS), (tmp_path / "branch", {**ACCESS, "revision": "main"})):
        requests.clear()
        drafter = DFlowDrafter.from_pretrained("org/drafter", cache_dir=cache, **access)
        assert drafter.config.block_size == 3
        assert {name for _, name, _ in requests} >= {"config.json", "model.safetensors"}
        for repository, name, options in requests:
            options["cache_dir"] = Path(options["cache_dir"])
            expected = {**ACCESS, "cache_dir": cache}
            if name == "config.json":  # the branch is followed once
                expected["revision"] = access["revision"]
            assert (repository, options) == ("org/drafter", expected), name


# -- transformers' keywords, and the way back


def test_dtype_device_map_and_loading_info(kind):
    """F3: a drafter that inherits how the target was loaded."""
    before, path = torch.get_default_dtype(), original(kind)
    drafter, report = DFlowDrafter.from_pretrained(
        path, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16} and not report["missing_keys"]
    assert DFlowDrafter.from_pretrained(path).dtype == torch.float32  # as stored
    assert torch.get_default_dtype() == before
    with pytest.raises(TypeError, match="no_such_option"):
        DFlowDrafter.from_pretrained(path, no_such_option=1)


def test_foreign_config_object_is_refused():
    with pytest.raises(DrafterConfigError, match="Qwen3Config"):
        DFlowDrafter.from_pretrained(original("dflash"), config=Qwen3Config())


@pytest.mark.parametrize("use_relay", [False, True])
def test_saved_in_our_layout_it_is_the_same(kind, use_relay, tmp_path):
    """Bug: a weight or a field of another layout that our own loses, AutoModel that does not know us, a relay that a
    converted drafter does not take, or one that does not start at zero."""
    drafter = DFlowDrafter.from_pretrained(original(kind), **({} if kind == "dflow" else {"use_relay": use_relay}))
    drafter.save_pretrained(tmp_path)
    files = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    script = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert files == {"config.json", "model.safetensors", "README.md", *script}
    for loaded in (DFlowDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(loaded, DFlowDrafter) and loaded.state_dict().keys() == drafter.state_dict().keys()
        assert all(torch.equal(value, drafter.state_dict()[key]) for key, value in loaded.state_dict().items())
        for key in type(drafter.config).__annotations__:
            assert getattr(loaded.config, key) == getattr(drafter.config, key), key
    if use_relay and kind != "dflow":
        width = drafter.config.hidden_size
        assert not drafter.relay(torch.randn(1, 3, width), torch.randn(1, width), torch.randn(1, width)).any()
        assert drafter.relay.up_proj.weight.any()
    else:
        assert (drafter.relay is not None) == (kind == "dflow")
