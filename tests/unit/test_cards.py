"""Model cards and publishing: what a finished card holds, what stops an upload, what is sent, figures as measured."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from kit import shared_target, tiny_drafter
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, cli
from hf_dflow.checkpoints.export import export_drafter
from hf_dflow.checkpoints.names import BUNDLED
from hf_dflow.hub.cards import FILL_IN, SECTIONS, check_card, make_card
from hf_dflow.hub.publishing import CardError, publish
from hf_dflow.training import checkpoint
from hf_dflow.training.checkpoint import write_process_state

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "model_cards"
SMOLLM2 = (CARDS / "smollm2-135m-instruct-b8.md").read_text(encoding="utf-8")
NAME = "org/my-drafter"
FILES = [
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
]


def measured(name):
    return json.loads((ROOT / "docs" / "results" / f"eval-{name}.json").read_text())


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_drafter_has_a_finished_card(name):
    """Bug: a card that the Hub would refuse, or that does not say what the figures were measured under."""
    assert check_card((CARDS / f"{name}.md").read_text(encoding="utf-8")) == []


BROKEN = {
    "no front matter": (lambda text: text.split("---", 2)[2], "front matter"),
    "broken YAML": (lambda text: text.replace("license: apache-2.0", "license: [apache"), "cannot be read"),
    "no metrics": (lambda text: re.sub(r"    metrics:\n(?:    .*\n){3}", "", text), "cannot be read"),
    "no licence": (lambda text: text.replace("license: apache-2.0\n", ""), "license"),
    "another library": (lambda text: text.replace("library_name: hf_dflow", "library_name: other"), "library_name"),
    "no base model": (lambda text: re.sub(r"base_model: .*\n", "", text), "base_model"),
    "a tag less": (lambda text: text.replace("- dflow\n", ""), "dflow"),
    "no figure": (lambda text: text.replace("type: tokens_per_step", "type: accuracy"), "tokens_per_step"),
    "no table": (lambda text: text.replace("|---", "|"), "a table"),
    "no conditions": (lambda text: re.sub("(?i)greedy|temperature", "", text), "conditions"),
    "no versions": (lambda text: text.replace("transformers 5.24.0", ""), "versions of transformers"),
    "a mark left": (lambda text: text + "[fill in: this]", "1 place(s)"),
    "a path": (lambda text: text + "\nsee /home/somebody/drafter\n", "machine"),
    **{
        f"no {title}": (lambda text, title=title: text.replace(f"## {title}\n", f"### {title}\n"), f"## {title}")
        for title in SECTIONS
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_card_lacks_is_said(case, tmp_path):
    """Bug: a card without licence, conditions or limits is published."""
    change, named = BROKEN[case]
    broken = change(SMOLLM2)
    assert broken != SMOLLM2
    problems = check_card(broken)
    assert any(named in problem for problem in problems)
    (tmp_path / "README.md").write_text(broken, encoding="utf-8")
    done = CliRunner().invoke(cli.app, ["card", "check", str(tmp_path)])
    assert done.exit_code == 1 and named in done.output


def test_the_template_makes_a_card_that_only_its_maker_can_finish():
    """Bug: a generated card that passes for a finished one, or that nobody can finish."""
    drafter = tiny_drafter(shared_target(), target_name="org/target", chat_mode="thinking")
    text = make_card(drafter, "org/drafter", "apache-2.0")
    card = ModelCard(text)
    assert card.data.base_model == "org/target" and card.data.license == "apache-2.0"
    assert 'from_pretrained("org/drafter"' in text and "Asked in the mode: thinking." in text and "{{" not in text
    problems = check_card(text)
    assert any("filled in" in problem for problem in problems)
    finished = re.sub(r"\[fill in: [^]]*\]", "greedy, said", text)
    index = ModelCard(SMOLLM2).data
    card = ModelCard(finished)
    card.data.model_name, card.data.eval_results = index.model_name, index.eval_results
    assert check_card(str(card)) == [] and FILL_IN not in str(card)


def test_the_template_is_the_packages():
    """Bug: two templates that drift apart."""
    template = (CARDS / "_template.md").read_text(encoding="utf-8")
    assert template == (ROOT / "hf_dflow" / "hub" / "card_template.md").read_text(encoding="utf-8")
    assert all(f"## {title}\n" in template for title in SECTIONS)


def test_a_card_names_the_parts_of_a_drafter():
    """Bug: a published drafter whose page does not say that its drafts condition on each other."""
    target, correction = shared_target(), {"correction_intermediate_size": 16, "correction_top_k": 4}
    for relay, fields, words in (
        ("random", {}, "with verifier relay for"),
        ("random", correction, "with verifier relay and causal correction for"),
        (None, {}, "drafter for speculative decoding"),
    ):
        assert words in make_card(tiny_drafter(target, 5, relay, **fields), None)


# -- publishing; through a Hub: tests/nightly/test_hub.py


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter(shared_target())  # saving one writes into its configuration


@pytest.fixture
def folder(drafter, tmp_path):
    """As a maker would have it: saved, the card finished, training state beside it."""
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text(SMOLLM2, encoding="utf-8")
    (tmp_path / "drafter" / "optimizer.pt").write_bytes(b"training state")
    return tmp_path / "drafter"


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
    """Bug: transformers' own push_to_hub, which writes a card of its own over ours; a pickle among the files (F2)."""
    sent = {}

    def upload(self, *, folder_path, repo_id, **kwargs):
        paths = [path for path in folder_path.rglob("*") if path.is_file()]
        sent.update({str(path.relative_to(folder_path)): path.read_bytes() for path in paths})

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    drafter.push_to_hub(NAME, card=folder / "README.md")
    assert sorted(sent) == FILES and sent["README.md"].decode() == SMOLLM2
    drafter.push_to_hub(NAME)
    assert sorted(sent) == FILES and FILL_IN in sent["README.md"].decode()
    with pytest.raises(ValueError, match="push_to_hub"):
        drafter.save_pretrained(folder, push_to_hub=True)


