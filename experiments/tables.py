"""Tables of a document that are made from records beside it, so that no figure is typed.

A table stands between `<!-- bench: PATH -->` and `<!-- /bench -->`, PATH being relative to the document.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflow.errors import DFlowError

BLOCK = re.compile(r"(<!-- bench: (?P<path>\S+) -->\n)(?P<table>.*?)(<!-- /bench -->)", re.DOTALL)
FIGURES = "tokens per step", "accepted", "std", "forwards per token", "p50, s", "p95, s", "tokens/s"
HEADINGS = ("mode", "strategy", *FIGURES)


def render(text: str, folder: Path) -> str:
    """`text` with every table made anew.

    Raises:
        DFlowError: There is no such table, or a record that it names cannot be read.
    """
    if not BLOCK.search(text):
        raise DFlowError("no table to fill: put <!-- bench: PATH.json --> and <!-- /bench --> on lines of their own")

    def fill(match: re.Match) -> str:
        path = folder / match["path"]
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return f"{match[1]}{as_markdown(record)}\n{match[4]}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DFlowError(f"{path}: no record of `hf-dflow bench run` ({error!r})") from error

    return BLOCK.sub(fill, text)


def as_markdown(record: dict[str, Any]) -> str:
    """The table over all tasks, and one line of conditions; figures by task are in the record and in the report."""
    lines = ["", "| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for mode, found in record["modes"].items():
        for name, times in found["latency"].items():
            cells = [mode, name, *_cells(found["all"]["contestants"].get(name), times)]
            lines.append("| " + " | ".join(cells) + " |")
        for name, reason in found.get("not_run", {}).items():
            cells = [mode, name, f"not run: {reason}", *["–"] * (len(FIGURES) - 1)]
            lines.append("| " + " | ".join(cells) + " |")
    said = record["conditions"]
    same = record["identity"]
    at_a_time = ("one" if said["concurrency"] == 1 else f"batches of {said['concurrency']}") + " at a time"
    texts = ", ".join(f"{name} {count}" for name, count in same["identical_to_plain"].items())
    lines += [
        "",
        f"{said['target']}, drafter {said['drafter']} with blocks of {said['block_size']}; {said['prompts']} prompts, "
        f"{said['output_tokens']} new tokens at most, {said['dtype']}, {said['threads']} threads, {at_a_time}; "
        f"{said['measuring']}. Greedy texts equal to the target's own, of {same['compared_with_plain']}: {texts}.",
        "",
    ]
    return "\n".join(lines)


def _cells(counts: dict[str, Any] | None, times: dict[str, Any]) -> list[str]:
    drafted = ["1", "–", "–"]
    if counts is not None:
        found = counts["tokens_per_step"]
        low, high = found["interval_95"]
        drafted = [
            f"{found['value']:.2f} [{low:.2f}, {high:.2f}]",
            f"{counts['draft_acceptance_rate']:.1%}",
            f"{counts['accepted_length_std']:.2f}",
        ]
    seconds = times["latency_seconds"]
    rest = [times["target_forwards_per_token"], seconds["p50"], seconds["p95"], times["effective_tps_with_bonus"]]
    forms = ("{:.3f}", "{:.2f}", "{:.2f}", "{:.1f}")
    return [*drafted, *(form.format(value) for form, value in zip(forms, rest, strict=True))]


def main(
    documents: Annotated[list[Path], typer.Argument(help="Markdown with <!-- bench: PATH.json --> blocks.")],
) -> None:
    """Fill the tables of documents from the records that they name."""
    for document in documents:
        document.write_text(render(document.read_text(encoding="utf-8"), document.parent), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
