"""The torch definition of each op: the contract that the Triton twins satisfy. Equations are in MATH.md."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RULES = ("greedy", "token", "block")
POSITIONS_AT_ONCE = 256  # that compact_rows copies: what it needs beside the cache


@dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """What `verify_block` decides from: drafted blocks, the logits of both models, and random numbers.

    Logits are final: temperature and every other processing come before. The output law is the target's under "token"
    and "block" provided that `draft_logits` is the law that the drafts were drawn from.

    Args:
        rule (`str`): "greedy", "token" or "block".
        draft_ids (`torch.LongTensor` of shape `(batch, num_drafts)`): Drafted tokens; `num_drafts` may be 0.
        draft_logits (`torch.Tensor` of shape `(batch, num_drafts, vocab)`, *optional*): The law of each draft; `None`
            where every draft is a point mass. Verification of a row ends before a draft whose law is not finite, as if
            `lengths` said so. Ignored by "greedy".
        target_logits (`torch.Tensor` of shape `(batch, num_drafts + 1, vocab)`): Row i judges draft i; -inf is fine. A
            row that holds NaN or +inf gets an unspecified but valid decision.
        uniforms (`torch.Tensor` of shape `(batch, num_drafts + 1)`, *optional*): Numbers in [0, 1). The first
            `num_drafts` decide acceptance (u < probability), the last draws the bonus token. Ignored by "greedy".
        lengths (`torch.LongTensor` of shape `(batch,)`, *optional*, defaults to `num_drafts`): Drafts to verify per
            row. Whatever lies beyond is ignored, NaN included.
        point_mass (`torch.BoolTensor` of shape `(batch, num_drafts)`, *optional*): True where the draft was copied
            rather than sampled: a point mass at `draft_ids`, whatever `draft_logits` holds.
        acceptance_probs (`torch.Tensor` of shape `(batch, num_drafts)`, *optional*): **Lossy.** Used in place of the
            rule's own; the residual stays the rule's. For "greedy" they must be 0 or 1; "block" takes none.
    """

    rule: str
    draft_ids: torch.Tensor  # [B, N]
    draft_logits: torch.Tensor | None  # [B, N, V]
    target_logits: torch.Tensor  # [B, N + 1, V]
    uniforms: torch.Tensor | None  # [B, N + 1]
    lengths: torch.Tensor | None = None  # [B]
    point_mass: torch.Tensor | None = None  # [B, N]
    acceptance_probs: torch.Tensor | None = None  # [B, N]

    def check(self) -> None:
        """Refuse what no backend can verify.

        Raises:
            ValueError: Unknown rule, a sampling rule without uniforms, "block" with `acceptance_probs`, a shape that
                does not fit, or tensors on several devices.
        """
        if self.rule not in RULES:
            raise ValueError(f"Unknown verification rule {self.rule!r}; choose one of {', '.join(map(repr, RULES))}.")
        if self.rule == "block" and self.acceptance_probs is not None:
            raise ValueError(
                'rule="block" takes no `acceptance_probs`: it accepts whole prefixes and has no acceptance per token '
                'that could be relaxed. Use rule="token" for relaxed (lossy) acceptance.'
            )
        if self.draft_ids.ndim != 2 or self.target_logits.ndim != 3:
            raise ValueError(
                "`draft_ids` must have shape (batch, num_drafts) and `target_logits` (batch, num_drafts + 1, vocab); "
                f"got {tuple(self.draft_ids.shape)} and {tuple(self.target_logits.shape)}."
            )
        (batch, num_drafts), vocab = self.draft_ids.shape, self.target_logits.shape[-1]
        shapes: dict[str, tuple[int, ...]] = {
            "draft_ids": (batch, num_drafts),
            "target_logits": (batch, num_drafts + 1, vocab),
            "lengths": (batch,),
            "point_mass": (batch, num_drafts),
            "acceptance_probs": (batch, num_drafts),
        }
        if self.rule != "greedy":
            if self.uniforms is None:
                raise ValueError(
                    f'rule="{self.rule}" needs `uniforms` of shape {(batch, num_drafts + 1)}; only "greedy" takes None.'
                )
            shapes |= {"uniforms": (batch, num_drafts + 1), "draft_logits": (batch, num_drafts, vocab)}
        device = self.target_logits.device
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape)} but {shape} fits `draft_ids` {(batch, num_drafts)} and "
                    f"a vocabulary of {vocab}."
                )
            if tensor.device != device:
                raise ValueError(f"`{name}` is on {tensor.device} but `target_logits` on {device}; move it there.")


@dataclass(frozen=True)
class BlockDecision:
    """What `verify_block` decides for each row.

    Args:
        accepted_length (`torch.LongTensor` of shape `(batch,)`): Accepted drafts, `0 … lengths`, bonus not counted.
        bonus_ids (`torch.LongTensor` of shape `(batch,)`): The token that the target supplies after them.
        acceptance_probs (`torch.Tensor` of shape `(batch, num_drafts)`): What each uniform was compared with: per
            draft under "token", per prefix under "block", 0 or 1 under "greedy". Not zeroed after the first failure;
            0 beyond `lengths`. In float32, or in float64 where either model's logits are.
    """

    accepted_length: torch.Tensor  # [B]
    bonus_ids: torch.Tensor  # [B]
    acceptance_probs: torch.Tensor  # [B, N]


@dataclass(frozen=True)
class Acceptance:
    """A sampled verification up to the draw of the bonus token, whose unnormalised law is `bonus_weights`."""

    accepted_length: torch.Tensor  # [B]
    acceptance_probs: torch.Tensor  # [B, N]
    bonus_weights: torch.Tensor  # [B, V]


@torch.no_grad()
def verify_block(inputs: VerifyInputs) -> BlockDecision:
    """Decide checked `inputs`; see [`~hf_dflow.kernels.verify_block`]. Nothing here waits for the device."""
    if inputs.rule == "greedy":
        return _verify_greedy(inputs)
    assert inputs.uniforms is not None  # checked
    acceptance = accept_drafts(inputs, inputs.uniforms)
    bonus_ids = _draw(acceptance.bonus_weights, inputs.uniforms[:, -1])
    return BlockDecision(acceptance.accepted_length, bonus_ids, acceptance.acceptance_probs)


def accept_drafts(inputs: VerifyInputs, uniforms: torch.Tensor) -> Acceptance:
    """How many drafts "token" or "block" accepts, and from which law the bonus token comes."""
    batch, num_drafts = inputs.draft_ids.shape
    slots = torch.arange(num_drafts, device=inputs.draft_ids.device)  # [N]
    active = _active_slots(inputs, slots)
    draft_ids = torch.where(active, inputs.draft_ids.long(), 0)  # ids beyond `lengths` may be out of range
    draft_probs, is_law = _draft_probs(inputs, draft_ids)
    active = active & (is_law.long().cumprod(-1) > 0)
    lengths = active.sum(-1)
    target_probs = inputs.target_logits.to(draft_probs.dtype).softmax(-1)  # [B, N + 1, V]

    target_drafted = target_probs[:, :-1].gather(-1, draft_ids[..., None])[..., 0]  # [B, N]
    draft_drafted = draft_probs.gather(-1, draft_ids[..., None])[..., 0]  # [B, N]
    path_weights = torch.ones_like(target_probs[..., 0])  # [B, N + 1]
    if inputs.rule == "block":
        path_weights = _path_weights(target_drafted, draft_drafted)
        probs = _block_acceptance(path_weights, target_probs, draft_probs, slots + 1 == lengths[:, None])
    elif inputs.acceptance_probs is None:
        probs = _capped_ratio(target_drafted, draft_drafted)
    else:
        probs = inputs.acceptance_probs.to(draft_probs.dtype)
    probs = torch.where(active, probs, 0.0)

    accepted = uniforms[:, :-1] < probs  # compared in the wider dtype: rounding u up to 1 would reject certainties
    accepted_length = _leading_true(accepted) if inputs.rule == "token" else _last_true(accepted, slots)

    rows = torch.arange(batch, device=draft_ids.device)
    bonus_weights = target_row = target_probs[rows, accepted_length]  # [B, V]
    if num_drafts:
        draft_row = draft_probs[rows, accepted_length.clamp(max=num_drafts - 1)]
        residual = (path_weights[rows, accepted_length][:, None] * target_row - draft_row).clamp_min(0.0)
        # A zero residual means equal laws up to rounding, where a rejection has (nearly) no probability.
        is_residual = (accepted_length < lengths) & (residual.sum(-1) > 0)
        bonus_weights = torch.where(is_residual[:, None], residual, target_row)
    return Acceptance(accepted_length, probs, bonus_weights)


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
    return _draw(probs.flatten(0, 1), uniforms.flatten()).view(uniforms.shape)


@torch.no_grad()
def compact_rows(states: Sequence[torch.Tensor], keep: torch.Tensor) -> torch.Tensor:
    """Move kept positions together in place; see [`~hf_dflow.kernels.compact_rows`]."""
    sources, counts = kept_positions(states, keep)
    for tensor in states:
        for start in range(0, keep.shape[1], POSITIONS_AT_ONCE):  # ascending: no source lies before its destination
            positions = slice(start, start + POSITIONS_AT_ONCE)
            index = sources[:, None, positions, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
            tensor[:, :, positions] = tensor.gather(2, index)
    return counts


def kept_positions(states: Sequence[torch.Tensor], keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each position comes from `[B, T]` (from itself behind the kept ones), and how many are kept `[B]`."""
    for tensor in states:
        if keep.ndim != 2 or tensor.ndim != 4 or (tensor.shape[0], tensor.shape[2]) != tuple(keep.shape):
            raise ValueError(
                "`states` must have shape (batch, heads, positions, width) and `keep` (batch, positions); got "
                f"{tuple(tensor.shape)} and {tuple(keep.shape)}."
            )
    keep = keep.bool()
    counts = keep.sum(-1)
    positions = torch.arange(keep.shape[1], device=keep.device)
    kept = torch.where(keep, positions, keep.shape[1]).sort(dim=-1).values
    return torch.where(positions < counts[:, None], kept, positions), counts


