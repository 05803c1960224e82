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
NOT_MEASURED = "not measured: this system does not report a process's resident set"


@dataclass
class Peak:
    """The peak of one call in bytes, `None` where it cannot be measured; and how it was measured."""

    bytes: int | None = None
    how: str = NOT_MEASURED


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Measure what happens inside; the [`Peak`] is filled in at the end.

    Freed memory is first returned to the system, as far as possible; otherwise a call would reuse it uncounted. That
    costs time, so calls that are timed are not measured.
    """
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes, peak.how = torch.cuda.max_memory_allocated(device) - before, CUDA
        return
    if not STATUS.exists():
        yield peak
        return
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    if can_reset_peak():
        before = status_bytes("VmRSS")
        yield peak
        peak.bytes, peak.how = max(0, status_bytes("VmHWM") - before), PEAK
        return
    sizes, is_over = [status_bytes("VmRSS")], threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            sizes.append(status_bytes("VmRSS"))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
    peak.bytes, peak.how = max(sizes) - sizes[0], SAMPLED


def can_reset_peak() -> bool:
    """Reset the peak; some containers forbid it."""
    try:
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, which counts in kB."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def weight_bytes(*models: Any) -> int:
    """Bytes of all models together; shared storage counts once."""
    storages = {}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()) if model is not None else ():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
