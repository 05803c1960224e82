"""Drafters whose every proposal is scripted through the product's own interface.

A random toy drafter is never accepted, so that clipping and rollback bugs look absent. These know what the target says
alone (`follow`) and decide by absolute position what to propose. Tests import them from `kit`.
"""

import torch

from hf_dflow import DFlowDrafter


class ScriptedDrafter(DFlowDrafter):
    """Runs the real forward, then lets `scripted_logits` rewrite the logits by absolute position.

    Position and call number travel in two extra channels of the draft states, so that a script needs no state of its
    own between `draft_hidden` and `compute_logits`. Padding is not counted in positions.
    """

    def follow(self, sequence, prompt_length: int = 1):
        """Tell the script the whole text, as a list or a `[1, T]` tensor of ids without padding. Returns `self`."""
        self.sequence = torch.as_tensor(sequence).flatten().tolist()
        self.prompt_length = prompt_length
        self.anchor_positions: list[int] = []  # one for each drafter forward since then
        if self.config.mask_token_id in self.sequence[prompt_length:]:
            raise ValueError("the followed text holds the mask token, which no drafter may propose")
        return self

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        hidden = super().draft_hidden(block_embeds, position_ids, extend, mask_for)
        anchor = int(position_ids[0, 0])
        if anchor == self.prompt_length:  # the first step of a call
            self.anchor_positions = []
        step = torch.full_like(position_ids, len(self.anchor_positions))
        self.anchor_positions.append(anchor)
        marks = torch.stack([position_ids, torch.arange(len(position_ids[0])).expand_as(position_ids), step], dim=-1)
        return torch.cat([hidden, marks.to(hidden.dtype)], dim=-1)

    def compute_logits(self, hidden, target_head):
        logits = super().compute_logits(hidden[..., :-3], target_head)
        for row in range(logits.shape[0]):
            for i, (position, slot, step) in enumerate(hidden[row, :, -3:].long().tolist()):
                right = self.sequence[position] if position < len(self.sequence) else 0
                logits[row, i] = self.scripted_logits(logits[row, i], right, slot=slot, step=step)
        return logits

    def scripted_logits(self, logits: torch.Tensor, right: int, *, slot: int, step: int) -> torch.Tensor:
        """Logits `[V]` of one slot (1 is the first draft), given the real ones and the followed text's token."""
        raise NotImplementedError

    def _say(self, logits: torch.Tensor, token: int) -> torch.Tensor:
        said = torch.tanh(logits)  # a law with weight on every token
        said[token] = 4.0
        return said

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
