"""The lab's variants of relay training: each takes away the one thing that it says."""

import json

import pytest
import torch
from kit import tiny_target
from trainer_kit import tiny_rows, tiny_training

from experiments.lab import variants
from experiments.lab.experiment import last_losses
from experiments.lab.variants import VARIANTS, Variant, VariantTrainer
from hf_dflow.training.config import Stage
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.rounds import draft_round, next_round, relay_additions

STAGE = Stage(4, 2, 4, 6)


@pytest.fixture
def started(tmp_path):
    """A trainer of a variant whose relay changes drafts, its first two rounds, and what follows in DFlow's own."""

    def start(variant):
        target, rows = tiny_target("llama", dtype=torch.float32), tiny_rows()
        training = tiny_training(stages=[STAGE], feature_noise=0.0)
        trainer = VariantTrainer(
            training, target, rows, LiveFeatures(rows, target, [0, 2]), tmp_path / "run", variant=variant
        )
        generator = torch.Generator().manual_seed(1)
        weight = trainer.drafter.relay.down_proj.weight
        weight.data = torch.randn(weight.shape, generator=generator)
        sequences, anchors = trainer.draw(STAGE)
        given = (trainer.drafter, target, sequences)
        first = draft_round(*given, anchors)
        anchors, relayed = next_round(*given, anchors, first)
        second = draft_round(*given, anchors, relayed)
        return trainer, (sequences, anchors, relayed, second), next_round(*given, anchors, second)

    return start


def followed(trainer, rounds):
    return trainer.follow(STAGE, *rounds)


def test_without_a_difference_it_is_dflow(started):
    """Bug: a variant that also changes something else."""
    trainer, rounds, (anchors, relayed) = started(Variant())
    ours, fed = followed(trainer, rounds)
    assert ours.position.equal(anchors.position)
    assert all(getattr(fed, name).equal(getattr(relayed, name)) for name in ("features", "is_fed", "rejected_ids"))


def test_half_feeds_whole_blocks(started):
    """Bug: slots left out instead of blocks, all or none of them, or blocks fed that DFlow would not feed."""
    trainer, rounds, (anchors, relayed) = started(VARIANTS["dflow_half"])
    shares = []
    for trainer.update in range(40):
        ours, fed = followed(trainer, rounds)
        assert ours.position.equal(anchors.position) and fed.features.equal(relayed.features)
        whole = (fed.is_fed == relayed.is_fed).all(dim=1) | ~fed.is_fed.any(dim=1)
        assert whole.all()
        shares.append(float(fed.is_fed.sum() / relayed.is_fed.sum()))
    assert 0.4 < sum(shares) / len(shares) < 0.6 and len(set(shares)) > 3


def test_shuffled_rows_are_those_of_other_blocks(started):
    """Bug: rows that stay where they were, or a bonus that no longer is the block's own anchor."""
    trainer, rounds, (_, relayed) = started(VARIANTS["dflow_shuffled"])
    _, fed = followed(trainer, rounds)
    rows, moved = rounds[1].row, variants._of_other_documents(rounds[1])
    assert (rows != rows[moved]).all()
    assert fed.features.equal(relayed.features[moved])
    ours, theirs = ({tuple(row.flatten().tolist()) for row in one.features} for one in (fed, relayed))
    assert ours == theirs
    assert fed.bonus_ids.equal(relayed.bonus_ids) and fed.is_fed.equal(relayed.is_fed)
    assert not fed.rejected_ids.equal(relayed.rejected_ids)


def test_plain_steps_are_those_without_a_relay(started):
    """Bug: anchors and rows that still come from the relay's drafts, which this random text never accepts."""
    trainer, rounds, (_, relayed) = started(VARIANTS["dflow_plain_steps"])
    sequences, before, _, _ = rounds
    plain = draft_round(trainer.drafter, trainer.target, sequences, before)
    expected, rows = next_round(trainer.drafter, trainer.target, sequences, before, plain)
    ours, fed = followed(trainer, rounds)
    assert ours.position.equal(expected.position) and fed.is_fed.any()
    assert fed.features.equal(rows.features) and not fed.features.equal(relayed.features)


@pytest.mark.parametrize("name", ["dflow_detached", "dflow_half"])
def test_the_detached_projection_learns_nothing_from_the_relay(started, name):
    """Bug: a gradient that comes through after all, or a relay that no longer learns itself."""
    trainer, (_, _, relayed, _), _ = started(VARIANTS[name])
    relay_additions(trainer.drafter, trainer.target, relayed).square().sum().backward()
    learns = trainer.drafter.fc.weight.grad is not None and bool(trainer.drafter.fc.weight.grad.any())
    assert learns == (name != "dflow_detached")
    assert trainer.drafter.relay.up_proj.weight.grad.any()


def test_last_losses_are_of_the_last_updates(tmp_path):
    """Bug: the whole run's mean, rounds that change places, or lines without losses counted."""
    lines = [{"update": 100, "losses": [9.0, 9.0]}, {"update": 150, "losses": [2.0, 1.0]}, {"update": 200}]
    lines.insert(2, {"update": 200, "losses": [1.0, 0.5]})
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert last_losses(tmp_path / "log.jsonl") == [1.5, 0.75]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_draw_the_anchors_that_dflow_draws(tmp_path, name):
    """Bug: a variant's own random numbers taken from the trainer's, so that it learns from other places in the text."""
    drawn = {}
    for variant in (Variant(), VARIANTS[name]):
        target, rows = tiny_target("llama", dtype=torch.float32), tiny_rows()
        given = (tiny_training(stages=[STAGE]), target, rows, LiveFeatures(rows, target, [0, 2]), tmp_path / "run")
        trainer = VariantTrainer(*given, variant=variant)
        for _ in range(2):
            trainer.step(STAGE, 1e-3)
        drawn[variant] = trainer.draw(STAGE)[1].position, trainer.candidates.sample(trainer.generator)
    ours, theirs = drawn.values()
    assert ours[0].equal(theirs[0]) and ours[1].equal(theirs[1])
