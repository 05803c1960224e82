"""The fast loop against the slow reference: same uniforms, tokens and accepted lengths; and the law it samples."""

import internals
import law
import pytest
import torch
from kit import plain_greedy
from memorize import memorize
from restless import restless_pair

from hf_dflow import DFlowGenerationConfig
from hf_dflow.reference import draft_block, reference_generate

PROMPT, NEW_TOKENS = [1, 5, 2], 60
SELECTOR = {"selector_rank": 4, "selector_top_k": 3}
CORRECTION = {"correction_intermediate_size": 16, "correction_top_k": 3}
CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 8}
KINDS = {
    "anchor drafts": {"sample_from_anchor": True},
    "window from the anchor": {"window_from_anchor": True, "sliding_is_causal": True},
    "convolutions": CONVOLUTION,
    "selector": SELECTOR,
    "causal correction": CORRECTION,
    "causal correction whose anchor drafts": {**CORRECTION, "sample_from_anchor": True},
    "DFlash 2 whose anchor drafts": {**CONVOLUTION, **SELECTOR, "sample_from_anchor": True},
}
TOLERANCE = 1e-9  # float64


@pytest.fixture(scope="module")
def plain_pair():
    """A random drafter without any addition but the relay."""
    return restless_pair()


def pair_of(kind):
    target, drafter = restless_pair(**KINDS[kind])
    generator = torch.Generator().manual_seed(5)
    for name, weight in drafter.named_parameters():
        if "_conv" in name or "causal_correction.down" in name:
            weight.data += torch.randn(weight.shape, generator=generator) * 0.2
        elif "codebook" in name:
            weight.data *= 0.6  # it is not trained: let it err, but not always
    return target, drafter


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """A pair whose drafter knows most of the target's greedy text, so that blocks are accepted in part."""
    target, drafter = pair_of(request.param)
    text = plain_greedy(target, torch.tensor([PROMPT]), NEW_TOKENS + drafter.config.block_size)
    memorize(drafter, target, text, prompt_length=len(PROMPT), steps=50)
    return target, drafter


def numbers(seed: int) -> list[float]:
    return torch.rand(4000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def assert_loop_is_the_reference(pair, monkeypatch, rule="greedy", seed=0, **options) -> list[int]:
    """Decode with both and return the accepted lengths."""
    target, drafter = pair
    temperature = {} if rule == "greedy" else {"temperature": 2.0}
    expected = reference_generate(
        target, drafter, PROMPT, NEW_TOKENS, rule=rule, uniforms=iter(numbers(seed)), **temperature, **options
    )
    internals.script_uniforms(monkeypatch, iter(numbers(seed)))
    sampling = {"do_sample": False} if rule == "greedy" else {"do_sample": True, "top_k": 0, "verification": rule}
    config = DFlowGenerationConfig(
        max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **sampling, **temperature, **options
    )
    output = target.generate(torch.tensor([PROMPT]), generation_config=config, assistant_model=drafter)
    assert output.sequences[0].tolist() == expected.token_ids
    assert output.statistics.per_step_accepted == expected.accepted_lengths
    return expected.accepted_lengths


@pytest.mark.parametrize("use_relay", [True, False])
@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_greedy_loop_is_the_reference(plain_pair, monkeypatch, use_relay, num_draft_tokens):
    """Bug: cache, position, window, alignment and crop errors that only cost acceptance, which no text shows."""
    options = {"use_relay": use_relay, "num_draft_tokens": num_draft_tokens}
    accepted = assert_loop_is_the_reference(plain_pair, monkeypatch, **options)
    assert max(accepted) >= 2 and 0 in accepted


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_sampling_loop_is_the_reference(plain_pair, monkeypatch, rule, seed):
    """Bug: a uniform used twice or for the wrong draft, and every bug above on sampled paths."""
    accepted = assert_loop_is_the_reference(plain_pair, monkeypatch, rule, seed)
    assert max(accepted) >= 2 and 0 < sum(accepted) < 4 * len(accepted)


@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_the_loop_is_the_reference_for_each_kind(pair, rule, monkeypatch):
    """Bug: relayed rows in slots that predict another position, a kernel's taps across blocks, a selector whose
    distribution is not the one verified."""
    accepted = assert_loop_is_the_reference(pair, monkeypatch, rule, seed=1)
    assert max(accepted) >= 2 and min(accepted) < 2
    if rule == "greedy":
        without = reference_generate(*pair, PROMPT, NEW_TOKENS, use_relay=False)
        assert without.accepted_lengths != accepted  # the relay does something


def test_relay_changes_the_reference(plain_pair):
    """Guards the tests above: a comparison of two loops in which the relay does nothing."""
    with_relay = reference_generate(*plain_pair, PROMPT, NEW_TOKENS)
    without = reference_generate(*plain_pair, PROMPT, NEW_TOKENS, use_relay=False)
    assert with_relay.token_ids == without.token_ids
    assert with_relay.accepted_lengths != without.accepted_lengths


@pytest.mark.parametrize("kind", ["window from the anchor", "convolutions"])
@torch.no_grad()
def test_the_kind_changes_the_drafts(kind, plain_pair):
    """Guards the tests above: a setting that neither loop applies."""
    target, drafter = pair_of(kind)
    drafter.load_state_dict(plain_pair[1].state_dict(), strict=False)
    states, plain_states = (draft_block(target, model, [*range(7)] * 3, None) for model in (drafter, plain_pair[1]))
    assert (states - plain_states).abs().max() > 1e-3


def test_sampling_without_uniforms_is_refused(plain_pair):
    with pytest.raises(ValueError, match="give uniforms"):
        reference_generate(*plain_pair, PROMPT, 4, rule="block")


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["anchor drafts", "selector", "causal correction"])
def test_the_law_is_the_targets(kind, rule, monkeypatch):
    """Bug: a draft distribution that depends on the drafts before it, verified as if it did not."""
    target = law.three_token_target()
    block_size = 2 if kind == "anchor drafts" else 3
    few = {
        "selector": {"selector_rank": 3, "selector_top_k": 2},
        "causal correction": {"correction_intermediate_size": 8, "correction_top_k": 2},
    }
    drafter = law.three_token_drafter(target, block_size, **few.get(kind, KINDS[kind]))
    if drafter.causal_correction is not None:  # it starts at zero
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.4)
    loop = law.Loop(monkeypatch, target, drafter, verification=rule)
    assert law.law_error(loop, num_steps=1) < TOLERANCE
