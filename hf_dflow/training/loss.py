"""Position-decayed cross-entropy of draft slots, over a candidate part of the vocabulary."""

import torch
from torch import nn

from hf_dflow.training.rounds import IGNORED


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

    def relabel(self, labels: torch.Tensor) -> torch.Tensor:
        """Vocabulary ids to candidate indices, same shape; ignored labels stay ignored."""
        return torch.where(labels == IGNORED, IGNORED, self.index_of[labels.clamp(min=0)])


def decayed_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head_weight: torch.Tensor,
    decay: float,
) -> torch.Tensor:
    """Mean of `exp(-(i - 1) / decay)`-weighted cross-entropies of slots i (arXiv 2602.06036).

    Args:
        hidden (`torch.Tensor` of shape `(A, N, H)`): Draft states.
        labels (`torch.LongTensor` of shape `(A, N)`): Rows of `head_weight`, or `IGNORED`.
        head_weight (`torch.Tensor` of shape `(K, H)`): LM head rows of the candidates.
        decay (`float`): γ, in slots; 7, 5, 4 for blocks of 16, 10, 8.

    Returns:
        `torch.Tensor`: A scalar; 0 without any label.
    """
    is_labelled = labels != IGNORED
    slots = torch.arange(labels.shape[1], device=labels.device, dtype=torch.float32)
    weights = torch.exp(-slots / decay).expand(labels.shape)[is_labelled]
    logits = nn.functional.linear(hidden[is_labelled].to(head_weight.dtype), head_weight).float()
    losses = nn.functional.cross_entropy(logits, labels[is_labelled], reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)
