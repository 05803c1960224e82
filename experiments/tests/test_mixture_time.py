"""Which share of decoding the mixture takes: its own calls are timed, and the drafts are those of the mixture."""

import json

import pytest
from typer.testing import CliRunner

from experiments import mixture_time
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import read_prompts
from hf_dflow.errors import DFlowError


def app():
    made = mixture_time.typer.Typer()
    made.command()(mixture_time.main)
    return made


def test_the_share_is_of_a_run_with_the_mixture(monkeypatch):
    """Bug: the share of a run in which nothing was mixed, or of calls that are left out."""
    pair, prompts = load_pair(str(TINY_TARGET), str(TINY_DRAFTER)), read_prompts(TINY_PROMPTS)[:2]
    record = mixture_time.measure(pair, prompts, 24)
    steps = 0
    for number, prompt in enumerate(prompts):
        mixed = Contestant("mixed", pair.drafter, options={"stale_mixture": True})
        steps += len(
            decode(pair.target, pair.encode(prompt.text), mixed, Mode(), 24, number).statistics.per_step_drafted
        )
    assert record["steps"] == steps and record["weights"] == "online" and record["prompts"] == 2
    low, high = record["share"]["interval_95"]
    assert 0 < low <= record["share"]["value"] <= high < 0.9
    taken = record["milliseconds_per_step"]
    assert taken["mixture"] / taken["all"] == pytest.approx(record["share"]["value"])
    slow = mixture_time.StaleMixture.adjust_draft_logits

    def slower(self, draft_logits, feedback):
        sum(range(300_000))
        return slow(self, draft_logits, feedback)

    monkeypatch.setattr(mixture_time.StaleMixture, "adjust_draft_logits", slower)
    assert mixture_time.measure(pair, prompts, 24)["share"]["value"] > 1.3 * record["share"]["value"]


def test_the_command_says_and_writes_it(tmp_path):
    """Bug: figures without conditions, or a run of one token whose share of nothing is written as a number."""
    given = ["--target", str(TINY_TARGET), "--drafter", str(TINY_DRAFTER), "--prompts", str(TINY_PROMPTS)]
    out = tmp_path / "time.json"
    refused = CliRunner().invoke(app(), [*given, "--max-new-tokens", "1"])
    assert refused.exit_code == 2 and "max-new-tokens" in refused.output
    few = tmp_path / "few.json"
    few.write_text(json.dumps({"own": [read_prompts(TINY_PROMPTS)[0].text]}))
    given[-1] = str(few)
    done = CliRunner().invoke(app(), [*given, "--max-new-tokens", "12", "--json", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads(out.read_text())
    assert record["conditions"]["max_new_tokens"] == 12 and f"{record['share']['value']:.2%}" in done.output


def test_nothing_drafted_is_no_share(monkeypatch):
    """Bug: a division by no steps."""
    monkeypatch.setattr(mixture_time, "decode", lambda *given: None)
    pair = load_pair(str(TINY_TARGET), str(TINY_DRAFTER))
    with pytest.raises(DFlowError, match="no step drafted"):
        mixture_time.measure(pair, read_prompts(TINY_PROMPTS)[:1], 4)
