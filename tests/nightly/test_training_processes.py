"""Training in processes of its own: one that is killed, at any moment, and two that train together."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from kit import ROOT, tiny_drafter
from trainer_child import DEATHS
from trainer_kit import assert_same_end, differing, tiny_trainer, training_target

from hf_dflow import DFlowDrafter
from hf_dflow.training import checkpoint

CHILD = str(ROOT / "tests" / "trainer_child.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LAST_WHOLE = dict.fromkeys(DEATHS, 10) | {"while the oldest goes": 15}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """20 updates without interruption."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("straight"))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder for each death, left by a process that really received SIGKILL there."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, CHILD, "kill", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=900)
    signals = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert signals == dict.fromkeys(DEATHS, signal.SIGKILL), result.stderr[-2000:]
    return folder


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_run_ends_as_the_straight_one(killed, straight, tmp_path, death):
    """Catches: a kill that loses the last whole checkpoint, or a resume without optimiser, schedule, data order,
    anchors or noise (any of which changes the weights)."""
    folder = shutil.copytree(killed / death, tmp_path / "run")
    resumed = tiny_trainer(folder)
    assert resumed.resume() and resumed.update == LAST_WHOLE[death]
    assert checkpoint.checkpoints(folder)[-1].name == f"checkpoint-{LAST_WHOLE[death]}"
    for whole in checkpoint.checkpoints(folder):  # a name is a promise, for older ones too
        DFlowDrafter.from_pretrained(whole)
    resumed.run()
    assert_same_end(resumed, straight)


def test_two_processes_draw_different_rows_and_keep_equal_weights(tmp_path):
    """Catches: processes that train on the same rows, or drift apart because a gradient was not shared."""
    launch = (
        "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch.split(), CHILD, "together", str(tmp_path)]
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    weights = [torch.load(tmp_path / f"weights-{process}.pt", weights_only=True) for process in (0, 1)]
    assert differing(*weights) == []
    drawn = [json.loads((tmp_path / f"drawn-{process}.json").read_text()) for process in (0, 1)]
    numbers = [[i for pair in pairs for i in pair] for pairs in drawn]
    together = [i for both in zip(*numbers, strict=True) for i in both]
    assert all(sorted(together[epoch : epoch + 7]) == list(range(7)) for epoch in range(0, 77, 7))
    newest = checkpoint.checkpoints(tmp_path / "run")[-1]
    states = [checkpoint.read_process_state(newest, process)["draws"] for process in (0, 1)]
    assert not states[0].equal(states[1]), "anchors and noise of their own"
    relay = {name for name in tiny_drafter(training_target(), 4).state_dict() if name.startswith("relay.")}
    assert relay <= set(weights[0])
