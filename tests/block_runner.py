"""Runs the code blocks that documents mark as runnable, offline and with the tiny pair."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from documents import DOCUMENTS, ROOT, Block, blocks, name_of
from typer.testing import CliRunner

from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.cli import app

# Documents name models of the Hub; here the tiny pair takes their place.
STAND_INS = {
    "Qwen/Qwen3-8B": str(TINY_TARGET),
    "z-lab/Qwen3-8B-DFlash-b16": str(TINY_DRAFTER),
}
SHELL_SYNTAX = re.compile(r"[|<>&;$`]")


def runnable(marker: str) -> dict[str, list[Block]]:
    """Document -> its blocks with this marker."""
    found = {name_of(document): [b for b in blocks(document) if b.marker == marker] for document in DOCUMENTS}
    return {document: marked for document, marked in found.items() if marked}


def run_python(page: list[Block], names: dict) -> dict:
    """Run a page's Python blocks one after the other, with `names` given; returns the names at the end."""
    names = {"__name__": "__main__", **names}
    for block in page:
        if block.language == "python":
            code = re.sub(r'"([\w./-]+)"', lambda match: f'"{STAND_INS.get(match[1], match[1])}"', block.code)
            exec(compile("\n" * (block.line - 1) + code, block.document, "exec"), names)
    return names


def run_shell(page: list[Block], folder: Path) -> str:
    """Run a page's shell blocks in `folder`, where the repository's own folders can be seen; returns what was printed.

    `hf-dflow` runs in this process, which spares each command the seconds of importing torch.
    """
    for path in ROOT.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    printed = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    before = Path.cwd()
    os.chdir(folder)
    try:
        for block in page:
            for line in block.commands if not block.language else ():
                if line.startswith("hf-dflow ") and not SHELL_SYNTAX.search(line):
                    result = CliRunner().invoke(app, shlex.split(line)[1:])
                    code, output = result.exit_code, result.output
                else:
                    done = subprocess.run(
                        ["bash", "-euo", "pipefail", "-c", line], env=environment, capture_output=True, text=True
                    )
                    code, output = done.returncode, done.stdout + done.stderr
                assert code == 0, f"{block.document}, line {block.line}: {line} ended with {code}:\n{output[-2000:]}"
                printed.append(output)
    finally:
        os.chdir(before)
    return "\n".join(printed)
