"""Drafters whose every proposal is scripted through the product's own interface.

A random toy drafter is never accepted, so that clipping and rollback bugs look absent. These know what the target says
alone (`follow`) and decide by absolute position what to propose. Tests import them from `kit`.
"""

import torch
from internals import watch_drafting_rows

from hf_dflow import DFlowDrafter


def _tell(drafter, rows: list[int]) -> None:
    """A drafter does not know which row is which; scripts need to, as rows that have ended leave the batch."""
    if isinstance(drafter, ScriptedDrafter):
        drafter.drafting_rows = rows


watch_drafting_rows(_tell)


class ScriptedDrafter(DFlowDrafter):
    """Runs the real forward, then lets `scripted_logits` rewrite the logits by row and absolute position.

    Row, position and step number travel in extra channels of the draft states, so that a script needs no state of its
    own between `draft_hidden` and `compute_logits`. Padding is not counted in positions.
    """

    def follow(self, sequence, prompt_length: int = 1):
        """Tell the script the whole text, as a list or a `[1, T]` tensor of ids without padding. Returns `self`."""
        return self.follow_rows([(sequence, prompt_length)])

    def follow_rows(self, texts):
        """Tell the script `(sequence, prompt_length)` of each row of a batch. Returns `self`."""
        self.sequences = [torch.as_tensor(sequence).flatten().tolist() for sequence, _ in texts]
        self.prompt_lengths = [prompt_length for _, prompt_length in texts]
        self.drafting_rows = [0]
        self.anchors: list[list[int]] = [[] for _ in texts]  # positions, one for each drafter forward of a row
        for sequence, start in zip(self.sequences, self.prompt_lengths, strict=True):
            if self.config.mask_token_id in sequence[start:]:
                raise ValueError("the followed text holds the mask token, which no drafter may propose")
        return self

    @property
    def anchor_positions(self) -> list[int]:
        """Of the only row."""
        return self.anchors[0]

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        hidden = super().draft_hidden(block_embeds, position_ids, extend, mask_for)
        marks = []
        for row, positions in zip(self.drafting_rows, position_ids.tolist(), strict=True):
            if positions[0] == self.prompt_lengths[row]:  # the first step of a call
                self.anchors[row] = []
            step = len(self.anchors[row])
            self.anchors[row].append(positions[0])
            marks.append([[row, position, slot, step] for slot, position in enumerate(positions)])
        return torch.cat([hidden, torch.tensor(marks, dtype=hidden.dtype, device=hidden.device)], dim=-1)

    def compute_logits(self, hidden, target_head):
        logits = super().compute_logits(hidden[..., :-4], target_head)
        for i, marks in enumerate(hidden[..., -4:].long().tolist()):
            for j, (row, position, slot, step) in enumerate(marks):
                sequence = self.sequences[row]
                right = sequence[position] if position < len(sequence) else 0
                logits[i, j] = self.scripted_logits(logits[i, j], right, slot=slot, step=step + self.offset * row)
        return logits

    offset = 0  # how many steps each row's script is ahead of the row before

    def scripted_logits(self, logits: torch.Tensor, right: int, *, slot: int, step: int) -> torch.Tensor:
        """Logits `[V]` of one slot (1 is the first draft), given the real ones and the followed text's token."""
        raise NotImplementedError

    def _say(self, logits: torch.Tensor, token: int) -> torch.Tensor:
        law = torch.tanh(logits)  # a law with weight on every token
        law[token] = 4.0
        return law

    def _wrong(self, right: int) -> int:
        return (right + 1) % self.config.mask_token_id


class OracleDrafter(ScriptedDrafter):
    """Always proposes what the followed text says."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, right)


class HostileDrafter(ScriptedDrafter):
    """Never proposes what the followed text says."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, self._wrong(right))


class PatternDrafter(ScriptedDrafter):
    """Right for as many slots as `pattern` says for the step (repeated without end), then wrong."""

    pattern: list[int] = [0]

    def scripted_logits(self, logits, right, *, slot, step):
        is_right = slot <= self.pattern[step % len(self.pattern)]
        return self._say(logits, right if is_right else self._wrong(right))


class TurnsGood(ScriptedDrafter):
    """Wrong up to position `good_from`, right from there on."""

    good_from: int = 0

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        self.is_good = int(position_ids[0, 0]) >= self.good_from
        return super().draft_hidden(block_embeds, position_ids, extend, mask_for)

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, right if self.is_good else self._wrong(right))


class NudgedDrafter(ScriptedDrafter):
    """The real drafter, relay included, pushed towards the followed text: its own states decide how far it gets."""

    nudge: float = 3.0

    def scripted_logits(self, logits, right, *, slot, step):
        nudged = logits / logits.std()
        nudged[right] += self.nudge
        return nudged


def scripted_steps(pattern: list[int], block_size: int, new_tokens: int) -> tuple[list[int], list[int], int]:
    """By hand: accepted lengths, drafted lengths and target forwards of a `PatternDrafter` over `new_tokens` tokens."""
    accepted, drafted, forwards, written = [], [], 1, 1  # the prefill gives the first token
    while written < new_tokens:
        forwards += 1
        drafts = min(block_size - 1, new_tokens - written - 1)
        if drafts:
            accepted.append(min(pattern[len(accepted) % len(pattern)], drafts))
            drafted.append(drafts)
        written += 1 + (accepted[-1] if drafts else 0)
    return accepted, drafted, forwards
