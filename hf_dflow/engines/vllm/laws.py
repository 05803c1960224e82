"""The draft law: which tokens a block proposes, and with what probabilities, from its slots' final states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Drafts:
    """A block of each request."""

    token_ids: torch.Tensor  # (B, N)
    probabilities: torch.Tensor | None = None  # (B, N, V), where the drafts are draws from them


def greedy_drafts(model: Any, hidden: torch.Tensor, anchor_ids: torch.Tensor) -> Drafts:
    """The most likely draft of each slot, after the one before it where the drafter has a causal correction.

    Args:
        model (`DFlowDraftModel`): The drafter.
        hidden (`torch.Tensor` of shape `(B, N, H)`): Final states of the slots.
        anchor_ids (`torch.Tensor` of shape `(B,)`): The blocks' anchors.
    """
    logits = _logits(model, hidden)
    if model.causal_correction is None:
        return Drafts(logits.argmax(dim=-1))
    candidates = model.candidates(hidden, logits)
    token_ids, previous = [], anchor_ids.long()
    for slot in range(hidden.shape[1]):
        scores = candidates.scores[:, slot] + candidates.change(slot, previous)
        is_best = scores == scores.max(dim=-1, keepdim=True).values
        # Of equal scores the lowest token, which an argmax over the vocabulary takes.
        previous = candidates.token_ids[:, slot].where(is_best, logits.shape[-1]).min(dim=-1).values
        token_ids.append(previous)
    return Drafts(torch.stack(token_ids, dim=1))


def sampled_drafts(
    model: Any,
    hidden: torch.Tensor,
    anchor_ids: torch.Tensor,
    process: Callable[[torch.Tensor], torch.Tensor],
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> Drafts:
    """Draws of each slot, with their probabilities.

    Args:
        model, hidden, anchor_ids: As for `greedy_drafts`.
        process (`Callable`): Logits `(B, V)`, float32 -> probabilities `(B, V)`.
        draw (`Callable`): Probabilities `(B, V)` -> tokens `(B,)`.
    """
    logits = _logits(model, hidden)
    candidates = None if model.causal_correction is None else model.candidates(hidden, logits)
    token_ids, probabilities, previous = [], [], anchor_ids.long()
    for slot in range(hidden.shape[1]):
        if candidates is None:
            slot_logits = logits[:, slot].float()
        else:
            slot_logits = candidates.logits(slot, previous, logits.shape[-1])
        probabilities.append(process(slot_logits))
        previous = draw(probabilities[-1])
        token_ids.append(previous)
    return Drafts(torch.stack(token_ids, dim=1), torch.stack(probabilities, dim=1))


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits `(B, N, V)` of final states `(B, N, H)`."""
    logits: Any = model.compute_logits(hidden.flatten(0, 1))
    return logits.view(*hidden.shape[:2], -1)
