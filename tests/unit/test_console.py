"""What all commands share: tables at every width, whole and readable, and results that are not lost."""

import io
import json

import pytest
import typer
from rich.console import Console

from hf_dflow.console import (
    UNBOUNDED,
    ResultTable,
    print_table,
    report_console,
    writable,
    writable_folder,
    write_json,
)
from hf_dflow.errors import DFlowError

MEASURES = ["tokens/step [95%]", "accepted", "wasted", "by position", "speed-up [95%]"]
ROWS = [
    ["unknown to the drafter", "transformers_dflash", "1.84 [1.71, 1.99]", "37.3%", "62.7%", "1.00 0.90", "1.4 [1, 2]"],
    ["all", "dflow", "2.08 [1.90, 2.30]", "48.6%", "51.4%", "0.95 0.85", "1.6 [1, 3]"],
]
TABLE = ResultTable("T=1, token verification", ["task", "strategy"], MEASURES, ROWS)


def printed(width):
    out = io.StringIO()
    print_table(Console(file=out, width=width), TABLE)
    return out.getvalue()


@pytest.mark.parametrize("width", [200, 100, 80, 70, 66, 60, 40, 30])
def test_no_cell_is_cut(width):
    """Bug: "1.84 [1…" in a narrow terminal, a figure in two lines, or markup eaten out of an interval."""
    text = printed(width)
    assert all(len(line) <= width for line in text.splitlines())
    for cell in [*MEASURES, *(cell for row in ROWS for cell in row[1:])]:
        assert cell in (text if width >= 40 else " ".join(text.split())), cell
    assert "…" not in text


def test_keys_stand_in_every_part():
    """Bug: the second half of a wide table whose rows are of nobody."""
    parts = printed(80).split(" of ")
    assert len(parts) > 2 and printed(80).count("transformers_dflash") == len(parts) - 1
    assert printed(200).count("transformers_dflash") == 1
    narrow = printed(40)  # a block of lines for each row
    assert "unknown to the drafter, transformers_dflash" in " ".join(narrow.split())
    assert "  wasted: 62.7%" in narrow and "  wasted: 51.4%" in narrow


def test_a_file_has_no_width(monkeypatch):
    """Bug: the 80 columns of a terminal that is not there, in a log or a pipe."""
    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = report_console()
    assert console.width == UNBOUNDED
    print_table(console, TABLE)
    text = console.file.getvalue()
    line = next(line for line in text.splitlines() if "transformers_dflash" in line)
    assert all(cell in line for cell in ROWS[0])
    assert max(map(len, text.splitlines())) < 250  # as wide as it needs, no more


def test_results_that_cannot_be_written_are_found_out_first(tmp_path, monkeypatch, capsys):
    """Bug: an hour of measuring, and then no folder, no right to write, or a full disk: all of it lost."""
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(typer.BadParameter, match="name a file in an existing folder"):
            writable(path)
    with pytest.raises(typer.BadParameter, match="is no folder"):
        writable_folder(file / "inside")
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b" and not (tmp_path / "a").exists()
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *args: False)
        for check, path in ((writable, file), (writable, tmp_path / "new"), (writable_folder, tmp_path)):
            with pytest.raises(typer.BadParameter, match="may not be written"):
                check(path)
    with pytest.raises(DFlowError, match="printed instead"):
        write_json(tmp_path / "gone" / "x.json", {"figure": 3})
    assert json.loads(capsys.readouterr().out) == {"figure": 3}
