"""A run that was killed, at any moment, ends with the weights of one that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import tiny_drafter, tiny_target
from trainer_child import DEATHS
from trainer_kit import STAGES, differing, tiny_rows, tiny_trainer, weights_of

from hf_dflow import DFlowDrafter, DFlowError
from hf_dflow.training import checkpoint

CHILD = Path(__file__).with_name("trainer_child.py")
TESTS_PATH = os.pathsep.join([str(CHILD.parent.parent), os.environ.get("PYTHONPATH", "")])
LAST_WHOLE = dict.fromkeys(DEATHS, 10) | {"while the oldest goes": 15}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """20 updates without interruption."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("straight"))
    trainer.run()
    assert trainer.drafter.relay.down_proj.weight.abs().sum() > 0, "the relay rounds trained the relay"
    return trainer


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder for each death, left by a process that really received SIGKILL there."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": TESTS_PATH, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(CHILD), "kill", str(folder)], capture_output=True, text=True, env=environment, timeout=900
    )
    signals = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert signals == dict.fromkeys(DEATHS, signal.SIGKILL), result.stderr[-2000:]
    return folder


@pytest.mark.parametrize("death", DEATHS)
def test_killed_run_ends_as_the_straight_one(killed, straight, tmp_path, death):
    """Catches: a kill that loses the last whole checkpoint, or a resume without optimiser, schedule, data order,
    anchors or noise (any of which changes the weights)."""
    folder = shutil.copytree(killed / death, tmp_path / "run")
    resumed = tiny_trainer(folder)
    assert resumed.resume() and resumed.update == LAST_WHOLE[death]
    newest = checkpoint.checkpoints(folder)[-1]
    assert newest.name == f"checkpoint-{LAST_WHOLE[death]}"
    for whole in checkpoint.checkpoints(folder):  # a name is a promise, for older ones too
        DFlowDrafter.from_pretrained(whole)
    resumed.run()
    assert differing(weights_of(resumed), weights_of(straight)) == []
    assert (resumed.rows_drawn, resumed.update) == (straight.rows_drawn, straight.update) == (40, 20)
    for name, parameter in straight.drafter.named_parameters():
        mine = resumed.optimizer.state[dict(resumed.drafter.named_parameters())[name]]
        assert all(mine[key].equal(value) for key, value in straight.optimizer.state[parameter].items()), name
    assert resumed.generator.get_state().equal(straight.generator.get_state())
    assert sorted(path.name for path in checkpoint.checkpoints(folder)) == ["checkpoint-15", "checkpoint-20"]


def test_log_of_a_killed_run_tells_each_update_once(killed, straight, tmp_path):
    """Catches: updates between the checkpoint and the kill that stand in the log twice, or a torn last line."""
    folder = shutil.copytree(killed / "before the rename", tmp_path / "run")
    assert '"update": 15,' in (folder / "log.jsonl").read_text(), "told before the kill that undid it"
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"update": 20, "los')
    first = tiny_trainer(folder)
    first.resume()
    first.run()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [5, 8, 10, 15, 20]
    told = [json.loads(line) for line in (straight.output / "log.jsonl").read_text().splitlines()]
    assert [line["losses"] for line in lines] == [line["losses"] for line in told]
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in told]


def test_checkpoint_is_a_drafter_and_keeps_training_state_apart(straight):
    """Catches: a checkpoint that cannot serve, an inference path that reads optimiser files, a pickle among them."""
    folder = checkpoint.checkpoints(straight.output)[-1]
    drafter = DFlowDrafter.from_pretrained(folder, dtype="float32")
    assert differing(drafter.state_dict(), weights_of(straight)) == []
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "model.safetensors",
        "training/optimizer.safetensors",
        "training/process-00000.safetensors",
        "training/state.json",
    ]
    for path in (folder / "training").iterdir():
        path.write_bytes(b"broken")
    DFlowDrafter.from_pretrained(folder)
    with pytest.raises(DFlowError, match=r"state\.json is missing or damaged"):
        tiny_trainer(straight.output).resume()


def other_target():
    return tiny_target("llama", dtype=torch.float32, seed=1)


def other_shape():
    return tiny_drafter(
        tiny_target("llama"), 4, target_layer_ids=[0, 2], num_hidden_layers=1, layer_types=["full_attention"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "configuration 'seed' was 0 and is 1"),
        ({"stages": [STAGES[0], replace(STAGES[1], updates=13)]}, "configuration 'stages' was"),
        ({"target": other_target}, "target was"),
        ({"rows": lambda: tiny_rows(seed=1)}, "data was"),
        ({"drafter": other_shape}, "drafter 'intermediate_size'|configuration 'initialise_from_target'"),
        ({"block_size": 5}, "configuration 'block_size' was 4 and is 5"),
    ],
)
def test_resuming_another_run_is_refused_in_words(tmp_path, changes, message):
    """Catches: weights of one run under the schedule, drafter, target or data of another, without a word."""
    small = {"stages": [replace(STAGES[0], updates=1)]}
    trainer = tiny_trainer(tmp_path, **small)
    trainer.run()
    made = {key: value() if callable(value) else value for key, value in changes.items()}
    with pytest.raises(DFlowError, match=message) as refusal:
        tiny_trainer(tmp_path, **{**small, **made}).resume()
    assert "use another output folder" in str(refusal.value)


def test_drafter_of_another_shape_is_refused_where_the_configuration_is_the_same(tmp_path):
    """Catches: a comparison of configurations only, though `--from` brings sizes of its own."""
    narrow = {"target_layer_ids": [0, 2], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    target = tiny_target("llama", dtype=torch.float32)
    small = {"stages": [replace(STAGES[0], updates=1)], "target": target}
    first = tiny_trainer(tmp_path, drafter=tiny_drafter(target, 4, **narrow), **small)
    first.run()
    wider = tiny_drafter(target, 4, **narrow, intermediate_size=64)
    with pytest.raises(DFlowError, match="drafter 'intermediate_size' was 48 and is 64"):
        tiny_trainer(tmp_path, drafter=wider, **small).resume()
