"""Which backend runs an op: torch everywhere, Triton where it can."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton")
Result = TypeVar("Result")

_broken: set[str] = set()  # ops whose kernels failed in this process
_told: set[str] = set()  # reasons that were logged
_has_triton: list[bool] = []  # filled by the first question: a failing import is slow


def is_gpu(device: torch.device) -> bool:
    """Whether "auto" runs kernels on this device."""
    return device.type == "cuda"


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; read when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def why_not_triton(device: torch.device) -> str | None:
    """What keeps Triton from running on `device`, and what to do about it; `None` where nothing does."""
    if not _has_triton:
        try:
            import triton  # noqa: F401
        except ImportError:
            _has_triton.append(False)
        else:
            _has_triton.append(True)
    if not _has_triton[0]:
        return "Triton is not installed; pip install 'hf-dflow[triton]' on Linux"
    if not is_gpu(device) and not is_interpreted():
        return f"Triton needs a CUDA device, but the tensors are on {device.type!r}"
    return None


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that cannot run on `device`.

    Raises:
        ValueError: It is unknown, or "triton" and Triton is missing or has no device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Unknown kernel backend {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}.")
    reason = why_not_triton(device) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f'backend="triton" cannot run here: {reason}. "auto" and "torch" run everywhere.')


def run_op(
    name: str,
    backend: str,
    device: torch.device,
    in_torch: Callable[[], Result],
    in_triton: Callable[[], Result],
) -> Result:
    """Run an op on the chosen backend.

    "triton" never falls back. "auto" takes torch where Triton cannot run, which is logged once, and for the rest of the
    process where a kernel does not compile, which is warned of once.

    Args:
        name (`str`): The op's, for messages.
        backend (`str`): "auto", "torch" or "triton".
        device (`torch.device`): Where the tensors are.
        in_torch, in_triton (`Callable`): The op on either backend.

    Raises:
        ValueError: See [`check_backend`].
    """
    check_backend(backend, device)
    if backend == "torch" or (backend == "auto" and not _auto_takes_triton(name, device)):
        return in_torch()
    if backend == "triton" or torch.compiler.is_compiling():
        return in_triton()
    try:
        return in_triton()
    except Exception as error:
        if not _is_about_compiling(error):
            raise
        _broken.add(name)
        logger.warning(
            "The Triton kernels of %s do not run here; torch takes over, which is slower. %s: %s",
            name,
            type(error).__name__,
            error,
        )
        return in_torch()


def _auto_takes_triton(name: str, device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return is_gpu(device) and why_not_triton(device) is None and name not in _broken
    reason = why_not_triton(device)
    if reason is None and not is_gpu(device):
        reason = "Triton only interprets kernels here"
    if reason is not None and reason not in _told:
        _told.add(reason)
        # On a CPU nothing is lost; on a GPU without Triton something is.
        level = logging.WARNING if is_gpu(device) else logging.INFO
        logger.log(level, "Verification runs in torch. %s.", reason)
    return reason is None and name not in _broken


def _is_about_compiling(error: Exception) -> bool:
    """Whether torch can still do what a kernel could not. A device that faulted is lost to torch as well."""
    device_faults = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return not isinstance(error, (*device_faults, ValueError)) and "CUDA error" not in str(error)
