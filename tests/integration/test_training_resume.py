"""A run that died ends as one that did not, and only the same run resumes. Real kills: tests/nightly."""

from dataclasses import replace

import pytest
from kit import tiny_drafter, tiny_target
from trainer_child import arm
from trainer_kit import (
    STAGES,
    assert_same_end,
    differing,
    tiny_rows,
    tiny_trainer,
    training_target,
    weights_of,
)

from hf_dflow import DFlowDrafter, DFlowError
from hf_dflow.training import checkpoint


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """20 updates without interruption."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("straight"))
    trainer.run()
    assert trainer.drafter.relay.down_proj.weight.abs().sum() > 0, "the relay rounds trained the relay"
    return trainer


def die():
    raise KeyboardInterrupt


def test_a_run_that_dies_while_it_saves_ends_as_the_straight_one(straight, tmp_path, monkeypatch):
    """Catches: a half-written checkpoint taken for a whole one, a resume without optimiser, schedule, data order,
    anchors or noise (any of which changes the weights), and updates that stand in the log twice."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        trainer = tiny_trainer(tmp_path)
        arm(trainer, "half the optimiser", die, patched.setattr)
        trainer.run()
    assert '"update": 15,' in (tmp_path / "log.jsonl").read_text(), "logged before the death that undid it"
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"update": 20, "los')
    resumed = tiny_trainer(tmp_path)
    assert resumed.resume() and resumed.update == 10
    resumed.run()
    assert_same_end(resumed, straight)


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


NARROW = {"target_layer_ids": [0, 2], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
OTHERS = {
    "seed": (lambda: {"seed": 1}, "configuration 'seed' was 0 and is 1"),
    "stages": (lambda: {"stages": [replace(STAGES[0], updates=2)]}, "configuration 'stages' was"),
    "block": (lambda: {"block_size": 3}, "configuration 'block_size' was 4 and is 3"),
    "rows": (lambda: {"rows": tiny_rows(seed=1)}, "data was"),
    "target": (lambda: {"target": tiny_target("llama", dtype=training_target().dtype, seed=1)}, "target was"),
    "drafter": (
        lambda: {"drafter": tiny_drafter(training_target(), 4, **NARROW, intermediate_size=64)},
        "drafter 'intermediate_size' was 48 and is 64",
    ),
}


@pytest.fixture(scope="module")
def one_update(tmp_path_factory):
    """The options of a run of one update, whose checkpoint is there."""
    options = {"stages": [replace(STAGES[0], updates=1)], "drafter": tiny_drafter(training_target(), 4, **NARROW)}
    folder = tmp_path_factory.mktemp("one")
    tiny_trainer(folder, **options).run()
    return folder, options


@pytest.mark.parametrize("name", OTHERS)
def test_resuming_another_run_is_refused_in_words(one_update, name):
    """Catches: weights of one run under the schedule, drafter, target or data of another, without a word. A drafter of
    another shape counts where the configurations are the same, since `--from` brings sizes of its own."""
    folder, options = one_update
    changes, message = OTHERS[name]
    with pytest.raises(DFlowError, match=message) as refusal:
        tiny_trainer(folder, **{**options, **changes()}).resume()
    assert "use another output folder" in str(refusal.value)
