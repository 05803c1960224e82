"""What one update draws, computes and changes; what must not reach the weights does not."""

from dataclasses import replace

import pytest
import torch
from accelerate.tracking import GeneralTracker
from kit import MASK_TOKEN_ID, tiny_target
from trainer_kit import (
    MASK_STAGE,
    PROMPT_LENGTH,
    RELAY_STAGE,
    differing,
    log_of,
    tiny_rows,
    tiny_trainer,
    weights_of,
)

from hf_dflow import DFlowError
from hf_dflow.training import checkpoint
from hf_dflow.training.config import Stage
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.log import RunLog

PLAIN = {"feature_noise": 0.0, "other_candidates": 0}


def shortened(rows: list[TrainingRow], length: int) -> list[TrainingRow]:
    return [TrainingRow(row.token_ids[:length], row.prompt_length, "", 0.0) for row in rows]


def test_anchors_are_distinct_and_fewer_where_an_answer_is_short(tmp_path):
    """Catches: the same block trained twice in one update, and anchors in the prompt."""
    trainer = tiny_trainer(tmp_path)
    _, anchors = trainer.draw(Stage(1, 0, 3, 100))
    rows = [trainer.rows[i] for i in trainer.order.share(0, 3, 0, 1)]
    pairs = list(zip(anchors.row.tolist(), anchors.position.tolist(), strict=True))
    assert sorted(pairs) == [(i, position) for i, row in enumerate(rows) for position in row.anchor_positions()]
    _, anchors = trainer.draw(Stage(1, 0, 3, 4))
    pairs = set(zip(anchors.row.tolist(), anchors.position.tolist(), strict=True))
    assert anchors.row.bincount().tolist() == [4, 4, 4] and len(pairs) == 12


def test_accumulated_forwards_are_one_update_of_all_their_rows(tmp_path):
    """Catches: gradients that add up instead of averaging, or an optimiser step at each forward."""
    options = {"rows": shortened(tiny_rows(4), 18), "max_grad_norm": 1e9, **PLAIN}
    once, twice = tiny_trainer(tmp_path, **options), tiny_trainer(tmp_path, gradient_accumulation=2, **options)
    # Every anchor is taken, so that both see the same blocks.
    whole, halves = once.step(Stage(1, 0, 4, 100), 1e-3), twice.step(Stage(1, 0, 2, 100), 1e-3)
    assert whole.losses == pytest.approx(halves.losses, abs=1e-5)
    assert whole.gradient_norm == pytest.approx(halves.gradient_norm, rel=1e-4)
    assert once.rows_drawn == twice.rows_drawn == 4
    assert {float(state["step"]) for state in twice.optimizer.state.values()} == {1.0}


def test_gradients_are_clipped(tmp_path):
    """Catches: a clip after the step."""
    trainer = tiny_trainer(tmp_path, max_grad_norm=1e-3)
    update = trainer.step(MASK_STAGE, 1e-3)
    norm = torch.stack([weight.grad.norm() for weight in trainer.parameters if weight.grad is not None]).norm()
    assert update.gradient_norm > 1e-2 and norm == pytest.approx(1e-3, rel=1e-3)


def test_a_stage_may_draft_shorter_blocks_with_a_decay_of_its_own(tmp_path):
    """Catches: a stage's block or decay that is read from the run, rounds that disagree about the length."""
    short, staged = tiny_trainer(tmp_path, **PLAIN, block_size=2), tiny_trainer(tmp_path, **PLAIN)
    losses = short.step(Stage(1, 2, 2, 4), 1e-3).losses
    assert staged.step(Stage(1, 2, 2, 4, block_size=2), 1e-3).losses == losses and len(losses) == 3
    assert staged.drafter.config.block_size == 4 and not differing(weights_of(short), weights_of(staged))
    own_decay = tiny_trainer(tmp_path, **PLAIN).step(Stage(1, 0, 2, 4, loss_decay=0.01), 1e-3).losses
    run_decay = tiny_trainer(tmp_path, **PLAIN, loss_decay=0.01).step(Stage(1, 0, 2, 4), 1e-3).losses
    default = tiny_trainer(tmp_path, **PLAIN).step(Stage(1, 0, 2, 4), 1e-3).losses
    assert own_decay == run_decay != default


