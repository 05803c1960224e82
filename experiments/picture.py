"""Draw how a text is decoded: drafted, accepted, rejected and relayed tokens in colour, from a real call.

`python -m experiments.picture docs/images/decode.svg` decodes one prompt with the bundled tiny pair.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_dflow
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.console import writable

PROMPT = "airports ZRE MSL RKD ZAD MLB DEM :"
NEW_TOKENS = 52

WIDTH, MARGIN = 720, 16
CHARACTER = 7.2  # width of a monospace character at the font size of the tokens
LINE, CHIP, PADDING, GAP = 27, 20, 5, 4  # heights of a line and of a token's box; space in and between the boxes

STYLE = """
.card { fill: #ffffff; stroke: #d0d7de; }
.note { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a; }
.title { font: 600 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
.token { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #24292f; }
.accepted { fill: #c6efce; } .rejected { fill: #ffd7d5; } .bonus { fill: #ffe9a8; } .behind { fill: #cfe4ff; }
.plain { fill: #eaeef2; }
.strike { stroke: #b3261e; stroke-width: 1.3; }
.relayed { fill: none; stroke: #0969da; stroke-width: 2; }
.arrow { stroke: #0969da; stroke-width: 1.5; fill: none; } .head { fill: #0969da; }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d; } .note { fill: #9ea7b3; } .title, .token { fill: #e6edf3; }
.accepted { fill: #1f6f3a; } .rejected { fill: #7d2b2b; } .bonus { fill: #7a5d00; } .behind { fill: #164a8a; }
.plain { fill: #30363d; } .strike { stroke: #ffb3ad; } .relayed, .arrow { stroke: #58a6ff; } .head { fill: #58a6ff; }
}
"""


@dataclass(frozen=True)
class Step:
    """One drafting step, in words.

    Args:
        drafts (`list[str]`): The verified drafts.
        accepted (`int`): How many of them were accepted.
        target_tokens (`list[str]`): The target's most likely token after the anchor and after each draft. The entry
            behind the accepted drafts is the bonus token; those behind it were computed on a rejected draft.
        num_relayed (`int`): How many of the drafts come from a slot that the relay fed.
    """

    drafts: list[str]
    accepted: int
    target_tokens: list[str]
    num_relayed: int

    @property
    def bonus(self) -> str:
        return self.target_tokens[self.accepted]

    @property
    def emitted(self) -> list[str]:
        return [*self.drafts[: self.accepted], self.bonus]


class StepRecorder(hf_dflow.AcceptanceProcessor):
    """Changes nothing and keeps every step."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.steps: list[Step] = []
        self._num_relayed = 0

    def __deepcopy__(self, memo) -> "StepRecorder":
        """A call copies its processors for each row; this one is read after the call."""
        return self

    def adjust_draft_logits(self, draft_logits, feedback):
        self._num_relayed = 0 if feedback is None else int(feedback.is_fed.sum())
        return draft_logits

    def observe(self, draft, verification) -> None:
        if not draft.token_ids.shape[1]:
            return
        self.steps.append(
            Step(
                drafts=self.words(draft.token_ids[0]),
                accepted=int(verification.accepted_length),
                target_tokens=self.words(verification.raw_logits[0].argmax(dim=-1)),
                num_relayed=min(self._num_relayed, draft.token_ids.shape[1]),
            )
        )
        self._num_relayed = 0

    def words(self, token_ids: torch.Tensor) -> list[str]:
        """Each token as text."""
        return [self.tokenizer.decode([token]).strip() or "·" for token in token_ids.tolist()]


def decode_steps(prompt: str = PROMPT, max_new_tokens: int = NEW_TOKENS) -> tuple[str, list[Step]]:
    """Decode greedily with the tiny pair: the first token, which the prefill gives, and the steps after it."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    recorder = StepRecorder(pair.tokenizer)
    inputs = pair.encode(prompt)
    config = hf_dflow.DFlowGenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, acceptance_processors=[recorder]
    )
    target: Any = pair.target
    output = target.generate(**inputs, assistant_model=pair.drafter, generation_config=config)
    return recorder.words(output[0, inputs["input_ids"].shape[1] :])[0], recorder.steps


def clearest_relay(steps: list[Step]) -> int:
    """The step whose rejected rows helped the next one most: accepted drafts that the target had already computed
    there, and that the step itself had drafted otherwise."""

    def rescued(index: int) -> int:
        step, following = steps[index], steps[index + 1]
        first_slot = step.accepted + 1  # the next block's first slot, counted from this step's anchor
        return sum(
            following.drafts[slot] == step.target_tokens[first_slot + slot]
            and (first_slot + slot >= len(step.drafts) or step.drafts[first_slot + slot] != following.drafts[slot])
            for slot in range(min(following.accepted, following.num_relayed))
        )

    return max(range(len(steps) - 1), key=rescued)


class Drawing:
    """SVG elements, from top to bottom."""

    def __init__(self):
        self.elements: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "note", anchor: str = "start") -> None:
        self.elements.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def token(
        self, x: float, y: float, word: str, kind: str, *, is_relayed: bool = False, width: float | None = None
    ) -> float:
        """One token in its box; returns where the next one begins."""
        length = len(word) * CHARACTER
        width = width or length + 2 * PADDING
        self.elements.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CHIP}" rx="4"/>'
        )
        start = x + (width - length) / 2
        self.elements.append(
            f'<text class="token" x="{start:.1f}" y="{y + 14.5:.1f}" textLength="{length:.1f}" '
            f'lengthAdjust="spacingAndGlyphs">{escape(word)}</text>'
        )
        if kind == "rejected":
            middle = y + CHIP / 2 + 0.5
            self.elements.append(
                f'<line class="strike" x1="{start:.1f}" y1="{middle}" x2="{start + length:.1f}" y2="{middle}"/>'
            )
        if is_relayed:
            self.elements.append(
                f'<rect class="relayed" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CHIP}" rx="4"/>'
            )
        return x + width + GAP

    def arrow(self, x: float, top: float, bottom: float) -> None:
        self.elements.append(f'<path class="arrow" d="M{x:.1f} {top} V{bottom - 5}"/>')
        self.elements.append(f'<path class="head" d="M{x - 4:.1f} {bottom - 6} h8 l-4 6 z"/>')

    def svg(self, height: float, title: str, description: str) -> str:
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img"><title>{escape(title)}</title><desc>{escape(description)}</desc><style>{STYLE}</style>'
        )
        return "\n".join([head, card, *self.elements, "</svg>", ""])


def draw(first: str, steps: list[Step], prompt: str = PROMPT) -> str:
    """The whole picture as SVG: every step in a line, and under it the step whose relay shows most."""
    drawing = Drawing()
    closer = clearest_relay(steps)
    y = _draw_legend(drawing, MARGIN)
    y = _draw_steps(drawing, y, first, steps)
    height = _draw_relay(drawing, y + 10, steps, closer)
    emitted = sum(len(step.emitted) for step in steps)
    description = (
        f"Prompt '{prompt}', greedy, float32, the bundled tiny pair: {emitted} tokens in {len(steps)} steps. "
        "Made by python -m experiments.picture."
    )
    return drawing.svg(height, "A text decoded with DFlow, step by step", description)


def _draw_legend(drawing: Drawing, y: float) -> float:
    lines = (
        (("accepted", "accepted", "draft"), ("rejected", "rejected", "draft"), ("bonus", "target", "its own token")),
        (
            ("behind", "computed", "by the target after a rejection; DFlash discards it"),
            ("plain", "relayed", "this slot was given such states"),
        ),
    )
    for line in lines:
        x: float = MARGIN
        for kind, word, meaning in line:
            x = drawing.token(x, y, word, kind, is_relayed=word == "relayed")
            drawing.text(x, y, meaning)
            x += 6.2 * len(meaning) + 12
        y += LINE
    return y + 10


def _draw_steps(drawing: Drawing, y: float, first: str, steps: list[Step]) -> float:
    drawing.text(MARGIN, y, "prefill")
    drawing.token(MARGIN + 56, y, first, "bonus")
    for number, step in enumerate(steps, start=1):
        y += LINE
        drawing.text(MARGIN, y, f"step {number}")
        x: float = MARGIN + 56
        for slot, word in enumerate(step.drafts):
            kind = "accepted" if slot < step.accepted else "rejected"
            if slot == step.accepted:
                x = drawing.token(x, y, step.bonus, "bonus")
            x = drawing.token(x, y, word, kind, is_relayed=slot < step.num_relayed)
        if step.accepted == len(step.drafts):
            drawing.token(x, y, step.bonus, "bonus")
    return y + LINE


def _draw_relay(drawing: Drawing, y: float, steps: list[Step], index: int) -> float:
    """Two steps, one column for each position of the text."""
    step, following = steps[index], steps[index + 1]
    first_slot = step.accepted + 1  # column of the next block's first slot; column 0 follows this step's anchor
    columns = max(len(step.target_tokens), first_slot + len(following.drafts))
    rows = [dict(enumerate(step.drafts)), dict(enumerate(step.target_tokens))]
    rows.append({first_slot - 1: step.bonus} | {first_slot + slot: word for slot, word in enumerate(following.drafts)})
    widths = [max(len(row.get(column, "")) for row in rows) * CHARACTER + 2 * PADDING for column in range(columns)]
    label = 92
    starts = [MARGIN + label + sum(widths[:column]) + GAP * column for column in range(columns)]

    drawing.text(MARGIN, y, f"Steps {index + 1} and {index + 2}, by position in the text", "title")
    tops = [y + LINE, y + 2 * LINE, y + 3 * LINE + 14]
    labels = (f"step {index + 1} drafts", "target", f"step {index + 2} drafts")
    for top, words in zip(tops, labels, strict=True):
        drawing.text(MARGIN, top, words)
    for column, word in rows[0].items():
        kind = "accepted" if column < step.accepted else "rejected"
        drawing.token(starts[column], tops[0], word, kind, width=widths[column])
    for column, word in rows[1].items():
        kind = "plain" if column < step.accepted else "bonus" if column == step.accepted else "behind"
        drawing.token(starts[column], tops[1], word, kind, width=widths[column])
    drawing.token(starts[first_slot - 1], tops[2], step.bonus, "bonus", width=widths[first_slot - 1])
    for slot, word in enumerate(following.drafts):
        column, is_relayed = first_slot + slot, slot < following.num_relayed
        kind = "accepted" if slot < following.accepted else "rejected"
        drawing.token(starts[column], tops[2], word, kind, is_relayed=is_relayed, width=widths[column])
        if is_relayed:
            drawing.arrow(starts[column] + widths[column] / 2, tops[1] + CHIP + 2, tops[2] - 2)
    return tops[2] + CHIP + MARGIN


def main(
    output: Annotated[Path, typer.Argument(help="SVG file to write.", callback=writable)],
    prompt: Annotated[str, typer.Option(help="What the tiny target is asked.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = NEW_TOKENS,
) -> None:
    """Decode a prompt with the bundled tiny pair, and draw its steps."""
    first, steps = decode_steps(prompt, max_new_tokens)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(draw(first, steps, prompt), encoding="utf-8")
    typer.echo(f"{output}: {sum(len(step.emitted) for step in steps)} tokens in {len(steps)} steps")


if __name__ == "__main__":
    typer.run(main)
