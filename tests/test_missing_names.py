"""A name that is no folder and no repository's: said in those words, before anything is loaded or asked for."""

import pytest
import typer
from kit import tiny_drafter, tiny_target, tiny_tokenizer
from typer.testing import CliRunner

from experiments import eval_drafter
from hf_dflow import DFlowDrafter, PairMismatchError
from hf_dflow.bench.runners import Pair
from hf_dflow.checkpoints.names import check_name
from hf_dflow.cli import app
from hf_dflow.console import errors_in_words

MISSING = "runs/first/drafter"
NOT_HERE = f"{MISSING}: there is no such folder, and it is no name on the Hub either"
COMMANDS = {
    "check, target": ["check", "--target", MISSING],
    "check, drafter": ["check", "--drafter", MISSING],
    "probe, target": ["probe", "--target", MISSING],
    "demo, drafter": ["demo", "--drafter", MISSING],
    "info": ["info", MISSING],
    "export": ["export", MISSING, "OUTPUT", "--to", "dflash"],
    "card": ["card", "new", MISSING],
    "data, target": ["data", MISSING, "OUTPUT.jsonl", "--prompts", "own"],
    "train, target": ["train", MISSING, "ROWS", "--output", "OUTPUT"],
    "train, from": ["train", "FOLDER", "ROWS", "--output", "OUTPUT", "--from", MISSING],
    "evaluation, target": ["eval", "--target", MISSING],
    "evaluation, drafter": ["eval", "--drafter", MISSING],
    "evaluation, other": ["eval", "--other", f"mine={MISSING}"],
    "evaluation, classic": ["eval", "--autoregressive", MISSING],
}
evaluation = typer.Typer()
evaluation.command()(errors_in_words()(eval_drafter.main))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_folder_is_called_so(name, tmp_path, monkeypatch):
    """Bug: "Repo id must be in the form …" for a mistyped path, or minutes of loading before it."""
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}\n')
    places = {"OUTPUT": "output", "OUTPUT.jsonl": "output.jsonl", "ROWS": "rows.jsonl", "FOLDER": "."}
    monkeypatch.chdir(tmp_path)
    for loader in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    first, *rest = (places.get(word, word) for word in COMMANDS[name])
    result = CliRunner().invoke(evaluation if first == "eval" else app, rest if first == "eval" else [first, *rest])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and NOT_HERE in said, (
        result.output,
        result.exception,
    )
    assert "Repo id" not in said


def test_a_file_and_names_that_may_exist(tmp_path, monkeypatch):
    """Bug: a file called missing, or a folder, a bundled drafter or a repository that is refused."""
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(OSError, match="is a file, not a folder"):
        check_name(file)
    for name in (tmp_path, "smollm2-135m-instruct-b8", "gpt2", "Qwen/Qwen3-8B"):
        check_name(name)
    for name in ("a/b/c", "/a", "a b/c", "", "org/-name"):
        with pytest.raises(OSError, match="no name on the Hub"):
            check_name(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"run/drafter: there is no such folder here\. As a name on the Hub: "):
        DFlowDrafter.from_pretrained("run/drafter", local_files_only=True)


def test_another_targets_drafter_is_refused_before_decoding(tmp_path):
    """Bug: the first prompts are decoded, then the call ends with an error that does not name the drafter."""
    target = tiny_target()
    tiny_drafter(tiny_target(hidden_size=16)).save_pretrained(tmp_path / "other")
    pair = Pair(target, tiny_drafter(target), tiny_tokenizer(), "tiny")
    with pytest.raises(PairMismatchError, match=r"--other mine=.*hidden size 32"):
        eval_drafter.contestants_of(pair, None, 7, [f"mine={tmp_path}/other"])
    wrong = Pair(target, DFlowDrafter.from_pretrained(tmp_path / "other"), tiny_tokenizer(), "tiny")
    with pytest.raises(PairMismatchError, match="hidden size 32"):
        eval_drafter.contestants_of(wrong, None, 7)