def test_saving_keeps_a_card(drafter, tmp_path):
    """Bug: a second save writes the template over a finished card."""
    drafter.save_pretrained(tmp_path)
    assert FILL_IN in (tmp_path / "README.md").read_text()
    assert "REPOSITORY = None" in (tmp_path / "custom_generate" / "generate.py").read_text()
    (tmp_path / "README.md").write_text("mine")
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert DFlowDrafter.from_pretrained(tmp_path).config.block_size == 8


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(drafter, umask, mode, tmp_path):
    """Bug: weights of mode 0600, which a colleague who shares the folder cannot read, and the rest of it they can."""
    before = os.umask(umask)
    try:
        (tmp_path / "mine.safetensors").touch(0o400)
        drafter.save_pretrained(tmp_path)
        drafter.save_pretrained(tmp_path)  # over files that exist
        (tmp_path / "sharded").mkdir()
        drafter.save_pretrained(tmp_path / "sharded", max_shard_size="20KB", variant="fp32")
        export_drafter(drafter, tmp_path / "dflash", "dflash", num_target_layers=4)
        write_process_state(checkpoint.begin(tmp_path / "run"), 0, {"cpu": torch.zeros(3)})
    finally:
        os.umask(before)
    files = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert files.pop(tmp_path / "mine.safetensors") == 0o400  # not ours
    assert len([path for path in files if path.suffix == ".safetensors"]) > 4
    assert set(files.values()) == {mode}, files


@pytest.mark.parametrize("way", ["path", "relative", "moved", "published"])
def test_the_saved_custom_generate_runs_from_its_folder(way, tmp_path, monkeypatch):
    """Bug: a script that knows its drafter by the name on the Hub only, and a folder that has none."""
    target, drafter = shared_target(), tiny_drafter(shared_target())
    folder = tmp_path / "my drafter-1.0"
    drafter.save_pretrained(folder, repository="nobody/nothing" if way == "published" else None)
    assert str(tmp_path) not in (folder / "custom_generate" / "generate.py").read_text()
    requirements = folder / "custom_generate" / "requirements.txt"
    requirements.write_text("")  # this package may not be installed under test
    if way == "moved":
        folder = folder.rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    given = folder.name if way == "relative" else str(folder)
    options = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True, "pad_token_id": 0}
    prompt = torch.arange(1, 13)[None]
    out = target.generate(prompt, custom_generate=given, trust_remote_code=True, **options)
    assert sum(out.statistics.per_step_drafted) > 0
    assert out.sequences.tolist() == target.generate(prompt, **options).sequences.tolist()


# -- figures


def test_the_cards_figures_are_those_measured():
    """Bug: a new measurement and an old card."""
    rows = [
        line for line in SMOLLM2.splitlines() if line.startswith("| 16 held out") or line.startswith("| 24 of other")
    ]
    results = ModelCard(SMOLLM2).data.eval_results
    for row, name, result in zip(rows, ("training-kinds", "other-kinds"), results, strict=True):
        record = measured(name)
        found = record["modes"]["T=0"]["all"]["contestants"]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for cell, contestant in zip(cells[1:3], ("dflash", "dflow"), strict=True):
            tokens = found[contestant]["tokens_per_step"]
            low, high = tokens["interval_95"]
            assert cell == f"{tokens['value']:.2f} [{low:.2f}, {high:.2f}]"
        assert result.metric_value == pytest.approx(found["dflow"]["tokens_per_step"]["value"], abs=0.005)
        versions = record["conditions"]["versions"]
        hardware = SMOLLM2.split("## Hardware and versions")[1]
        assert f"transformers {versions['transformers']}" in hardware and record["conditions"]["cpu"] in hardware
        assert f"torch {versions['torch'].split('+')[0]}" in hardware
        assert f"{record['conditions']['prompts']} " in cells[0]


def test_the_tiny_pairs_figures_are_those_measured():
    text = (CARDS / "tiny-airports-b8.md").read_text(encoding="utf-8")
    corpus = json.loads((ROOT / "docs" / "results" / "lab-airports.json").read_text())["corpora"]["airports-b8"]
    row = text.split("|---|---|---|\n")[1].splitlines()[0]
    kinds = ("dflow", "dflow, relay off", "dflash")
    assert row == "| " + " | ".join(f"{corpus[kind]['tokens_per_step_by_seed'][1]:.2f}" for kind in kinds) + " |"
    assert ModelCard(text).data.eval_results[0].metric_value == 4.75
