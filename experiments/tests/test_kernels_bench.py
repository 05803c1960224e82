"""The GPU benchmark's script, tried out on a CPU under the interpreter, and the profile of the relay's inputs."""

import json
from pathlib import Path

import kernel_kit
import pytest
import torch
from kernel_kit import tiled
from typer.testing import CliRunner

from experiments import kernels as bench
from experiments import relay_profile
from experiments.__main__ import app

pytestmark = kernel_kit.ignore_numpy_warnings

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "record.json"


def invoke(*arguments: str):
    with tiled(block=16, rows=32):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_the_whole_script_on_tiny_shapes(output):
    """Bug: a slip in the script costs the one session in which a GPU is lent."""
    result = invoke("kernels", "--device", "cpu", "--budget", "0", "--output", str(output))
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
    result = invoke("kernels", "--device", "cpu", "--output", str(output))
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
    result = invoke("kernels")
    assert result.exit_code == 2 and "No CUDA device here" in result.output


@NEEDS_GPU
def test_the_gate_passes_on_this_gpu():
    """Bug: kernels that are right when interpreted and wrong on the device."""
    plan = bench.Plan((1,), (7,), (49_152,), 1000, (257, 49_152), 5, 2**20)
    assert bench.gate(plan, "cuda")["passed"]


def test_relay_profile_counts(output):
    """Bug: a profile that counts matrix products among the ops a fused kernel would replace, or no bytes at all."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    record = relay_profile.run(output=output, num_hidden_layers=1, layer_types=["full_attention"], head_dim=16, **small)
    assert json.loads(output.read_text()) == json.loads(json.dumps(record))
    assert record["launches"]["matrix products"] == 3  # context projection, and the relay's MLP up and down
    assert 10 < record["launches"]["everything else"] < 40
    rows = 15 * 32 * 2  # bytes of one state for each draft
    assert 5 * rows < record["bytes"]["everything else"] < 200 * rows
    assert record["measured_seconds"] is None


def test_the_committed_profile_is_the_commands():
    """Bug: the README's figure comes from a file that the command no longer gives."""
    path = Path(__file__).parents[2] / "docs" / "results" / "relay-profile.json"
    committed = json.loads(path.read_text(encoding="utf-8"))
    assert committed["sizes"] == {"hidden": 2560, "drafts": 15, "batch": 1}
    assert round(1e3 * committed["most_that_fusing_saves_seconds"]["eager"], 2) == 0.13
    assert round(100 * committed["share_of_paper_step"]["eager"], 1) == 0.3
