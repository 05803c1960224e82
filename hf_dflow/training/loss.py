"""Position-decayed cross-entropy of draft slots against sparse targets, in chunks that bound the memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hf_dflow.training.rounds import IGNORED

SLOTS_PER_CHUNK = 256  # logits of one chunk at 49,152 candidates in float32: 50 MB


@dataclass
class SlotTargets:
    """What each slot should say: a few tokens and their weights, which sum to 1, or to 0 where a slot has none."""

    ids: torch.Tensor  # [A, N, K]
    weights: torch.Tensor  # [A, N, K] float32


def slot_targets(
    labels: torch.Tensor,
    teacher_ids: torch.Tensor | None = None,
    teacher_probs: torch.Tensor | None = None,
    distillation: float = 0.0,
) -> SlotTargets:
    """Mix the trajectory's token and the target's distribution at its place.

    Args:
        labels (`torch.LongTensor` of shape `(A, N)`): The trajectory, or `IGNORED`.
        teacher_ids (`torch.LongTensor` of shape `(A, N, K)`, *optional*): The target's likeliest tokens there.
        teacher_probs (`torch.Tensor` of shape `(A, N, K)`, *optional*): Their probabilities; renormalised over K.
        distillation (`float`, *optional*, defaults to 0): Share of the target's distribution in the mix, 0 … 1.
    """
    is_labelled = (labels != IGNORED).float()
    ids, weights = labels.clamp(min=0)[..., None], is_labelled[..., None]
    if distillation and teacher_ids is not None and teacher_probs is not None:
        soft = teacher_probs / teacher_probs.sum(dim=-1, keepdim=True).clamp(min=1e-9) * is_labelled[..., None]
        ids = torch.cat([ids, teacher_ids], dim=-1)
        weights = torch.cat([(1 - distillation) * weights, distillation * soft], dim=-1)
    return SlotTargets(ids, weights)


class CandidateVocabulary:
    """The tokens that a step's softmax runs over: all that occur in the data, and fresh random others each step.

    Most of a small drafter's training time would go into logits of tokens that the data never holds. The random
    others keep those from drifting upwards; decoding uses the whole vocabulary.

    Args:
        data_ids (`torch.LongTensor` of shape `(K,)`): Distinct tokens of the training data.
        vocab_size (`int`): Size of the whole vocabulary.
        num_others (`int`): Random other tokens drawn with each call of `sample`.
    """

    def __init__(self, data_ids: torch.Tensor, vocab_size: int, num_others: int):
        self.data_ids = data_ids
        is_other = torch.ones(vocab_size, dtype=torch.bool)
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
        """Vocabulary ids to candidate indices; the weight of tokens outside the data goes to those inside."""
        ids = self.index_of[targets.ids]
        weights = targets.weights.masked_fill(ids == IGNORED, 0.0)
        kept = weights.sum(dim=-1, keepdim=True)
        return SlotTargets(ids.clamp(min=0), weights * (targets.weights.sum(-1, keepdim=True) / kept.clamp(min=1e-9)))


def decayed_cross_entropy(
    hidden: torch.Tensor,
    targets: SlotTargets,
    head_weight: torch.Tensor,
    decay: float,
    shape_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
) -> torch.Tensor:
    """Mean of `exp(-(i - 1) / decay)`-weighted cross-entropies of slots i (arXiv 2602.06036).

    Logits exist for `SLOTS_PER_CHUNK` slots at a time: each chunk's gradient is taken while its logits are at hand.

    Args:
        hidden (`torch.Tensor` of shape `(A, N, H)`): Draft states.
        targets (`SlotTargets`): Ids are rows of `head_weight`.
        head_weight (`torch.Tensor` of shape `(K, H)`): LM head rows of the candidates.
        decay (`float`): γ, in slots; 7, 5, 4 for blocks of 16, 10, 8.
        shape_logits (`Callable`, *optional*): What the drafter does to raw logits (multiplier, soft-cap).

    Returns:
        `torch.Tensor`: A scalar; 0 without any label.
    """
    is_labelled = targets.weights.sum(dim=-1) > 0
    slots = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
    slot_weights = torch.exp(-slots / decay).expand(is_labelled.shape)[is_labelled]
    slot_weights = slot_weights / slot_weights.sum().clamp(min=1e-9)
    weights = targets.weights[is_labelled] * slot_weights[:, None]
    return _ChunkedCrossEntropy.apply(hidden[is_labelled], targets.ids[is_labelled], weights, head_weight, shape_logits)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`-sum weights * log_softmax(hidden @ head.T)[ids]`; forward also computes the gradients, chunk by chunk.

    The idea of taking the gradient inside the forward is Liger-Kernel's fused linear cross-entropy (2410.10989).
    """

    @staticmethod
    def forward(ctx, hidden, ids, weights, head_weight, shape_logits):
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad = torch.zeros_like(hidden)
        head_grad = torch.zeros_like(head_weight) if ctx.needs_input_grad[3] else None
        for start in range(0, len(hidden), SLOTS_PER_CHUNK):
            chunk = slice(start, start + SLOTS_PER_CHUNK)
            states = hidden[chunk].detach().requires_grad_()
            head = head_weight.detach().requires_grad_(head_grad is not None)
            with torch.enable_grad():
                logits = shape_logits(nn.functional.linear(states.to(head.dtype), head).float())
                picked = logits.gather(-1, ids[chunk])
                loss = (weights[chunk] * (logits.logsumexp(dim=-1, keepdim=True) - picked)).sum()
            inputs = [states, head] if head_grad is not None else [states]
            gradients = torch.autograd.grad(loss, inputs)
            hidden_grad[chunk] = gradients[0]
            if head_grad is not None:
                head_grad += gradients[1]
            total += loss.detach()
        ctx.save_for_backward(hidden_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx, gradient):
        hidden_grad, head_grad = ctx.saved_tensors
        return gradient * hidden_grad, None, None, None if head_grad is None else gradient * head_grad, None