def test_bfloat16_arithmetic_keeps_float32_weights(tmp_path):
    """Catches: master weights in bfloat16 (small updates vanish), or a precision setting without effect."""
    exact = tiny_trainer(tmp_path, feature_noise=0.0)
    half = tiny_trainer(tmp_path, feature_noise=0.0, precision="bfloat16")
    losses = [trainer.step(RELAY_STAGE, 1e-3).losses for trainer in (exact, half)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)
    states = [value for state in half.optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in [*weights_of(half).values(), *states]} == {torch.float32}


def test_only_the_relay_is_trained_where_only_it_should_be(tmp_path):
    """Catches: `train_only` that freezes nothing, or a relay without gradient."""
    trainer = tiny_trainer(tmp_path, stages=[replace(RELAY_STAGE, updates=3)], train_only="relay")
    before = weights_of(trainer)
    trainer.run()
    changed = differing(before, weights_of(trainer))
    assert changed and all(name.startswith("relay.") for name in changed)
    assert {id(weight) for weight in trainer.parameters} == {id(w) for w in trainer.drafter.relay.parameters()}


def test_log_holds_lines_and_tensorboard_the_same_numbers(tmp_path):
    """Catches: curves that TensorBoard does not show, or that show other numbers than the log."""
    log = RunLog(tmp_path, 10, is_main=True)
    with log:
        log.start(0)
        log.record(5, losses=[2.0, 3.0], tokens_per_step=1.5, skipped_because="a reason")
    assert log_of(tmp_path)[0]["losses"] == [2.0, 3.0]
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves == {"losses/0": [(5, 2.0)], "losses/1": [(5, 3.0)], "tokens_per_step": [(5, 1.5)]}


class Recording(GeneralTracker):
    name, requires_logging_directory = "recording", False

    def __init__(self):
        super().__init__()
        self.settings, self.logged, self.is_finished = {}, [], False

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


def test_trackers_get_the_numbers_of_the_log(tmp_path):
    """N23: curves only in files of this machine; or a tracker that gets other numbers, or is never closed."""
    tracker = Recording()
    trainer = tiny_trainer(tmp_path, stages=[replace(MASK_STAGE, updates=2)], log_every=1, report_to=[tracker])
    trainer.run()
    assert [step for step, _ in tracker.logged] == [1, 2] and tracker.is_finished
    for (_, values), line in zip(tracker.logged, log_of(tmp_path), strict=True):
        assert values["losses/0"] == line["losses"][0] and values["learning_rate"] == line["learning_rate"]
    assert tracker.settings["block_size"] == 4 and '"updates": 2' in tracker.settings["stages"]
    assert not (tmp_path / "tensorboard").exists(), "only what was asked for"


def test_mask_token_is_never_among_what_the_data_needs(tmp_path):
    """Catches: a mask that the drafter could then never propose though the target says it."""
    target = tiny_target("llama", dtype=torch.float32)
    target.generation_config.eos_token_id = MASK_TOKEN_ID
    trainer = tiny_trainer(tmp_path, target=target, mask_token_id=None)
    used = {token_id for row in trainer.rows for token_id in row.token_ids[row.prompt_length :]}
    assert trainer.drafter.config.mask_token_id not in {*used, 0, MASK_TOKEN_ID}


# -- what must not reach the weights


def infinite_features(sequences, anchors):
    sequences.features[:, :PROMPT_LENGTH] = torch.inf


def one_nan(sequences, anchors):
    sequences.features[0, PROMPT_LENGTH - 1, 3] = torch.nan


