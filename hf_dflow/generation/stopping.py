"""Where a step's tokens end: at the same token as plain decoding."""

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_dflow.generation.rows import Row
from hf_dflow.generation.step import Emission, Verification


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
        self, index: int, row: Row, new_tokens: list[int], draft_ids: torch.Tensor, verification: Verification
    ) -> Emission:
        """What of a step enters one row's output.

        Args:
            index (`int`): Of the row in the batch.
            row (`Row`): The row.
            new_tokens (`list[int]`): Its accepted drafts and the bonus.
            draft_ids (`torch.Tensor` of shape `(B, N)`): Drafts of the whole batch.
            verification (`Verification`): Of the whole batch.

        Returns:
            `Emission`: At least one token.
        """
        only, accepted = slice(index, index + 1), len(new_tokens) - 1
        new_ids = torch.cat([draft_ids[only, :accepted], verification.bonus_ids[only, None]], dim=1)
        if verification.is_stopped and verification.is_stopped[index]:
            return Emission(new_ids[:, :accepted], new_tokens[:accepted], accepted, is_last=True)
        # Judged one by one, the accepted drafts are known not to end the sequence.
        for count in range(1 + (accepted if row.path.is_lazy else 0), len(new_tokens) + 1):
            if self.ends(row, new_ids[:, :count], verification.scores[only, :count], new_tokens[count - 1]):
                return Emission(new_ids[:, :count], new_tokens[:count], min(accepted, count), is_last=True)
        return Emission(new_ids, new_tokens, accepted, is_last=False)

    def ends(self, row: Row, new_ids: torch.Tensor, scores: torch.Tensor, last_token: int | None = None) -> bool:
        """Whether the sequence ends with the last of `new_ids` `(1, k)`, none of those before having ended it.

        Args:
            scores (`torch.Tensor` of shape `(1, k, V)`): Of the new tokens.
            last_token (`int`, *optional*): The last new token, where the host knows it.
        """
        if self.asks_criteria:
            path_ids = torch.cat([row.ids, new_ids], dim=1)
            return bool(self.criteria(path_ids, row.records.scores_with(scores)).all())
        if row.length + new_ids.shape[1] >= self.max_length:
            return True
        return (int(new_ids[0, -1]) if last_token is None else last_token) in self.eos_ids
