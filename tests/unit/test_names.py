"""Drafters by name: the table, the bundled ones, and what a name may be."""

import json
import re
from pathlib import Path

import pytest
import torch
from kit import shared_target, tiny_drafter, tiny_target
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, UnknownDrafterError, cli
from hf_dflow.checkpoints.names import BUNDLED, TABLE, drafter_for, drafters_for
from hf_dflow.checkpoints.reader import LAYOUTS
from hf_dflow.generation.configuration import CHAT_MODES

ROOT = Path(__file__).parents[2]


def test_the_bundled_drafter_needs_no_network(monkeypatch):
    """Bug: a name in the package that goes to the Hub."""
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", None)
    for drafter in (
        DFlowDrafter.from_pretrained("tiny-airports-b8"),
        DFlowDrafter.for_target("tiny-airports-b8/TARGET", dtype=torch.float64),
    ):
        assert drafter.config.block_size == 8 and drafter.relay is not None
    assert drafter.dtype == torch.float64


def test_a_folder_goes_before_a_name(tmp_path, monkeypatch):
    """Bug: a user's own folder shadowed by a bundled drafter of that name."""
    monkeypatch.chdir(tmp_path)
    tiny_drafter(shared_target(), 5).save_pretrained(tmp_path / "tiny-airports-b8")
    assert DFlowDrafter.from_pretrained("tiny-airports-b8").config.block_size == 5


def test_for_target_takes_names_and_models(monkeypatch):
    """Bug: a target that has a drafter is not found, or gets that of another."""
    assert drafter_for("Qwen/Qwen3-8B").name == "z-lab/Qwen3-8B-DFlash-b16"
    target = tiny_target()
    target.config._name_or_path = "Qwen/Qwen3-4B"
    assert drafter_for(target).name == "z-lab/Qwen3-4B-DFlash-b16"
    assert [row.name for row in drafters_for("meta-models/muse-glimmer-30b")] == [
        "z-lab/Muse-Glimmer-30B-DFlash2",
        "meta-models/Muse-Glimmer-30B-assistant",
    ]
    asked = []
    monkeypatch.setattr(
        DFlowDrafter, "from_pretrained", classmethod(lambda cls, *args, **kwargs: asked.append((args, kwargs)))
    )
    DFlowDrafter.for_target("Qwen/Qwen3-8B", revision="abc", token="t")
    assert asked == [(("z-lab/Qwen3-8B-DFlash-b16",), {"revision": "abc", "token": "t"})]


def test_an_unlisted_target_is_told_what_is_near():
    with pytest.raises(UnknownDrafterError, match="Qwen/Qwen3-8B") as error:
        DFlowDrafter.for_target("Qwen/Qwen3-8B-FP8")
    assert "hf-dflow drafters" in str(error.value)
    with pytest.raises(UnknownDrafterError, match="None"):
        DFlowDrafter.for_target(object())


def test_the_table_is_sound():
    """Bug: a row that names a format we cannot load, or a bundled drafter that is not there."""
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.format in LAYOUTS and (row.name in BUNDLED or re.fullmatch(r"[\w.-]+/[\w.-]+", row.name))
    for name, path in BUNDLED.items():
        assert (path / "model.safetensors").exists()
        config = json.loads((path / "config.json").read_text())
        row = next(row for row in TABLE if row.name == name)
        assert row.block_size == config["block_size"]
    assert all(row.chat_mode in (None, *CHAT_MODES) for row in TABLE)
    licences = {row.licence for row in TABLE}
    assert licences <= {None, "apache-2.0", "mit"}  # identifiers of the Hub's list
    for name in BUNDLED:
        card = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
        assert f"license: {next(row.licence for row in TABLE if row.name == name)}\n" in card


def test_the_command_lists_them():
    """Bug: `hf-dflow drafters` shows another table than `for_target` reads."""
    everything = CliRunner().invoke(cli.app, ["drafters"], env={"COLUMNS": "250"})
    assert everything.exit_code == 0 and all(row.name in everything.output for row in TABLE)
    one = CliRunner().invoke(cli.app, ["drafters", "--target", "qwen/qwen3-8b"], env={"COLUMNS": "250"})
    assert "z-lab/Qwen3-8B-DFlash-b16" in one.output and "non-thinking" in one.output
    assert "Qwen3-4B" not in one.output
    none = CliRunner().invoke(cli.app, ["drafters", "--target", "no/such"])
    assert none.exit_code == 2 and "no drafter is listed" in none.output + none.stderr
