"""The public ops. The rest of the package imports them from here only, so that a backend is chosen in one place."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_dflow.kernels import torch_ops as reference
from hf_dflow.kernels.backends import BACKENDS, check_backend, run_op
from hf_dflow.kernels.torch_ops import RULES, BlockDecision, DraftLaw, SparseLogits, draw_tokens

__all__ = [
    "BACKENDS",
    "RULES",
    "BlockDecision",
    "DraftLaw",
    "SparseLogits",
    "check_backend",
    "compact_rows",
    "draw_tokens",
    "verify_block",
]


def verify_block(
    *,
    draft_ids: torch.Tensor,  # [B, N]
    draft_logits: DraftLaw,  # [B, N, V] | SparseLogits [B, N, K] | None
    target_logits: torch.Tensor,  # [B, N + 1, V]
    uniforms: torch.Tensor | None,  # [B, N + 1]
    rule: str,
    lengths: torch.Tensor | None = None,  # [B]
    point_mass: torch.Tensor | None = None,  # [B, N]
    acceptance_probs: torch.Tensor | None = None,  # [B, N]
    temperature: torch.Tensor | None = None,  # [B]
    return_residual: bool = False,
    backend: str = "auto",
) -> BlockDecision:
    """Decide how many drafts of each row to accept, and draw the bonus token.

    Args:
        backend (`str`, *optional*, defaults to `"auto"`): "torch", "triton", or "auto": Triton on a CUDA device where
            it is installed. The same uniforms lead to the same decisions up to rounding. "triton" never falls back.

    All other arguments, the result and the errors are those of [`~hf_dflow.kernels.torch_ops.verify_block`].

    Raises:
        ValueError: See there; or "triton" cannot run here.
    """
    arguments: dict[str, Any] = {
        "draft_ids": draft_ids,
        "draft_logits": draft_logits,
        "target_logits": target_logits,
        "uniforms": uniforms,
        "rule": rule,
        "lengths": lengths,
        "point_mass": point_mass,
        "acceptance_probs": acceptance_probs,
        "temperature": temperature,
        "return_residual": return_residual,
    }

    def in_triton() -> BlockDecision:
        from hf_dflow.kernels.verification import verify_block

        return verify_block(**arguments)

    device = target_logits.device
    return run_op("verify_block", backend, device, lambda: reference.verify_block(**arguments), in_triton)


def compact_rows(states: Sequence[torch.Tensor], keep: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Move the kept positions of each row of a cache together, in place.

    Args:
        states (`Sequence[torch.Tensor]` of shape `(batch, heads, positions, width)`): Keys and values; all are moved
            alike. What lies behind a row's kept positions afterwards is left over and means nothing.
        keep (`torch.BoolTensor` of shape `(batch, positions)`): Which positions to keep.
        backend (`str`, *optional*, defaults to `"auto"`): As for [`verify_block`].

    Returns:
        `torch.LongTensor` of shape `(batch,)`: How many positions each row has now.

    Raises:
        ValueError: A shape does not fit, "triton" cannot run here, or a kernel is given states whose last dimension is
            not contiguous; nothing was moved then.
    """

    def in_triton() -> torch.Tensor:
        from hf_dflow.kernels.compaction import compact_rows

        return compact_rows(states, keep)

    return run_op("compact_rows", backend, keep.device, lambda: reference.compact_rows(states, keep), in_triton)
