"""A drafter published to a Hub on loopback, and what another machine gets from there by name."""

import json

import pytest
import torch
from hub_server import Hub
from kit import plain_greedy, tiny_drafter, tiny_target
from memorize import memorize
from test_cards import SMOLLM2
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, cli
from hf_dflow.hub.publishing import CardError, publish

NAME = "org/my-drafter"
FILES = [
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
]
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
def drafter():
    """It knows most of what the target says after the script's prompt."""
    target, prompt = tiny_target(dtype=torch.float32), torch.arange(1, 13)[None]
    drafter = tiny_drafter(target, relay="zero", target_name="org/target")
    memorize(drafter, target, plain_greedy(target, prompt, 40), prompt_length=12)
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    """As a maker would have it: saved, the card finished."""
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text(SMOLLM2, encoding="utf-8")
    (tmp_path / "drafter" / "optimizer.pt").write_bytes(b"training state")
    return tmp_path / "drafter"


def test_publish_then_load_by_name_elsewhere(folder, drafter, tmp_path):
    """Bug: a file missing from the repository, training state that goes along, a script that loads another drafter, or
    that runs without being trusted."""
    tiny_target(dtype=torch.float32).save_pretrained(tmp_path / "target")
    with Hub() as hub:
        dry = hub.run(PUBLISH, tmp_path / "maker", "publish", str(folder), NAME, "--dry-run")
        assert "Nothing was sent" in dry and all(name in dry for name in FILES) and "optimizer" not in dry
        assert hub.requests == [] and hub.repositories == {}
        done = hub.run(PUBLISH, tmp_path / "maker", "publish", str(folder), NAME, "--message", "First drafter")
        assert f"Published: {hub.url}/{NAME}/commit/" in done
        _, files = hub.repositories[NAME][-1]
        assert sorted(files) == FILES and files["README.md"].decode() == SMOLLM2
        assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
        assert f"REPOSITORY = '{NAME}'" in files["custom_generate/generate.py"].decode()
        used = json.loads(hub.run(USE, tmp_path / "user", str(tmp_path / "target"), NAME).splitlines()[-1])
        offline = hub.run(USE, tmp_path / "user", str(tmp_path / "target"), NAME, offline=True)
        assert json.loads(offline.splitlines()[-1]) == used
    assert used["equal"] and used["sampled"] and used["accepted"][0] == used["accepted"][1]
    assert max(used["accepted"][0]) >= 2
    assert "trust_remote_code" in used["refused"]
    assert used["sum"] == pytest.approx(drafter.fc.weight.double().sum().item())


def test_a_card_that_is_not_ready_stops_it(drafter, folder, monkeypatch):
    """Bug: a repository is made first and the card is found wanting afterwards."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: pytest.fail("sent"))
    with pytest.raises(CardError, match="license"):
        publish(drafter, NAME, SMOLLM2.replace("license: apache-2.0\n", ""))
    with pytest.raises(CardError, match="Limits"):
        drafter.push_to_hub(NAME, card=SMOLLM2.replace("## Limits", "## Ends"))
    (folder / "README.md").unlink()
    done = CliRunner().invoke(cli.app, ["publish", str(folder), NAME])
    assert done.exit_code == 2 and "card new" in done.output + done.stderr


def test_push_to_hub_uploads_what_the_command_does(drafter, folder, monkeypatch):
    """Bug: transformers' own push_to_hub, which writes a card of its own over ours."""
    sent = {}

    def upload(self, *, folder_path, repo_id, **kwargs):
        sent.update(
            {str(one.relative_to(folder_path)): one.read_bytes() for one in folder_path.rglob("*") if one.is_file()}
        )

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    drafter.push_to_hub(NAME, card=folder / "README.md")
    assert sorted(sent) == FILES and sent["README.md"].decode() == SMOLLM2
    with pytest.raises(ValueError, match="push_to_hub"):
        drafter.save_pretrained(folder, push_to_hub=True)


def test_saving_keeps_a_card_and_says_what_is_missing(drafter, tmp_path):
    """Bug: a second save writes the template over a finished card."""
    drafter.save_pretrained(tmp_path)
    assert "[fill in" in (tmp_path / "README.md").read_text()
    assert "REPOSITORY = None" in (tmp_path / "custom_generate" / "generate.py").read_text()
    (tmp_path / "README.md").write_text("mine")
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert DFlowDrafter.from_pretrained(tmp_path).config.target_name == "org/target"