def _verify_greedy(inputs: VerifyInputs) -> BlockDecision:
    choices = inputs.target_logits.argmax(-1)  # [B, N + 1]; on the logits as given: ties fall as in plain generation
    matches = inputs.draft_ids == choices[:, :-1] if inputs.acceptance_probs is None else inputs.acceptance_probs
    active = _active_slots(inputs, torch.arange(matches.shape[1], device=matches.device))
    probs = torch.where(active, matches.to(torch.promote_types(inputs.target_logits.dtype, torch.float32)), 0.0)
    accepted_length = _leading_true(probs >= 0.5)
    return BlockDecision(accepted_length, choices.gather(1, accepted_length[:, None])[:, 0], probs)


def _active_slots(inputs: VerifyInputs, slots: torch.Tensor) -> torch.Tensor:
    """Which drafts `[B, N]` are to be verified, of all the `slots` `[N]`."""
    if inputs.lengths is None:
        return torch.ones_like(inputs.draft_ids, dtype=torch.bool)
    return slots < inputs.lengths.long()[:, None]


def _draft_probs(inputs: VerifyInputs, draft_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft probabilities `[B, N, V]` and where they are a law at all `[B, N]`; `draft_ids` `[B, N]` are in range."""
    dtype = torch.promote_types(inputs.target_logits.dtype, torch.float32)
    if inputs.draft_logits is None:
        zeros = torch.zeros_like(inputs.target_logits[:, :-1], dtype=dtype)
        return zeros.scatter_(-1, draft_ids[..., None], 1.0), torch.ones_like(draft_ids, dtype=torch.bool)
    probs = inputs.draft_logits.to(torch.promote_types(inputs.draft_logits.dtype, dtype)).softmax(-1)
    is_law = ~probs[..., 0].isnan()  # a softmax over NaN, +inf or nothing but -inf is NaN throughout
    if inputs.point_mass is not None:
        one_hot = torch.zeros_like(probs).scatter_(-1, draft_ids[..., None], 1.0)
        probs = torch.where(inputs.point_mass[..., None], one_hot, probs)
        is_law = is_law | inputs.point_mass
    return probs, is_law


def _capped_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """`min(1, numerator / denominator)`, where 0/0 is 0: a token without target probability is refused."""
    return torch.where(denominator > 0, numerator / denominator, numerator.sign()).clamp_max(1.0)


def _path_weights(target_drafted: torch.Tensor, draft_drafted: torch.Tensor) -> torch.Tensor:
    """Capped likelihood ratios `[B, N + 1]` of the draft prefixes, from both laws at the drafts `[B, N]`."""
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
    """Probabilities `[B, N]` of accepting each prefix."""
    surplus = (path_weights[:, :-1, None] * target_probs[:, :-1] - draft_probs).clamp_min(0.0).sum(-1)  # [B, N]
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
    return torch.nn.functional.pad(places, (1, 0)).amax(-1)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens `[B]` by inverse CDF of unnormalised `weights` `[B, V]` at `uniforms` `[B]`."""
    # A running float32 sum loses every token below 6e-8. MPS has nothing wider.
    cumulative = (weights if weights.device.type == "mps" else weights.double()).cumsum(-1)
    threshold = uniforms.to(cumulative.dtype)[:, None] * cumulative[:, -1:]
    vocab = torch.arange(weights.shape[-1], device=weights.device)
    possible = weights > 0  # a parallel scan is not monotone to the last bit: a zero weight might pass for a step
    first_above = torch.where(possible & (cumulative > threshold), vocab, vocab.shape[0]).amin(-1)
    last_possible = torch.where(possible, vocab, 0).amax(-1)  # for a threshold that rounds up to the whole sum
    return torch.minimum(first_above, last_possible)
