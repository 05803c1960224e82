"""The code blocks that documents mark as runnable do run."""

import pytest
from block_runner import run_python, run_shell, runnable
from documents import RUNNABLE

import hf_dflow
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

PAGES = runnable(RUNNABLE)


@pytest.fixture(scope="module")
def given():
    """What pages take as given: the names that the README's lines make."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    inputs = pair.encode("airports ZRE MSL :")
    return {
        "hf_dflow": hf_dflow,
        "target": pair.target,
        "drafter": pair.drafter,
        "tokenizer": pair.tokenizer,
        "inputs": inputs,
    }


@pytest.mark.parametrize("document", [name for name, page in PAGES.items() if any(b.language for b in page)])
def test_python_blocks(document, given, capsys):
    """Bug: lines that a reader copies end in a traceback."""
    names = run_python(PAGES[document], given)
    assert capsys.readouterr().out
    if document == "README.md":
        assert names["out"].shape[1] > names["inputs"]["input_ids"].shape[1]


@pytest.mark.parametrize("document", [name for name, page in PAGES.items() if any(not b.language for b in page)])
def test_shell_blocks(document, tmp_path):
    """Bug: a command that a reader copies is refused, or needs the network."""
    assert run_shell(PAGES[document], tmp_path)


def test_most_pages_are_run():
    """Bug: the markers are lost, and nothing runs any more."""
    assert {"README.md", "docs/index.md", "docs/options.md", "docs/batches.md", "docs/monitor.md"} <= set(PAGES)
