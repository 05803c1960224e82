"""The whole algorithm, slow and obvious: no caches, the full prefix at every step, one number at a time.

For readers, and for tests of the fast loop: the same uniforms give the same tokens and the same accepted lengths.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dflow.generation._compat import capture_features
from hf_dflow.model.drafter import DFlowDrafter, apply_rotary


@dataclass
class ReferenceResult:
    """What [`reference_generate`] returns."""

    token_ids: list[int]  # prompt and continuation
    accepted_lengths: list[int] = field(default_factory=list)  # of each step


@dataclass
class _Relay:
    """What one step leaves for the next: rows of rejected drafts, and the two tokens that condition them."""

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
    tokens = list(prompt_ids)
    result = ReferenceResult(tokens)
    longest = num_draft_tokens or drafter.config.drafts_per_block
    end = len(tokens) + max_new_tokens
    eos = set(eos_token_ids)
    relay: _Relay | None = None

    def law(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        return (logits if rule == "greedy" else logits / temperature).softmax(-1)

    while True:
        is_first = not result.accepted_lengths and len(tokens) == end - max_new_tokens
        drafts: list[int] = []
        draft_laws: list[torch.Tensor] = []
        num_drafts = 0 if is_first else min(longest, end - len(tokens) - 1)
        if num_drafts:
            states = draft_block(target, drafter, tokens, relay if use_relay else None)
            for state in states[:num_drafts]:
                row = _without_mask_token(drafter.compute_logits(state, target.get_output_embeddings()), drafter)
                if drafter.candidate_selector is not None:
                    row = _selected(drafter.candidate_selector, state, row, [*tokens, *drafts][-1])
                if drafter.causal_correction is not None:
                    row = _corrected(drafter, target, state, row, [*tokens, *drafts][-1])
                draft_laws.append(law(row))
                drafts.append(_draw(draft_laws[-1], rule, uniforms))
        logits, features = _target_rows(target, drafter, tokens + drafts)
        target_laws = [law(row) for row in logits[len(tokens) - 1 :]]

        accepted, bonus = decide(rule, drafts, draft_laws, target_laws, logits[len(tokens) - 1 :], uniforms)
        relay = None
        if num_drafts and accepted < num_drafts:
            anchor_row = len(tokens) - 1
            rejected = range(accepted + 1, num_drafts + 1)
            relay = _Relay(
                {j - accepted: features[anchor_row + j] for j in rejected},
                bonus,
                drafts[accepted],
            )
        emitted = 0
        for token in [*drafts[:accepted], bonus]:
            tokens.append(token)
            emitted += 1
            if token in eos or len(tokens) == end:
                break
        if num_drafts:
            result.accepted_lengths.append(min(accepted, emitted))
        if tokens[-1] in eos or len(tokens) == end:
            return result


def draft_block(target: Any, drafter: DFlowDrafter, tokens: list[int], relay: _Relay | None) -> torch.Tensor:
    """Final states `[N, H]` of the rows that draft, behind `tokens`, the last of which is the anchor."""
    config, embedding = drafter.config, target.get_input_embeddings()
    _, features = _target_rows(target, drafter, tokens[:-1])
    context = drafter.project_context(features[None])[0]
    slots = [tokens[-1]] + [config.mask_token_id] * (config.block_size - 1)
    block = drafter.embed(torch.tensor(slots), embedding).clone()
    if relay is not None:
        pair = drafter.embed(torch.tensor([[relay.bonus_id], [relay.rejected_id]]), embedding)
        for slot, row in relay.slot_features.items():
            # A slot is numbered by the draft it makes: where the anchor's row drafts too, one row further up.
            addition = drafter.relay(drafter.project_context(row[None, None]), *pair)[0, 0]
            block[slot - 1 + drafter.first_drafting_row] += addition

    num_context, length = len(context), len(tokens) - 1 + config.block_size
    hidden = block
    for layer_idx, layer in enumerate(drafter.layers):
        normed = layer.input_layernorm(hidden)
        attention_in, attention_out = _kernels(layer.attention_conv, normed)
        normed = _convolved(normed, attention_in)
        states = torch.cat([context, normed])
        rotary = drafter.rotary_emb(states[None], torch.arange(length)[None])
        attention = layer.self_attn
        keys, values = (part[0] for part in attention.key_values(states[None], rotary))
        queries = attention.q_norm(attention.q_proj(normed).view(config.block_size, -1, config.head_dim))
        queries = apply_rotary(queries.transpose(0, 1)[None], tuple(table[:, num_context:] for table in rotary))[0]
        output = torch.empty(config.block_size, config.num_attention_heads, config.head_dim, dtype=hidden.dtype)
        for i in range(config.block_size):
            seen = [k for k in range(length) if _may_look(config, layer_idx, num_context, i, k)]
            for head in range(config.num_attention_heads):
                group = head * config.num_key_value_heads // config.num_attention_heads
                scores = keys[group, seen] @ queries[head, i] * config.head_dim**-0.5
                output[i, head] = scores.softmax(-1) @ values[group, seen]
        hidden = hidden + _convolved(attention.o_proj(output.flatten(1)), attention_out)
        normed = layer.post_attention_layernorm(hidden)
        mlp_in, mlp_out = _kernels(layer.mlp_conv, normed)
        hidden = hidden + _convolved(layer.mlp(_convolved(normed, mlp_in)), mlp_out)
    return drafter.norm(hidden)[drafter.first_drafting_row :]


def _kernels(convolution, states: torch.Tensor):
    """Both kernels `[L, K, H]` of a DFlash 2 convolution for a sublayer's input `[L, H]`, or none."""
    if convolution is None:
        return None, None
    dynamic = convolution.kernel_projection(states).view(len(states), 2, convolution.base_kernel.shape[1], -1)
    whole = torch.stack([dynamic[..., c // convolution.group_size] for c in range(states.shape[-1])], dim=-1)
    whole = whole + convolution.base_kernel
    return whole[:, 0], whole[:, 1]


def _convolved(states: torch.Tensor, kernel: torch.Tensor | None) -> torch.Tensor:
    if kernel is None:
        return states
    output = torch.zeros_like(states)
    for position in range(len(states)):
        for tap in range(min(kernel.shape[1], position + 1)):
            output[position] += kernel[position, tap] * states[position - tap]
    return output


def _selected(selector, state: torch.Tensor, logits: torch.Tensor, previous: int) -> torch.Tensor:
    """Logits `[vocab]` of a slot's candidates behind the token `previous`; -inf for all others."""
    selected = torch.full_like(logits, -torch.inf)
    query = selector.hidden_projection(state) * selector.predecessor_codebook.weight[previous]
    for token in logits.topk(min(selector.top_k, len(logits))).indices.tolist():
        selected[token] = logits[token] + query @ selector.successor_codebook.weight[token]
    return selected


def _corrected(drafter: DFlowDrafter, target: Any, state: torch.Tensor, logits: torch.Tensor, previous: int):
    """Logits `[vocab]` of a slot's candidates once its state knows that `previous` was drafted before it."""
    correction = drafter.causal_correction
    embed = drafter.embed(torch.tensor(previous), target.get_input_embeddings())
    anew = _without_mask_token(
        drafter.compute_logits(correction(state, embed), target.get_output_embeddings()), drafter
    )
    selected = torch.full_like(logits, -torch.inf)
    for token in logits.topk(min(correction.top_k, len(logits))).indices.tolist():
        selected[token] = anew[token]
    return selected


def decide(
    rule: str,
    drafts: list[int],
    draft_laws: list[torch.Tensor],
    target_laws: list[torch.Tensor],
    target_logits: torch.Tensor,
    uniforms: Iterator[float] | None,
) -> tuple[int, int]:
    """Accepted length and bonus: arXiv 2211.17192 ("token"), 2403.10444 ("block"), or matching ("greedy")."""
    num_drafts = len(drafts)
    if rule == "greedy":
        choices = target_logits.float().argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafts) if token != choices[i]), num_drafts)
        return accepted, choices[accepted]
    assert uniforms is not None
    tests = [next(uniforms) for _ in drafts]
    weights = [1.0]  # w_0 … w_N; token verification keeps them at 1
    if rule == "token":
        accepted = 0
        for i, token in enumerate(drafts):
            if tests[i] >= float(target_laws[i][token] / draft_laws[i][token]):
                break
            accepted = i + 1
        weights *= num_drafts + 1
    else:
        for i, token in enumerate(drafts):
            weights.append(min(1.0, weights[-1] * float(target_laws[i][token] / draft_laws[i][token])))
        accepted = 0
        for i in range(1, num_drafts + 1):
            if i == num_drafts:
                threshold = weights[i]
            else:
                surplus = float((weights[i] * target_laws[i] - draft_laws[i]).clamp(min=0).sum())
                total = surplus + 1 - weights[i]
                threshold = 1.0 if total == 0 else surplus / total
            if tests[i - 1] < threshold:
                accepted = i
    residual = target_laws[accepted]
    if accepted < num_drafts:
        difference = (weights[accepted] * residual - draft_laws[accepted]).clamp(min=0)
        residual = difference / difference.sum() if difference.sum() > 0 else residual
    return accepted, _draw(residual, rule, uniforms)


