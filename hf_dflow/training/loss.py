"""Position-decayed cross-entropy of draft slots against sparse targets, in chunks that bound the memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dflow.errors import DFlowError
from hf_dflow.training.packing import IGNORED

LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**27}  # 64 and 512 MiB in float32: larger ones are no faster


def slots_per_chunk(vocab_size: int, device: torch.device) -> int:
    """How many slots' logits over `vocab_size` tokens are held at a time."""
    return max(1, LOGITS_PER_CHUNK.get(device.type, LOGITS_PER_CHUNK["cpu"]) // vocab_size)


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
    soft = teacher_probs / teacher_probs.sum(dim=-1, keepdim=True).clamp(min=1e-9) * is_labelled[..., None]
    ids = torch.cat([ids, teacher_ids], dim=-1)
    return SlotTargets(ids, torch.cat([(1 - distillation) * weights, distillation * soft], dim=-1))


@dataclass
class HeadRows:
    """The LM head's rows of C candidate tokens, in the candidates' order."""

    weight: torch.Tensor  # [C, H]
    bias: torch.Tensor | None  # [C]


def head_rows(drafter: Any, target: Any, candidate_ids: torch.Tensor) -> HeadRows:
    """Rows of the head that turns this drafter's states into logits: its own, which learns, or the target's.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        target (`PreTrainedModel`): Its target.
        candidate_ids (`torch.LongTensor` of shape `(C,)`): Ids of the target's vocabulary that the drafter can say.

    Raises:
        DFlowError: The head's rows are no plain matrix.
    """
    head = target.get_output_embeddings() if drafter.lm_head is None else drafter.lm_head
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point():
        raise DFlowError(
            f"the LM head {type(head).__name__} has no floating-point weight matrix to train against; load the target "
            "without quantising its head."
        )
    rows = candidate_ids.to(weight.device)
    if drafter.draft_token_ids is not None:
        rows = torch.searchsorted(drafter.draft_token_ids, rows)  # the head's rows are a reduced vocabulary's
    bias = getattr(head, "bias", None)
    return HeadRows(weight[rows], None if bias is None else bias[rows])


class CandidateVocabulary:
    """The tokens that a step's softmax runs over: all that occur in the data, and fresh random others each step.

    Most of a small drafter's training time would go into logits of tokens that the data never holds. The random
    others keep those from drifting upwards; decoding uses the whole vocabulary.

    Args:
        data_ids (`torch.LongTensor` of shape `(K,)`): Distinct tokens of the training data.
        vocab_size (`int`): Size of the whole vocabulary.
        num_others (`int`): Random other tokens drawn with each call of `sample`.
        sayable_ids (`torch.LongTensor`, *optional*): Tokens that the drafter's head has rows for; by default all.
    """

    def __init__(
        self, data_ids: torch.Tensor, vocab_size: int, num_others: int, sayable_ids: torch.Tensor | None = None
    ):
        is_other = torch.ones(vocab_size, dtype=torch.bool)
        if sayable_ids is not None:
            is_other.fill_(False)
            is_other[sayable_ids] = True
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
        """Vocabulary ids to candidate indices; the weight of tokens outside the data goes to those inside."""
        ids = self.index_of.to(targets.ids.device)[targets.ids]
        weights = targets.weights.masked_fill(ids == IGNORED, 0.0)
        kept = weights.sum(dim=-1, keepdim=True)
        return SlotTargets(ids.clamp(min=0), weights * (targets.weights.sum(-1, keepdim=True) / kept.clamp(min=1e-9)))


def decayed_cross_entropy(
    hidden: torch.Tensor,
    targets: SlotTargets,
    head_weight: torch.Tensor,
    decay: float,
    shape_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    head_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of `exp(-(i - 1) / decay)`-weighted cross-entropies of slots i (arXiv 2602.06036).

    Logits exist for a chunk of slots at a time: each chunk's gradient is taken while its logits are at hand.

    Args:
        hidden (`torch.Tensor` of shape `(A, N, H)`): Draft states.
        targets (`SlotTargets`): Ids are rows of `head_weight`.
        head_weight (`torch.Tensor` of shape `(C, H)`): LM head rows of the candidates.
        decay (`float`): γ, in slots; 7, 5, 4 for blocks of 16, 10, 8.
        shape_logits (`Callable`, *optional*): What the drafter does to raw logits (multiplier, soft-cap).
        head_bias (`torch.Tensor` of shape `(C,)`, *optional*): The head's bias of the candidates.

    Returns:
        `torch.Tensor`: A scalar; 0 without any label.
    """
    is_labelled = targets.weights.sum(dim=-1) > 0
    slots = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
    slot_weights = torch.exp(-slots / decay).expand(is_labelled.shape)[is_labelled]
    slot_weights = slot_weights / slot_weights.sum().clamp(min=1e-9)
    weights = targets.weights[is_labelled] * slot_weights[:, None]
    labelled = hidden[is_labelled]
    return _ChunkedCrossEntropy.apply(labelled, targets.ids[is_labelled], weights, head_weight, head_bias, shape_logits)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`-sum weights * log_softmax(hidden @ head.T + bias)[ids]`; forward also computes the gradients, chunk by chunk.

    The idea of taking the gradient inside the forward is Liger-Kernel's fused linear cross-entropy (2410.10989).
    """

    @staticmethod
    def forward(ctx, hidden, ids, weights, head_weight, head_bias, shape_logits):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        given: list[Any] = [hidden, head_weight, head_bias]
        wanted = [i for i, place in enumerate((0, 3, 4)) if ctx.needs_input_grad[place]]
        sums: list[Any] = [torch.zeros_like(x, dtype=wide) if i in wanted else None for i, x in enumerate(given)]
        total = hidden.new_zeros((), dtype=wide)
        size = slots_per_chunk(len(head_weight), hidden.device)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            leaves: list[Any] = [None if x is None else x.detach() for x in (hidden[chunk], head_weight, head_bias)]
            for i in wanted:
                leaves[i].requires_grad_()
            with torch.enable_grad():
                states, weight, bias = leaves
                logits = shape_logits(nn.functional.linear(states.to(weight.dtype), weight, bias).to(wide))
                picked = logits.gather(-1, ids[chunk])
                loss = (weights[chunk] * (logits.logsumexp(dim=-1, keepdim=True) - picked)).sum()
            del logits, picked
            total += loss.detach()
            gradients = torch.autograd.grad(loss, [leaves[i] for i in wanted]) if wanted else ()
            for i, gradient in zip(wanted, gradients, strict=True):
                part = sums[i][chunk] if i == 0 else sums[i]
                part += gradient
        ctx.dtypes = [None if x is None else x.dtype for x in given]
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx, gradient):
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        hidden, weight, bias = (None if x is None else (gradient * x).to(dtype) for x, dtype in pairs)
        return hidden, None, None, weight, bias, None
