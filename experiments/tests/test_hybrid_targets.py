"""The experiment on hybrid targets at its smallest, and its committed record."""

import json

import pytest
from commands import invoke

from experiments import hybrid_targets
from experiments.tables import record


@pytest.mark.parametrize("family", hybrid_targets.FAMILIES)
def test_every_family_has_recurrent_layers(family):
    """Bug: a target that is no hybrid is counted as one."""
    target = hybrid_targets.new_target(family)
    kinds = [type(layer).__name__ for layer in hybrid_targets.cache_of(target).layers]
    assert any("Linear" in kind for kind in kinds)
    assert {"DynamicLayer", "LinearAttentionAndFullAttentionLayer"} & set(kinds), "attention as well"


def test_one_family_from_target_to_figures(tmp_path, monkeypatch):
    """Bug: held-out prompts are trained on, a kind is another, or a text that differs is not seen."""
    monkeypatch.setattr(hybrid_targets, "PROMPTS", hybrid_targets.PROMPTS[::12])
    path = tmp_path / "record.json"
    small = "--family lfm2 --target-updates 2 --updates 3 --json"
    result = invoke(hybrid_targets.main, tmp_path / "run", small, path)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["families"]["lfm2"]
    assert found["rows"] + found["prompts"] == len(hybrid_targets.PROMPTS) and found["prompts"]
    assert list(found["kinds"]) == ["dflash", "dflow", "dflow, relay off"]
    assert all(kind["identical"] == found["prompts"] for kind in found["kinds"].values())
    trained = {
        kind: json.loads((tmp_path / "run" / "lfm2" / kind / "drafter" / "training.json").read_text())
        for kind in hybrid_targets.KINDS
    }
    differing = {key for key in trained["dflow"] if trained["dflow"][key] != trained["dflash"][key]}
    assert differing == {"use_relay", "stages"}
    assert "`lfm2`" in result.output


def test_an_unknown_family_is_refused_before_anything_is_made(tmp_path):
    """Bug: half an hour of training, and then a key error."""
    result = invoke(hybrid_targets.main, tmp_path, "--family nobody")
    assert result.exit_code == 2 and "use one or more of qwen3_5_text" in result.output


def test_drafters_for_hybrids_reach_two_tokens_a_step():
    """Bug: a record that does not show what the documents say it shows."""
    families = record("hybrid-targets")["families"]
    assert families.keys() == hybrid_targets.FAMILIES.keys()
    for found in families.values():
        for kind in ("dflash", "dflow"):
            assert found["kinds"][kind]["tokens_per_step"]["interval_95"][0] >= 2
        assert all(kind["identical"] == found["prompts"] for kind in found["kinds"].values())
