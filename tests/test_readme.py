"""The README's commands are those of the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_figure_is_left_open():
    """Bug: a placeholder shipped in place of a measured number."""
    for path in (ROOT / "README.md", *(ROOT / "model_cards").glob("*.md")):
        assert "TODO" not in path.read_text(encoding="utf-8"), path.name


def test_the_commands_exist():
    """Bug: the two commands a stranger tries first are not there."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test", "bench-loop"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
