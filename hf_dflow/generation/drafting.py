"""Anchor, context features and feedback become a block of draft tokens with the law they were drawn from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_dflow.generation.path import PathProcessor
from hf_dflow.generation.rows import DraftCache
from hf_dflow.kernels import draw_tokens
from hf_dflow.modeling_dflow import DFlowDrafter

if TYPE_CHECKING:
    from hf_dflow.generation.acceptance import AcceptanceProcessor
    from hf_dflow.generation.feedback import VerifierFeedback


@dataclass(frozen=True)
class DraftBlock:
    """N drafted tokens; N is 0 where there was nothing to draft."""

    token_ids: torch.Tensor  # [B, N]
    logits: torch.Tensor  # [B, N, V] processed, float32 or float64: the law that `token_ids` were drawn from
    is_finite: torch.Tensor  # [B] False where the drafter produced NaN or inf; its tokens are then arbitrary


class DraftSession:
    """The drafter at work in one call: its cache of context keys and values, and nothing that outlives the call.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        embedding, head (`nn.Module`): The target's input embedding and LM head.
        vocab_size (`int`): Width of the target's logits.
        path (`PathProcessor`): The call's logits processors.
        processors (`list[AcceptanceProcessor]`): The call's acceptance processors.
        use_relay (`bool`): Whether feedback conditions the slots.
        device (`torch.device`): Where drafts are returned.
    """

    def __init__(
        self,
        drafter: DFlowDrafter,
        embedding: nn.Module,
        head: nn.Module,
        *,
        vocab_size: int,
        path: PathProcessor,
        processors: "list[AcceptanceProcessor]",
        use_relay: bool,
        device: torch.device,
    ):
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.vocab_size, self.path, self.processors, self.device = vocab_size, path, processors, device
        self.use_relay = use_relay
        self.cache = DraftCache(drafter)
        config = drafter.config
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
        prefix_ids: torch.Tensor,
        anchor_position: int,
        num_drafts: int,
        feedback: "VerifierFeedback | None",
        uniforms: torch.Tensor | None,
    ) -> DraftBlock:
        """Draft a full block and keep its first `num_drafts` tokens.

        Args:
            prefix_ids (`torch.LongTensor` of shape `(B, T)`): Committed tokens, the anchor last.
            anchor_position (`int`): The anchor's absolute position, padding not counted.
            num_drafts (`int`): N, at least 1.
            feedback (`VerifierFeedback`, *optional*): Of the step before.
            uniforms (`torch.Tensor` of shape `(B, N)`, *optional*): Numbers in [0, 1); `None` drafts the most likely.
        """
        logits = self.block_logits(prefix_ids[:, -1], anchor_position, feedback)[:, :num_drafts]
        wide = torch.promote_types(logits.dtype, torch.float32)  # verification computes as wide as the draft law is
        logits = self._to_target_vocabulary(logits.to(device=self.device, dtype=wide))
        said = logits if self._cannot_say is None else logits.masked_fill(self._cannot_say, 0.0)
        is_finite = said.isfinite().all(dim=-1).all(dim=-1)
        logits = torch.where(is_finite[:, None, None], logits, 0.0)
        if self.drafter.config.mask_token_id < self.vocab_size:
            logits[..., self.drafter.config.mask_token_id] = -torch.inf
        logits = self._hide_missing_tokens(logits)
        for processor in self.processors:
            logits = processor.adjust_draft_logits(logits, feedback)
        token_ids, logits = self._choose(prefix_ids, logits, uniforms)
        return DraftBlock(token_ids, logits, is_finite)

    def block_logits(
        self, anchor_ids: torch.Tensor, anchor_position: int, feedback: "VerifierFeedback | None"
    ) -> torch.Tensor:
        """Unprocessed draft logits `[B, L - 1, vocab]` of one drafter forward."""
        drafter = self.drafter
        masks = self._mask_embeds
        if self.use_relay and feedback is not None:
            masks = masks + self._relay_additions(feedback)
        block = torch.cat([drafter.embed(anchor_ids[:, None], self.embedding), masks], dim=1)
        positions = torch.arange(anchor_position, anchor_position + block.shape[1], device=block.device)[None]

        def mask_for(layer_idx: int, key_length: int) -> torch.Tensor | None:
            return drafter.attention_mask(layer_idx, block.shape[1], key_length, block.device)

        hidden = drafter.draft_hidden(block, positions, self.cache.extend, mask_for)
        return drafter.compute_logits(hidden[:, 1:], self.head)

    def _relay_additions(self, feedback: "VerifierFeedback") -> torch.Tensor:
        """`[B, L - 1, H]`, zero in slots that no rejected row feeds."""
        drafter = self.drafter
        additions = drafter.relay(
            drafter.project_context(feedback.features),
            drafter.embed(feedback.bonus_ids, self.embedding),
            drafter.embed(feedback.rejected_ids, self.embedding),
        )
        additions = torch.where(feedback.is_fed.to(additions.device)[..., None], additions, 0.0)
        return nn.functional.pad(additions, (0, 0, 0, self._mask_embeds.shape[1] - additions.shape[1]))

    def _to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut padded ids that the target does not have."""
        return logits[..., : self.vocab_size]

    def _hide_missing_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Give target tokens that the drafter does not know a draft probability of zero; verification reaches them."""
        missing = self.vocab_size - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _choose(
        self, prefix_ids: torch.Tensor, logits: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens `[B, N]` and the processed logits `[B, N, V]` they were drawn from."""
        if self.path.drafts_at_once:
            logits = self.path.drafts(logits)
            return _pick(logits, uniforms), logits
        path_ids, rows = prefix_ids, []
        for i, row in enumerate(logits.unbind(1)):
            rows.append(self.path.draft_row(path_ids, row.clone())[:, None])
            chosen = _pick(rows[-1], None if uniforms is None else uniforms[:, i : i + 1])
            path_ids = torch.cat([path_ids, chosen], dim=1)
        return path_ids[:, prefix_ids.shape[1] :], torch.cat(rows, dim=1)


def _pick(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Most likely tokens, or draws at `uniforms` `[B, N]`, of `logits` `[B, N, V]`."""
    return logits.argmax(dim=-1) if uniforms is None else draw_tokens(logits, uniforms)
