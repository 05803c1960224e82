"""What a call takes of memory at its peak, above what was held before it."""

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5), clear_refs: the peak of the resident set becomes its present size
SAMPLE_SECONDS = 0.002

CUDA = "torch.cuda.max_memory_allocated, above what was allocated before the call"
PEAK = "peak of the process's resident set (VmHWM), above the resident set before the call"
SAMPLED = (
    f"resident set of the process every {1e3 * SAMPLE_SECONDS:g} ms, above that before the call: short peaks missed"
)
NOT_ASKED = "not measured: not asked for"
NOT_MEASURED = "not measured: this system does not tell a process its resident set"


@dataclass
class Peak:
    """Of one call.

    Args:
        bytes (`int`, *optional*): Above what was held before it; `None` where it cannot be measured.
        how (`str`): What was read.
    """

    bytes: int | None = None
    how: str = NOT_MEASURED


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Measure what is done inside; the [`Peak`] is filled in at the end.

    What was freed before is given back to the system first, where it lets us, or a call would live on it unseen. That
    costs time, so calls that are timed are not measured.
    """
    found = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.bytes, found.how = torch.cuda.max_memory_allocated(device) - before, CUDA
        return
    if not STATUS.exists():
        yield found
        return
    give_back()
    if can_reset_peak():
        before = status_bytes("VmRSS")
        yield found
        found.bytes, found.how = max(0, status_bytes("VmHWM") - before), PEAK
        return
    before = status_bytes("VmRSS")
    with _sampling() as seen:
        yield found
    found.bytes, found.how = max(0, max(seen, default=before) - before), SAMPLED


def give_back() -> None:
    """Ask the C library to return freed memory to the system; glibc can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def can_reset_peak() -> bool:
    """Reset the peak; some containers forbid it."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, which counts in kB."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def _sampling() -> Iterator[list[int]]:
    seen, is_over = [status_bytes("VmRSS")], threading.Event()

    def look() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            seen.append(status_bytes("VmRSS"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
        seen.append(status_bytes("VmRSS"))


def weight_bytes(*models: Any) -> int:
    """Of all models together; what two share counts once."""
    held = {}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()) if model is not None else ():
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())
