"""What a GPU would refuse, found without one: the tests of devices in a process that pretends to have two."""

import os
import subprocess
import sys

import pytest
import torch
from kit import ROOT
from torch.utils import backend_registration

TESTS = ROOT / "tests"
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no such backends",
)


def child(*arguments: str) -> subprocess.CompletedProcess:
    """Pytest over some tests of devices."""
    environment = {
        **os.environ,
        "HF_DFLOW_TEST_DEVICE": "pretended",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-p", "pretended_device", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    return subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests itself")
@pytest.mark.parametrize("name", ["test_devices.py", "test_device_training.py", "test_device_experiments.py"])
def test_the_tests_of_devices_pass(name):
    """C10: tensors on the wrong device, which a CPU alone never notices."""
    paths = [*TESTS.rglob(name), *(ROOT / "experiments" / "tests").glob(name)]
    done = child(*map(str, paths))
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-6000:]


def test_the_device_refuses_what_cuda_refuses():
    """Guards the test above: a device that takes anything finds nothing."""
    done = child("pretended_refusals.py")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:]
