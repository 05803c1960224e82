"""Anchor, context features and feedback become a proposal, with the law that its drafts were drawn from."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dflow.generation.cache import DraftCache
from hf_dflow.generation.policy.base import Expand
from hf_dflow.generation.rows import Row
from hf_dflow.generation.step import DraftTree, Proposal, VerifierFeedback
from hf_dflow.kernels import draw_tokens
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.model.heads import Candidates

CHILDREN = 16  # of a tree's node, at most


@dataclass(frozen=True)
class Slots:
    """A block's slots before any draft was chosen."""

    logits: torch.Tensor  # [B, N, V] unprocessed, float32 or float64, on the target's device; -inf: never drafted
    candidates: (
        Candidates | None
    )  # where each draft conditions on the previous one, see `DFlowDrafter.candidates`; else None
    is_finite: torch.Tensor  # [B]
    lengths: tuple[int, ...]  # slots of each row that count
    device: torch.device  # of the drafter's states
    anchor_ids: torch.Tensor  # [B] the token before the first slot

    def expansion(self) -> Expand:
        """How the slots of a single row continue a path: alike behind every token, or as the candidates are scored.

        All of it is computed at once, so that a tree costs one wait for the device and not one for each node.
        """
        width = min(CHILDREN, self.logits.shape[-1])
        if self.candidates is None:
            top = self.logits[0].log_softmax(dim=-1).topk(width, dim=-1)
            tokens, log_probs = top.indices.tolist(), top.values.tolist()
            return lambda slot, previous: (tokens[slot], log_probs[slot])
        candidates = self.candidates
        with torch.autocast(self.device.type, enabled=False):  # a tree grows outside of the session's methods
            first = candidates.scores[:, 0] + candidates.change(0, self.anchor_ids.to(self.device))
            after = torch.cat([first[0, None, None].expand(1, *2 * first.shape[-1:]), candidates.following()[0]])
        top = after.log_softmax(dim=-1).topk(min(width, after.shape[-1]), dim=-1)  # [N, K, children]
        ids = candidates.token_ids[0]
        children, log_probs = ids[:, None].expand(after.shape).gather(-1, top.indices).tolist(), top.values.tolist()
        places = [{}, *({token: place for place, token in enumerate(slot)} for slot in ids[:-1].tolist())]

        def expand(slot: int, previous: int) -> tuple[list[int], list[float]]:
            place = places[slot].get(previous, 0)  # the first slot is the same at every place
            return children[slot][place], log_probs[slot][place]

        return expand

    def as_tree(self, tree: DraftTree) -> Proposal:
        """The proposal of a tree that was grown from these slots."""
        token_ids = torch.tensor([tree.token_ids], device=self.logits.device)
        return Proposal(token_ids, self.logits, self.is_finite, (tree.size,), tree=tree)


def _own_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a session without the caller's autocast: the drafter casts for itself, to a type of its own."""

    @functools.wraps(method)
    def run(session: "DraftSession", *args, **kwargs):
        with torch.autocast(session.drafter.device.type, enabled=False):
            return method(session, *args, **kwargs)

    return run


