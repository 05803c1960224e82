"""What the drafter proposes in a round, and what the frozen target computes on it."""

from typing import Any

import torch
from transformers import DynamicCache

from hf_dflow.errors import DFlowError
from hf_dflow.generation._compat import cache_argument, capture_features, get_cache, has_recurrent_cache
from hf_dflow.generation.cache import crop
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.frozen_target import inner_model
from hf_dflow.training.loss import slots_per_chunk
from hf_dflow.training.masks import PackedMask
from hf_dflow.training.packing import Anchors, BlockLayout, Sequences, context_places
from hf_dflow.training.state_grid import StateGrid, check_blocks

FULL, SLIDING = "full_attention", "sliding_attention"


@torch.no_grad()
def greedy_proposals(
    drafter: DFlowDrafter, target: Any, hidden: torch.Tensor, anchor_ids: torch.Tensor
) -> torch.Tensor:
    """The tokens `[A, N]` that greedy decoding drafts from states `[A, N, H]` behind anchors `[A]`.

    Logits exist for a chunk of blocks at a time.
    """
    embedding, head, config = target.get_input_embeddings(), target.get_output_embeddings(), drafter.config
    blocks_per_chunk = max(1, slots_per_chunk(config.vocab_size, hidden.device) // max(1, hidden.shape[1]))
    proposals = []
    for states, previous in zip(hidden.split(blocks_per_chunk), anchor_ids.split(blocks_per_chunk), strict=True):
        logits = drafter.compute_logits(states, head)
        logits[..., config.mask_token_id] = -torch.inf
        candidates = drafter.candidates(states, logits.to(states.device), embedding, head)
        if candidates is None:
            proposals.append(logits.argmax(dim=-1).to(hidden.device))
            continue
        tokens: list[torch.Tensor] = []
        for slot in range(hidden.shape[1]):
            previous = candidates.logits(slot, previous, logits.shape[-1]).argmax(dim=-1)
            tokens.append(previous)
        proposals.append(torch.stack(tokens, dim=1))
    return torch.cat(proposals)


@torch.no_grad()
def proposal_features(
    target: Any, sequences: Sequences, anchors: Anchors, proposals: torch.Tensor, layer_ids: list[int]
) -> torch.Tensor:
    """Target states `[A, N + 1, layers * H]` of every block `[anchor, proposals]`, all of them in one target pass.

    A block sees its document before its anchor, and itself. The first call computes keys and values of the rows' own
    tokens and keeps them in `sequences.target_cache`, so that every round pays for its blocks alone. A target with
    recurrent layers cannot run blocks side by side in a row: they are the rows of a batch (`StateGrid`).

    Args:
        proposals (`torch.LongTensor` of shape `(A, N)`): What was drafted.
        layer_ids (`list[int]`): Layers whose outputs are returned. That of the last layer carries the final norm.

    Raises:
        DFlowError: The target has layers, or an attention implementation, that cannot run blocks side by side.
    """
    block_ids = torch.cat([sequences.anchor_ids(anchors)[:, None], proposals], dim=1)
    if has_recurrent_cache(target):
        if sequences.target_cache is None:
            check_blocks(target)
            sequences.target_cache = StateGrid(target, sequences)
        return sequences.target_cache.block_features(anchors, block_ids, layer_ids)
    attention = _attention_kinds(target)
    blocks = BlockLayout(anchors, len(sequences.lengths), block_ids.shape[1])
    context, own = context_places(sequences), blocks.places(sequences)
    if sequences.target_cache is None:
        has_documents = sequences.document_starts is not None  # else plain causal attention, as padding comes last
        _, sequences.target_cache = _forward(
            target,
            sequences.token_ids,
            attention_mask=_target_mask(target, attention, PackedMask(context, context)) if has_documents else None,
            position_ids=context.positions,
            cache=DynamicCache(),  # no configuration: sliding layers keep all rows, and the mask has the window
        )
    states, cache = _forward(
        target,
        blocks.pack(block_ids),
        attention_mask=_target_mask(target, attention, PackedMask(own, context + own)),
        position_ids=own.positions,
        cache=sequences.target_cache,
    )
    crop(cache, own.index.shape[1])
    return blocks.unpack(capture_features(states, layer_ids))


def check_relay_target(target: Any) -> None:
    """Refuse a target on which relay rounds cannot run.

    Raises:
        DFlowError: Its layers or its attention implementation are of another kind, or it computes blocks wrongly.
    """
    if has_recurrent_cache(target):
        check_blocks(target)
    else:
        _attention_kinds(target)


def _forward(
    target: Any, token_ids: torch.Tensor, *, attention_mask: Any, position_ids: torch.Tensor, cache: Any
) -> tuple[Any, Any]:
    """Hidden states of all layers and the extended cache; no logits are computed."""
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None:  # slots past it, and padding, teach nothing, but a table of learned positions has no row
        position_ids = position_ids.clamp(max=limit - 1)
    output = inner_model(target)(
        token_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        output_hidden_states=True,
        use_cache=True,
        **{cache_argument(target): cache},
    )
    return output.hidden_states, get_cache(output)


def _attention_kinds(target: Any) -> dict[str, int | None]:
    """The kinds of attention layers that the target has, and their reach; `None` is all of the past."""
    config = target.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    others = kinds - {FULL, SLIDING}
    if others:
        raise DFlowError(
            f"{type(target).__name__} has layers of kind {', '.join(sorted(others))}; relay rounds run all proposals "
            "side by side, which only full and sliding attention can. Train without relay rounds (relay_rounds=0)."
        )
    implementation = config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise DFlowError(
            f"relay rounds give the target a mask of their own, which attn_implementation='{implementation}' does not "
            "take; load the target with attn_implementation='sdpa' or 'eager'."
        )
    window = getattr(config, "sliding_window", None)
    reach = None if window is None or getattr(config, "use_sliding_window", True) is False else window - 1
    if not kinds:  # all layers are alike
        return {FULL: reach}
    return {kind: reach if kind == SLIDING else None for kind in kinds}


def _target_mask(target: Any, attention: dict[str, int | None], mask: PackedMask) -> Any:
    """One additive mask, or one for each kind of layer, as transformers' models with several kinds take them."""

    def additive(reach: int | None) -> torch.Tensor:  # eager attention would add a boolean mask as zeros and ones
        visible = mask.dense(True, reach)
        return torch.zeros_like(visible, dtype=target.dtype).masked_fill(~visible, torch.finfo(target.dtype).min)

    if SLIDING not in attention:
        return additive(attention[FULL])
    return {kind: additive(attention.get(kind)) for kind in (FULL, SLIDING)}
