"""Documents name what exists: links, files, modules, commands, options and tests."""

import importlib
import importlib.util
import re

import pytest
import typer
import yaml
from documents import DOCUMENTS, ROOT, anchors, blocks, inline_code, name_of, prose
from typer.main import get_command

import hf_dflow
from hf_dflow.cli import app

TOP_FOLDERS = ("hf_dflow", "experiments", "tests", "examples", "docs", "model_cards")
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def shell_commands(document):
    """Every command line of a document, in blocks and in the text."""
    lines = [line for block in blocks(document) if not block.language for line in block.commands]
    return lines + [code for code in inline_code(document) if code.startswith(("hf-dflow ", "python -m ", "make "))]


@each_document
def test_links_lead_somewhere(document):
    """Bug: a page or a heading was renamed, and others still point at it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        place = (document.parent / path).resolve() if path else document
        assert place.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(place), f"{link}: {place.name} has {sorted(anchors(place))}"


@each_document
def test_files_that_are_named_exist(document):
    """Bug: a reader looks for a file that was moved."""
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what there was")
    tests = {path.name for path in ROOT.glob("*/**/test_*.py")}
    for code in inline_code(document):
        for word in code.split():
            if re.fullmatch(r"test_\w+\.py", word):
                assert word in tests, word
            elif word.split("/")[0] in TOP_FOLDERS and re.fullmatch(r"[\w./-]+", word) and "/" in word:
                assert (ROOT / word).exists(), word


def resolve(name):
    """The module, or the attribute of one, that a dotted name means; fails where there is none."""
    parts = name.split(".")
    module, rest = importlib.import_module(parts[0]), parts[1:]
    while rest and hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{rest[0]}"):
        module, rest = importlib.import_module(f"{module.__name__}.{rest[0]}"), rest[1:]
    for attribute in rest:
        module = getattr(module, attribute)
    return module


@each_document
def test_modules_and_names_exist(document):
    """Bug: an import path of an earlier layout."""
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what there was")
    names = set()
    for code in inline_code(document) + [block.code for block in blocks(document)]:
        names |= set(re.findall(r"(?<![\w./])(?:hf_dflow|experiments)(?:\.\w+)+(?![\w/])", code))
    for name in names - {name for name in names if name.endswith((".py", ".md"))}:
        resolve(name.removesuffix(".NAME"))


@each_document
def test_tests_that_are_named_exist(document):
    """Bug: a table of identities names a test that was renamed."""
    known = set()
    for path in ROOT.glob("*/**/test_*.py"):
        known |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))) | {path.stem}
    for name in re.findall(r"(?<![\w/])test_\w+", " ".join(inline_code(document))):
        assert any(test == name or (name.endswith("_") and test.startswith(name)) for test in known), name


@each_document
def test_commands_and_their_options_exist(document):
    """Bug: a command that the reader types is refused."""
    if document.name == "CHANGELOG.md":
        pytest.skip("it names what there was")
    root = get_command(app)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in shell_commands(document):
        for part in re.split(r"[|;]|&&", re.sub(r"\$\((.*?)\)", r"; \1 ;", line)):
            words = part.replace("…", "").split()
            if words[:1] == ["make"] and len(words) > 1:
                assert re.search(rf"^{words[1]}:", makefile, re.M), part
            elif words[:1] == ["hf-dflow"]:
                check_command(root, words[1:])
            elif words[:2] == ["python", "-m"] and words[2].startswith("hf_dflow"):
                resolve(words[2])
            elif words[:2] == ["python", "-m"] and re.fullmatch(r"experiments\.[a-z_]+", words[2]):
                check_command(experiment_command(words[2]), words[3:])


def experiment_command(name):
    """The command line of `python -m name`."""
    module = resolve(name)
    if hasattr(module, "__path__"):
        module = resolve(f"{name}.__main__")
    if hasattr(module, "app"):
        return get_command(module.app)
    single = typer.Typer()
    single.command()(module.main)
    return get_command(single)


def check_command(command, words):
    """Follow the subcommands, then look at each option."""
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{command.name}: no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in options, f"{command.name}: no option {word}"


def test_the_readme_is_short_and_its_tree_is_right():
    """Bug: the front door grows back, or names a folder that is gone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert "\nmake demo " in text and "\nmake test " in text
    tree = text.split("hf_dflow/           what is installed")[1].split("```")[0]
    folder = "hf_dflow/"
    inside = {"    ": ""}
    for line in filter(None, tree.splitlines()):
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        path = name if indent == 0 else folder + name if indent == 2 else inside["    "] + name
        if indent == 2:
            inside["    "] = path
        assert (ROOT / path).exists(), path


def test_every_example_is_listed():
    """Bug: an example that nobody finds."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"`examples/{path.name}`" not in page] == []


def test_every_public_name_has_its_api_entry():
    """Bug: a public class that no page describes, or one that is described and no longer public."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r'heading: "hf_dflow\.(\w+)"', text))
    errors = {name for name in hf_dflow.__all__ if name.endswith("Error")}  # the module as a whole
    assert described == set(hf_dflow.__all__) - errors - {"__version__"}
    for path, heading in re.findall(r'^::: (\S+)\n.*heading: "(?:hf_dflow\.)?(\w+)"', text, re.M):
        assert path.endswith(f".{heading}")
        resolve(path)


def test_every_page_is_in_the_menu():
    """Bug: a page that can only be reached by a search. mkdocs checks the other way round."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text)["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages


@each_document
def test_no_figure_is_left_open(document):
    """Bug: a placeholder shipped in place of a measured number."""
    assert not re.search(r"TODO|FIXME|XXX", document.read_text(encoding="utf-8"))


def test_the_map_of_modules_leads_to_modules():
    """Bug: the changelog sends a reader to a path that has moved on, or says that an unmoved one is gone."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("| old | new |")[1]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.M)
    assert len(rows) > 50
    for old, new in rows:
        is_module = old == old.lower()  # a class may still be imported where it once stood
        if is_module and "(" not in new:
            with pytest.raises((ImportError, AttributeError)):
                resolve(old)
        for name in re.findall(r"`((?:hf_dflow|experiments)[\w.]+)`", new.split(" (")[0]):
            resolve(name)