class DraftSession:
    """The drafter at work in one call: its cache of context keys and values, and nothing that outlives the call.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        embedding, head (`nn.Module`): The target's input embedding and LM head.
        vocab_size (`int`): Width of the target's logits.
        use_relay (`bool`): Whether feedback conditions the slots.
        use_correction (`bool`): Whether each draft conditions on the previous one, where the drafter has a causal
            correction.
        device (`torch.device`): Where drafts are returned.
        batch_size (`int`, *optional*, defaults to 1): B, rows.
    """

    def __init__(
        self,
        drafter: DFlowDrafter,
        embedding: nn.Module,
        head: nn.Module,
        *,
        vocab_size: int,
        use_relay: bool,
        use_correction: bool = True,
        device: torch.device,
        batch_size: int = 1,
    ):
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.vocab_size, self.device = vocab_size, device
        self.use_relay, self.use_correction = use_relay, use_correction
        self.cache = DraftCache(drafter, batch_size)
        config = drafter.config
        mask_ids = torch.full((1, config.block_size - 1), config.mask_token_id, device=device)
        self._mask_embeds = drafter.embed(mask_ids, embedding)  # [1, L - 1, H]
        self._never_drafted = None  # [vocab] tokens that a reduced draft vocabulary lacks: their -inf is no fault
        if drafter.draft_token_ids is not None:
            never_drafted = torch.ones(config.vocab_size, dtype=torch.bool, device=drafter.device)
            never_drafted[drafter.draft_token_ids] = False
            self._never_drafted = never_drafted[:vocab_size].to(device)

    def has_room(self, anchor_position: int) -> bool:
        """Whether a block at `anchor_position` stays within the positions that the drafter was made for."""
        return anchor_position + self.drafter.config.block_size <= self.drafter.config.max_position_embeddings

    def empty(self, batch_size: int) -> Proposal:
        """A proposal without drafts."""
        return Proposal(
            token_ids=torch.empty(batch_size, 0, dtype=torch.long, device=self.device),
            logits=torch.empty(batch_size, 0, self.vocab_size, device=self.device),
            is_finite=torch.ones(batch_size, dtype=torch.bool, device=self.device),
            lengths=(0,) * batch_size,
        )

    @_own_precision
    def extend_context(self, features: torch.Tensor, first_positions: list[int], counts: list[int]) -> None:
        """Add tapped target states to the context; arguments are those of [`DraftCache.append_context`]."""
        self.cache.append_context(features, first_positions, counts)

    @_own_precision
    def slots(self, rows: list[Row], lengths: list[int], feedback: VerifierFeedback | None) -> Slots:
        """One drafter forward over a full block of each row.

        Args:
            rows (`list[Row]`): B rows.
            lengths (`list[int]`): How many slots of each row count, N at most; one of them at least 1.
            feedback (`VerifierFeedback`, *optional*): Of the step before.
        """
        num_drafts, config = max(lengths), self.drafter.config
        anchor_ids = torch.cat([row.ids[:, -1] for row in rows])
        hidden = self.block_hidden(anchor_ids, [row.next_position for row in rows], feedback)[:, :num_drafts]
        logits = self.drafter.compute_logits(hidden, self.head)
        wide = torch.promote_types(logits.dtype, torch.float32)  # verification computes as wide as the draft law is
        logits = logits.to(device=self.device, dtype=wide)[..., : self.vocab_size]
        judged = logits if self._never_drafted is None else logits.masked_fill(self._never_drafted, 0.0)
        is_finite = judged.isfinite().all(dim=-1)
        if min(lengths) < num_drafts:
            counts = torch.tensor(lengths, device=self.device)
            is_finite = is_finite | (torch.arange(num_drafts, device=self.device) >= counts[:, None])
        is_finite = is_finite.all(dim=-1)
        logits = torch.where(is_finite[:, None, None], logits, 0.0)
        if config.mask_token_id < self.vocab_size:
            logits[..., config.mask_token_id] = -torch.inf
        # Tokens that the drafter does not know get a draft probability of zero; verification reaches them.
        missing = self.vocab_size - logits.shape[-1]
        logits = nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        logits = self._adjust(rows, lengths, logits, feedback)
        candidates = None
        if self.use_correction or self.drafter.causal_correction is None:
            hidden = torch.where(is_finite.to(hidden.device)[:, None, None], hidden, 0.0)
            candidates = self.drafter.candidates(hidden, logits.to(hidden.device), self.embedding, self.head)
        return Slots(logits, candidates, is_finite, tuple(lengths), hidden.device, anchor_ids)

    @_own_precision
    def choose(self, rows: list[Row], slots: Slots, uniforms: torch.Tensor | None) -> Proposal:
        """A chain of drafts, one from each slot: the most likely, or draws at `uniforms` `(B, N)` in [0, 1)."""
        path = rows[0].path  # of one kind for all rows
        if slots.candidates is None and path.drafts_at_once:
            logits = path.drafts(slots.logits)
            return Proposal(_pick(logits, uniforms), logits, slots.is_finite, slots.lengths, slots.logits)
        previous = torch.cat([row.ids[:, -1] for row in rows])
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for slot in range(slots.logits.shape[1]):
            logits = slots.logits[:, slot]
            if slots.candidates is not None:
                logits = slots.candidates.logits(slot, previous.to(self.drafter.device), self.vocab_size)
            logits = self._process(rows, slots.lengths, tokens, logits.to(self.device))
            previous = _pick(logits[:, None], None if uniforms is None else uniforms[:, slot : slot + 1])[:, 0]
            tokens.append(previous)
            laws.append(logits)
        return Proposal(
            torch.stack(tokens, dim=1), torch.stack(laws, dim=1), slots.is_finite, slots.lengths, slots.logits
        )

    def block_hidden(
        self, anchor_ids: torch.Tensor, anchor_positions: list[int], feedback: VerifierFeedback | None
    ) -> torch.Tensor:
        """Final states `[B, N, H]` of the rows that draft, of one drafter forward behind anchors `[B]`."""
        drafter, first_row = self.drafter, self.drafter.first_drafting_row
        masks = self._mask_embeds.expand(len(anchor_positions), -1, -1)
        block = torch.cat([drafter.embed(anchor_ids[:, None], self.embedding), masks], dim=1)
        if self.use_relay and feedback is not None:
            block = block + nn.functional.pad(self._relay_additions(feedback), (0, 0, first_row, 0))
        first = torch.tensor(anchor_positions, device=block.device)[:, None]
        positions = first + torch.arange(block.shape[1], device=block.device)

        def mask_for(layer_idx: int, key_length: int) -> torch.Tensor | None:
            return self.cache.mask(layer_idx, block.shape[1], block.device)

        return drafter.draft_hidden(block, positions, self.cache.extend, mask_for)[:, first_row:]

    def _relay_additions(self, feedback: VerifierFeedback) -> torch.Tensor:
        """What is added to the rows that draft, `[B, N, H]`; zero in those that no rejected row feeds.

        Entry i of the feedback predicted the position of the new block's draft i + 1, and feeds the row that predicts
        it: masked slot i + 1, or, where the anchor's row drafts too, row i.
        """
        additions = self.drafter.relay_additions(
            feedback.features, feedback.bonus_ids, feedback.rejected_ids, self.embedding
        )
        additions = torch.where(feedback.is_fed.to(additions.device)[..., None], additions, 0.0)
        return nn.functional.pad(additions, (0, 0, 0, self.drafter.config.drafts_per_block - additions.shape[1]))

    def _adjust(
        self, rows: list[Row], lengths: list[int], logits: torch.Tensor, feedback: VerifierFeedback | None
    ) -> torch.Tensor:
        """Logits `[B, N, V]` after each row's own acceptance processors, which see no other row."""
        if not rows[0].acceptance_processors:
            return logits
        adjusted = []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            row_logits = logits[index : index + 1, :length]
            row_feedback = None if feedback is None else feedback.row(index)
            for processor in row.acceptance_processors if length else []:
                row_logits = processor.adjust_draft_logits(row_logits, row_feedback)
            missing = logits.shape[1] - length
            adjusted.append(nn.functional.pad(row_logits, (0, 0, 0, missing)) if missing else row_logits)
        return torch.cat(adjusted)

    def _process(
        self, rows: list[Row], lengths: tuple[int, ...], tokens: list[torch.Tensor], logits: torch.Tensor
    ) -> torch.Tensor:
        """Each row's logits processors on the logits `[B, V]` that follow the drafts `tokens` chosen so far."""
        path = rows[0].path  # of one kind for all rows
        if path.drafts_at_once:
            return path.drafts(logits[:, None])[:, 0]
        processed = list(logits.split(1))
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(tokens) < length:
                path_ids = torch.cat([row.ids, *(chosen[index : index + 1, None] for chosen in tokens)], dim=1)
                processed[index] = row.path.draft_row(path_ids, processed[index].clone())
        return torch.cat(processed)


def _pick(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Most likely tokens, or draws at `uniforms` `[B, N]`, of `logits` `[B, N, V]`."""
    return logits.argmax(dim=-1) if uniforms is None else draw_tokens(logits, uniforms)
