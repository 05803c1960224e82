"""Users' files and others' texts: read in UTF-8 or refused in words, and harmless on a terminal."""

import codecs
import gzip
import io
import re
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

import hf_dflow.console
from hf_dflow import DFlowError, cli, logs
from hf_dflow.bench import workloads
from hf_dflow.bench.report import read_record
from hf_dflow.console import ResultTable, print_table, report_console
from hf_dflow.drafter_commands import _read_card
from hf_dflow.training import prompts as training
from hf_dflow.training.config import TrainingConfig
from hf_dflow.training.data import read_rows

TITLE, CLEAR = "\x1b]0;owned\x07", "\x9b2J"  # change a terminal's title; clear it, in one byte of Latin-1
ROW = '{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5, 6]}\n'
READERS = {
    "demo, check, probe, calibrate: --prompts": ("p.json", workloads.read_prompts, '{"chat": ["café"]}\n'),
    "bench: --jsonl": ("p.jsonl", workloads.jsonl_prompts, '{"prompt": "a"}\n{"prompt": "café"}\n'),
    "data: .jsonl": ("p.jsonl", training.read_prompts, '{"prompt": "a"}\n{"prompt": "café"}\n'),
    "data: .txt": ("p.txt", training.read_prompts, "a\ncafé\n"),
    "train: rows": ("rows.jsonl", read_rows, ROW + ROW.replace("{", '{"task": "é", ', 1)),
    "train: --config": ("run.json", TrainingConfig.from_json, '{"stages":\n [{"updates": 3}], "é": 1}\n'),
    "bench report": ("r.json", read_record, '{"modes": {},\n"é": 1}\n'),
    "card check": ("README.md", _read_card, "---\ncafé\n"),
}


def result_of(read, path):
    """What is read, or the words of a refusal that has nothing to do with the encoding."""
    try:
        return repr(read(path))
    except DFlowError as error:
        return str(error)


@pytest.mark.parametrize("case", READERS)
def test_a_byte_order_mark_changes_nothing(case, tmp_path):
    """Bug: a file saved by Notepad is no JSON, or its first prompt begins with U+FEFF."""
    name, read, text = READERS[case]
    path = tmp_path / name
    path.write_bytes(text.encode())
    without = result_of(read, path)
    path.write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
    assert "ufeff" not in without and result_of(read, path).replace("\\r", "").replace("\r", "") == without


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("case", READERS)
def test_another_encoding_is_refused_with_file_line_and_remedy(case, encoding, tmp_path):
    """Bug: "'utf-8' codec can't decode byte 0xe9 in position 71": of which file, where, and what now?"""
    name, read, text = READERS[case]
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DFlowError) as refusal:
        read(path)
    line = text[: text.index("é")].count("\n") + 1 if encoding == "cp1252" else r"\d"
    assert re.match(rf"{re.escape(str(path))}, line {line}: .*; save the file as UTF-8", str(refusal.value))


def test_compressed_rows_are_refused_by_line(tmp_path):
    """Bug: a damaged archive and another encoding have one message."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress((ROW + "é\n").encode("cp1252")))
    with pytest.raises(DFlowError, match=r"line 2: .*byte 0xe9"):
        read_rows(path)


def test_separators_within_a_prompt_are_no_line_ends(tmp_path):
    """Bug: U+2028, which JSON may hold as it is, cuts a prompt in two."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85"}\n', encoding="utf-8")
    assert [prompt.text for prompt in workloads.jsonl_prompts(path)] == ["one\u2028two\x85"]


def test_no_text_commands_a_terminal():
    """Bug: a prompt or an answer changes the terminal's title, hides what stands before, or reverses a line."""
    from hf_dflow.text import visible

    text = f"a{TITLE}b{CLEAR}c\rd\u202ee\udce9f\x7f\tg\r\nh"
    shown = "a\\x1b]0;owned\\x07b\\x9b2Jc\\rd\\u202ee\\udce9f\\x7f\tg\nh"
    assert visible(text) == shown and visible(shown) == shown


def test_consoles_emit_no_escapes_but_their_own(monkeypatch):
    """Bug: rich strips the bell and leaves the escape; texts, rules, titles and cells each come through another way."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = report_console()
    text = f"a{TITLE}b{CLEAR}\u202e\udce9"
    console.print(Text(text, style="bold"), text)
    console.rule(text)
    print_table(console, ResultTable(TITLE, [f"k{CLEAR}"], ["m"], [[TITLE, CLEAR]]))
    left = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own styles
    assert "\x1b[1m" in out.getvalue() and "owned" in left
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\udce9]", left)


def test_tables_stay_aligned_around_escapes(monkeypatch):
    """Bug: cells are measured before their control characters are spelt out."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    print_table(report_console(), ResultTable("", ["k"], ["m"], [[TITLE, "1"], ["short", "2"]]))
    assert "\x1b" not in out.getvalue()
    assert len({len(line.rstrip()) for line in out.getvalue().splitlines() if line.rstrip().endswith(("1", "2"))}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--prompts", f"/nowhere/{TITLE}.json"],
        ["plan", "--target", TITLE, "--drafter", "d", "--gpu-memory", "1"],
        ["plan", "--target", "t", "--drafter", "d", "--gpu-memory", CLEAR],
        [f"no{TITLE}"],
        ["demo", f"--no{TITLE}"],
        ["demo", "--json", f"/nowhere/{TITLE}/x.json"],
        ["card", "check", f"{TITLE}.md"],
        ["train", "t", f"{TITLE}.jsonl", "--output", "o", "--config", TITLE],
    ],
    ids=repr,
)
def test_errors_quote_arguments_harmlessly(arguments):
    """Bug: a file's name reaches the terminal raw by way of the error about it."""
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2, result.output
    assert not re.search("[\x07\x1b\x9b]", result.output + result.stderr)


def test_warnings_quote_names_harmlessly(caplog):
    """Bug: the name of a model in a warning commands the terminal."""
    logs.get_logger("hf_dflow.test_texts").warning("made for %s", TITLE)
    assert "made for \\x1b]0" in caplog.text and TITLE not in caplog.text


def test_commands_print_through_the_console_only():
    """Bug: a new command that prints with typer.echo, print or rich's own console, raw."""
    raw = re.compile(r"(?<![\w.])(?:typer\.echo|print|Console)\(")
    package = Path(hf_dflow.console.__file__).parent
    paths = [path for path in package.rglob("*.py") if path.name not in ("console.py", "smollm2.py")]
    found = {path.name: raw.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert not {name: calls for name, calls in found.items() if calls}
