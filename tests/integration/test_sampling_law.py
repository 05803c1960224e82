"""The output law of the whole sampling loop, relay active: exactly over one and two steps, and by chi-square."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from internals import corrupt_the_draft_law, relay_of_the_same_step
from kit import SAMPLED, decode
from law import VOCAB, Loop, branches, law_error, target_law, three_token_drafter, three_token_target
from scipy.stats import chi2
from transformers import set_seed

from hf_dflow import AcceptanceMonitor, MonitorSettings, StepTimes

EXACT = 1e-9  # float64 enumeration rounds at 1e-15
BROKEN = 1e-3  # what a negative control must exceed
RULES = ("token", "block")


@pytest.fixture(scope="module")
def target(three_tokens):
    return three_tokens


@pytest.fixture(scope="module")
def drafter(target):
    return three_token_drafter(target)


@pytest.mark.parametrize("rule", RULES)
def test_two_steps_with_the_relay(monkeypatch, target, drafter, rule):
    """Bug: feedback that reaches the wrong side of sampling, or a row, cache or law that is off in the second step."""
    loop = Loop(monkeypatch, target, drafter, verification=rule)
    truth = target_law(target, 6)
    law, drafts, ends = np.zeros_like(truth), {}, set()
    for tokens, probability, steps in branches(loop, 2):
        law[tokens] += probability * truth[tokens] / truth[tokens].sum()
        first = loop.script[1], steps[0].taken.accepted
        drafts.setdefault(first[1], (first[0], steps[1].draft_law))
        ends.add(steps[1].taken.accepted)
    assert np.abs(law - truth).max() < EXACT
    assert set(drafts) == ends == {0, 1, 2}  # every accepted length came before and after a relay

    without = Loop(monkeypatch, target, drafter, verification=rule, use_relay=False)
    for accepted, (branch, draft_law) in drafts.items():
        last = replace(branch, outcome=lambda actual: actual[0])
        difference = np.abs(draft_law - without.run([branch, last])[1].draft_law).max()
        assert difference == 0 if accepted == 2 else difference > 0.05  # else the relay was not active


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("block_size", [2, 3])
def test_one_step(monkeypatch, target, rule, temperature, block_size):
    """Bug (A2): a temperature that the draft law misses, or a dimension that is squeezed away."""
    loop = Loop(
        monkeypatch, target, three_token_drafter(target, block_size), verification=rule, temperature=temperature
    )
    assert law_error(loop, 1, block_size - 1, temperature) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("limit", ["max_new_tokens", "num_draft_tokens"])
def test_a_shorter_verification(monkeypatch, target, rule, limit):
    """Bug: near the length limit the last verified draft is judged as though another followed."""
    drafter = three_token_drafter(target, 4)
    options = {"max_new_tokens": 4} if limit == "max_new_tokens" else {"num_draft_tokens": 2}
    loop = Loop(monkeypatch, target, drafter, verification=rule, **options)
    assert law_error(loop, 1, 2) < EXACT


def test_processors_shape_both_laws(monkeypatch, target, drafter):
    """Bug (A7): top-k on the target alone, or draft and target processed by different positions."""
    loop = Loop(monkeypatch, target, drafter, top_k=2, verification="block")
    truth = target_law(target, 3)
    law = np.zeros_like(truth)
    for tokens, probability, _ in branches(loop, 1):
        law[tokens] += probability * truth[tokens] / truth[tokens].sum()
    first = truth.sum((1, 2))
    kept = np.where(first >= np.sort(first)[1], first, 0.0)
    assert np.abs(law.sum((1, 2)) - kept / kept.sum()).max() < EXACT
    assert np.count_nonzero(law.sum((1, 2))) == 2


# -- controls: what the tests above must see


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sabotage", [corrupt_the_draft_law, relay_of_the_same_step])
def test_control_wrong_draft_law(monkeypatch, target, drafter, rule, sabotage):
    """Control: a law that the drafts were not drawn from must be seen."""
    sabotage(monkeypatch)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 1) > BROKEN


def test_control_forced_acceptance(monkeypatch, target, drafter):
    """Control (A3): accepting every draft must be seen."""

    def force(inputs):
        return replace(inputs, acceptance_probs=torch.ones(inputs.draft_ids.shape, dtype=torch.float64))

    assert law_error(Loop(monkeypatch, target, drafter, verification="token", alter=force), 1) > BROKEN


# -- end to end


def without_memory(target):
    """`target` as a Markov chain: its law depends on the last token alone, so that each token is one draw of many."""
    with torch.no_grad():
        target.transformer.wpe.weight.zero_()
        for block in target.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.attn.c_proj.bias.zero_()
    return target


def transition_p_value(block_size: int, num_calls: int, rows: int = 1, new_tokens: int = 320, **options) -> float:
    """p-value of the transitions in what `num_calls` calls for `rows` rows sample, against the target's own."""
    target = without_memory(three_token_target())
    target.set_attn_implementation("sdpa")  # holes of a batch
    drafter = three_token_drafter(target, block_size)
    counts = np.zeros((VOCAB, VOCAB))
    accepted = drafted = 0
    for seed in range(num_calls):
        set_seed(seed)
        prompts = torch.ones(rows, 1, dtype=torch.long)
        output = decode(target, drafter, prompts, new_tokens, **SAMPLED, **options)
        tokens = output.sequences.numpy()
        np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
        accepted += output.statistics.num_accepted_draft_tokens
        drafted += output.statistics.num_draft_tokens
    assert 0.1 < accepted / drafted < 0.9  # acceptance and residual are both at work
    law = target(torch.arange(VOCAB)[:, None]).logits[:, 0].double().softmax(-1).numpy()
    expected = counts.sum(1, keepdims=True) * law
    assert expected.min() > 5
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), VOCAB * (VOCAB - 1)))


@pytest.mark.parametrize(("block_size", "num_calls", "rows"), [(3, 3, 1), (3, 1, 24), (16, 1, 12), (16, 3, 1)])
def test_chi_square(block_size, num_calls, rows):
    """Bug: random numbers shared between draws or rows, or a law that is right only with scripted numbers."""
    assert transition_p_value(block_size, num_calls, rows) > 1e-4


def test_chi_square_under_a_monitor():
    """Bug: a switch between drafting and plain decoding that knows the token it is about to let through."""
    settings = MonitorSettings(window=2, fewest_steps=1, probe_steps=1, first_pause=1, longest_pause=2)
    monitor = AcceptanceMonitor(settings, times=StepTimes(draft=0.5, verify=1.5, plain=1.0))
    assert transition_p_value(3, 4, monitor=monitor.route("law")) > 1e-4
    figures = monitor.route("law").figures()
    assert figures.num_switches > 25 and figures.num_plain_steps > 200 and figures.num_spec_steps > 200


def test_control_chi_square(monkeypatch):
    """Control: a corrupted draft law must be seen in the sampled text."""
    corrupt_the_draft_law(monkeypatch)
    assert transition_p_value(3, 1, 12) < 1e-6
