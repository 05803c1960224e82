"""The examples that the tiny pair runs, in this process and without network: they show what they promise."""

import ast
import importlib
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_use_public_names_alone(path):
    """Bug: an example that breaks when something inside the package moves."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_dflow"):
            public = importlib.import_module(str(node.module)).__all__
            assert {alias.name for alias in node.names} <= set(public), f"{node.module} has {public}"
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("hf_dflow.") for alias in node.names)


def test_batch(run_example):
    """Bug: prompts padded on the right, or rows that all tell the same counts."""
    printed = run_example("batch.py", "--tiny", "--max-new-tokens", "24")
    lengths = [
        [int(n) for n in lengths_text.split(", ")] for lengths_text in re.findall(r"step by step: \[(.*)\]", printed)
    ]
    assert len(lengths) == 3 and len(set(map(tuple, lengths))) > 1
    assert all(max(row) >= 2 for row in lengths), "a prompt that was shifted or padded wrongly has no draft accepted"
    assert "all rows: " in printed and "for 72 tokens" in printed
    alone = run_example("batch.py", "--tiny", "--max-new-tokens", "24", "airports ZRE MSL :")
    assert alone.split("\n")[1] in printed


def test_compare_strategies(run_example):
    """Bug: a way is left out, forwards are counted for the wrong one, or a winner that nobody measured."""
    printed = run_example("compare_strategies.py", "--tiny", "--max-new-tokens", "24", "airports ZRE MSL :")
    rows = re.findall(r"^(plain|prompt lookup|DFlash|DFlow) +[0-9.]+ +([0-9.]+) +(\d) of 1$", printed, re.M)
    assert [(way, same) for way, _, same in rows] == [
        (way, "1") for way in ("plain", "prompt lookup", "DFlash", "DFlow")
    ]
    per_forward = {way: float(tokens) for way, tokens, _ in rows}
    assert per_forward["plain"] == 1 < per_forward["DFlash"] < per_forward["DFlow"]
    assert re.search(r"Fastest here: (plain|prompt lookup|DFlash|DFlow)\.", printed)


def test_use_published_drafter(run_example):
    """Bug: the folder is loaded instead of the name, or a drafter whose drafts nobody accepts after the export."""
    printed = run_example("use_published_drafter.py", "--tiny", "--max-new-tokens", "24")
    assert printed.startswith("somebody/tiny-DFlash-b8: blocks of 8")
    assert float(re.search(r"([0-9.]+) tokens per step", printed)[1]) > 2


def test_monitor_route(run_example):
    """Bug: a demonstration in which nothing is switched, or everything is."""
    printed = run_example("monitor_route.py", "--tiny", "--max-new-tokens", "64")
    assert re.search(r"known to the drafter: drafting, \d+ steps with drafts and [0-2] without", printed)
    without = int(re.search(r"unknown to the drafter: \w+, \d+ steps with drafts and (\d+) without", printed)[1])
    assert without > 20 and "event: " in printed and "decodes plainly" in printed
    assert 'hf_dflow_drafting{route="known to the drafter"} 1' in printed


def test_publish(run_example, tmp_path):
    """Bug: an upload that was not asked for, or a card with marks that goes out."""
    printed = run_example("publish.py", "me/mine")
    assert "model.safetensors" in printed and "custom_generate/generate.py" in printed
    assert "Dry run" in printed and "me/mine; nothing was sent" in printed
    (tmp_path / "card.md").write_text((EXAMPLES.parent / "model_cards" / "_template.md").read_text(encoding="utf-8"))
    with pytest.raises(SystemExit, match="not ready"):
        run_example("publish.py", "--card", str(tmp_path / "card.md"), "--upload")
