"""The torch definition of each op: the contract that every other backend satisfies. Equations are in MATH.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

RULES = ("greedy", "token", "block")
MOVED_TOGETHER = 256  # positions that compact_rows copies at once: what it needs beside the cache


@dataclass(frozen=True)
class SparseLogits:
    """A truncated draft law: tokens that are not listed have probability zero.

    Args:
        ids (`torch.LongTensor` of shape `(batch, num_drafts, k)`): Token ids, distinct within a position.
        logits (`torch.Tensor` of shape `(batch, num_drafts, k)`): Their logits; the softmax runs over `k`.
    """

    ids: torch.Tensor  # [B, N, K]
    logits: torch.Tensor  # [B, N, K]


DraftLaw: TypeAlias = torch.Tensor | SparseLogits | None  # dense [B, N, V]; None = every draft is a point mass


@dataclass(frozen=True)
class BlockDecision:
    """What `verify_block` decides for each row.

    Args:
        accepted_length (`torch.LongTensor` of shape `(batch,)`): Accepted drafts, `0 … lengths`, bonus not counted.
        bonus_ids (`torch.LongTensor` of shape `(batch,)`): The token that the target supplies after them.
        acceptance_probs (`torch.Tensor` of shape `(batch, num_drafts)`): What each uniform was compared with: per
            draft under "token", per prefix under "block", 0 or 1 under "greedy". Not zeroed after the first failure;
            0 beyond `lengths`.
        residual_probs (`torch.Tensor` of shape `(batch, vocab)`, *optional*): The law that the bonus was drawn from.
    """

    accepted_length: torch.Tensor  # [B]
    bonus_ids: torch.Tensor  # [B]
    acceptance_probs: torch.Tensor  # [B, N]
    residual_probs: torch.Tensor | None = None  # [B, V]


@torch.no_grad()
def verify_block(
    *,
    draft_ids: torch.Tensor,  # [B, N]
    draft_logits: DraftLaw,  # [B, N, V] | SparseLogits [B, N, K] | None
    target_logits: torch.Tensor,  # [B, N + 1, V]
    uniforms: torch.Tensor | None,  # [B, N + 1]
    rule: str,
    lengths: torch.Tensor | None = None,  # [B]
    point_mass: torch.Tensor | None = None,  # [B, N]
    acceptance_probs: torch.Tensor | None = None,  # [B, N]
    temperature: torch.Tensor | None = None,  # [B]
    return_residual: bool = False,
) -> BlockDecision:
    """Decide how many drafts of each row to accept, and draw the bonus token.

    Under "token" and "block" the output law is the target's, provided that `draft_logits` is the law the drafts were
    drawn from. Logits are final but for `temperature`: every other processing comes before. Nothing here waits for the
    device. A row whose target logits hold NaN or +inf gets an unspecified but valid decision.

    Args:
        draft_ids (`torch.LongTensor` of shape `(batch, num_drafts)`): Drafted tokens; `num_drafts` may be 0.
        draft_logits (`torch.Tensor` of shape `(batch, num_drafts, vocab)`, `SparseLogits` or `None`):
            The law of each draft; `None` when all are point masses. Verification of a row ends before a draft whose
            law is not finite, as if `lengths` said so. Ignored by "greedy".
        target_logits (`torch.Tensor` of shape `(batch, num_drafts + 1, vocab)`): Row i judges draft i; -inf is fine.
        uniforms (`torch.Tensor` of shape `(batch, num_drafts + 1)`, *optional*): Numbers in [0, 1). The first
            `num_drafts` decide acceptance (u < probability), the last draws the bonus. Ignored by "greedy".
        rule (`str`): "greedy", "token" or "block".
        lengths (`torch.LongTensor` of shape `(batch,)`, *optional*, defaults to `num_drafts`): Drafts to verify per
            row. Whatever lies beyond is ignored, NaN included.
        point_mass (`torch.BoolTensor` of shape `(batch, num_drafts)`, *optional*): True where the draft was looked up
            or recycled rather than sampled: a point mass at `draft_ids`, whatever `draft_logits` holds.
        acceptance_probs (`torch.Tensor` of shape `(batch, num_drafts)`, *optional*): **Lossy.** Used in place of the
            rule's own; the residual stays the rule's. For "greedy" they must be 0 or 1.
        temperature (`torch.Tensor` of shape `(batch,)`, *optional*): Positive; divides the logits of both laws. Given
            here it saves a pass over the logits. Ignored by "greedy".
        return_residual (`bool`, *optional*, defaults to `False`): Whether to fill `residual_probs`.

    Returns:
        `BlockDecision`: Probabilities are in float32, or in float64 where an input has it.

    Raises:
        ValueError: Unknown rule, "token" or "block" without uniforms, "block" with `acceptance_probs`, or a shape that
            does not fit.
    """
    check_arguments(
        draft_ids,
        draft_logits,
        target_logits,
        uniforms,
        rule,
        lengths,
        point_mass,
        acceptance_probs,
        temperature,
    )
    batch, num_drafts = draft_ids.shape
    slots = torch.arange(num_drafts, device=draft_ids.device)  # [N]
    if lengths is None:
        lengths = torch.full((batch,), num_drafts, device=draft_ids.device)
    lengths = lengths.long().clamp(0, num_drafts)  # [B]
    active = slots < lengths[:, None]  # [B, N]
    if rule == "greedy":
        return _verify_greedy(draft_ids, target_logits, active, acceptance_probs, return_residual)
    assert uniforms is not None  # checked above
    if temperature is not None:
        target_logits, draft_logits = _scaled(target_logits, draft_logits, temperature)

    draft_ids = torch.where(active, draft_ids.long(), 0)  # ids beyond `lengths` may be out of range
    draft_probs, is_law = _draft_probs(draft_ids, draft_logits, target_logits, active, point_mass)
    active = active & (is_law.long().cumprod(-1) > 0)
    lengths = active.sum(-1)
    target_probs = target_logits.to(draft_probs.dtype).softmax(-1)  # [B, N + 1, V]

    target_drafted = target_probs[:, :-1].gather(-1, draft_ids[..., None])[..., 0]  # [B, N]
    draft_drafted = draft_probs.gather(-1, draft_ids[..., None])[..., 0]  # [B, N]
    path_weights = torch.ones_like(target_probs[..., 0])  # [B, N + 1]
    if rule == "block":
        path_weights = _path_weights(target_drafted, draft_drafted)
        probs = _block_acceptance(path_weights, target_probs, draft_probs, slots + 1 == lengths[:, None])
    elif acceptance_probs is None:
        probs = _capped_ratio(target_drafted, draft_drafted)
    else:
        probs = acceptance_probs.to(draft_probs.dtype)
    probs = torch.where(active, probs, 0.0)

    accepted = uniforms[:, :-1] < probs  # compared in the wider dtype: rounding u up to 1 would reject certainties
    accepted_length = _leading_true(accepted) if rule == "token" else _last_true(accepted, slots)

    rows = torch.arange(batch, device=draft_ids.device)
    bonus_weights = target_row = target_probs[rows, accepted_length]  # [B, V]
    if num_drafts:
        draft_row = draft_probs[rows, accepted_length.clamp(max=num_drafts - 1)]
        residual = (path_weights[rows, accepted_length][:, None] * target_row - draft_row).clamp_min(0.0)
        # A zero residual means that p = q up to rounding, where a rejection has (nearly) no probability.
        rejected = (accepted_length < lengths) & (residual.sum(-1) > 0)
        bonus_weights = torch.where(rejected[:, None], residual, target_row)
    bonus_ids, bonus_probs = _draw(bonus_weights, uniforms[:, -1])
    return BlockDecision(accepted_length, bonus_ids, probs, bonus_probs if return_residual else None)


@torch.no_grad()
def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token from the softmax of each row of logits by inverse CDF.

    Args:
        logits (`torch.Tensor` of shape `(batch, rows, vocab)`): Final logits; -inf is fine.
        uniforms (`torch.Tensor` of shape `(batch, rows)`): Numbers in [0, 1).

    Returns:
        `torch.LongTensor` of shape `(batch, rows)`: Never a token of probability zero.
    """
    probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    return _draw(probs.flatten(0, 1), uniforms.flatten())[0].view(uniforms.shape)


