"""The doors of the ops, and which backend runs behind them: torch everywhere, Triton where it can."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from hf_dflow.kernels import torch_ops
from hf_dflow.kernels.torch_ops import BlockDecision, VerifyInputs
from hf_dflow.logs import get_logger

logger = get_logger(__name__)

BACKENDS = ("auto", "torch", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # not imported before a kernel runs: that takes its time

_broken_ops: set[str] = set()  # ops whose kernels did not compile in this process
_logged_reasons: set[str] = set()


def verify_block(inputs: VerifyInputs, backend: str = "auto") -> BlockDecision:
    """Decide how many drafts of each row to accept, and choose the bonus token.

    Args:
        inputs (`VerifyInputs`): Drafts, logits of both models and random numbers; checked here.
        backend (`str`, *optional*, defaults to `"auto"`): "torch", "triton", or "auto": Triton on a CUDA device where
            it is installed. The same uniforms lead to the same decisions up to rounding. "triton" never falls back.

    Raises:
        ValueError: See [`VerifyInputs.check`]; or "triton" cannot run here.
    """
    inputs.check()
    return _run("verify_block", backend, inputs.target_logits.device, inputs)


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
    return _run("compact_rows", backend, keep.device, states, keep)


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that cannot run on `device`.

    Raises:
        ValueError: It is unknown, or "triton" and Triton is missing or has no device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Unknown kernel backend {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}.")
    reason = _why_not_triton(device) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f'backend="triton" cannot run here: {reason}. "auto" and "torch" run everywhere.')


def is_gpu(device: torch.device) -> bool:
    """Whether "auto" runs kernels on this device."""
    return device.type == "cuda"


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; read when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def _why_not_triton(device: torch.device) -> str | None:
    """What keeps Triton from running on `device`, and what to do about it; `None` where nothing does."""
    if not HAS_TRITON:
        return "Triton is not installed; pip install 'hf-dflow[triton]' on Linux"
    if not is_gpu(device) and not is_interpreted():
        return f"Triton needs a CUDA device, but the tensors are on {device.type!r}"
    return None


def _run(op: str, backend: str, device: torch.device, *arguments: Any) -> Any:
    """Run an op on the chosen backend.

    "auto" takes torch where Triton cannot run, which is logged once, and for the rest of the process where a kernel
    does not compile, which is warned of once.
    """
    check_backend(backend, device)
    in_torch = getattr(torch_ops, op)
    if backend == "torch" or (backend == "auto" and not _auto_takes_triton(op, device)):
        return in_torch(*arguments)
    try:
        return _triton_twin(op)(*arguments)
    except Exception as error:
        if backend == "triton" or not _torch_can_take_over(error):
            raise
        _broken_ops.add(op)
        logger.warning(
            "The Triton kernels of %s do not run here; torch takes over, which is slower. %s: %s",
            op,
            type(error).__name__,
            error,
        )
        return in_torch(*arguments)


def _triton_twin(op: str) -> Any:
    from hf_dflow.kernels import triton_compact, triton_verify

    return getattr(triton_verify if op == "verify_block" else triton_compact, op)


def _auto_takes_triton(op: str, device: torch.device) -> bool:
    reason = _why_not_triton(device)
    if reason is None and not is_gpu(device):
        reason = "Triton only interprets kernels here"
    if reason is not None and reason not in _logged_reasons:
        _logged_reasons.add(reason)
        # On a CPU nothing is lost; on a GPU without Triton something is.
        logger.log(logging.WARNING if is_gpu(device) else logging.INFO, "Verification runs in torch. %s.", reason)
    return reason is None and op not in _broken_ops


def _torch_can_take_over(error: Exception) -> bool:
    """Whether torch can still do what a kernel could not. A device that faulted is lost to torch as well."""
    device_faults = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return not isinstance(error, (*device_faults, ValueError)) and "CUDA error" not in str(error)
