"""Training rounds: one masked-block round, then reject-conditioned rounds on the drafter's own proposals."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.masks import PackedMask, flex_fits
from hf_dflow.training.packing import IGNORED, Anchors, BlockLayout, Places, Sequences, context_places
from hf_dflow.training.proposals import greedy_proposals, proposal_features


@dataclass
class Relayed:
    """What the frozen target computed on the rejected rows of the round before, shifted to the slots that it feeds."""

    features: torch.Tensor  # [A, N, taps * target_hidden_size]; index i feeds slot i + 1
    is_fed: torch.Tensor  # [A, N]
    bonus_ids: torch.Tensor  # [A]
    rejected_ids: torch.Tensor  # [A]


@dataclass
class RoundResult:
    """Draft states of all slots and what they should predict."""

    hidden: torch.Tensor  # [A, N, H]
    labels: torch.Tensor  # [A, N], IGNORED past the end of the document and where nothing is supervised
    teacher_ids: torch.Tensor | None = None  # [A, N, K] the target's likeliest tokens at each slot's place
    teacher_probs: torch.Tensor | None = None  # [A, N, K]


def draft_round(
    drafter: DFlowDrafter,
    target: Any,
    sequences: Sequences,
    anchors: Anchors,
    relayed: Relayed | None = None,
    *,
    block_size: int | None = None,
    use_flex: bool | None = None,
) -> RoundResult:
    """Draft every anchor's block in one forward; its slots are plain masks or conditioned on `relayed`.

    All blocks of a row are one row of queries; their keys are the row's context and the blocks themselves. Distances
    and directions are the serving mask's, so that training sees what decoding will see.

    Args:
        block_size (`int`, *optional*): Anchor and slots to draft; by default the drafter's.
        use_flex (`bool`, *optional*): Whether attention is FlexAttention; by default where it compiles, otherwise the
            drafter's own implementation with dense masks.
    """
    config, parameter = drafter.config, drafter.fc.weight
    if use_flex is None:
        use_flex = flex_fits(parameter.device, parameter.dtype, config.head_dim, config.attention_dropout)
    length = block_size or config.block_size
    # A dense mask grows with the square of the blocks in a row: past the context's length more rows are cheaper.
    max_blocks = None if use_flex else max(16, sequences.token_ids.shape[1] // length)
    blocks = BlockLayout(anchors, len(sequences.lengths), length, max_blocks)
    context, own = context_places(sequences), blocks.places(sequences)
    own_context = Places(*(blocks.repeat(values) for values in vars(context).values()))
    masks = _masks_by_kind(drafter, PackedMask(own, own_context + own), use_flex)
    context_key_values = drafter.context_key_values(drafter.project_context(sequences.features), context.positions)

    def extend(layer_idx, keys, values):
        context_keys, context_values = context_key_values[layer_idx]
        return (
            torch.cat([blocks.repeat(context_keys), keys], dim=-2),
            torch.cat([blocks.repeat(context_values), values], dim=-2),
        )

    hidden = drafter.draft_hidden(
        blocks.pack(_block_embeds(drafter, target, sequences.anchor_ids(anchors), relayed, length)),
        own.positions,
        extend,
        lambda layer_idx, _: masks[config.layer_types[layer_idx]],
    )
    return _with_labels(blocks.unpack(hidden)[:, 1:], sequences, anchors)


def _masks_by_kind(drafter: DFlowDrafter, mask: PackedMask, use_flex: bool) -> dict[str, Any]:
    """The drafter's serving masks, by kind of layer."""
    config = drafter.config
    build = mask.for_flex if use_flex else mask.dense
    rules = {
        "full_attention": (config.full_is_causal, None),
        "sliding_attention": (config.sliding_is_causal, config.sliding_window and config.window_reach),
    }
    return {kind: build(*rules[kind]) for kind in set(config.layer_types)}


