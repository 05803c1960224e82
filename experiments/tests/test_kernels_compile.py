"""The kernels compile for GPUs that are not here, and none spills a register."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton: pip install 'hf-dflow[triton]'")

KERNELS = {
    "_argmax_kernel",
    "_match_kernel",
    "_partials_kernel",
    "_weights_kernel",
    "_residual_kernel",
    "_bonus_kernel",
    "_compact_kernel",
}
MAX_REGISTERS = 32 * 1024  # of one program: two of them share a multiprocessor
MAX_SHARED = 48 * 1024  # what every architecture grants without being asked


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "experiments.kernel_resources", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)["kernels"]


def test_every_kernel_compiles_for_three_architectures(rows):
    """Bug: what the interpreter accepts and the compiler refuses, or an instruction that one generation lacks."""
    compiled = {(row["kernel"], row["architecture"]) for row in rows}
    assert compiled == {(kernel, f"sm_{number}") for kernel in KERNELS for number in (80, 90, 100)}
    for row in rows:
        print(row)


def test_no_kernel_spills(rows):
    """Bug: a tile too large for the registers: several times slower, and nothing says so."""
    for row in rows:
        assert row["spill_bytes"] == 0 and row["stack_bytes"] == 0, row
        assert 32 * row["num_warps"] * row["registers"] <= MAX_REGISTERS, row
        assert row["shared_bytes"] <= MAX_SHARED, row
