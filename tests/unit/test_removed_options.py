"""Options of earlier versions are refused by name, and files that hold them unset still load."""

import json

import pytest
from kit import tiny_drafter, tiny_target

from hf_dflow import DFlowDrafter, DrafterConfigError
from hf_dflow.training.config import TrainingConfig, TrainingConfigError


def test_a_relay_that_reads_logits_is_refused_by_name(tmp_path):
    """Bug: `relay_top_k` ignored in silence, so that a trained relay loses half of its input; null refused too."""
    drafter = tiny_drafter(tiny_target(), 8)
    with pytest.raises(DrafterConfigError, match=r"'relay_top_k' is 4.*train the drafter again"):
        tiny_drafter(tiny_target(), 8, relay_top_k=4)
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "relay_top_k" not in config
    for value in (16, None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "relay_top_k": value}))
        if value is not None:
            with pytest.raises(DrafterConfigError, match="'relay_top_k' is 16"):
                DFlowDrafter.from_pretrained(tmp_path)
    assert "relay_top_k" not in DFlowDrafter.from_pretrained(tmp_path).config.to_dict()


def test_a_training_configuration_that_sets_it_is_refused_by_name():
    """Bug: "unknown key" for a key that earlier versions documented."""
    with pytest.raises(TrainingConfigError, match=r'"relay_top_k" is 4.*leave the key out'):
        TrainingConfig.from_dict({"stages": [{"updates": 1}], "relay_top_k": 4})
    assert TrainingConfig.from_dict({"stages": [{"updates": 1}], "relay_top_k": None}).stages[0].updates == 1
