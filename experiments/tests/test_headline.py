"""The headline's runs resume and are skipped when done, and its interval covers targets and seeds."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import headline
from experiments.headline import KINDS, RunKey, design, hierarchical_bootstrap, read_record, summarise
from experiments.lab import corpora
from hf_dflow.training.trainer import Trainer

PROMPTS = 40


def cell(ratio, steps=100):
    """Tokens and steps of one kind, then of its base, which takes a token a step; every prompt alike."""
    ones = np.ones(PROMPTS)
    return np.stack([ratio * steps * ones, steps * ones, steps * ones, steps * ones])


def width(counts):
    low, high = hierarchical_bootstrap(counts, resamples=2000)["interval_95"]
    return high - low


def test_a_known_variance_between_seeds_or_targets_widens_the_interval():
    """Bug: seeds pooled before the bootstrap, so that an interval over prompts alone passes for one over training."""
    generator = np.random.default_rng(0)
    spread = 0.1 * generator.standard_normal((3, 5))
    alike = {target: [cell(1.4)] * 5 for target in range(3)}
    seeds_vary = {target: [cell(1.4 + spread[target, seed]) for seed in range(5)] for target in range(3)}
    targets_vary = {target: [cell(1.4 + spread[target, 0])] * 5 for target in range(3)}
    assert width(alike) == pytest.approx(0.0, abs=1e-12), "all prompts are alike, so only training could vary"
    of_seeds = spread[0].std() / 5**0.5
    assert 0.5 < width({0: seeds_vary[0]}) / (2 * 1.96 * of_seeds) < 2.0, "one target: its seeds alone"
    # The mean of 15 runs has a standard error of 0.1 / sqrt(15); of 3 targets, what their means show.
    assert 0.5 < width(seeds_vary) / (2 * 1.96 * 0.1 / 15**0.5) < 2.0
    of_targets = spread[:, 0].std() / 3**0.5
    assert 0.5 < width(targets_vary) / (2 * 1.96 * of_targets) < 2.0
    assert width(targets_vary) > 1.5 * width({0: targets_vary[0], 1: targets_vary[0], 2: targets_vary[0]}) + 0.01


def test_prompts_are_drawn_once_for_all_runs():
    """Bug: prompts drawn anew for each run, so that their difficulty averages out and narrows the interval."""
    tokens = np.linspace(100, 300, PROMPTS)
    steps = np.full(PROMPTS, 100.0)
    easy_and_hard = np.stack([tokens, steps, steps, steps])
    one, many = width({0: [easy_and_hard]}), width({target: [easy_and_hard] * 5 for target in range(3)})
    assert many == pytest.approx(one, rel=0.1) and one > 0.1
    assert hierarchical_bootstrap({0: [easy_and_hard]})["value"] == pytest.approx(1.0)


def test_unequal_numbers_of_seeds_weigh_targets_alike():
    """Bug: the target with more finished seeds decides the mean."""
    counts = {target: [cell(2.0)] * 9 if target % 2 else [cell(1.0)] for target in range(40)}
    found = hierarchical_bootstrap(counts, resamples=500)
    assert found["value"] == pytest.approx(0.5)
    low, high = found["interval_95"]
    assert 0.3 < low < 0.5 < high < 0.7


def test_every_prefix_is_a_smaller_design():
    """Bug: one target's five seeds first, so that hours pass before a second target is seen."""
    keys = list(design(3, 5))
    assert len(keys) == len(set(keys)) == 45
    assert keys[:9] == [RunKey(0, target, kind) for target in range(3) for kind in KINDS]
    assert {key.target_seed for key in keys[9:18]} == {0, 1, 2} and {key.drafter_seed for key in keys[9:18]} == {1}


def toy_corpus():
    words = [f"w{i}" for i in range(30)]
    documents = [" ".join(words[(i + j) % 30] for j in range(40)) for i in range(30)]
    return corpora.Corpus("toy", documents[:24], documents[24:], True, lambda ids: ids[:5])


