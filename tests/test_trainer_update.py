"""What one update draws and computes, and what a run is made of."""

import itertools
import json

import pytest
import torch
from kit import MASK_TOKEN_ID, tiny_drafter, tiny_target
from trainer_kit import STAGES, differing, tiny_rows, tiny_trainer, tiny_training, weights_of

from hf_dflow.training.config import PRESETS, Stage, TrainingConfig, TrainingConfigError
from hf_dflow.training.log import RunLog
from hf_dflow.training.packing import RowOrder, lay_out, place_rows
from hf_dflow.training.rounds import draft_round
from hf_dflow.training.start import resolve

PACKING = 1e-5  # the same sums in another order, float32


def test_every_row_comes_once_before_any_comes_again_and_processes_share_them():
    """Catches: drawing with replacement (a third of the data unseen in an epoch), and processes on the same rows."""
    order = RowOrder(7, seed=3)
    epochs = [[order[epoch * 7 + i] for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [RowOrder(7, 3)[i] for i in (16, 2)] == [epochs[2][2], epochs[0][2]], "a function of the number alone"
    assert [RowOrder(7, 4)[i] for i in range(7)] != epochs[0]
    shares = [order.share(4, 2, process, 3) for process in range(3)]
    assert sorted(itertools.chain(*shares)) == sorted(order[i] for i in range(4, 10))


def test_anchors_are_distinct_and_fewer_where_an_answer_is_short(tmp_path):
    """Catches: the same block trained twice in one update, and anchors in the prompt."""
    trainer = tiny_trainer(tmp_path)
    _, anchors = trainer.draw(Stage(1, 0, 3, 100))
    rows = [trainer.rows[i] for i in trainer.order.share(0, 3, 0, 1)]
    pairs = list(zip(anchors.row.tolist(), anchors.position.tolist(), strict=True))
    assert sorted(pairs) == [(i, position) for i, row in enumerate(rows) for position in row.anchor_positions()]
    _, anchors = trainer.draw(Stage(1, 0, 3, 4))
    assert (
        anchors.row.bincount().tolist() == [4, 4, 4]
        and len(set(zip(*map(torch.Tensor.tolist, (anchors.row, anchors.position)), strict=True))) == 12
    )


def test_packed_rows_give_the_states_of_rows_apart():
    """Catches: packed documents at wrong places: an anchor in its neighbour, or positions that count on."""
    target = tiny_target("llama", dtype=torch.float32)
    drafter = tiny_drafter(target, 4, target_layer_ids=[0, 2])
    lengths = (24, 15, 13, 11, 9, 8)
    rows = [
        type(row)(row.token_ids[:length], row.prompt_length, "", 0.0)
        for row, length in zip(tiny_rows(7)[:0:-1], lengths, strict=True)
    ]
    features = [
        torch.randn(len(row.token_ids), 64, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)
    ]
    results = []
    for pack in (False, True):
        generator = torch.Generator().manual_seed(5)
        sequences, anchors = lay_out(
            rows, features, [], anchors_per_row=3, pack=pack, generator=generator, device=torch.device("cpu")
        )
        results.append((sequences, draft_round(drafter, target, sequences, anchors)))
    (apart, one), (packed, other) = results
    assert (
        packed.token_ids.shape[0] < apart.token_ids.shape[0] and packed.token_ids.shape[1] == apart.token_ids.shape[1]
    )
    assert one.labels.equal(other.labels) and bool((one.labels == -100).any())
    torch.testing.assert_close(other.hidden, one.hidden, rtol=0, atol=PACKING)
    places, starts = place_rows(rows, True)
    assert any(start > 0 for start in starts), "a row that is not the first of its packed row"
    ends = [start + len(row.token_ids) for start, row in zip(starts, rows, strict=True)]
    for place in set(places):
        spans = sorted((starts[i], ends[i]) for i in range(len(rows)) if places[i] == place)
        assert spans[0][0] == 0 and all(end == start for (_, end), (start, _) in itertools.pairwise(spans))


def test_accumulated_forwards_are_one_update_of_all_their_rows(tmp_path):
    """Catches: gradients that add up instead of averaging, or an optimiser step at each forward."""
    rows = tiny_rows(4)
    alike = [type(row)(row.token_ids[:18], row.prompt_length, "", 0.0) for row in rows]
    common = {"rows": alike, "feature_noise": 0.0, "other_candidates": 0, "max_grad_norm": 1e9}
    once = tiny_trainer(tmp_path / "1", **common)
    twice = tiny_trainer(tmp_path / "2", **common, gradient_accumulation=2)
    # Every anchor is taken, so that both see the same blocks.
    whole, half = Stage(1, 0, 4, 100), Stage(1, 0, 2, 100)
    one, two = once.step(whole, 1e-3), twice.step(half, 1e-3)
    assert one.losses == pytest.approx(two.losses, abs=1e-5) and one.gradient_norm == pytest.approx(
        two.gradient_norm, rel=1e-4
    )
    assert once.rows_drawn == twice.rows_drawn == 4
    steps = {float(state["step"]) for state in twice.optimizer.state.values()}
    assert steps == {1.0}


def test_gradients_are_clipped_and_the_schedule_is_a_warm_up_and_a_cosine(tmp_path):
    """Catches: a clip after the step, a warm-up that begins at zero, a cosine over the wrong number of updates."""
    trainer = tiny_trainer(tmp_path, max_grad_norm=1e-3)
    update = trainer.step(STAGES[0], 1e-3)
    norm = torch.stack([one.grad.norm() for one in trainer.parameters if one.grad is not None]).norm()
    assert update.gradient_norm > 1e-2 and norm == pytest.approx(1e-3, rel=1e-3)
    stage = Stage(100, learning_rate=2.0, warmup_share=0.04)
    rates = [stage.learning_rate_at(update) for update in range(100)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[52] == pytest.approx(1.0) and 0 < rates[99] < 0.001 and sorted(rates[4:], reverse=True) == rates[4:]


def test_a_stage_may_draft_shorter_blocks_with_a_decay_of_its_own(tmp_path):
    """Catches: a stage's block or decay that is read from the run, rounds that disagree about the length."""
    common = {"feature_noise": 0.0, "other_candidates": 0}
    short = tiny_trainer(tmp_path / "1", **common, block_size=2)
    staged = tiny_trainer(tmp_path / "2", **common)
    decayed = tiny_trainer(tmp_path / "3", **common)
    one = short.step(Stage(1, 2, 2, 4), 1e-3).losses
    assert staged.step(Stage(1, 2, 2, 4, block_size=2), 1e-3).losses == one and len(one) == 3
    assert staged.drafter.config.block_size == 4 and not differing(weights_of(short), weights_of(staged))
    first_slot = decayed.step(Stage(1, 0, 2, 4, loss_decay=0.01), 1e-3).losses
    plain = tiny_trainer(tmp_path / "4", **common).step(Stage(1, 0, 2, 4), 1e-3).losses
    alone = tiny_trainer(tmp_path / "5", **common, loss_decay=0.01).step(Stage(1, 0, 2, 4), 1e-3).losses
    assert first_slot == alone != plain


@pytest.mark.parametrize("wrong", [{"block_size": 1}, {"block_size": 5}, {"block_size": "2"}, {"loss_decay": 0}])
def test_an_impossible_stage_is_refused_with_what_is_allowed(wrong):
    """Catches: a stage whose block is longer than the drafter's, which fails after hours, in its first update."""
    with pytest.raises(TrainingConfigError, match=r"stage 1: \"(block_size|loss_decay)\" is .*; give a"):
        tiny_training(stages=[Stage(1, **wrong)]).check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_decay": 1e-320},
        {"loss_decay": 10**400},
        {"seed": 2**70},
        {"target_layer_ids": [0, 99]},
        {"mask_token_id": 10**6},
    ],
)
def test_impossible_numbers_are_refused_before_any_feature(wrong, tmp_path):
    """Bug: an IndexError out of the target, or losses that are never finite, after the features were computed."""
    with pytest.raises(TrainingConfigError, match=next(iter(wrong))):
        training = tiny_training(**wrong)
        training.check()
        resolve(training, tiny_target("llama", dtype=torch.float32), torch.arange(5))


def test_bfloat16_arithmetic_keeps_float32_weights(tmp_path):
    """Catches: master weights in bfloat16 (small updates vanish), or a precision setting without effect."""
    plain = tiny_trainer(tmp_path / "1", feature_noise=0.0)
    half = tiny_trainer(tmp_path / "2", feature_noise=0.0, precision="bfloat16")
    losses = [trainer.step(STAGES[1], 1e-3).losses for trainer in (plain, half)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)
    assert {weight.dtype for weight in weights_of(half).values()} == {torch.float32}
    states = [value for state in half.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_only_the_relay_is_trained_where_only_it_should_be(tmp_path):
    """Catches: `train_only` that freezes nothing, or a relay without gradient."""
    trainer = tiny_trainer(tmp_path, stages=[STAGES[1]], train_only="relay")
    before = weights_of(trainer)
    trainer.run()
    changed = differing(before, weights_of(trainer))
    assert changed and all(name.startswith("relay.") for name in changed)
    assert sum(one.numel() for one in trainer.parameters) == sum(
        one.numel() for one in trainer.drafter.relay.parameters()
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"relay_rounds": 2}, "unknown key relay_rounds; known: num_hidden_layers"),
        ({"stages": [{"updates": 1, "lr": 1}]}, "stage 1: unknown key lr"),
        ({"stages": [{"relay_rounds": 1}]}, 'stage 1: "updates" is missing'),
        ({"stages": []}, '"stages" is \\[\\]; give at least one'),
        ({"stages": {"updates": 1}}, "give a list of objects"),
        ({"stages": [{"updates": 0}]}, 'stage 1: "updates" is 0; give a whole number from 1'),
        ({"stages": [{"updates": 1, "learning_rate": -1}]}, 'stage 1: "learning_rate" is -1'),
        ({"stages": [{"updates": 1}], "precision": "fp8"}, '"precision" is \'fp8\'; give one of "float32", "bfloat16"'),
        ({"stages": [{"updates": 1}], "block_size": 1}, '"block_size" is 1; give a whole number from 2'),
        ({"stages": [{"updates": 1}], "distillation": 2}, '"distillation" is 2'),
        ({"stages": [{"updates": 1}], "target_layer_ids": []}, '"target_layer_ids" is \\[\\]'),
        ({"stages": [{"updates": 1}], "train_only": "relay"}, '"relay_rounds" is 0; give at least 1'),
        ({"stages": [{"updates": 1}], "save_every": 2.5}, '"save_every" is 2.5'),
        ([], "expected a JSON object"),
    ],
)
def test_configuration_that_cannot_be_is_refused_by_name(tmp_path, record, message):
    """Catches: a misspelt key that is ignored for the length of a run, or a value that fails hours later."""
    path = tmp_path / "training.json"
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingConfigError, match=message) as refusal:
        TrainingConfig.from_json(path)
    assert str(path) in str(refusal.value)


