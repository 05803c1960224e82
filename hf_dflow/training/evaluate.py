"""Tokens per step on stored greedy answers, from one draft of every position: no decoding, so no target time."""

import torch

from hf_dflow.modeling_dflow import DFlowDrafter
from hf_dflow.training.rounds import Anchors, Sequences, draft_round


@torch.no_grad()
def tokens_per_step(drafter: DFlowDrafter, target, row, features: torch.Tensor) -> tuple[int, int, int]:
    """Walk one greedy answer as decoding would, relay off.

    Args:
        row (`TrainingRow`): An answer the target wrote greedily.
        features (`torch.Tensor` of shape `(tokens, taps * target_hidden_size)`): Its features.

    Returns:
        `tuple[int, int, int]`: Tokens walked, steps taken, and steps whose first draft was right.
    """
    length = len(row.token_ids)
    positions = torch.arange(row.prompt_length, length - 1)
    sequences = Sequences(torch.tensor([row.token_ids]), torch.tensor([length]), features[None])
    result = draft_round(drafter, target, sequences, Anchors(torch.zeros_like(positions), positions))
    logits = drafter.compute_logits(result.hidden, target.get_output_embeddings())
    accepted = (logits.argmax(-1) == result.labels).long().cumprod(dim=1).sum(dim=1).tolist()
    at, steps, first_right = 0, 0, 0
    while at < len(accepted):
        first_right += accepted[at] > 0
        at += accepted[at] + 1
        steps += 1
    return at, steps, first_right
