"""The README's tree and commands are those of the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def listed_paths() -> set[str]:
    tree = README.split("## What is where")[1].split("```")[1]
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in filter(str.strip, tree.splitlines()):
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = "".join(folder for _, folder in folders) + name
        paths.add(path)
        if name.endswith("/"):
            folders.append((indent, name))
    return paths


def test_the_tree_names_every_module_and_no_other():
    """Bug: a reader looks for a file that was renamed, or a new module is nowhere explained."""
    listed = listed_paths()
    assert [path for path in listed if not (ROOT / path).exists()] == []
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hf_dflow").rglob("*.py")
        if path.stat().st_size and path.name != "_version.py"
    }
    assert modules - listed == set()


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
