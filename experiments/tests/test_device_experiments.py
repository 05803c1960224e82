"""Experiments on a GPU, or on what tests/pretended_device.py makes up."""

import os

import pytest
import torch
from kit import tiny_target
from test_four_drafters import DECODING, SMALL, run, short, target  # noqa: F401  (two are fixtures)
from trainer_kit import tiny_rows

from experiments import four_drafters
from experiments.resident import ResidentFeatures

DEVICE = os.environ.get("HF_DFLOW_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def test_resident_features():
    """C10: rows or a teacher's tokens left on the CPU."""
    stores = []
    for device in (DEVICE, "cpu"):
        model = tiny_target("llama", dtype=torch.float32, attention="sdpa").to(device)
        stores.append(ResidentFeatures(tiny_rows(), model, [0, 2], teacher_top_k=4))
        stores[-1].fill()
    for index in range(len(tiny_rows())):
        features, expected = (store[index].cpu() for store in stores)
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
        probs, expected = (store.teacher(index).probs.cpu() for store in stores)
        torch.testing.assert_close(probs, expected, rtol=1e-3, atol=1e-3)


def test_the_whole_experiment(target, tmp_path, short, monkeypatch):  # noqa: F811
    """Bug: a stage of the script for a GPU that has only ever run on a CPU."""
    load = four_drafters.load_target
    monkeypatch.setattr(four_drafters, "load_target", lambda name, dtype, device: load(name, dtype, DEVICE))
    (tmp_path / "prompts.txt").write_text("\n".join(f"question number {i}?" for i in range(60)))
    result = run(target, tmp_path / "out", "--prompts", tmp_path / "prompts.txt", "--updates 2", SMALL, DECODING)
    assert result.exit_code == 0, result.output