def _block_embeds(
    drafter: DFlowDrafter, target: Any, anchor_ids: torch.Tensor, relayed: Relayed | None, length: int
) -> torch.Tensor:
    """Input embeddings `[A, L, H]`: the anchor's, and mask embeddings with the relay's additions."""
    masks = anchor_ids.new_full((len(anchor_ids), length - 1), drafter.config.mask_token_id)
    embeds = drafter.embed(torch.cat([anchor_ids[:, None], masks], dim=1), target.get_input_embeddings())
    if relayed is None:
        return embeds
    return embeds + nn.functional.pad(relay_additions(drafter, target, relayed), (0, 0, 1, 0))


def relay_additions(drafter: DFlowDrafter, target: Any, relayed: Relayed) -> torch.Tensor:
    """Additions `[A, N, H]` to the mask embeddings of slots 1 … N; zero where nothing is fed."""
    additions = drafter.relay_additions(
        relayed.features, relayed.bonus_ids, relayed.rejected_ids, target.get_input_embeddings()
    )
    return torch.where(relayed.is_fed[..., None], additions, 0.0)


def _with_labels(hidden: torch.Tensor, sequences: Sequences, anchors: Anchors) -> RoundResult:
    """Slot k predicts the token at anchor + k."""
    slots = torch.arange(1, hidden.shape[1] + 1, device=anchors.position.device)
    positions = anchors.position[:, None] + slots
    row, column = anchors.row[:, None], positions.clamp(max=sequences.token_ids.shape[1] - 1)
    is_label = positions < sequences.document_ends(anchors)[:, None]
    if sequences.is_supervised is not None:
        is_label = is_label & sequences.is_supervised[row, column]
        is_label = is_label.long().cumprod(dim=1).bool()  # an answer ends with its first token that is not supervised
    result = RoundResult(hidden, sequences.token_ids[row, column].masked_fill(~is_label, IGNORED))
    if sequences.teacher_ids is not None and sequences.teacher_probs is not None:
        result.teacher_ids = sequences.teacher_ids[row, column - 1]  # row t of the target predicts position t + 1
        result.teacher_probs = sequences.teacher_probs[row, column - 1]
    return result


def previous_embeds(drafter: DFlowDrafter, target: Any, anchor_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Embeddings `[A, N, H]` of the token before each slot on the trajectory, whose tokens are `labels` `[A, N]`."""
    previous_ids = torch.cat([anchor_ids[:, None], labels[:, :-1].clamp(min=0)], dim=1)
    return drafter.embed(previous_ids, target.get_input_embeddings())


def accepted_lengths(proposals: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`[A]`: how many of the proposals `[A, N]` greedy decoding of the stored trajectory `[A, N]` would accept."""
    return (proposals == labels).long().cumprod(dim=1).sum(dim=1)


@torch.no_grad()
def next_round(
    drafter: DFlowDrafter,
    target: Any,
    sequences: Sequences,
    anchors: Anchors,
    result: RoundResult,
    use_relay: bool = True,
) -> tuple[Anchors, Relayed | None]:
    """Run the round's greedy proposals through the frozen target and step every anchor along its trajectory.

    Accepted length and bonus come from the stored trajectory, so the next round's context features are reused.
    Anchors whose next block has no label left are kept; their labels are all ignored. Without the relay, an ablation,
    the anchors step in the same way and the target does not run.
    """
    proposals = greedy_proposals(drafter, target, result.hidden, sequences.anchor_ids(anchors))  # [A, N]
    accepted = accepted_lengths(proposals, result.labels)  # [A]
    position = torch.minimum(anchors.position + accepted + 1, sequences.document_ends(anchors) - 1)
    next_anchors = Anchors(anchors.row, position)
    if not use_relay:
        return next_anchors, None
    taps = proposal_features(target, sequences, anchors, proposals, list(drafter.config.target_layer_ids))
    num_drafts = proposals.shape[1]
    source_rows = accepted[:, None] + torch.arange(1, num_drafts + 1, device=proposals.device)  # row j feeds slot j - a
    last_draft = accepted.clamp(max=num_drafts - 1)
    return next_anchors, Relayed(
        features=taps.gather(1, source_rows.clamp(max=num_drafts)[..., None].expand(-1, -1, taps.shape[-1])),
        is_fed=source_rows <= num_drafts,
        bonus_ids=sequences.anchor_ids(next_anchors),
        rejected_ids=proposals.gather(1, last_draft[:, None])[:, 0],
    )
