"""The example that trains a target and a drafter from nothing, at its smallest: still minutes."""

import re


def test_training_example_ends_with_a_drafter_that_saves_forwards(tmp_path, run_example):
    """Bug: a training example that runs through and leaves a drafter whose drafts nobody accepts."""
    small = ("--target-updates", "60", "--updates", "50", "--rows", "105")
    said = run_example("train_drafter.py", "--folder", str(tmp_path), *small)
    decoded = [float(number) for number in re.findall(r"relay o[nf]+: ([0-9.]+) tokens per step", said)]
    assert len(decoded) == 2 and min(decoded) > 1.1
    assert (tmp_path / "run" / "drafter" / "model.safetensors").exists()
    assert re.search(r"[0-9.]+ tokens per step, ", said), "the last lines: decoding with it"
