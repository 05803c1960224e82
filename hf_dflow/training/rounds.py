"""Training rounds: one masked-block round, then reject-conditioned rounds on the drafter's own proposals."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dflow.modeling_dflow import DFlowDrafter

IGNORED = -100


@dataclass
class Sequences:
    """A few training rows, padded on the right. S is the longest row."""

    token_ids: torch.Tensor  # [R, S]
    lengths: torch.Tensor  # [R]
    features: torch.Tensor  # [R, S, taps * target_hidden_size]
    teacher_ids: torch.Tensor | None = None  # [R, S, K] the target's likeliest tokens behind each position
    teacher_probs: torch.Tensor | None = None  # [R, S, K]


@dataclass
class Anchors:
    """A blocks to draft, any number a sequence."""

    row: torch.Tensor  # [A] which sequence
    position: torch.Tensor  # [A] the anchor's absolute position


@dataclass
class Relayed:
    """What the frozen target computed on the rejected rows of the round before, shifted to the slots it feeds."""

    features: torch.Tensor  # [A, N, taps * target_hidden_size]; slot i is row i - 1
    is_fed: torch.Tensor  # [A, N]
    bonus_ids: torch.Tensor  # [A]
    rejected_ids: torch.Tensor  # [A]


@dataclass
class RoundResult:
    """Draft states of all slots and what they should have said."""

    hidden: torch.Tensor  # [A, N, H]
    labels: torch.Tensor  # [A, N], IGNORED past the end of the sequence
    teacher_ids: torch.Tensor | None = None  # [A, N, K] the target's likeliest tokens at each slot's place
    teacher_probs: torch.Tensor | None = None  # [A, N, K]


def block_mask(
    drafter: DFlowDrafter, layer_idx: int, anchor_positions: torch.Tensor, context_length: int
) -> torch.Tensor:
    """Bool mask `[A, 1, L, context_length + L]`: a block sees the context before its anchor, and itself.

    Distances and directions are the serving mask's, so training sees what decoding will see.
    """
    config, device = drafter.config, anchor_positions.device
    block_length = config.block_size
    block_positions = anchor_positions[:, None] + torch.arange(block_length, device=device)  # [A, L]
    context_positions = torch.arange(context_length, device=device).expand(len(anchor_positions), -1)
    keys = torch.cat([context_positions, block_positions], dim=1)  # [A, S + L]
    distance = block_positions[:, :, None] - keys[:, None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    visible[:, :, :context_length] = (context_positions < anchor_positions[:, None])[:, None]
    is_sliding = config.layer_types[layer_idx] == "sliding_attention"
    if config.sliding_is_causal if is_sliding else config.full_is_causal:
        visible &= distance >= 0
    if is_sliding:
        visible &= distance.abs() <= config.window_reach
    return visible[:, None]


def draft_round(
    drafter: DFlowDrafter,
    target: Any,
    sequences: Sequences,
    anchors: Anchors,
    relayed: Relayed | None = None,
) -> RoundResult:
    """Draft every anchor's block in one forward, its slots plain masks or conditioned on `relayed`."""
    config = drafter.config
    device = sequences.token_ids.device
    context_length = sequences.token_ids.shape[1]
    slots = torch.arange(config.block_size, device=device)

    context = drafter.project_context(sequences.features)
    context_key_values = drafter.context_key_values(
        context, torch.arange(context_length, device=device).expand(len(sequences.lengths), -1)
    )
    anchor_ids = sequences.token_ids[anchors.row, anchors.position]
    masks = torch.full((len(anchor_ids), config.block_size - 1), config.mask_token_id, device=device)
    embeds = drafter.embed(torch.cat([anchor_ids[:, None], masks], dim=1), target.get_input_embeddings())
    if relayed is not None:
        embeds = embeds + nn.functional.pad(relay_additions(drafter, target, relayed), (0, 0, 1, 0))

    def extend(layer_idx, keys, values):
        context_keys, context_values = context_key_values[layer_idx]
        return (
            torch.cat([context_keys[anchors.row], keys], dim=-2),
            torch.cat([context_values[anchors.row], values], dim=-2),
        )

    masks_by_type = {
        kind: block_mask(drafter, config.layer_types.index(kind), anchors.position, context_length)
        for kind in set(config.layer_types)
    }
    hidden = drafter.draft_hidden(
        embeds,
        anchors.position[:, None] + slots,
        extend,
        lambda layer_idx, _: masks_by_type[config.layer_types[layer_idx]],
    )
    label_positions = anchors.position[:, None] + slots[1:]
    places = anchors.row[:, None], label_positions.clamp(max=context_length - 1)
    labels = sequences.token_ids[places]
    labels = labels.masked_fill(label_positions >= sequences.lengths[anchors.row][:, None], IGNORED)
    result = RoundResult(hidden=hidden[:, 1:], labels=labels)
    if sequences.teacher_ids is not None and sequences.teacher_probs is not None:
        row, position = places
        result.teacher_ids = sequences.teacher_ids[row, position - 1]  # row t of the target predicts position t + 1
        result.teacher_probs = sequences.teacher_probs[row, position - 1]
    return result


