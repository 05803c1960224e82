"""A Hub on loopback: a drafter is published there, and other processes load it by name, online and offline."""

import json
from pathlib import Path

import pytest
import torch
from hub_server import Hub
from kit import plain_greedy, tiny_drafter, tiny_target
from memorize import memorize

NAME = "org/drafter"
CARD = (Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-b8.md").read_text(encoding="utf-8")
FILES = [
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
]
LOAD = """
import json, sys
from hf_dflow import DFlowDrafter
found = []
for options in json.loads(sys.argv[1]):
    drafter = DFlowDrafter.from_pretrained("org/drafter", **options)
    found.append({
        "scale": drafter.config.output_multiplier, "sum": drafter.fc.weight.double().sum().item(),
        "commit": drafter.config._commit_hash, "name": drafter.name_or_path, "dtype": str(drafter.dtype),
    })
print(json.dumps(found))
"""
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


PUBLISH = """
import sys
from hf_dflow.cli import app
sys.argv = ["hf-dflow", *sys.argv[1:]]
app()
"""
USE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from hf_dflow import DFlowDrafter
folder, name = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(folder)
prompt = torch.arange(1, 13)[None]
options = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
plain = target.generate(prompt, **options)
drafter = DFlowDrafter.from_pretrained(name)
ours = target.generate(prompt, assistant_model=drafter, speculation_type="dflow", **options)
try:
    target.generate(prompt, custom_generate=name, **options)
    refused = None
except ValueError as error:
    refused = str(error)
theirs = target.generate(prompt, custom_generate=name, trust_remote_code=True, **options)
sampling = dict(max_new_tokens=12, do_sample=True, top_k=5, temperature=0.8)
torch.manual_seed(3)
one = target.generate(prompt, assistant_model=drafter, speculation_type="dflow", **sampling)
torch.manual_seed(3)
other = target.generate(prompt, custom_generate=name, trust_remote_code=True, **sampling)
print()  # behind the question whether to trust, which has no end of line
print(json.dumps({
    "equal": ours.sequences.tolist() == plain.sequences.tolist() == theirs.sequences.tolist(),
    "accepted": [ours.statistics.per_step_accepted, theirs.statistics.per_step_accepted],
    "sampled": one.tolist() == other.tolist(), "refused": refused, "sum": drafter.fc.weight.double().sum().item(),
}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A repository of two commits, the second also in a subfolder and named otherwise in its weights."""
    with Hub() as hub:
        hub.drafters, hub.commits = [], []
        for seed in (1, 2):
            path = tmp_path_factory.mktemp("drafter")
            drafter = tiny_drafter(tiny_target(dtype=torch.float32), seed=seed, output_multiplier=float(seed))
            drafter.save_pretrained(path)
            files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
            files |= {f"inner/{name}": content for name, content in files.items()} if seed == 2 else {}
            hub.drafters.append(drafter)
            hub.commits.append(hub.commit(NAME, files))
        yield hub


def load(hub, home, *options, script=LOAD, offline=False):
    """What each `from_pretrained(NAME, **options)` gives, all in one process."""
    return json.loads(hub.run(script, home, json.dumps(options), offline=offline).splitlines()[-1])


def test_two_revisions_online_then_offline(hub, tmp_path):
    """Bug: a revision that reaches config.json and not the weights; a look-up that needs the network though the cache
    is filled; the branch of a cache that is taken for a commit; look-ups of adapters, pickles or code, which a
    repository could use to have something else loaded."""
    online = load(hub, tmp_path, {"revision": hub.commits[0]}, {}, {"subfolder": "inner"})
    for i, one in zip((0, 1, 1), online, strict=True):
        assert one["scale"] == i + 1 and one["commit"] == hub.commits[i] and one["name"] == NAME
        assert one["sum"] == pytest.approx(hub.drafters[i].fc.weight.double().sum().item())
    assert (tmp_path / "hub" / "models--org--drafter" / "refs" / "main").read_text() == hub.commits[1]
    asked = [path.split("/resolve/")[1].split("/", 1) for _, path in hub.requests if "/resolve/" in path]
    assert {path for _, path in asked} == {
        "config.json",
        "model.safetensors",
        "inner/config.json",
        "inner/model.safetensors",
    }
    # The branch is followed for config.json and nothing else.
    assert {path for revision, path in asked if revision == "main"} == {"config.json", "inner/config.json"}
    before = len(hub.requests)
    cached = {"local_files_only": True}
    silent = load(
        hub, tmp_path, {"revision": hub.commits[0], **cached}, {"dtype": "bfloat16", **cached}, script=NO_NETWORK + LOAD
    )
    assert silent[0] == online[0] and silent[1]["dtype"] == "torch.bfloat16" and silent[1]["commit"] == hub.commits[1]
    assert load(hub, tmp_path, {}, script=NO_NETWORK + LOAD, offline=True)[0] == online[1]
    assert len(hub.requests) == before


def test_publish_then_load_by_name_elsewhere(tmp_path):
    """Bug: a file missing from the repository, training state that goes along, a script that loads another drafter, or
    that runs without being trusted."""
    target, prompt, folder = tiny_target(dtype=torch.float32), torch.arange(1, 13)[None], tmp_path / "drafter"
    target.save_pretrained(tmp_path / "target")
    drafter = tiny_drafter(target, relay="zero", target_name="org/target")
    memorize(drafter, target, plain_greedy(target, prompt, 40), prompt_length=12)  # after the script's prompt
    drafter.save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    (folder / "optimizer.pt").write_bytes(b"training state")
    with Hub() as hub:
        dry = hub.run(PUBLISH, tmp_path / "maker", "publish", str(folder), NAME, "--dry-run")
        assert "Nothing was sent" in dry and all(name in dry for name in FILES) and "optimizer" not in dry
        assert hub.requests == [] and hub.repositories == {}
        done = hub.run(PUBLISH, tmp_path / "maker", "publish", str(folder), NAME, "--message", "First drafter")
        assert f"Published: {hub.url}/{NAME}/commit/" in done
        _, files = hub.repositories[NAME][-1]
        assert sorted(files) == FILES and files["README.md"].decode() == CARD
        assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
        assert f"REPOSITORY = '{NAME}'" in files["custom_generate/generate.py"].decode()
        used = json.loads(hub.run(USE, tmp_path / "user", str(tmp_path / "target"), NAME).splitlines()[-1])
        offline = hub.run(USE, tmp_path / "user", str(tmp_path / "target"), NAME, offline=True)
        assert json.loads(offline.splitlines()[-1]) == used
    assert used["equal"] and used["sampled"] and used["accepted"][0] == used["accepted"][1]
    assert max(used["accepted"][0]) >= 2
    assert "trust_remote_code" in used["refused"]
    assert used["sum"] == pytest.approx(drafter.fc.weight.double().sum().item())
