"""Where a committed block ends: at the same token as plain decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from hf_dflow.generation.drafting import DraftBlock
    from hf_dflow.generation.rows import Row
    from hf_dflow.generation.verification import Verification


@dataclass(frozen=True)
class Emission:
    """What of one row's step enters its output."""

    new_ids: torch.Tensor  # [1, n]
    tokens: list[int]  # the same on the host
    accepted: int  # how many of them are drafts
    is_last: bool

    @property
    def count(self) -> int:
        return len(self.tokens)


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

    def cut(
        self, i: int, row: "Row", new_tokens: list[int], draft: "DraftBlock", verification: "Verification"
    ) -> Emission:
        """What of a row's step enters its output.

        Args:
            i (`int`): Which row of the batch.
            row (`Row`): The same.
            new_tokens (`list[int]`): Its accepted drafts and the bonus.
            draft, verification: Of the step, for the whole batch.
        """
        one, accepted = slice(i, i + 1), len(new_tokens) - 1
        new_ids = torch.cat([draft.token_ids[one, :accepted], verification.bonus_ids[one, None]], dim=1)
        if verification.is_stopped and verification.is_stopped[i]:
            count, is_last = accepted, True
        else:
            count, is_last = self.clip(
                row.ids,
                new_ids,
                new_tokens,
                lambda count: row.records.scores_with(verification.scores[one, :count]),
                asked=accepted if row.path.is_lazy else 0,
            )
        return Emission(new_ids[:, :count], new_tokens[:count], min(accepted, count), is_last)

    def clip(
        self,
        prefix_ids: torch.Tensor,
        new_ids: torch.Tensor,
        new_tokens: list[int],
        scores_with: Callable[[int], tuple[torch.Tensor, ...] | None],
        asked: int = 0,
    ) -> tuple[int, bool]:
        """How many of the new tokens are emitted, and whether the sequence ends there.

        Args:
            prefix_ids (`torch.LongTensor` of shape `(1, T)`): Committed tokens.
            new_ids (`torch.LongTensor` of shape `(1, n)`): What the step would commit.
            new_tokens (`list[int]`): The same on the host.
            scores_with (`Callable[[int], tuple | None]`): Scores up to and including the k-th new token.
            asked (`int`, *optional*, defaults to 0): So many new tokens are known not to end the sequence.
        """
        for count in range(asked + 1, len(new_tokens) + 1):
            if self.asks_criteria:
                ends = self._criteria_end(prefix_ids, new_ids[:, :count], scores_with(count))
            else:
                length = prefix_ids.shape[1] + count
                ends = new_tokens[count - 1] in self.eos_ids or length >= self.max_length
            if ends:
                return count, True
        return len(new_tokens), False

    def ends(self, prefix_ids: torch.Tensor, new_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Whether the sequence ends with the last of `new_ids` `(1, k)`, none of those before having ended it."""
        if self.asks_criteria:
            return self._criteria_end(prefix_ids, new_ids, scores)
        return int(new_ids[0, -1]) in self.eos_ids or prefix_ids.shape[1] + new_ids.shape[1] >= self.max_length

    def _criteria_end(self, prefix_ids, new_ids, scores) -> bool:
        return bool(self.criteria(torch.cat([prefix_ids, new_ids], dim=1), scores).all())
