"""A run's configuration: what is refused by name, what a file holds, and the schedule of a stage."""

import json

import pytest
import torch
from trainer_kit import tiny_training, training_target

from hf_dflow.training.config import PRESETS, Stage, TrainingConfig, TrainingConfigError
from hf_dflow.training.start import resolve


def one_update(**fields) -> dict:
    return {"stages": [{"updates": 1}], **fields}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"relay_rounds": 2}, "unknown key relay_rounds; known: num_hidden_layers"),
        ({"stages": [{"updates": 1, "lr": 1}]}, "stage 1: unknown key lr"),
        ({"stages": [{"relay_rounds": 1}]}, 'stage 1: "updates" is missing'),
        ({"stages": []}, '"stages" is \\[\\]; give at least one'),
        ({"stages": {"updates": 1}}, "give a list of objects"),
        ({"stages": [{"updates": 0}]}, 'stage 1: "updates" is 0; give a whole number from 1'),
        ({"stages": [{"updates": True}]}, 'stage 1: "updates" is True; give a whole number from 1'),
        ({"stages": [{"updates": 1, "learning_rate": -1}]}, 'stage 1: "learning_rate" is -1; give a number above 0'),
        ({"stages": [{"updates": 1, "block_size": 1}]}, 'stage 1: "block_size" is 1; give a whole number from 2'),
        ({"stages": [{"updates": 1, "block_size": "2"}]}, "stage 1: \"block_size\" is '2'; give a whole number from 2"),
        (one_update(stages=[{"updates": 1, "block_size": 5}], block_size=4), '"block_size" is 5; .* the drafter\'s 4'),
        ({"stages": [{"updates": 1, "loss_decay": 0}]}, 'stage 1: "loss_decay" is 0; give a number from 0.01'),
        (one_update(precision="fp8"), '"precision" is \'fp8\'; give one of "float32", "bfloat16"'),
        (one_update(block_size=1), '"block_size" is 1; give a whole number from 2'),
        (one_update(distillation=2), '"distillation" is 2; give a number from 0 to 1'),
        (one_update(target_layer_ids=[]), '"target_layer_ids" is \\[\\]'),
        (one_update(train_only="relay"), '"relay_rounds" is 0; give at least 1'),
        (one_update(save_every=2.5), '"save_every" is 2.5'),
        (one_update(loss_decay=1e-320), '"loss_decay" is'),
        (one_update(loss_decay=10**400), '"loss_decay" is'),
        (one_update(seed=2**70), '"seed" is'),
        ([], "expected a JSON object"),
    ],
)
def test_an_impossible_configuration_is_refused_by_name(tmp_path, record, message):
    """Catches: a misspelt key that is ignored for the length of a run, or a value that fails hours later."""
    path = tmp_path / "training.json"
    path.write_text(json.dumps(record))
    with pytest.raises(TrainingConfigError, match=message) as refusal:
        TrainingConfig.from_json(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("wrong", [{"target_layer_ids": [0, 99]}, {"mask_token_id": 10**6}])
def test_what_the_target_lacks_is_refused_before_any_feature(wrong):
    """Bug: an IndexError out of the target, after the features were computed."""
    with pytest.raises(TrainingConfigError, match=next(iter(wrong))):
        resolve(tiny_training(**wrong), training_target(), torch.arange(5))


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


def test_the_schedule_is_a_warm_up_and_a_cosine():
    """Catches: a warm-up that begins at zero, a cosine over the wrong number of updates."""
    stage = Stage(100, learning_rate=2.0, warmup_share=0.04)
    rates = [stage.learning_rate_at(update) for update in range(100)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[52] == pytest.approx(1.0) and 0 < rates[99] < 0.001 and sorted(rates[4:], reverse=True) == rates[4:]