def test_configuration_survives_json_and_keeps_its_stages_when_shortened(tmp_path):
    """Catches: a field that the file does not hold, or stages that vanish when a run is made shorter."""
    training = tiny_training()
    path = tmp_path / "training.json"
    path.write_text(json.dumps(training.to_dict()))
    assert TrainingConfig.from_json(path) == training
    for name, preset in PRESETS.items():
        preset.check(name)
        for updates in (2, 3, 7, preset.updates, 3 * preset.updates):
            shorter = preset.with_updates(updates)
            shorter.check(name)
            assert shorter.updates == updates
    assert [stage.updates for stage in tiny_training().with_updates(10).stages] == [4, 6]
    with pytest.raises(TrainingConfigError, match="1 updates for 2 stages"):
        tiny_training().with_updates(1)


def test_log_holds_lines_and_tensorboard_the_same_numbers(tmp_path):
    """Catches: curves that TensorBoard does not show, or that show other numbers than the log."""
    log = RunLog(tmp_path, 10, is_main=True)
    with log:
        log.start(0)
        log.record(5, losses=[2.0, 3.0], tokens_per_step=1.5, skipped_because="a reason")
    assert json.loads((tmp_path / "log.jsonl").read_text())["losses"] == [2.0, 3.0]
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown == {"losses/0": [(5, 2.0)], "losses/1": [(5, 3.0)], "tokens_per_step": [(5, 1.5)]}


def test_mask_token_is_never_among_what_the_data_needs(tmp_path):
    """Catches: a mask that the drafter could then never propose though the target says it."""
    target = tiny_target("llama", dtype=torch.float32)
    target.generation_config.eos_token_id = MASK_TOKEN_ID
    trainer = tiny_trainer(tmp_path, target=target, mask_token_id=None)
    used = {token_id for row in trainer.rows for token_id in row.token_ids[row.prompt_length :]}
    assert trainer.drafter.config.mask_token_id not in {*used, 0, MASK_TOKEN_ID}
