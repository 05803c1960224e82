"""Who sees whom in a packed row. The rule is written once; dense masks and FlexAttention's both come from it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from hf_dflow.logs import get_logger
from hf_dflow.training.packing import CONTEXT, Places

logger = get_logger(__name__)

# (row, head, query, key) index tensors, broadcast against each other -> bool: FlexAttention's signature.
MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class PackedMask:
    """Queries see the context of their own document before their bound, and the slots of their own block.

    Args:
        queries (`Places`): Q per row.
        keys (`Places`): K per row.
    """

    queries: Places
    keys: Places

    def rule(self, is_causal: bool, reach: int | None) -> MaskRule:
        """The rule as a function of indices.

        Args:
            is_causal (`bool`): Hide keys behind the query.
            reach (`int`, *optional*): Hide keys farther away than this.
        """
        queries, keys = self.queries, self.keys

        def is_visible(row, head, query, key):
            is_before = (keys.document[row, key] == queries.document[row, query]) & (
                keys.index[row, key] < queries.bound[row, query]
            )
            is_own = keys.block[row, key] == queries.block[row, query]
            visible = torch.where(keys.block[row, key] == CONTEXT, is_before, is_own)
            distance = queries.index[row, query] - keys.index[row, key]
            if is_causal:
                visible = visible & (distance >= 0)
            if reach is not None:
                visible = visible & (distance.abs() <= reach)
            return visible

        return is_visible

    def dense(self, is_causal: bool, reach: int | None) -> torch.Tensor:
        """Bool mask `[R, 1, Q, K]`, True where a query sees a key."""
        rows, num_queries = self.queries.index.shape
        device = self.queries.index.device
        row = torch.arange(rows, device=device)[:, None, None]
        query = torch.arange(num_queries, device=device)[None, :, None]
        key = torch.arange(self.keys.index.shape[1], device=device)[None, None, :]
        return self.rule(is_causal, reach)(row, torch.zeros_like(row), query, key)[:, None]

    def for_flex(self, is_causal: bool, reach: int | None) -> Any:
        """FlexAttention's `BlockMask`: tiles in which no query sees any key are never computed."""
        rows, num_queries = self.queries.index.shape
        device = str(self.queries.index.device)
        num_keys = self.keys.index.shape[1]
        return create_block_mask(self.rule(is_causal, reach), rows, None, num_queries, num_keys, device=device)


def flex_fits(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether FlexAttention serves this drafter: a CUDA device on which it compiles, and sizes that it takes."""
    is_supported = device.type == "cuda" and dtype != torch.float64 and head_dim >= 16 and not dropout
    return is_supported and _flex_compiles(str(device))


@functools.cache
def _flex_compiles(device: str) -> bool:
    """Try once, forward and backward; a CUDA machine may lack a compiler."""
    try:
        from transformers.integrations.flex_attention import compile_friendly_flex_attention

        states = torch.zeros(1, 1, 128, 16, device=device, requires_grad=True)
        mask = create_block_mask(lambda row, head, query, key: query >= key, 1, None, 128, 128, device=device)
        output: Any = compile_friendly_flex_attention(states, states, states, block_mask=mask)
        output.sum().backward()
    except Exception as error:
        logger.warning("FlexAttention does not compile here (%s); training uses SDPA with dense masks.", error)
        return False
    return True
