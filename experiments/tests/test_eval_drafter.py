"""Held-out evaluation: other drafters side by side, names that are wrong refused, records with their conditions."""

import json

import pytest
import torch
from commands import invoke
from kit import prompt_of, tiny_drafter, tiny_target, tiny_tokenizer

from experiments import eval_drafter
from experiments.decisions import plot_calibration
from hf_dflow import DFlowDrafter, PairMismatchError
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import modes_of
from hf_dflow.console import errors_in_words
from hf_dflow.errors import DFlowError
from hf_dflow.training import prompts as training_prompts

MISSING = "runs/first/drafter"
command = errors_in_words()(eval_drafter.main)


class TinyTokenizer:
    """Ids of a prompt's length."""

    chat_template = None

    def apply_chat_template(self, messages, **kwargs):
        ids = prompt_of(4 + len(messages[0]["content"]))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def test_command_writes_what_it_prints(target, tmp_path, monkeypatch):
    """Bug: an option never reaches the plan, or the JSON lacks its conditions or holds a private text."""
    pair = Pair(target, tiny_drafter(target, 8), TinyTokenizer(), "tiny")
    monkeypatch.setattr(eval_drafter, "load_pair", lambda *args: pair)
    conversations = [f"a question of somebody, number {i}" for i in range(200)]
    monkeypatch.setattr(training_prompts, "sharegpt_prompts", lambda: conversations)
    (tmp_path / "own.json").write_text('{"chat": ["one", "three"]}')
    path = tmp_path / "out.json"
    options = f"--prompts {tmp_path}/own.json --sharegpt 1 --max-new-tokens 8 --json {path} --plain"
    options += " --temperature 0 --temperature 1 --verification token --seed 0 --seed 1"
    result = invoke(command, options)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert list(record["modes"]) == ["T=0", "T=1, token verification"]
    assert list(record["modes"]["T=0"]["by_task"]) == ["chat", "sharegpt"]
    assert len(record["rows"]) == 3 * (1 + 2)
    assert record["identity"]["identical_to_plain"] == {"dflash": 3, "dflow": 3}
    conditions = record["conditions"]
    assert (conditions["prompts"], conditions["seeds"], conditions["dtype"]) == (3, [0, 1], "float32")
    assert "question" not in path.read_text()
    words = " ".join(result.output.split())
    for part in ("dflow - dflash", "times as fast", "ms per token", "standard deviation", "3 of 3 the same by all"):
        assert part in words


def test_modes_that_are_none():
    """Bug: a temperature of NaN, or a misspelt rule, that decodes as something else."""
    with pytest.raises(DFlowError, match="use one or more of token, block"):
        modes_of([1.0], ["tokens"])
    for temperature in (float("nan"), float("inf"), -1.0):
        with pytest.raises(DFlowError, match="--temperature"):
            modes_of([temperature], ["token"])


def test_other_drafters_are_compared_side_by_side(target, tmp_path):
    """Bug: another folder is never decoded, its relay counts as off, or two contestants share a name."""
    drafter = tiny_drafter(target, 8)
    drafter.save_pretrained(tmp_path / "mine")
    pair = Pair(target, tiny_drafter(target, 8, relay=None), TinyTokenizer(), "tiny")
    found = eval_drafter.contestants_of(pair, None, 7, [f"mine={tmp_path}/mine"])
    assert [(one.name, one.use_relay) for one in found] == [
        ("dflash", False),
        ("mine", True),
        ("mine, relay off", False),
    ]
    assert found[1].model is found[2].model and found[1].model.fc.weight.equal(drafter.fc.weight)
    with pytest.raises(DFlowError, match="is not one of"):  # both would be called "x, relay off"
        eval_drafter.contestants_of(pair, None, 7, [f"x, relay off={tmp_path}/mine", f"x={tmp_path}/mine"])
    for wrong in ("mine", f"={tmp_path}/mine", f"dflash={tmp_path}/mine", f"plain={tmp_path}/mine", "mine="):
        with pytest.raises(DFlowError, match="give NAME=FOLDER with a name that is not one of"):
            eval_drafter.contestants_of(pair, None, 7, [wrong])


def test_another_targets_drafter_is_refused_before_decoding(target, tmp_path):
    """Bug: the first prompts are decoded, then the call ends with an error that does not name the drafter."""
    tiny_drafter(tiny_target(hidden_size=16)).save_pretrained(tmp_path / "other")
    pair = Pair(target, tiny_drafter(target), tiny_tokenizer(), "tiny")
    with pytest.raises(PairMismatchError, match=r"--other mine=.*hidden size 32"):
        eval_drafter.contestants_of(pair, None, 7, [f"mine={tmp_path}/other"])
    wrong = Pair(target, DFlowDrafter.from_pretrained(tmp_path / "other"), tiny_tokenizer(), "tiny")
    with pytest.raises(PairMismatchError, match="hidden size 32"):
        eval_drafter.contestants_of(wrong, None, 7)


@pytest.mark.parametrize("option", ["--target", "--drafter", "--other", "--autoregressive"])
def test_a_missing_folder_is_called_so(option, tmp_path, monkeypatch):
    """Bug: "Repo id must be in the form …" for a mistyped path, or minutes of loading before it."""
    monkeypatch.chdir(tmp_path)
    for loader in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    result = invoke(command, option, f"mine={MISSING}" if option == "--other" else MISSING)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"{MISSING}: there is no such folder, and it is no name on the Hub" in message


def test_a_plot_of_nothing_is_refused(tmp_path):
    """Bug: a picture without panels, which matplotlib refuses in words of its own."""
    empty = {"modes": {"T=0": {"all": {"contestants": {}}, "by_task": {}, "calibration": None}}}
    with pytest.raises(DFlowError, match="nothing to plot"):
        plot_calibration(empty, tmp_path / "plot.png")
