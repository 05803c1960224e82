"""DFlash with the verifier relay, slow and obvious: no caches, the full prefix at every step, one row, explicit loops.

For readers, and for tests of the fast loop: the same uniforms give the same tokens and the same accepted lengths.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dflow.model.drafter import DFlowDrafter


@dataclass
class ReferenceResult:
    """What [`reference_generate`] returns."""

    token_ids: list[int]  # prompt and continuation
    accepted_lengths: list[int] = field(default_factory=list)  # of each step


@dataclass
class Relay:
    """Feedback of one step to the next: rows of rejected drafts, and the two tokens that condition them."""

    slot_features: dict[int, torch.Tensor]  # slot -> [taps * target_hidden_size]
    bonus_id: int
    rejected_id: int


@torch.no_grad()
def reference_generate(
    target: Any,
    drafter: DFlowDrafter,
    prompt_ids: Iterable[int],
    max_new_tokens: int,
    *,
    eos_token_ids: Iterable[int] = (),
    use_relay: bool = True,
    rule: str = "greedy",
    temperature: float = 1.0,
    num_draft_tokens: int | None = None,
    uniforms: Iterator[float] | None = None,
) -> ReferenceResult:
    """Decode one sequence.

    Args:
        target (`PreTrainedModel`): A causal language model.
        drafter (`DFlowDrafter`): Its drafter.
        prompt_ids (`Iterable[int]`): The prompt.
        max_new_tokens (`int`): At most this many new tokens.
        eos_token_ids (`Iterable[int]`): Tokens that end the sequence.
        use_relay (`bool`): Whether rejected rows condition the next draft.
        rule (`str`): "greedy", "token" or "block".
        temperature (`float`): Divides both logits; ignored when greedy.
        num_draft_tokens (`int`, *optional*, defaults to all of a block): Drafts verified a step, at most.
        uniforms (`Iterator[float]`, *optional*): Numbers in [0, 1), needed unless greedy. A step with N drafts takes N
            for the drafts, N for the acceptance tests and one for the bonus; the first token takes one.
    """
    if uniforms is None and rule != "greedy":
        raise ValueError(f"the rule {rule!r} samples: give uniforms, or use 'greedy'.")
    uniforms = iter(()) if uniforms is None else uniforms
    tokens = list(prompt_ids)
    result = ReferenceResult(tokens)
    longest = num_draft_tokens or drafter.config.drafts_per_block
    end = len(tokens) + max_new_tokens
    eos = set(eos_token_ids)
    relay: Relay | None = None
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()

    def probs_of(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        return (logits if rule == "greedy" else logits / temperature).softmax(-1)

    num_drafts = 0  # the first step only samples the first token
    while True:
        # Draft: each slot of the block in turn.
        drafts: list[int] = []
        draft_probs: list[torch.Tensor] = []
        if num_drafts:
            states = draft_block(target, drafter, tokens, relay if use_relay else None)
            slot_logits = drafter.compute_logits(states, head).clone()
            slot_logits[:, drafter.config.mask_token_id] = -torch.inf
            candidates = drafter.candidates(states[None], slot_logits[None], embedding, head)
            for slot in range(num_drafts):
                row = slot_logits[slot]
                if candidates is not None:  # otherwise the slots are independent
                    row = candidates.logits(slot, torch.tensor([*tokens, *drafts][-1:]), len(row))[0]
                draft_probs.append(probs_of(row))
                drafts.append(_sample(draft_probs[-1], rule, uniforms))

        # Verify: one target forward over prefix and drafts.
        logits, features = _target_rows(target, drafter, tokens + drafts)
        anchor_row = len(tokens) - 1
        accepted, bonus = verify(
            rule, drafts, draft_probs, [probs_of(row) for row in logits[anchor_row:]], logits[anchor_row:], uniforms
        )

        # Relay: rejected rows feed the slots of the next block.
        relay = None
        if accepted < num_drafts:
            rows = {j - accepted: features[anchor_row + j] for j in range(accepted + 1, num_drafts + 1)}
            relay = Relay(rows, bonus, drafts[accepted])

        # Emit, up to an end of text or the length limit.
        num_emitted = 0
        for token in [*drafts[:accepted], bonus]:
            tokens.append(token)
            num_emitted += 1
            if token in eos or len(tokens) == end:
                break
        if num_drafts:
            result.accepted_lengths.append(min(accepted, num_emitted))
        if tokens[-1] in eos or len(tokens) == end:
            return result
        num_drafts = min(longest, end - len(tokens) - 1)


def draft_block(target: Any, drafter: DFlowDrafter, tokens: list[int], relay: Relay | None) -> torch.Tensor:
    """Final states `[N, H]` of the rows that draft, after `tokens`, the last of which is the anchor."""
    config, embedding = drafter.config, target.get_input_embeddings()
    _, features = _target_rows(target, drafter, tokens[:-1])
    context = drafter.project_context(features[None])
    slots = [tokens[-1]] + [config.mask_token_id] * (config.block_size - 1)
    block = drafter.embed(torch.tensor(slots), embedding).clone()
    if relay is not None:
        bonus, rejected = drafter.embed(torch.tensor([[relay.bonus_id], [relay.rejected_id]]), embedding)
        for slot, row in relay.slot_features.items():
            # A slot is numbered by the draft it makes: where the anchor's row drafts too, one row further up.
            addition = drafter.relay(drafter.project_context(row[None, None]), bonus, rejected)[0, 0]
            block[slot - 1 + drafter.first_drafting_row] += addition

    num_context = context.shape[1]
    length = num_context + config.block_size
    rotary = drafter.rotary_emb(context, torch.arange(length)[None])
    block_rotary = tuple(table[:, num_context:] for table in rotary)
    heads_per_group = config.num_attention_heads // config.num_key_value_heads
    hidden = block[None]
    for layer_idx, layer in enumerate(drafter.layers):
        attention = layer.self_attn

        def attend(states, layer_idx=layer_idx, attention=attention):
            keys, values = attention.key_values(torch.cat([context, states], dim=1), rotary)
            queries = attention.queries(states, block_rotary)
            output = torch.empty(1, config.block_size, config.num_attention_heads, config.head_dim, dtype=states.dtype)
            for row in range(config.block_size):
                visible = [key for key in range(length) if _is_visible(config, layer_idx, num_context, row, key)]
                for head in range(config.num_attention_heads):
                    group = head // heads_per_group
                    scores = keys[0, group, visible] @ queries[0, head, row] * config.head_dim**-0.5
                    output[0, row, head] = scores.softmax(-1) @ values[0, group, visible]
            return attention.o_proj(output.flatten(2))

        hidden = layer.run(hidden, attend)
    return drafter.norm(hidden)[0, drafter.first_drafting_row :]


def verify(
    rule: str,
    drafts: list[int],
    draft_probs: list[torch.Tensor],
    target_probs: list[torch.Tensor],
    target_logits: torch.Tensor,
    uniforms: Iterator[float],
) -> tuple[int, int]:
    """Accepted length and bonus: arXiv 2211.17192 ("token"), 2403.10444 ("block"), or matching ("greedy")."""
    num_drafts = len(drafts)
    if rule == "greedy":
        choices = target_logits.float().argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafts) if token != choices[i]), num_drafts)
        return accepted, choices[accepted]
    thresholds = [next(uniforms) for _ in drafts]
    weights = [1.0]  # w_0 … w_N of block verification; token verification keeps them at 1
    if rule == "token":
        accepted = 0
        for i, token in enumerate(drafts):
            if thresholds[i] >= float(target_probs[i][token] / draft_probs[i][token]):
                break
            accepted = i + 1
        weights *= num_drafts + 1
    else:
        for i, token in enumerate(drafts):
            weights.append(min(1.0, weights[-1] * float(target_probs[i][token] / draft_probs[i][token])))
        accepted = 0
        for i in range(1, num_drafts + 1):
            if i == num_drafts:
                acceptance = weights[i]
            else:
                surplus = float((weights[i] * target_probs[i] - draft_probs[i]).clamp(min=0).sum())
                total = surplus + 1 - weights[i]
                acceptance = 1.0 if total == 0 else surplus / total
            if thresholds[i - 1] < acceptance:
                accepted = i
    residual = target_probs[accepted]
    if accepted < num_drafts:
        difference = (weights[accepted] * residual - draft_probs[accepted]).clamp(min=0)
        residual = difference / difference.sum() if difference.sum() > 0 else residual
    return accepted, _sample(residual, rule, uniforms)


def _target_rows(target: Any, drafter: DFlowDrafter, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, vocab]` and tapped states `[T, taps * H]` of one target forward without cache."""
    output = target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    taps = [output.hidden_states[i + 1][0] for i in drafter.config.target_layer_ids]  # entry 0 is the embedding
    return output.logits[0], torch.cat(taps, dim=-1)


def _is_visible(config, layer_idx: int, anchor: int, row: int, key: int) -> bool:
    """Whether row `row` of the block whose anchor sits at position `anchor` sees position `key`."""
    query = anchor + row
    is_sliding = config.layer_types[layer_idx] == "sliding_attention"
    if (config.sliding_is_causal if is_sliding else config.full_is_causal) and key > query:
        return False
    if is_sliding and config.window_from_anchor:
        return anchor - key <= config.window_reach
    return not is_sliding or abs(query - key) <= config.window_reach


def _sample(probs: torch.Tensor, rule: str, uniforms: Iterator[float]) -> int:
    if rule == "greedy":
        return int(probs.argmax())
    threshold, total = next(uniforms), 0.0
    normalised = (probs.double() / probs.double().sum()).tolist()
    for token, probability in enumerate(normalised):
        total += probability
        if probability > 0 and total > threshold:
            return token
    return max(token for token, probability in enumerate(normalised) if probability > 0)
