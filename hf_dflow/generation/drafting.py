"""Anchor, context features and feedback become a block of draft tokens with the law they were drawn from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_dflow.generation.cache import DraftCache
from hf_dflow.kernels import draw_tokens
from hf_dflow.model.drafter import DFlowDrafter

if TYPE_CHECKING:
    from hf_dflow.generation.feedback import VerifierFeedback
    from hf_dflow.generation.rows import Row


@dataclass(frozen=True)
class DraftBlock:
    """N drafted tokens; N is 0 where there was nothing to draft."""

    token_ids: torch.Tensor  # [B, N]
    logits: torch.Tensor  # [B, N, V] processed, float32 or float64: the law that `token_ids` were drawn from
    is_finite: torch.Tensor  # [B] False where the drafter produced NaN or inf; its tokens are then arbitrary
    lengths: torch.Tensor | None = None  # [B] drafts that count, the rest being filling; None where all N do
    base_logits: torch.Tensor | None = None  # [B, N, V] what the drafter said before any draft of the block was chosen

    def confidences(self, is_sampled: bool) -> torch.Tensor:
        """`[B, N]` how sure the drafter is of each slot's most likely token.

        Where drafts are sampled, before any of them was: a cut that follows from these does not depend on the tokens.
        """
        logits = self.base_logits if is_sampled and self.base_logits is not None else self.logits
        return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()

    def cut(self, lengths: list[int]) -> "DraftBlock":
        """Only the first `lengths[b]` drafts of each row."""
        most = max(lengths)
        counts = None if min(lengths) == most else torch.tensor(lengths, device=self.token_ids.device)
        return DraftBlock(self.token_ids[:, :most], self.logits[:, :most], self.is_finite, counts)

    def row(self, row: int, length: int) -> "DraftBlock":
        """The block of one row, as if it were alone, with its `length` drafts."""
        one = slice(row, row + 1)
        return DraftBlock(self.token_ids[one, :length], self.logits[one, :length], self.is_finite[one])


@dataclass(frozen=True)
class Slots:
    """What the drafter said of a block's slots before any of them was chosen."""

    logits: torch.Tensor  # [B, N, V] unprocessed, wide, on the target's device; -inf for what must not be drafted
    candidates: Any  # of slots that hear of each other, see `DFlowDrafter.candidates`; else None
    is_finite: torch.Tensor  # [B]
    counts: torch.Tensor | None  # [B] drafts that count; None where all N do
    device: torch.device  # where candidates are asked


