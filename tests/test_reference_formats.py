"""What other formats add to a drafter, in the loop: against the slow reference, and the law of what is sampled."""

import law
import pytest
import torch
from kit import plain_greedy
from memorize import memorize
from restless import restless_pair
from test_reference import NEW_TOKENS, fast

from hf_dflow.reference import draft_block, reference_generate

PROMPT = [1, 5, 2]
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


@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_the_loop_is_the_reference(pair, rule, monkeypatch):
    """Bug: relayed rows in slots that predict another position, a kernel's taps across blocks, a selector's law that
    is not the one verified."""
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    sampling = {} if rule == "greedy" else {"rule": rule, "temperature": 2.0, "uniforms": iter(numbers)}
    expected = reference_generate(*pair, PROMPT, NEW_TOKENS, **sampling)
    options = {} if rule == "greedy" else {"uniforms": iter(numbers), "verification": rule, "temperature": 2.0}
    tokens, accepted = fast(pair, monkeypatch, **options)
    assert tokens == expected.token_ids and accepted == expected.accepted_lengths
    assert max(accepted) >= 2 and min(accepted) < 2
    if rule == "greedy":
        without = reference_generate(*pair, PROMPT, NEW_TOKENS, use_relay=False)
        assert without.token_ids == tokens
        assert without.accepted_lengths != accepted  # the relay does something


@pytest.mark.parametrize("kind", ["window from the anchor", "convolutions"])
@torch.no_grad()
def test_the_kind_changes_the_drafts(kind):
    """Bug: a setting that neither loop applies."""
    plain, (target, drafter) = restless_pair()[1], pair_of(kind)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    one, other = (draft_block(target, model, [*range(7)] * 3, None) for model in (drafter, plain))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["anchor drafts", "selector", "causal correction"])
def test_the_law_is_the_targets(kind, rule, monkeypatch):
    """Bug: a draft law that depends on the drafts before it, verified as if it did not."""
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
