"""Peak memory of a call: what it held at most, not what the process ever held."""

from types import SimpleNamespace

import pytest
import torch

from hf_dflow.bench import peak_memory
from hf_dflow.bench.peak_memory import NOT_MEASURED, PEAK, SAMPLED, STATUS, peak_of, weight_bytes

MEBIBYTE = 2**20
CPU = torch.device("cpu")
has_status = pytest.mark.skipif(not STATUS.exists(), reason="no /proc/self/status here")


def hold(mebibytes, seconds=0.0):
    """Touch so much memory, and let it go."""
    held = torch.ones(mebibytes * MEBIBYTE // 4)
    if seconds:
        import time

        time.sleep(seconds)
    del held


@has_status
def test_each_call_has_its_own_peak():
    """Bug: the peak of the process, which a small call inherits from a large one before it."""
    found = []
    for mebibytes in (192, 48, 96):
        with peak_of(CPU) as peak:
            hold(mebibytes, 0.02)
        assert peak.how in (PEAK, SAMPLED)
        found.append(peak.bytes / MEBIBYTE)
    assert found == pytest.approx([192, 48, 96], abs=12)


@has_status
def test_without_a_peak_that_can_be_reset(monkeypatch):
    """Bug: containers that forbid the reset get the peak of their whole life, under the same name."""
    monkeypatch.setattr(peak_memory, "can_reset_peak", lambda: False)
    with peak_of(CPU) as peak:
        hold(64, 0.2)
    assert peak.how == SAMPLED and "short peaks missed" in peak.how
    assert peak.bytes / MEBIBYTE == pytest.approx(64, abs=12)


def test_systems_that_tell_nothing(monkeypatch, tmp_path):
    """Bug: 0 bytes where nothing was measured."""
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "none")
    with peak_of(CPU) as peak:
        hold(1)
    assert peak.bytes is None and peak.how == NOT_MEASURED


def test_cuda_counts_from_what_was_allocated(monkeypatch):
    """Bug: the models' own weights counted as the call's, or a peak of an earlier call."""
    log, allocated = [], iter([700])
    fake = SimpleNamespace(
        synchronize=lambda device: log.append("wait"),
        reset_peak_memory_stats=lambda device: log.append("reset"),
        memory_allocated=lambda device: next(allocated),
        max_memory_allocated=lambda device: 1000,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    with peak_of(torch.device("cuda")) as peak:
        log.append("call")
    assert log == ["wait", "reset", "call", "wait"] and peak.bytes == 300


def test_shared_weights_count_once():
    """Bug: a tied head, or what drafter and target share, counted twice."""
    one, other = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4, bias=False)
    tied = torch.nn.Linear(8, 8, bias=False)
    tied.weight = one.weight
    assert weight_bytes(one, None, tied, other) == (64 + 32) * 4