def no_anchor(sequences, anchors):
    anchors.row, anchors.position = anchors.row[:0], anchors.position[:0]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(infinite_features, "the loss is not finite"), (one_nan, "the loss is not finite"), (no_anchor, "no row")],
)
@pytest.mark.parametrize("stage", [MASK_STAGE, RELAY_STAGE], ids=["mask round", "relay rounds"])
def test_a_spoiled_batch_is_skipped_counted_and_logged(tmp_path, capsys, spoil, reason, stage):
    """Catches: one bad batch that makes all weights NaN, or that goes by without a word."""
    trainer = tiny_trainer(tmp_path, stages=[replace(stage, updates=4)], save_every=2)
    draw, step, before = trainer.draw, trainer.step, []

    def spoiled_draw(stage):
        drawn = draw(stage)
        if trainer.update == 1:
            spoil(*drawn)
        return drawn

    trainer.draw = spoiled_draw
    trainer.step = lambda *arguments: (before.append(weights_of(trainer)), step(*arguments))[1]
    trainer.run()
    assert differing(before[1], before[2]) == [] and differing(before[2], before[3]) != []
    assert trainer.skipped == 1 and trainer.skipped_in_row == 0
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())
    assert all(value.isfinite().all() for state in trainer.optimizer.state.values() for value in state.values())
    skips = [(line["update"], line["skipped"]) for line in log_of(tmp_path) if "skipped_because" in line]
    assert skips == [(2, 1)] and f"skipped_because {reason}" in capsys.readouterr().out


def test_infinite_gradient_of_a_finite_loss_is_skipped(tmp_path):
    """Catches: a guard that looks at the loss only; bfloat16 overflows in the backward pass first."""
    trainer = tiny_trainer(tmp_path)
    weight = trainer.drafter.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
    before = weights_of(trainer)
    update = trainer.step(MASK_STAGE, 1e-3)
    assert update.skipped == "the gradient is not finite" and torch.tensor(update.losses).isfinite().all()
    assert differing(weights_of(trainer), before) == []


def test_run_stops_after_many_skips_and_keeps_the_last_good_checkpoint(tmp_path):
    """Catches: a night of skipped updates, and a checkpoint of the moment when everything had gone wrong."""
    options = {"stages": [replace(MASK_STAGE, updates=7)], "max_skips_in_row": 2, "save_every": 2}
    trainer = tiny_trainer(tmp_path, **options)
    step = trainer.step

    def breaks_after_three(stage, rate):
        if trainer.update == 3:
            trainer.drafter.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
        return step(stage, rate)

    trainer.step = breaks_after_three
    with pytest.raises(DFlowError, match=r"2 updates in a row were skipped, the last because the gradient is not"):
        trainer.run()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    resumed = tiny_trainer(tmp_path, **options)
    assert resumed.resume()
    resumed.run()
    assert resumed.update == 7 and resumed.skipped == 1


def test_non_finite_weights_are_never_saved(tmp_path):
    """Catches: weights that broke without a bad gradient taking the place of the last good checkpoint."""
    trainer = tiny_trainer(tmp_path)
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
    empty = shortened(tiny_rows(2), PROMPT_LENGTH + answer_length)
    stages = [replace(MASK_STAGE, updates=3), replace(RELAY_STAGE, updates=3)]
    trainer = tiny_trainer(tmp_path, rows=[*empty, *tiny_rows(1)], stages=stages)
    draw, drawn = trainer.draw, []
    trainer.draw = lambda stage: drawn.append(draw(stage)) or drawn[-1]
    trainer.run()
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())
    assert all(bool((anchors.position >= PROMPT_LENGTH).all()) for _, anchors in drawn)
    assert {len(anchors.row) for _, anchors in drawn} == {0, 4} and trainer.skipped > 0


def test_what_cannot_be_trained_is_refused_before_training(tmp_path, monkeypatch):
    """Catches: a run over a file whose template marked nothing as the assistant's; half precision that the run's own
    record does not show."""
    rows = [TrainingRow(row.token_ids, len(row.token_ids), "", 0.0) for row in tiny_rows(3)]
    with pytest.raises(DFlowError, match="none of the 3 rows holds a supervised token"):
        tiny_trainer(tmp_path, rows=rows)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(DFlowError, match=r"mixed precision fp16, the configuration says .* \"float32\""):
        tiny_trainer(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    tiny_trainer(tmp_path, precision="bfloat16")