def test_a_killed_run_resumes_and_what_is_recorded_is_not_made_again(tmp_path, monkeypatch):
    """Bug: a drafter trained from its beginning after a kill, a run made twice, or one that is not the straight run."""
    small = {"TARGET_UPDATES": 2, "DRAFTER_UPDATES": 3, "NUM_PROMPTS": 8, "NUM_HELD_OUT": 2, "MAX_NEW_TOKENS": 14}
    for name, value in {**small, "SAVE_EVERY": 1, "KINDS": ("dflow", "multi_round")}.items():
        monkeypatch.setattr(headline, name, value)
    monkeypatch.setattr(corpora, "airports", toy_corpus)
    monkeypatch.setattr(headline, "version", lambda package: "0")
    updates, honest = [], Trainer.step

    def step(self, *rest):
        if len(updates) == 5:
            updates.append("killed")
            raise KeyboardInterrupt
        updates.append(self.output.parent.parent.name)
        return honest(self, *rest)

    monkeypatch.setattr(Trainer, "step", step)
    command = ["run", str(tmp_path / "work"), "--targets", "1", "--seeds", "1", "--record"]
    assert CliRunner().invoke(headline.app, [*command, str(tmp_path / "killed.jsonl")]).exit_code != 0
    assert [key.kind for key in read_record(tmp_path / "killed.jsonl")] == ["dflow"]
    with open(tmp_path / "killed.jsonl", "a") as lines:
        lines.write('{"drafter_seed": 0, "tar')  # what a kill in the middle of a write leaves
    before = (tmp_path / "work" / "target-0" / "target.json").stat().st_mtime_ns
    resumed = CliRunner().invoke(headline.app, [*command, str(tmp_path / "killed.jsonl")])
    assert resumed.exit_code == 0, resumed.exception
    assert (tmp_path / "work" / "target-0" / "target.json").stat().st_mtime_ns == before
    assert len(updates) == 6 + 1, "multi_round resumed from its checkpoint at update 2"
    straight = ["run", str(tmp_path / "again"), "--targets", "1", "--seeds", "1", "--record", str(tmp_path / "b.jsonl")]
    assert CliRunner().invoke(headline.app, straight).exit_code == 0
    ours, theirs = (read_record(tmp_path / name) for name in ("killed.jsonl", "b.jsonl"))
    assert list(ours) == list(theirs) == list(design(1, 1))
    for key in ours:
        assert ours[key]["counts"] == theirs[key]["counts"] and ours[key]["prompts"] == theirs[key]["prompts"]
        run = Path("target-0", "runs", f"{key.kind}-0-3-2", "checkpoint-3", "model.safetensors")
        assert (tmp_path / "work" / run).read_bytes() == (tmp_path / "again" / run).read_bytes()
    assert ours[RunKey(0, 0, "dflow")]["counts"].keys() == {"dflow", "dflow, relay off"}

    done = len(updates)
    assert CliRunner().invoke(headline.app, [*command, str(tmp_path / "killed.jsonl")]).exit_code == 0
    assert len(updates) == done
    reported = CliRunner().invoke(headline.app, ["report", "--record", str(tmp_path / "killed.jsonl")])
    assert "| dflow over multi_round | 1 × 1 |" in reported.output and "10,000 resamples" in reported.output


def test_tokens_per_step_are_emitted_tokens_over_drafting_steps(tmp_path):
    """Bug: a bonus token counted for a step that was cut, or the prompt's forward counted as a step."""
    counts = {"tokens": [10, 20], "steps": [4, 6], "identical": [1, 1]}
    base = {"tokens": [10, 20], "steps": [10, 10], "identical": [1, 1]}
    entry = {"drafter_seed": 0, "target_seed": 0, "prompts": ["a", "b"]}
    runs = {
        RunKey(0, 0, "dflow"): {**entry, "counts": {"dflow": counts, "dflow, relay off": base}},
        RunKey(0, 0, "dflash"): {**entry, "counts": {"dflash": base}, "prompts": ["b", "a"]},
    }
    found = summarise(runs)
    assert found["tokens_per_step_by_run"]["dflow"] == [3.0]
    assert list(found["comparisons"]) == ["dflow over dflash"], "multi_round is not finished"
    assert found["comparisons"]["dflow over dflash"]["gain"]["value"] == pytest.approx(3.0 / 1.5 - 1)
    assert found["texts_identical"] == "6 of 6"
    assert json.dumps(found)
