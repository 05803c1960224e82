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
    "a stage": (
        lambda: {"stages": [replace(STAGES[0], updates=2)]},
        "configuration 'stages' 1 'updates' was 1 and is 2",
    ),
    "stages": (lambda: {"stages": STAGES}, "configuration 'stages' had 1 entries and has 2"),
    "open": (
        lambda: {"train_only": "relay", "stages": [replace(STAGES[1], updates=1)]},
        "'train_only' was null and is",
    ),
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
    assert not set("{}") & set(str(refusal.value)), "words, no Python dicts"
    assert ("--extend" in str(refusal.value)) == (name in ("a stage", "stages"))


def lengthened(updates: int, **changes) -> dict:
    return {"stages": [replace(STAGES[0], updates=updates, **changes)]}


def test_a_finished_run_is_extended_and_its_last_stage_goes_on(tmp_path):
    """N23: a run of 30 updates cannot begin with a finished one of 20, or begins anew with its weights alone."""
    tiny_trainer(tmp_path, **lengthened(2)).run()
    before = checkpoint.checkpoints(tmp_path)[-1]
    extended = tiny_trainer(tmp_path, **lengthened(4))
    assert extended.resume(extend=True) and (extended.update, extended.training.updates) == (2, 4)
    assert extended.optimizer.state, "the optimiser goes on too"
    extended.run()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [before.name, "checkpoint-4"]
    again = tiny_trainer(tmp_path, **lengthened(4))
    assert again.resume() and differing(weights_of(again), weights_of(extended)) == []


def test_all_that_is_added_goes_into_the_last_stage(tmp_path):
    """N23: stages that are over become longer, and the last checkpoint's update falls into one that it never was in."""
    short = [replace(STAGES[0], updates=2), replace(STAGES[1], updates=1)]
    tiny_trainer(tmp_path, stages=short).run()
    longer = {"stages": [replace(STAGES[0], updates=4), replace(STAGES[1], updates=2)]}
    extended = tiny_trainer(tmp_path, **longer)
    assert extended.resume(extend=True)
    assert [stage.updates for stage in extended.training.stages] == [2, 4]
    extended.run()
    again = tiny_trainer(tmp_path, **longer)
    assert again.resume(extend=True) and [stage.updates for stage in again.training.stages] == [2, 4]
    with pytest.raises(DFlowError, match="'stages' 1 'updates' was 2 and is 4"):
        tiny_trainer(tmp_path, **longer).resume()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lengthened(1), "cannot be extended to 1"),
        (lengthened(5, learning_rate=0.5), "'stages' 1 'learning_rate' was 0.001 and is 0.5"),
        ({**lengthened(5), "seed": 1}, "'seed' was 0 and is 1"),
    ],
)
def test_only_a_longer_run_of_the_same_kind_extends_another(tmp_path, changes, message):
    """N23: an extension that takes another run's weights, or trains updates backwards."""
    tiny_trainer(tmp_path, **lengthened(2)).run()
    with pytest.raises(DFlowError, match=message):
        tiny_trainer(tmp_path, **changes).resume(extend=True)


def test_a_run_that_has_not_finished_is_not_extended(tmp_path):
    """N23: a schedule that changes in its middle, without a word."""
    trainer = tiny_trainer(tmp_path, **lengthened(2))
    trainer.save()
    with pytest.raises(DFlowError, match="is at update 0 of 2 and cannot be extended to 5: let it finish"):
        tiny_trainer(tmp_path, **lengthened(5)).resume(extend=True)