@torch.no_grad()
def compact_rows(states: Sequence[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
    """Move kept positions together in place; see [`~hf_dflow.kernels.compact_rows`].

    Args:
        states (`Sequence[torch.Tensor]` of shape `(batch, heads, positions, width)`): Keys and values.
        keep (`torch.BoolTensor` of shape `(batch, positions)`): Which positions to keep.

    Returns:
        `torch.LongTensor` of shape `(batch,)`: How many positions each row has now.

    Raises:
        ValueError: A shape does not fit.
    """
    sources, counts = kept_positions(states, keep)
    for one in states:
        for start in range(0, keep.shape[1], MOVED_TOGETHER):  # ascending: no source lies before its destination
            moved = sources[:, None, start : start + MOVED_TOGETHER, None].expand(-1, one.shape[1], -1, one.shape[3])
            one[:, :, start : start + MOVED_TOGETHER] = one.gather(2, moved)
    return counts


def kept_positions(states: Sequence[torch.Tensor], keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each position comes from `[B, T]` (from itself behind the kept ones), and how many are kept `[B]`."""
    for one in states:
        if keep.ndim != 2 or one.ndim != 4 or (one.shape[0], one.shape[2]) != tuple(keep.shape):
            raise ValueError(
                "`states` must have shape (batch, heads, positions, width) and `keep` (batch, positions); got "
                f"{tuple(one.shape)} and {tuple(keep.shape)}."
            )
    keep = keep.bool()
    counts = keep.sum(-1)
    positions = torch.arange(keep.shape[1], device=keep.device)
    kept = torch.where(keep, positions, keep.shape[1]).sort(dim=-1).values
    return torch.where(positions < counts[:, None], kept, positions), counts


def _verify_greedy(
    draft_ids: torch.Tensor,  # [B, N]
    target_logits: torch.Tensor,  # [B, N + 1, V]
    active: torch.Tensor,  # [B, N]
    acceptance_probs: torch.Tensor | None,  # [B, N]
    return_residual: bool,
) -> BlockDecision:
    dtype = torch.promote_types(target_logits.dtype, torch.float32)
    choices = target_logits.argmax(-1)  # [B, N + 1]; on the logits as given: ties fall as in plain generation
    own = (draft_ids == choices[:, :-1]) if acceptance_probs is None else acceptance_probs
    probs = torch.where(active, own.to(dtype), 0.0)
    accepted_length = _leading_true(probs >= 0.5)
    bonus_ids = choices.gather(1, accepted_length[:, None])  # [B, 1]
    residual_probs = None
    if return_residual:
        residual_probs = torch.zeros_like(target_logits[:, 0], dtype=dtype).scatter_(1, bonus_ids, 1.0)
    return BlockDecision(accepted_length, bonus_ids[:, 0], probs, residual_probs)


def _scaled(
    target_logits: torch.Tensor,  # [B, N + 1, V]
    draft_logits: DraftLaw,
    temperature: torch.Tensor,  # [B]
) -> tuple[torch.Tensor, DraftLaw]:
    """Both laws' logits over the row's temperature, in float32 or wider."""

    def scaled(logits: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide) / temperature[:, None, None].to(wide)

    if isinstance(draft_logits, SparseLogits):
        draft_logits = SparseLogits(draft_logits.ids, scaled(draft_logits.logits))
    elif draft_logits is not None:
        draft_logits = scaled(draft_logits)
    return scaled(target_logits), draft_logits


def _draft_probs(
    draft_ids: torch.Tensor,  # [B, N]
    draft_logits: DraftLaw,
    target_logits: torch.Tensor,  # [B, N + 1, V]
    active: torch.Tensor,  # [B, N]
    point_mass: torch.Tensor | None,  # [B, N]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense draft probabilities `[B, N, V]` and where they are a law at all `[B, N]`."""
    dtype = torch.promote_types(target_logits.dtype, torch.float32)
    template = target_logits[:, :-1]  # the shape and device of a dense law
    if draft_logits is None:
        one_hot = torch.zeros_like(template, dtype=dtype).scatter_(-1, draft_ids[..., None], 1.0)
        return one_hot, torch.ones_like(active)

    logits = draft_logits.logits if isinstance(draft_logits, SparseLogits) else draft_logits
    dtype = torch.promote_types(logits.dtype, dtype)
    probs = logits.to(dtype).softmax(-1)
    is_law = ~probs[..., 0].isnan()  # a softmax over NaN, +inf or nothing but -inf is NaN throughout
    if isinstance(draft_logits, SparseLogits):
        ids = torch.where(active[..., None], draft_logits.ids.long(), 0)
        probs = torch.zeros_like(template, dtype=dtype).scatter_(-1, ids, probs)
    if point_mass is not None:
        one_hot = torch.zeros_like(probs).scatter_(-1, draft_ids[..., None], 1.0)
        probs = torch.where(point_mass[..., None], one_hot, probs)
        is_law = is_law | point_mass
    return probs, is_law


def _capped_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """`min(1, numerator / denominator)` of one shape, where 0/0 is 0: a token without target probability is refused."""
    return torch.where(denominator > 0, numerator / denominator, numerator.sign()).clamp_max(1.0)


def _path_weights(target_drafted: torch.Tensor, draft_drafted: torch.Tensor) -> torch.Tensor:
    """Capped likelihood ratios w_0 … w_N `[B, N + 1]` of the draft prefixes, from both laws at the drafts `[B, N]`."""
    weights = [target_drafted.new_ones(target_drafted.shape[0])]
    for target_prob, draft_prob in zip(target_drafted.unbind(1), draft_drafted.unbind(1), strict=True):
        weights.append(_capped_ratio(weights[-1] * target_prob, draft_prob))
    return torch.stack(weights, dim=1)


def _block_acceptance(
    path_weights: torch.Tensor,  # [B, N + 1]
    target_probs: torch.Tensor,  # [B, N + 1, V]
    draft_probs: torch.Tensor,  # [B, N, V]
    is_last: torch.Tensor,  # [B, N], True at each row's last verified draft
) -> torch.Tensor:
    """Probabilities h_1 … h_N `[B, N]` of accepting each prefix."""
    surplus = (path_weights[:, :-1, None] * target_probs[:, :-1] - draft_probs).clamp_min(0.0).sum(-1)  # S_0 … S_{N-1}
    surplus = torch.cat([surplus[:, 1:], torch.zeros_like(path_weights[:, :1])], dim=1)[:, : is_last.shape[1]]
    weights = path_weights[:, 1:]
    total = surplus + (1.0 - weights)
    return torch.where(is_last, weights, torch.where(total == 0, 1.0, surplus / total))


def _leading_true(accepted: torch.Tensor) -> torch.Tensor:
    """How many entries `[B]` of `accepted` `[B, N]` precede the first False."""
    return accepted.long().cumprod(-1).sum(-1)


def _last_true(accepted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The one-based place `[B]` of the last True in `accepted` `[B, N]`, 0 where there is none."""
    places = torch.where(accepted, slots + 1, 0)
    return torch.cat([torch.zeros_like(places.sum(-1, keepdim=True)), places], dim=-1).amax(-1)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF draw from unnormalised `weights` `[B, V]` at `uniforms` `[B]`: ids `[B]` and the law `[B, V]`."""
    # A running float32 sum loses every token below 6e-8. MPS has nothing wider.
    wide = weights if weights.device.type == "mps" else weights.double()
    cumulative = wide.cumsum(-1)
    threshold = uniforms.to(wide.dtype)[:, None] * cumulative[:, -1:]
    vocab = torch.arange(weights.shape[-1], device=weights.device)
    possible = (
        weights > 0
    )  # a parallel scan is not monotone to the last bit, so that a zero weight might pass for a step
    first_above = torch.where(possible & (cumulative > threshold), vocab, vocab.shape[0]).amin(-1)
    last_possible = torch.where(possible, vocab, 0).amax(-1)  # for a threshold that rounds up to the whole sum
    return torch.minimum(first_above, last_possible), (wide / cumulative[:, -1:]).to(weights.dtype)


def check_arguments(
    draft_ids: torch.Tensor,
    draft_logits: DraftLaw,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor | None,
    rule: str,
    lengths: torch.Tensor | None,
    point_mass: torch.Tensor | None,
    acceptance_probs: torch.Tensor | None,
    temperature: torch.Tensor | None,
) -> None:
    """What every backend of `verify_block` refuses, in the same words.

    Raises:
        ValueError: See [`verify_block`].
    """
    if rule not in RULES:
        raise ValueError(f"Unknown verification rule {rule!r}; choose one of {', '.join(map(repr, RULES))}.")
    if rule == "block" and acceptance_probs is not None:
        raise ValueError(
            'rule="block" takes no `acceptance_probs`: it accepts whole prefixes and has no acceptance per token that '
            'could be relaxed. Use rule="token" for relaxed (lossy) acceptance.'
        )
    if rule != "greedy" and uniforms is None:
        raise ValueError(f'rule="{rule}" needs `uniforms` of shape (batch, num_drafts + 1); only "greedy" takes None.')
    if draft_ids.ndim != 2 or target_logits.ndim != 3:
        raise ValueError(
            "`draft_ids` must have shape (batch, num_drafts) and `target_logits` (batch, num_drafts + 1, vocab); got "
            f"{tuple(draft_ids.shape)} and {tuple(target_logits.shape)}."
        )
    batch, num_drafts = draft_ids.shape
    vocab = target_logits.shape[-1]
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "target_logits": (target_logits, (batch, num_drafts + 1, vocab)),
        "lengths": (lengths, (batch,)),
        "point_mass": (point_mass, (batch, num_drafts)),
        "acceptance_probs": (acceptance_probs, (batch, num_drafts)),
        "temperature": (temperature, (batch,)),
    }
    if rule != "greedy":
        expected["uniforms"] = (uniforms, (batch, num_drafts + 1))
        if isinstance(draft_logits, SparseLogits):
            sparse_shape = (batch, num_drafts, draft_logits.ids.shape[-1])
            expected["draft_logits.ids"] = (draft_logits.ids, sparse_shape)
            expected["draft_logits.logits"] = (draft_logits.logits, sparse_shape)
        else:
            expected["draft_logits"] = (draft_logits, (batch, num_drafts, vocab))
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)} but {shape} fits `draft_ids` {(batch, num_drafts)} and a "
                f"vocabulary of {vocab}."
            )
    if rule != "greedy" and isinstance(draft_logits, SparseLogits) and draft_logits.ids.shape[-1] == 0:
        raise ValueError("`draft_logits.ids` lists no token: a draft law needs at least one per position.")
