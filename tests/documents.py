"""The documents of the repository: their links, the names they mention, and their code blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "experiments/README.md", "hf_dflow/kernels/MATH.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "model_cards").glob("*.md") if not path.is_symlink()),
]
FENCE = re.compile(
    r"(?:^<!-- (?P<marker>runnable[a-z ]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
RUNNABLE, NIGHTLY = "runnable", "runnable nightly"


def name_of(document: Path) -> str:
    """The document's path in the repository."""
    return document.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A code block. `<!-- runnable -->` or `<!-- runnable nightly -->` above it has the tests run it."""

    document: str
    line: int
    language: str  # "" for shell
    code: str
    marker: str | None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, continued ones joined, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        stripped = (re.sub(r"\s+#.*$", "", line).strip() for line in lines)
        return [line for line in stripped if line and not line.startswith("#")]


def blocks(document: Path) -> Iterator[Block]:
    """All code blocks of a document."""
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(name_of(document), line, match["language"], match["code"], match["marker"])


def prose(document: Path) -> str:
    """A document without its code blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def inline_code(document: Path) -> list[str]:
    """What stands between backticks in the prose, line breaks read as blanks."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(document))]


def anchors(document: Path) -> set[str]:
    """What `#…` may follow the document's name in a link, as GitHub and the site make it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