def _target_rows(target: Any, drafter: DFlowDrafter, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, vocab]` and tapped states `[T, taps * H]` of one target forward without cache."""
    output = target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.logits[0], capture_features(output.hidden_states, drafter.config.target_layer_ids)[0]


def _may_look(config, layer_idx: int, anchor: int, row: int, key: int) -> bool:
    """Whether row `row` of the block whose anchor sits at position `anchor` sees position `key`."""
    query = anchor + row
    is_sliding = config.layer_types[layer_idx] == "sliding_attention"
    if (config.sliding_is_causal if is_sliding else config.full_is_causal) and key > query:
        return False
    if is_sliding and config.window_from_anchor:
        return anchor - key <= config.window_reach
    return not is_sliding or abs(query - key) <= config.window_reach


def _without_mask_token(logits: torch.Tensor, drafter: DFlowDrafter) -> torch.Tensor:
    logits = logits.clone()
    logits[drafter.config.mask_token_id] = -torch.inf
    return logits


def _draw(law: torch.Tensor, rule: str, uniforms: Iterator[float] | None) -> int:
    if rule == "greedy":
        return int(law.argmax())
    assert uniforms is not None
    threshold, total = next(uniforms), 0.0
    probs = (law.double() / law.double().sum()).tolist()
    for token, probability in enumerate(probs):
        total += probability
        if probability > 0 and total > threshold:
            return token
    return max(token for token, probability in enumerate(probs) if probability > 0)
