"""Commands in processes of their own, on outputs that are not UTF-8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

ENCODINGS = ("cp1252", "ascii", "latin-1", "C")
HELP = """
import typer
from hf_dflow import cli
def paths(command, path):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, [*path, name])
for path in paths(typer.main.get_command(cli.app), []):
    cli.app([*path, "--help"], standalone_mode=False)
"""
RUN = "import sys; from hf_dflow import cli; cli.app(sys.argv[1:])"
PROMPT = "airports FYV FRT: \u4f60\u597d \x1b]0;owned\x07 \U0001f600"


def run(encoding, code, *arguments):
    """A process whose streams have `encoding`; "C" is the C locale without Python's own way out of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONUTF8"))}
    if encoding == "C":
        environment |= {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        environment.pop("PYTHONIOENCODING", None)
    else:
        environment["PYTHONIOENCODING"] = encoding
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, timeout=300)


def words_of(done):
    return done.stderr.decode(errors="replace")[-1500:]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_help_prints(encoding):
    """Bug: `plan --help` ends in UnicodeEncodeError, since its text holds an ellipsis."""
    done = run(encoding, HELP)
    assert done.returncode == 0, words_of(done)
    assert done.stdout.count(b"Usage:") > 15


@pytest.mark.parametrize("command, encoding", [("demo", "cp1252"), ("check", "C"), ("bench run", "ascii")])
def test_commands_that_decode_print(command, encoding, tmp_path):
    """Bug: everything is decoded, then `demo --tiny` ends with 2, as a line of dashes is not in cp1252."""
    prompts, record = tmp_path / "prompts.json", tmp_path / "record.json"
    prompts.write_text(json.dumps({"t\u00e2che \u4f60 \x1b[2J": [PROMPT]}), encoding="utf-8")
    tokens = "--output-tokens" if command == "bench run" else "--max-new-tokens"
    done = run(encoding, RUN, *command.split(), "--tiny", "--prompts", prompts, tokens, 4, "--json", record)
    assert done.returncode == 0, words_of(done)
    assert b"codec" not in done.stderr and b"\x1b" not in done.stdout + done.stderr
    assert json.loads(record.read_text(encoding="utf-8"))
    assert b"\\u4f60" in done.stdout  # spelt out, not lost


SEVERAL = """
import json, sys
from hf_dflow import cli
for arguments in json.loads(sys.argv[1]):
    cli.app(arguments, standalone_mode=False)
"""


def test_commands_without_decoding_print_and_write_utf8(tmp_path):
    """Bug: a table with a dash fails; a model card in the terminal's encoding, which `card check` cannot read."""
    record, page = tmp_path / "plan.json", tmp_path / "page.html"
    commands = [
        ["plan", "--target", TINY_TARGET, "--drafter", TINY_DRAFTER, "--gpu-memory", 1, "--json", record],
        ["info", TINY_DRAFTER],
        ["drafters"],
        ["bench", "report", record, "--html", page, "--allow-open", "--canary", "good \u2192 \u4f60"],
    ]
    done = run("cp1252", SEVERAL, json.dumps([list(map(str, command)) for command in commands]))
    assert done.returncode == 0, words_of(done)
    assert "\u2192 \u4f60" in page.read_text(encoding="utf-8") and b"\\u4f60" in done.stdout
    card = run("cp1252", RUN, "card", "new", TINY_DRAFTER)
    assert card.returncode == 0 and card.stdout.decode("utf-8").startswith("---"), words_of(card)


def test_no_file_is_opened_in_the_locales_encoding():
    """Bug: a file that is written in UTF-8 on one machine and in cp1252 on another."""
    pytest.importorskip("ruff")
    package = Path(__file__).parents[2] / "hf_dflow"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "PLW1514", package]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
