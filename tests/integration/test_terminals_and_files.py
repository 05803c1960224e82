"""Terminals and files that are not the developer's: other encodings, commands in text, permissions, folders."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from kit import plain_greedy, prompt_of, tiny_drafter, tiny_target
from typer.testing import CliRunner

from hf_dflow import AcceptanceMonitor, DFlowDrafter, DFlowGenerationConfig
from hf_dflow.bench.workloads import jsonl_prompts
from hf_dflow.bench.workloads import read_prompts as read_tasks
from hf_dflow.checkpoints.export import export_drafter
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError
from hf_dflow.training.prompts import read_prompts


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize("arguments", [["plan", "--help"], ["bench", "report", "--help"], ["drafters"]])
def test_output_in_any_encoding(encoding, arguments):
    """Catches a traceback where the output's encoding lacks a character."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "hf_dflow.cli", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr


def test_no_text_commands_the_terminal(tmp_path):
    """Catches an escape sequence of a prompt or a file's name that reaches the terminal."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"chat": ["\\u001b]0;owned\\u0007 From which airport\\u202e?"]}')
    shown = CliRunner().invoke(app, ["demo", "--tiny", "--prompts", str(prompts), "--max-new-tokens", "4"])
    assert shown.exit_code == 0 and "\\x1b]0;owned" in shown.output
    refused = CliRunner().invoke(app, ["demo", "--tiny", "--prompts", f"{tmp_path}/\x1b]0;x"])
    unknown = CliRunner().invoke(app, ["demo", "--\x1b]0;x"])
    assert refused.exit_code == unknown.exit_code == 2
    for output in (shown.output, refused.output, unknown.output):
        assert not {"\x1b", "\x07", "\u202e"} & set(output)


READERS = {
    "prompts.json": (read_tasks, '{"chat": ["é"]}'),
    "rows.jsonl": (jsonl_prompts, '{"prompt": "é"}'),
    "own.jsonl": (lambda path: read_prompts(str(path)), '{"prompt": "é"}'),
    "own.txt": (lambda path: read_prompts(str(path)), "é"),
}


@pytest.mark.parametrize("name", READERS)
def test_prompts_with_a_mark_or_in_another_encoding(name, tmp_path):
    """Catches a byte-order mark that is taken for text, and an error that names neither file nor line."""
    read, content = READERS[name]
    path = tmp_path / name
    path.write_text(content, encoding="utf-8-sig")
    assert [prompt.text for prompt in read(path)] == ["é"]
    path.write_text("\n" + content, encoding="latin-1")
    with pytest.raises(DFlowError, match=f"{name}, line 2: .*UTF-8"):
        read(path)


def test_saved_weights_are_as_readable_as_other_files(tmp_path):
    """Catches weights that only their owner can read."""
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    export_drafter(drafter, tmp_path / "exported", "dflash", num_target_layers=4)
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
        assert modes == {(folder / "config.json").stat().st_mode & 0o777}


def test_a_saved_folder_decodes_where_it_lies(tmp_path):
    """Catches a `custom_generate/` that only runs once it is published."""
    target = tiny_target()
    tiny_drafter(target).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    options = {"max_new_tokens": 12, "do_sample": False, "trust_remote_code": True}
    ours = target.generate(prompt_of(9), custom_generate=str(tmp_path / "moved"), **options)
    assert torch.equal(ours, plain_greedy(target, prompt_of(9), max_new_tokens=12))


def test_a_configuration_with_a_monitor_is_copied_pickled_and_saved(tmp_path):
    """Catches a monitor's lock in the way of pickling, and a copy that loses its monitor."""
    route = AcceptanceMonitor().route("chat")
    config = DFlowGenerationConfig(monitor=route, num_draft_tokens=3)
    assert copy.copy(config).monitor is route and copy.deepcopy(config).monitor is route
    read = pickle.loads(pickle.dumps(config))
    assert read.monitor is None and read.num_draft_tokens == 3 and config.monitor is route
    config.save_pretrained(tmp_path)
    assert DFlowGenerationConfig.from_pretrained(tmp_path).num_draft_tokens == 3


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("tiny-airport-b8", "tiny-airports-b8"), ("Qwen3-8B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16")],
)
def test_a_misspelt_drafter_is_refused_at_once(name, nearest, monkeypatch):
    """Catches a request to the Hub for a misspelt bundled name, retried for 23 seconds."""
    monkeypatch.setattr("hf_dflow.checkpoints.files.cached_file", None)
    with pytest.raises(OSError, match=f"Did you mean {nearest}"):
        DFlowDrafter.from_pretrained(name)
