"""Scripts about kernels: the GPU benchmark under the interpreter, compiled resources, the relay's profile."""

import json
import os
import subprocess
import sys

import kernel_kit
import pytest
import torch
from commands import invoke
from kernel_kit import tiled

from experiments import kernels as bench
from experiments import relay_profile
from hf_dflow.console import errors_in_words

pytestmark = kernel_kit.ignore_numpy_warnings

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
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "record.json"


def measure(*arguments):
    with tiled(block=16, rows=32):
        return invoke(errors_in_words()(bench.main), *arguments)


def test_the_whole_script_on_tiny_shapes(output):
    """Bug: a slip in the script costs the one session in which a GPU is lent."""
    result = measure("--device", "cpu", "--budget", "0", "--json", str(output))
    record = json.loads(output.read_text())
    assert result.exit_code == 0 and record["gate"]["passed"] and record["gate"]["rows"] >= 30
    assert {row["rule"] for row in record["rows"]} == {"token", "block"}
    for row in record["rows"]:
        elements = row["batch"] * (2 * row["drafts"] + 1) * row["vocab"]
        assert row["bytes_read"] == 2 * elements * (2 if row["rule"] == "block" else 1)
        assert row["graph_us"] > 0 and row["torch_us"] > 0 and "budget" in row["torch_compile_us"]
    assert {"torch", "triton", "transformers"} <= set(record["versions"])
    assert "mean nothing" in record["device"]


def test_no_figure_without_correctness(output, monkeypatch):
    """Bug: a kernel that is wrong is timed and its speed reported."""
    correct = bench.verify_block

    def off_by_one(inputs, backend):
        decision = correct(inputs, backend)
        decision.bonus_ids.add_(1)
        return decision

    monkeypatch.setattr(bench, "verify_block", off_by_one)
    result = measure("--device", "cpu", "--json", str(output))
    record = json.loads(output.read_text())
    assert result.exit_code == 1 and not record["gate"]["passed"] and "rows" not in record


def test_a_broken_baseline_costs_only_its_own_figure(monkeypatch):
    """Bug: a vLLM of another version, or a compile error, ends the run before the record is written."""

    def broken(inputs):
        raise ImportError("no module named vllm")

    monkeypatch.setattr(bench, "vllm_sampler", broken)
    monkeypatch.setattr(bench, "_compiled", broken)
    clock = bench.Clock("cpu", 1)
    inputs = bench.make_inputs(1, 1, 20, "token", device="cpu")
    with tiled(block=16):
        row = bench.measure(clock, inputs, 1.0, lambda: False)
    assert row["vllm_us"] == row["torch_compile_us"] == "not run: ImportError: no module named vllm"


def test_goals_are_judged_by_the_worst_row():
    """Bug: one fast shape hides that another misses the goal."""
    row = {"batch": 64, "drafts": 15, "vocab": 151_936, "share_of_copy_bandwidth": 0.9, "speedup_over_torch": 6.0}
    slow = {**row, "share_of_copy_bandwidth": 0.5, "speedup_over_torch": 2.0}
    single = {**row, "batch": 1, "graph_us": 25.0}
    assert all(bench.goals([row, single]).values())
    assert list(bench.goals([row, slow, {**single, "graph_us": 40.0}]).values()) == [False] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    """Bug: a traceback, or figures of something else, where there is no GPU."""
    result = measure()
    assert result.exit_code == 2 and "no CUDA device here" in " ".join(result.output.split())


@NEEDS_GPU
def test_the_gate_passes_on_this_gpu():
    """Bug: kernels that are right when interpreted and wrong on the device."""
    plan = bench.Plan((1,), (7,), (49_152,), 1000, (257, 49_152), 5, 2**20)
    assert bench.gate(plan, "cuda")["passed"]


def test_relay_profile_counts():
    """Bug: a profile that counts matrix products among the ops a fused kernel would replace, or no bytes at all."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    record = relay_profile.profile(num_hidden_layers=1, layer_types=["full_attention"], head_dim=16, **small)
    assert record["launches"]["matrix products"] == 3  # context projection, and the relay's MLP up and down
    assert 10 < record["launches"]["everything else"] < 40
    rows = 15 * 32 * 2  # bytes of one state for each draft
    assert 5 * rows < record["bytes"]["everything else"] < 200 * rows
    assert record["measured_seconds"] is None


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


def test_no_kernel_spills(rows):
    """Bug: a tile too large for the registers: several times slower, and nothing says so."""
    for row in rows:
        assert row["spill_bytes"] == 0 and row["stack_bytes"] == 0, row
        assert 32 * row["num_warps"] * row["registers"] <= MAX_REGISTERS, row
        assert row["shared_bytes"] <= MAX_SHARED, row
