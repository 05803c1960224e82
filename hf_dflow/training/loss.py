"""Position-decayed cross-entropy of draft slots over the tokens that matter, in chunks that bound the memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.packing import IGNORED

LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**27}  # 64 and 512 MiB in float32: larger ones are no faster


def slots_per_chunk(vocab_size: int, device: torch.device) -> int:
    """How many slots' logits over `vocab_size` tokens are held at a time."""
    return max(1, LOGITS_PER_CHUNK.get(device.type, LOGITS_PER_CHUNK["cpu"]) // vocab_size)


# -- what each slot should predict


@dataclass
class SlotTargets:
    """A few tokens for each slot and their weights, which sum to 1, or to 0 where a slot has no label."""

    ids: torch.Tensor  # [A, N, K]
    weights: torch.Tensor  # [A, N, K] float32


def slot_targets(
    labels: torch.Tensor,
    teacher_ids: torch.Tensor | None = None,
    teacher_probs: torch.Tensor | None = None,
    distillation: float = 0.0,
) -> SlotTargets:
    """Mix the trajectory's token with the target's distribution at its place.

    Args:
        labels (`torch.LongTensor` of shape `(A, N)`): The trajectory, or `IGNORED`.
        teacher_ids (`torch.LongTensor` of shape `(A, N, K)`, *optional*): The target's likeliest tokens there.
        teacher_probs (`torch.Tensor` of shape `(A, N, K)`, *optional*): Their probabilities; renormalised over K.
        distillation (`float`, *optional*, defaults to 0): Share of the target's distribution in the mix, 0 … 1.

    Raises:
        DFlowError: Distillation without a teacher.
    """
    is_labelled = (labels != IGNORED).float()
    ids, weights = labels.clamp(min=0)[..., None], is_labelled[..., None]
    if not distillation:
        return SlotTargets(ids, weights)
    if teacher_ids is None or teacher_probs is None:
        raise DFlowError(
            f"distillation is {distillation}, but there is no distribution of the target; make the features with "
            "teacher_top_k of 1 or more, or set distillation to 0."
        )
    soft_weights = teacher_probs / teacher_probs.sum(dim=-1, keepdim=True).clamp(min=1e-9) * is_labelled[..., None]
    return SlotTargets(
        torch.cat([ids, teacher_ids], dim=-1),
        torch.cat([(1 - distillation) * weights, distillation * soft_weights], dim=-1),
    )


# -- which tokens the softmax runs over


class CandidateVocabulary:
    """The tokens of an update's softmax: all that occur in the data, and random others that change each time.

    Most of a small drafter's training time would go into logits of tokens that never occur in the data. The random
    others keep those logits from drifting upwards; decoding uses the whole vocabulary.

    Args:
        data_ids (`torch.LongTensor` of shape `(K,)`): Distinct tokens of the training data.
        vocab_size (`int`): Size of the whole vocabulary.
        num_others (`int`): Random other tokens drawn with each call of `sample`.
        draftable (`torch.LongTensor`, *optional*): Tokens that the drafter's head has rows for; by default all.
    """

    def __init__(self, data_ids: torch.Tensor, vocab_size: int, num_others: int, draftable: torch.Tensor | None = None):
        is_other = torch.ones(vocab_size, dtype=torch.bool)
        if draftable is not None:
            is_other.fill_(False)
            is_other[draftable] = True
        data_ids = data_ids[data_ids < vocab_size]
        data_ids = self.data_ids = data_ids[is_other[data_ids]]
        is_other[data_ids] = False
        self.other_ids = is_other.nonzero()[:, 0]
        self.num_others = min(num_others, len(self.other_ids))
        self.index_of = torch.full((vocab_size,), IGNORED)
        self.index_of[data_ids] = torch.arange(len(data_ids))

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Candidate ids `[K + num_others]`; the first K are always the data's."""
        chosen = torch.randperm(len(self.other_ids), generator=generator)[: self.num_others]
        return torch.cat([self.data_ids, self.other_ids[chosen]])

    def relabel(self, targets: SlotTargets) -> SlotTargets:
        """Replace vocabulary ids by candidate indices; the weight of tokens outside the data goes to those inside."""
        ids = self.index_of.to(targets.ids.device)[targets.ids]
        weights = targets.weights.masked_fill(ids == IGNORED, 0.0)
        kept = weights.sum(dim=-1, keepdim=True)
        return SlotTargets(ids.clamp(min=0), weights * (targets.weights.sum(-1, keepdim=True) / kept.clamp(min=1e-9)))


def draftable_ids(drafter: DFlowDrafter, vocab_size: int) -> torch.Tensor:
    """Ids below `vocab_size` that the drafter's head has a row for, ascending, on the CPU."""
    if drafter.draft_token_ids is not None:
        ids = drafter.draft_token_ids.cpu()
    else:
        ids = torch.arange(drafter.config.vocab_size)
    return ids[ids < vocab_size]


def frequent_tokens(
    counted_ids: Iterable[int], size: int, vocab_size: int, never: Iterable[int] = (), always: Iterable[int] = ()
) -> torch.Tensor:
    """A reduced draft vocabulary: the `size` most frequent tokens, ascending, filled up with the lowest other ids.

    Args:
        counted_ids (`Iterable[int]`): What the target wrote.
        size (`int`): Tokens of the draft vocabulary.
        vocab_size (`int`): Tokens of the target's.
        never (`Iterable[int]`, *optional*): Tokens to leave out, such as the mask.
        always (`Iterable[int]`, *optional*): Tokens to keep however rare they are, such as the end of a text.

    Returns:
        `torch.LongTensor` of shape `(size,)`.

    Raises:
        DFlowError: There are fewer than `size` tokens to choose from.
    """
    excluded = torch.tensor(sorted(set(never)), dtype=torch.long)
    if not 1 <= size <= vocab_size - len(excluded):
        raise DFlowError(
            f"a draft vocabulary of {size} tokens cannot be chosen from {vocab_size - len(excluded)}; give a size "
            "from 1 to that, or none for the whole vocabulary."
        )
    counts = torch.bincount(torch.tensor(list(counted_ids), dtype=torch.long), minlength=vocab_size)[:vocab_size]
    counts[torch.tensor(sorted(set(always)), dtype=torch.long)] = counts.max() + 1
    counts[excluded] = -1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


@dataclass
class HeadRows:
    """The LM head's rows of C candidate tokens, in the candidates' order."""

    weight: torch.Tensor  # [C, H]
    bias: torch.Tensor | None = None  # [C]


def head_rows(drafter: DFlowDrafter, head: Any, candidate_ids: torch.Tensor) -> HeadRows:
    """Rows of the head that turns this drafter's states into logits.

    Args:
        drafter (`DFlowDrafter`): Whose draft vocabulary the rows of `head` stand for.
        head (`nn.Linear`): From [`frozen_target.linear_head`].
        candidate_ids (`torch.LongTensor` of shape `(C,)`): Ids of the target's vocabulary that the head has rows for.
    """
    rows = candidate_ids.to(head.weight.device)
    if drafter.draft_token_ids is not None:
        rows = torch.searchsorted(drafter.draft_token_ids, rows)
    return HeadRows(head.weight[rows], None if head.bias is None else head.bias[rows])


# -- the loss


def decayed_cross_entropy(
    hidden: torch.Tensor,
    targets: SlotTargets,
    head: HeadRows,
    decay: float,
    shape_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> torch.Tensor:
    """Mean cross-entropy of the slots, slot i weighted by `exp(-(i - 1) / decay)` (arXiv 2602.06036).

    Logits exist for a chunk of slots at a time: each chunk's gradient is taken while its logits are at hand.

    Args:
        hidden (`torch.Tensor` of shape `(A, N, H)`): Draft states.
        targets (`SlotTargets`): Ids are indices of `head`'s rows.
        head (`HeadRows`): LM head rows of the candidates.
        decay (`float`): γ, in slots; 7, 5, 4 for blocks of 16, 10, 8.
        shape_logits (`Callable`, *optional*): How the drafter transforms raw logits (multiplier, soft-cap).

    Returns:
        `torch.Tensor`: A scalar; 0 without any label.
    """
    is_labelled = targets.weights.sum(dim=-1) > 0
    slots = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
    slot_weights = torch.exp(-slots / decay).expand(is_labelled.shape)[is_labelled]
    slot_weights = slot_weights / slot_weights.sum().clamp(min=1e-9)
    weights = targets.weights[is_labelled] * slot_weights[:, None]
    return _ChunkedCrossEntropy.apply(
        hidden[is_labelled], targets.ids[is_labelled], weights, head.weight, head.bias, shape_logits
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`-sum weights * log_softmax(hidden @ head.T + bias)[ids]`; forward also computes the gradients, chunk by chunk.

    The idea of taking the gradient inside the forward is Liger-Kernel's fused linear cross-entropy (2410.10989).
    """

    @staticmethod
    def forward(ctx, hidden, ids, weights, head_weight, head_bias, shape_logits):
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        inputs: list[Any] = [hidden, head_weight, head_bias]
        needs_grad = [i for i, argument in enumerate((0, 3, 4)) if ctx.needs_input_grad[argument]]
        gradients: list[Any] = [
            torch.zeros_like(x, dtype=sum_dtype) if i in needs_grad else None for i, x in enumerate(inputs)
        ]
        total = hidden.new_zeros((), dtype=sum_dtype)
        size = slots_per_chunk(len(head_weight), hidden.device)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            leaves: list[Any] = [None if x is None else x.detach() for x in (hidden[chunk], head_weight, head_bias)]
            for i in needs_grad:
                leaves[i].requires_grad_()
            with torch.enable_grad():
                states, weight, bias = leaves
                logits = shape_logits(nn.functional.linear(states.to(weight.dtype), weight, bias).to(sum_dtype))
                picked = logits.gather(-1, ids[chunk])
                loss = (weights[chunk] * (logits.logsumexp(dim=-1, keepdim=True) - picked)).sum()
            del logits, picked
            total += loss.detach()
            chunk_gradients = torch.autograd.grad(loss, [leaves[i] for i in needs_grad]) if needs_grad else ()
            for i, gradient in zip(needs_grad, chunk_gradients, strict=True):
                part = gradients[i][chunk] if i == 0 else gradients[i]
                part += gradient
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx, gradient):
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        hidden, weight, bias = (None if x is None else (gradient * x).to(dtype) for x, dtype in pairs)
        return hidden, None, None, weight, bias, None
