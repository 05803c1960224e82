"""Training, features, probe and benchmark on a GPU, or on what tests/pretended_device.py makes up."""

import os

import pytest
import torch
from kit import tiny_drafter, tiny_target
from trainer_kit import differing, log_of, tiny_rows, tiny_trainer, weights_of
from typer.testing import CliRunner

from hf_dflow import cli
from hf_dflow.bench.probe import probe_text
from hf_dflow.errors import DFlowError
from hf_dflow.training import checkpoint
from hf_dflow.training.config import Stage
from hf_dflow.training.features import FeatureStore

DEVICE = os.environ.get("HF_DFLOW_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = 1e-3 if DEVICE == "cuda" else 2e-5  # of a loss; on the CPU, sums may be ordered otherwise
KINDS = {
    "dflow": {},
    "correction": {"correction_intermediate_size": 8},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "bfloat16": {"precision": "bfloat16"},
}
if DEVICE != "cuda":
    del KINDS["bfloat16"]  # the pretended device has no autocast


def target_on(device: str):
    return tiny_target("llama", dtype=torch.float32, attention="sdpa").to(device)


def losses(folder, device: str, **changes) -> list[float]:
    """Of every round of a short run's updates."""
    stages = [Stage(2, 0, 2, 4), Stage(3, 2, 2, 4)]
    trainer = tiny_trainer(folder / device, target=target_on(device), stages=stages, log_every=1, **changes)
    trainer.run()
    return [loss for line in log_of(folder / device) for loss in line.get("losses", [])]


@pytest.mark.parametrize("name", KINDS)
def test_training_learns_the_same_on_a_device(name, tmp_path):
    """C10: anchors, masks, proposals or losses made on the wrong device."""
    found, expected = (losses(tmp_path, device, **KINDS[name]) for device in (DEVICE, "cpu"))
    assert len(found) == 2 + 3 * 3
    if name != "bfloat16":  # whose rounding is each device's own
        assert found == pytest.approx(expected, rel=CLOSE)


def test_a_run_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    """C10: an optimiser's state that comes back on the CPU."""
    whole, part = (tiny_trainer(tmp_path / name, target=target_on(DEVICE)) for name in "ab")
    whole.run()
    saved = checkpoint.write_shared_state

    def dying(*arguments, **options):
        saved(*arguments, **options)
        if part.update > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "write_shared_state", dying)
        part.run()
    again = tiny_trainer(tmp_path / "b", target=target_on(DEVICE))
    assert again.resume() and 0 < again.update <= 8
    again.run()
    assert not differing(weights_of(whole), weights_of(again))


def test_features(tmp_path):
    """C10: rows or a teacher's tokens left on the CPU."""
    stores = []
    for device in (DEVICE, "cpu"):
        store = FeatureStore(tmp_path / device, tiny_rows(), target_on(device), [0, 2], teacher_top_k=4)
        store.fill()
        stores.append(store)
    for index in range(len(tiny_rows())):
        found, expected = (store[index].cpu() for store in stores)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        found, expected = (store.teacher(index).probs.cpu() for store in stores)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_probe():
    """C10: a walk that compares tokens of two devices, or two models on two that are not refused."""
    model, text = tiny_target("llama", attention="sdpa"), list(range(1, 30))
    drafter = tiny_drafter(model, 8, relay=None)
    expected = probe_text(drafter, model, text, 5)
    with pytest.raises(DFlowError, match="load both onto one device"):
        probe_text(drafter.to(DEVICE), model, text, 5)
    assert probe_text(drafter, model.to(DEVICE), text, 5) == expected


def test_the_benchmark(tmp_path):
    """Bug: a strategy, a clock or a count that only ever ran on the CPU."""
    options = ["--tiny", "--output-tokens", "10", "--per-task", "1", "--temperature", "0", "--temperature", "1"]
    result = CliRunner().invoke(
        cli.app, ["bench", "run", *options, "--device", DEVICE, "--json", str(tmp_path / "bench.json")]
    )
    assert result.exit_code == 0, result.output
