"""What must not reach the weights does not; what cannot be trained on is refused before the first update."""

import json

import pytest
import torch
from kit import tiny_target
from trainer_kit import PROMPT_LENGTH, STAGES, differing, tiny_rows, tiny_trainer, weights_of

from hf_dflow import DFlowError
from hf_dflow.training import checkpoint
from hf_dflow.training.data import TrainingRow

MASK_STAGE, RELAY_STAGE = STAGES


def poison_one(trainer, update: int, poison) -> None:
    """Let `poison(sequences, anchors)` spoil what is drawn for one update."""
    draw = trainer.draw

    def spoiled(stage):
        sequences, anchors = draw(stage)
        if trainer.update == update:
            poison(sequences, anchors)
        return sequences, anchors

    trainer.draw = spoiled


def infinite_features(sequences, anchors):
    sequences.features[:, :PROMPT_LENGTH] = torch.inf


def one_nan(sequences, anchors):
    sequences.features[0, PROMPT_LENGTH - 1, 3] = torch.nan


def no_anchor(sequences, anchors):
    anchors.row, anchors.position = anchors.row[:0], anchors.position[:0]


@pytest.mark.parametrize(
    ("poison", "reason"),
    [(infinite_features, "the loss is not finite"), (one_nan, "the loss is not finite"), (no_anchor, "no row")],
)
@pytest.mark.parametrize("stage", STAGES, ids=["mask round", "relay rounds"])
def test_spoiled_batch_is_skipped_counted_and_said(tmp_path, capsys, poison, reason, stage):
    """Catches: one bad batch that makes all weights NaN, or that goes by without a word."""
    trainer = tiny_trainer(tmp_path, stages=[stage], save_every=1)
    poison_one(trainer, 1, poison)
    before = []
    step = trainer.step
    trainer.step = lambda *arguments: (before.append(weights_of(trainer)), step(*arguments))[1]
    trainer.run()
    assert differing(before[1], before[2]) == [] and differing(before[2], before[3]) != []
    assert trainer.skipped == 1 and trainer.skipped_in_row == 0
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())
    assert all(value.isfinite().all() for state in trainer.optimizer.state.values() for value in state.values())
    said = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["update"], line["skipped"]) for line in said if "skipped_because" in line] == [(2, 1)]
    assert f"skipped_because {reason}" in capsys.readouterr().out


def test_infinite_gradient_of_a_finite_loss_is_skipped(tmp_path):
    """Catches: a guard that looks at the loss only; bfloat16 overflows in the backward pass first."""
    trainer = tiny_trainer(tmp_path)
    weight = trainer.drafter.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
    before = weights_of(trainer)
    update = trainer.step(MASK_STAGE, 1e-3)
    assert update.skipped == "the gradient is not finite" and all(map(torch.isfinite, torch.tensor(update.losses)))
    assert differing(weights_of(trainer), before) == []


def test_run_stops_after_many_skips_and_keeps_the_last_good_checkpoint(tmp_path):
    """Catches: a night of skipped updates, and a checkpoint of the moment when everything had gone wrong."""
    trainer = tiny_trainer(tmp_path, max_skips_in_row=4, save_every=5)
    step = trainer.step

    def breaks_after_six(stage, rate):
        if trainer.update == 6:
            trainer.drafter.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
        return step(stage, rate)

    trainer.step = breaks_after_six
    with pytest.raises(DFlowError, match=r"4 updates in a row were skipped, the last because the gradient is not"):
        trainer.run()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-5"]
    resumed = tiny_trainer(tmp_path, max_skips_in_row=4, save_every=5)
    assert resumed.resume()
    resumed.run()
    assert resumed.update == 20 and resumed.skipped == 0


def test_non_finite_weights_are_never_saved(tmp_path):
    """Catches: weights that broke without a bad gradient taking the place of the last good checkpoint."""
    trainer = tiny_trainer(tmp_path, save_every=1)
    trainer.step(MASK_STAGE, 1e-3)
    trainer.update = 1
    trainer.save()
    with torch.no_grad():
        trainer.drafter.fc.weight[0, 0] = torch.inf
    trainer.update = 2
    with pytest.raises(DFlowError, match=r"fc\.weight is not finite, so nothing was saved"):
        trainer.save()
    with pytest.raises(DFlowError, match="not finite"):
        checkpoint.export(trainer.drafter, tmp_path / "drafter", torch.bfloat16, {})
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("answer_length", [0, 1])
def test_rows_that_supervise_nothing_train_with_the_others(tmp_path, answer_length):
    """Catches: a crash, or anchors in the prompt, where an answer is empty or a single token."""
    empty = [
        TrainingRow(row.token_ids[: PROMPT_LENGTH + answer_length], PROMPT_LENGTH, "", 0.0) for row in tiny_rows(2)
    ]
    trainer = tiny_trainer(tmp_path, rows=[*empty, *tiny_rows(1)])
    drawn = []
    draw = trainer.draw
    trainer.draw = lambda stage: drawn.append(draw(stage)) or drawn[-1]
    trainer.run()
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())
    assert all(bool((anchors.position >= PROMPT_LENGTH).all()) for _, anchors in drawn)
    assert any(len(anchors.row) == 0 for _, anchors in drawn) and trainer.skipped > 0
    assert any(len(anchors.row) == 4 for _, anchors in drawn)


def test_data_without_anything_to_learn_is_refused_before_training(tmp_path):
    """Catches: a run over a file whose template marked nothing as the assistant's."""
    rows = [TrainingRow(row.token_ids, len(row.token_ids), "", 0.0) for row in tiny_rows(3)]
    with pytest.raises(DFlowError, match="none of the 3 rows holds a supervised token"):
        tiny_trainer(tmp_path, rows=rows)


def test_launcher_that_contradicts_the_configuration_is_refused(tmp_path, monkeypatch):
    """Catches: half precision that the run's own record does not show."""
    target = tiny_target("llama", dtype=torch.float32)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(DFlowError, match=r"mixed precision fp16, the configuration says .* \"float32\""):
        tiny_trainer(tmp_path, target=target)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    tiny_trainer(tmp_path, target=target, precision="bfloat16")
