"""The pair that travels with the package: small, trained, and worth its relay."""

import pytest
from typer.testing import CliRunner

from hf_dflow import tokenizer_fingerprint
from hf_dflow.bench.demo import compare
from hf_dflow.bench.runners import load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PAIR, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import read_prompts
from hf_dflow.cli import app
from hf_dflow.generation import pair as pair_check

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def comparisons():
    return compare(load_pair(TINY_TARGET, TINY_DRAFTER), read_prompts(TINY_PROMPTS), 96)


def test_pair_is_small_enough_to_travel():
    """Catches: float32 weights, optimiser states or features that got into the package."""
    sizes = {path.name: path.stat().st_size for path in TINY_PAIR.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in TINY_PAIR.rglob("*") if path.is_file()) < 10 * MEBIBYTE
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in sizes)


def test_relay_saves_target_forwards_and_changes_no_text(comparisons):
    """Catches: weights that do not belong together, a relay that is off, shifted or untrained; a text that differs."""
    forwards = {"plain": 0, "dflash": 0, "dflow": 0}
    accepted = []
    for comparison in comparisons:
        for name, run in comparison.runs.items():
            forwards[name] += run.target_forwards
            assert run.new_tokens == comparison.runs["plain"].new_tokens
        accepted += comparison.runs["dflow"].statistics.per_step_accepted
    assert 7 in accepted and any(0 < count < 7 for count in accepted)
    assert forwards["dflash"] < 0.35 * forwards["plain"]
    assert forwards["dflow"] < 0.9 * forwards["dflash"]


def test_what_the_drafter_records_is_this_target():
    """Bug: no fingerprint of the tokenizer, or that of another one, which warns at every check."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    assert pair.drafter.config.tokenizer_fingerprint == tokenizer_fingerprint(pair.tokenizer)
    assert pair.drafter.config.num_target_layers == pair.target.config.num_hidden_layers
    assert pair_check._slow(pair.target, pair.target.config, pair.drafter.config, pair.tokenizer, pair.chat_mode) == []


def test_commands_take_it(comparisons):
    """Catches: --tiny that loads SmolLM2, or goes together with another target."""
    result = CliRunner().invoke(app, ["probe", "--tiny", "--max-new-tokens", "40"])
    assert result.exit_code == 0, result.output
    assert "unknown" in result.output
    refused = CliRunner().invoke(app, ["check", "--tiny", "--drafter", "other"])
    assert refused.exit_code == 2 and "--tiny" in refused.output
