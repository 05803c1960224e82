"""A reduced draft vocabulary: which tokens a drafter's own head has rows for."""

from collections.abc import Iterable

import torch

from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter


def frequent_tokens(
    counted_ids: Iterable[int], size: int, vocab_size: int, never: Iterable[int] = (), always: Iterable[int] = ()
) -> torch.Tensor:
    """The `size` most frequent tokens, ascending; a text with fewer leaves room that the lowest other ids fill.

    Args:
        counted_ids (`Iterable[int]`): What the target wrote.
        size (`int`): Tokens of the draft vocabulary.
        vocab_size (`int`): Tokens of the target's.
        never (`Iterable[int]`, *optional*): Tokens without a row, such as the mask, which nobody may say.
        always (`Iterable[int]`, *optional*): Tokens that have one however rare they are, such as the end of a text.

    Returns:
        `torch.LongTensor` of shape `(size,)`.

    Raises:
        DFlowError: `size` is not within what there is to choose from.
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


def sayable_ids(drafter: DFlowDrafter, vocab_size: int) -> torch.Tensor:
    """Ids below `vocab_size` that the drafter's head has a row for, ascending, on the CPU."""
    if drafter.draft_token_ids is not None:
        ids = drafter.draft_token_ids.cpu()
    else:
        ids = torch.arange(drafter.config.vocab_size)
    return ids[ids < vocab_size]
