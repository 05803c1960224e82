"""Where a committed block ends: at the same token as plain decoding."""

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class StopPlan:
    """Decides, before any state changes, how many of a step's tokens enter the output.

    EOS and length need integers only. Any other criterion is asked for every prefix in order, once each, as plain
    decoding asks it.

    Args:
        criteria (`StoppingCriteriaList`): As `generate` prepared it.
        max_length (`int`): Longest sequence, prompt included.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int):
        self.criteria = criteria
        self.max_length = max_length
        self.eos_ids: set[int] = set()
        self.asks_criteria = False
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            else:
                self.asks_criteria = True

    def clip(
        self, prefix_ids: torch.Tensor, new_ids: torch.Tensor, new_tokens: list[int], scores_until
    ) -> tuple[int, bool]:
        """How many of the new tokens are emitted, and whether the sequence ends there.

        Args:
            prefix_ids (`torch.LongTensor` of shape `(1, T)`): Committed tokens.
            new_ids (`torch.LongTensor` of shape `(1, n)`): What the step would commit.
            new_tokens (`list[int]`): The same on the host.
            scores_until (`Callable[[int], tuple | None]`): Scores up to and including the k-th new token.
        """
        for count, token in enumerate(new_tokens, 1):
            ends = token in self.eos_ids or prefix_ids.shape[1] + count >= self.max_length
            if self.asks_criteria:
                ids = torch.cat([prefix_ids, new_ids[:, :count]], dim=1)
                ends = bool(self.criteria(ids, scores_until(count)).all())
            if ends:
                return count, True
        return len(new_tokens), False