class DraftSession:
    """The drafter at work in one call: its cache of context keys and values, and nothing that outlives the call.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        embedding, head (`nn.Module`): The target's input embedding and LM head.
        vocab_size (`int`): Width of the target's logits.
        use_relay (`bool`): Whether feedback conditions the slots.
        use_correction (`bool`): Whether slots hear of each other, where the drafter has a causal correction.
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
        self.first_row = drafter.first_drafting_row
        mask_ids = torch.full((1, config.block_size - 1), config.mask_token_id, device=device)
        self._mask_embeds = drafter.embed(mask_ids, embedding)  # [1, L - 1, H]
        self._cannot_say = None  # [vocab] tokens without a row in a reduced draft vocabulary: -inf is no fault there
        if drafter.draft_token_ids is not None:
            everything = torch.ones(config.vocab_size, dtype=torch.bool, device=drafter.device)
            everything[drafter.draft_token_ids] = False
            self._cannot_say = everything[:vocab_size].to(device)

    def has_room(self, anchor_position: int) -> bool:
        """Whether a block at `anchor_position` stays within the positions that the drafter was made for."""
        return anchor_position + self.drafter.config.block_size <= self.drafter.config.max_position_embeddings

    def nothing(self, batch_size: int) -> DraftBlock:
        """A block without drafts."""
        return DraftBlock(
            token_ids=torch.empty(batch_size, 0, dtype=torch.long, device=self.device),
            logits=torch.empty(batch_size, 0, self.vocab_size, device=self.device),
            is_finite=torch.ones(batch_size, dtype=torch.bool, device=self.device),
        )

    def draft(
        self,
        rows: "list[Row]",
        lengths: list[int],
        feedback: "VerifierFeedback | None",
        uniforms: torch.Tensor | None,
    ) -> DraftBlock:
        """Draft a full block for each row and keep its first `lengths[b]` tokens; N is the largest of these.

        Args:
            rows (`list[Row]`): B rows; the last of a row's committed tokens is its anchor.
            lengths (`list[int]`): How many drafts each row verifies; one of them is at least 1.
            feedback (`VerifierFeedback`, *optional*): Of the step before.
            uniforms (`torch.Tensor` of shape `(B, N)`, *optional*): Numbers in [0, 1); `None` drafts the most likely.
        """
        slots = self.slots(rows, lengths, feedback)
        if slots.candidates is None:
            token_ids, logits = self._choose(rows, lengths, slots.logits, uniforms)
        else:
            token_ids, logits = self._select(rows, lengths, slots.candidates, slots.logits.shape[1], uniforms)
        return DraftBlock(token_ids, logits, slots.is_finite, slots.counts, slots.logits)

    def slots(self, rows: "list[Row]", lengths: list[int], feedback: "VerifierFeedback | None") -> Slots:
        """One drafter forward over a full block; the slots that count. Arguments are those of `draft`."""
        num_drafts = max(lengths)
        anchor_ids = torch.cat([row.ids[:, -1] for row in rows])
        positions = [row.next_position for row in rows]
        hidden = self.block_hidden(anchor_ids, positions, feedback)[:, :num_drafts]
        logits = self.drafter.compute_logits(hidden, self.head)
        wide = torch.promote_types(logits.dtype, torch.float32)  # verification computes as wide as the draft law is
        logits = self._to_target_vocabulary(logits.to(device=self.device, dtype=wide))
        said = logits if self._cannot_say is None else logits.masked_fill(self._cannot_say, 0.0)
        counts = None if min(lengths) == num_drafts else torch.tensor(lengths, device=self.device)
        is_finite = said.isfinite().all(dim=-1)
        if counts is not None:
            is_finite = is_finite | (torch.arange(num_drafts, device=self.device) >= counts[:, None])
        is_finite = is_finite.all(dim=-1)
        logits = torch.where(is_finite[:, None, None], logits, 0.0)
        if self.drafter.config.mask_token_id < self.vocab_size:
            logits[..., self.drafter.config.mask_token_id] = -torch.inf
        logits = self._hide_missing_tokens(logits)
        logits = self._adjust(rows, lengths, logits, feedback)
        hidden = torch.where(is_finite.to(hidden.device)[:, None, None], hidden, 0.0)
        candidates = None
        if self.use_correction or self.drafter.causal_correction is None:
            candidates = self.drafter.candidates(hidden, logits.to(hidden.device), self.embedding, self.head)
        return Slots(logits, candidates, is_finite, counts, hidden.device)

    def block_hidden(
        self, anchor_ids: torch.Tensor, anchor_positions: list[int], feedback: "VerifierFeedback | None"
    ) -> torch.Tensor:
        """Final states `[B, N, H]` of the rows that draft, of one drafter forward behind anchors `[B]`."""
        drafter = self.drafter
        masks = self._mask_embeds.expand(len(anchor_positions), -1, -1)
        block = torch.cat([drafter.embed(anchor_ids[:, None], self.embedding), masks], dim=1)
        if self.use_relay and feedback is not None:
            block = block + nn.functional.pad(self._relay_additions(feedback), (0, 0, self.first_row, 0))
        first = torch.tensor(anchor_positions, device=block.device)[:, None]
        positions = first + torch.arange(block.shape[1], device=block.device)

        def mask_for(layer_idx: int, key_length: int) -> torch.Tensor | None:
            return self.cache.mask(layer_idx, block.shape[1], block.device)

        hidden = drafter.draft_hidden(block, positions, self.cache.extend, mask_for)
        return hidden[:, self.first_row :]

    def _relay_additions(self, feedback: "VerifierFeedback") -> torch.Tensor:
        """What is added to the rows that draft, `[B, N, H]`; zero in those that no rejected row feeds.

        Entry i of the feedback predicted the position of the new block's draft i + 1, and feeds the row that predicts
        it: masked slot i + 1, or, where the anchor's row drafts too, row i.
        """
        drafter = self.drafter
        additions = drafter.relay_additions(
            feedback.features, feedback.bonus_ids, feedback.rejected_ids, self.embedding
        )
        additions = torch.where(feedback.is_fed.to(additions.device)[..., None], additions, 0.0)
        return nn.functional.pad(additions, (0, 0, 0, drafter.config.drafts_per_block - additions.shape[1]))

    def _to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut padded ids that the target does not have."""
        return logits[..., : self.vocab_size]

    def _hide_missing_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Give target tokens that the drafter does not know a draft probability of zero; verification reaches them."""
        missing = self.vocab_size - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _adjust(
        self, rows: "list[Row]", lengths: list[int], logits: torch.Tensor, feedback: "VerifierFeedback | None"
    ) -> torch.Tensor:
        """Logits `[B, N, V]` after each row's own acceptance processors, which see no other row."""
        if not rows[0].acceptance_processors:
            return logits
        adjusted = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = logits[i : i + 1, :length]
            seen = None if feedback is None else feedback.row(i)
            for processor in row.acceptance_processors if length else []:
                own = processor.adjust_draft_logits(own, seen)
            adjusted.append(_fill(own, logits.shape[1]))
        return torch.cat(adjusted)

    def _choose(
        self, rows: "list[Row]", lengths: list[int], logits: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens `[B, N]` and the processed logits `[B, N, V]` they were drawn from."""
        path = rows[0].path  # of one kind for all rows
        if path.drafts_at_once:
            logits = path.drafts(logits)
            return _pick(logits, uniforms), logits
        tokens, laws = [], []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            path_ids, processed = row.ids, [logits[i : i + 1, :0]]
            for slot in range(length):
                processed.append(row.path.draft_row(path_ids, logits[i : i + 1, slot].clone())[:, None])
                chosen = _pick(processed[-1], None if uniforms is None else uniforms[i : i + 1, slot : slot + 1])
                path_ids = torch.cat([path_ids, chosen], dim=1)
            tokens.append(nn.functional.pad(path_ids[:, row.length :], (0, logits.shape[1] - length)))
            laws.append(_fill(torch.cat(processed, dim=1), logits.shape[1]))
        return torch.cat(tokens), torch.cat(laws)

    def _select(
        self,
        rows: "list[Row]",
        lengths: list[int],
        candidates: Any,
        num_drafts: int,
        uniforms: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens `[B, N]` that are picked in order among each slot's candidates, and the laws they came from."""
        device = self.drafter.device
        previous = torch.cat([row.ids[:, -1] for row in rows])
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for slot in range(num_drafts):
            law = candidates.logits(slot, previous.to(device), self.vocab_size).to(self.device)
            law = self._process_slot(rows, lengths, slot, tokens, law)
            previous = _pick(law[:, None], None if uniforms is None else uniforms[:, slot : slot + 1])[:, 0]
            tokens.append(previous)
            laws.append(law)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1)

    def _process_slot(
        self, rows: "list[Row]", lengths: list[int], slot: int, tokens: list[torch.Tensor], law: torch.Tensor
    ) -> torch.Tensor:
        """Each row's logits processors on `law` `[B, V]` behind the drafts `tokens` picked so far."""
        path = rows[0].path  # of one kind for all rows
        if path.drafts_at_once:
            return path.drafts(law[:, None])[:, 0]
        processed = list(law.split(1))
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if slot < length:
                path_ids = torch.cat([row.ids, *(chosen[i : i + 1, None] for chosen in tokens)], dim=1)
                processed[i] = row.path.draft_row(path_ids, processed[i].clone())
        return torch.cat(processed)


def _fill(logits: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """`logits` `[1, n, V]` with rows that nobody reads up to `num_drafts`."""
    missing = num_drafts - logits.shape[1]
    return nn.functional.pad(logits, (0, 0, 0, missing)) if missing else logits


def _pick(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Most likely tokens, or draws at `uniforms` `[B, N]`, of `logits` `[B, N, V]`."""
    return logits.argmax(dim=-1) if uniforms is None else draw_tokens(logits, uniforms)