def relay_additions(drafter: DFlowDrafter, target: Any, relayed: Relayed) -> torch.Tensor:
    """Additions `[A, N, H]` to the mask embeddings of slots 1 … N; zero where nothing is fed."""
    embedding = target.get_input_embeddings()
    additions = drafter.relay(
        drafter.project_context(relayed.features),
        drafter.embed(relayed.bonus_ids, embedding),
        drafter.embed(relayed.rejected_ids, embedding),
    )
    return additions * relayed.is_fed[..., None]


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
    Anchors whose next block has no label left are kept; their labels are all ignored. Without the relay, which is an
    ablation, the anchors step alike and the target is not asked.
    """
    proposals = drafter.compute_logits(result.hidden, target.get_output_embeddings())
    proposals[..., drafter.config.mask_token_id] = -torch.inf
    proposals = proposals.argmax(dim=-1)  # [A, N]
    accepted = (proposals == result.labels).long().cumprod(dim=1).sum(dim=1)  # [A]
    num_drafts = proposals.shape[1]
    position = torch.minimum(anchors.position + accepted + 1, sequences.lengths[anchors.row] - 1)
    following = Anchors(anchors.row, position)
    if not use_relay:
        return following, None
    taps = proposal_features(drafter, target, sequences, anchors, proposals)  # [A, N + 1, taps * H], row 0 the anchor
    slots = torch.arange(1, num_drafts + 1, device=proposals.device)
    source_rows = accepted[:, None] + slots  # slot j - a is fed by row j
    is_fed = source_rows <= num_drafts
    gathered = taps.gather(1, source_rows.clamp(max=num_drafts)[..., None].expand(-1, -1, taps.shape[-1]))
    rejected_ids = proposals.gather(1, accepted.clamp(max=num_drafts - 1)[:, None])[:, 0]
    bonus_ids = sequences.token_ids[anchors.row, position]
    return following, Relayed(gathered, is_fed, bonus_ids, rejected_ids)


def proposal_features(
    drafter: DFlowDrafter, target: Any, sequences: Sequences, anchors: Anchors, proposals: torch.Tensor
) -> torch.Tensor:
    """Tapped target states `[A, N + 1, taps * H]` of every block `[anchor, proposals]`, one target pass a sequence.

    The pass runs over the sequence followed by all its blocks; a block sees the sequence before its anchor and itself.
    """
    block_length = proposals.shape[1] + 1
    output = sequences.features.new_empty(len(anchors.row), block_length, sequences.features.shape[-1])
    for row in anchors.row.unique().tolist():
        members = (anchors.row == row).nonzero()[:, 0]
        length = int(sequences.lengths[row])
        starts = anchors.position[members]
        block_ids = torch.cat([sequences.token_ids[row, starts][:, None], proposals[members]], dim=1)
        token_ids = torch.cat([sequences.token_ids[row, :length], block_ids.flatten()])[None]
        block_positions = (starts[:, None] + torch.arange(block_length, device=starts.device)).flatten()
        position_ids = torch.cat([torch.arange(length, device=starts.device), block_positions])[None]
        block_of = torch.arange(len(members), device=starts.device).repeat_interleave(block_length)
        total = token_ids.shape[1]
        visible = torch.ones(total, total, dtype=torch.bool, device=starts.device).tril()
        visible[length:, length:] &= block_of[:, None] == block_of[None, :]
        visible[length:, :length] = torch.arange(length, device=starts.device) < starts[block_of][:, None]
        # An additive mask: eager attention would add a boolean one as zeros and ones.
        mask = torch.zeros_like(visible, dtype=target.dtype).masked_fill(~visible, torch.finfo(target.dtype).min)
        states = target(
            token_ids,
            attention_mask=mask[None, None],
            position_ids=position_ids,
            output_hidden_states=True,
            use_cache=False,
            logits_to_keep=1,
        ).hidden_states
        features = torch.cat([states[i + 1][0, length:] for i in drafter.config.target_layer_ids], dim=-1)
        output[members] = features.view(len(members), block_length, -1)
    return output
