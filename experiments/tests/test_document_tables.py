"""Tables of documents are made from committed records."""

import re
from collections import Counter

import pytest

from experiments.common import ROOT
from experiments.tables import BLOCK, TABLES, documents, main, render
from hf_dflow.errors import DFlowError

DOCUMENTS = documents([ROOT / "README.md", ROOT / "docs", ROOT / "model_cards"])
MEASURED = re.compile(r"^\|.*\d \[[-+\d., %]+\] \|", re.MULTILINE)  # a cell with an interval
UNUSED = {"headline"}  # until its runs are complete


def test_making_the_tables_anew_changes_nothing():
    """Bug: a figure that was typed, or not made again after a new measurement."""
    used = Counter(block["name"] for path in DOCUMENTS for block in BLOCK.finditer(path.read_text(encoding="utf-8")))
    assert set(TABLES) - UNUSED <= set(used), "a table that no document prints"
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert render(text) == text, f"{path}: run `python -m experiments.tables docs README.md model_cards`"
        typed = MEASURED.search(BLOCK.sub("", text))
        assert typed is None, f"{path} has a typed table of measured figures: {typed[0]}"


def test_only_marked_tables_change(tmp_path):
    """Bug: text around a table lost, two tables taken for one, or an unknown name left as it was."""
    tables = {"one": lambda: "| 1 |", "two": lambda: "| 2 |"}
    block = "<!-- table: {} -->\n{}<!-- end table -->"
    text = f"before\n{block.format('one', 'old')}\n".replace("old<", "old\n<") + f"between\n{block.format('two', '')}\n"
    made = render(text, tables)
    assert made == (
        "before\n<!-- table: one -->\n\n| 1 |\n\n<!-- end table -->\n"
        "between\n<!-- table: two -->\n\n| 2 |\n\n<!-- end table -->\n"
    )
    assert render(made, tables) == made and render("no table", tables) == "no table"
    for wrong in ("<!-- table: one -->\nno end\n", "<!-- end table -->\n", made.replace("<!-- end table -->\nb", "b")):
        with pytest.raises(DFlowError, match="lacks its begin or end"):
            render(wrong, tables)
    (tmp_path / "page.md").write_text(block.format("three", ""))
    with pytest.raises(DFlowError, match=r"page\.md: table 'three' is unknown; use one of strategies"):
        main([tmp_path])
    with pytest.raises(DFlowError, match="no such file or folder"):
        main([tmp_path / "gone.md"])
