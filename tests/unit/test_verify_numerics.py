"""`verify_block` where probabilities are equal, tiny, zero or no law at all: what broke other implementations."""

import math
from dataclasses import replace

import kernel_kit
import pytest
import torch
from kernel_kit import BACKENDS, JUST_BELOW_ONE, NAN, no_drafts, one_row, random_inputs, verify

from hf_dflow.kernels import RULES, VerifyInputs, verify_block

pytestmark = [kernel_kit.ignore_numpy_warnings, pytest.mark.parametrize("backend", BACKENDS)]

SAMPLED = ("token", "block")


def decided(inputs: VerifyInputs, backend: str) -> tuple[int, int]:
    """Accepted length and bonus of the only row."""
    decision = verify(inputs, backend)
    return int(decision.accepted_length), int(decision.bonus_ids)


def repeated(inputs: VerifyInputs, uniforms: torch.Tensor) -> VerifyInputs:
    """The only row of `inputs` once for each row of `uniforms`."""
    return replace(kernel_kit.each_tensor(inputs, lambda x: x.expand(len(uniforms), *x.shape[1:])), uniforms=uniforms)


@pytest.mark.parametrize("rule", SAMPLED)
def test_scenario_a3_acceptance_rate_is_the_ratio(rule, backend):
    """Bug (A3): constant uniforms, or the target's maximum in the denominator: 0.1 against 0.9 accepted always."""
    torch.manual_seed(0)
    inputs = repeated(one_row([0.1, 0.9], [0.9, 0.1], 0, [0.0, 0.0], rule), torch.rand(20_000, 2))
    decision = verify(inputs, backend, rows=4096)
    assert 0.10 < decision.accepted_length.double().mean() < 0.122
    by_default = verify_block(inputs)  # "auto" on a CPU: torch
    assert torch.equal(decision.accepted_length, by_default.accepted_length)
    assert torch.equal(decision.bonus_ids, by_default.bonus_ids)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scenario_e2_equal_laws_accept_everything(rule, dtype, backend):
    """Bug (E2): equal logits leave a residual, 0/0, or two different probabilities; some u just below 1 is rounded up
    to 1 and rejects."""
    torch.manual_seed(0)
    target_logits = (3 * torch.randn(4, 4, 50)).to(dtype)
    inputs = VerifyInputs(
        rule=rule,
        draft_ids=torch.randint(50, (4, 3)),
        draft_logits=target_logits[:, :-1],
        target_logits=target_logits,
        uniforms=torch.full((4, 4), JUST_BELOW_ONE, dtype=torch.float64),
    )
    decision = verify(inputs, backend)
    assert (decision.acceptance_probs == 1).all() and (decision.accepted_length == 3).all()
    assert decision.acceptance_probs.dtype == torch.promote_types(dtype, torch.float32)


def test_scenario_e2_zero_residual_falls_back_to_the_target(backend):
    """Bug (E2): a rejection at equal laws, possible only through relaxed acceptance or rounding, divides by zero."""
    probs, refuse = [0.25, 0.75], torch.zeros(1, 1)
    for u, token in ((0.24, 0), (0.26, 1), (0.9, 1)):
        inputs = one_row(probs, probs, 0, [0.5, u], "token", acceptance_probs=refuse)
        assert decided(inputs, backend) == (0, token)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scenario_e2_laws_that_differ_by_rounding(rule, dtype, backend):
    """Bug (E2): ratios of 1 ± 1e-7: 1 - ratio cancels, the residual underflows, a probability turns negative or NaN."""
    torch.manual_seed(0)
    draft_logits = torch.randn(64, 4, 11, dtype=dtype)
    factor = 1 + 1e-7 * (2 * torch.randint(2, (64, 4, 11)) - 1).double()
    target_logits = torch.cat([draft_logits.double() + factor.log(), torch.randn(64, 1, 11)], dim=1).to(dtype)
    for last in (0.0, JUST_BELOW_ONE):
        for u in (0.5, JUST_BELOW_ONE):
            uniforms = torch.full((64, 5), u, dtype=torch.float64)
            uniforms[:, -1] = last
            inputs = VerifyInputs(
                rule=rule,
                draft_ids=torch.randint(11, (64, 4)),
                draft_logits=draft_logits,
                target_logits=target_logits,
                uniforms=uniforms,
            )
            decision = verify(inputs, backend, rows=64)
            assert ((decision.acceptance_probs >= 0) & (decision.acceptance_probs <= 1)).all()
            assert ((decision.bonus_ids >= 0) & (decision.bonus_ids < 11)).all()
            if u == 0.5:
                assert (decision.accepted_length == 4).all()


@pytest.mark.parametrize("rule", SAMPLED)
def test_scenario_e2_one_hot_laws(rule, backend):
    """Bug (E2): -inf logits make NaN; equal one-hots must accept, different ones reject and return the target's."""
    first, second = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    assert decided(one_row(first, first, 0, [JUST_BELOW_ONE, JUST_BELOW_ONE], rule), backend) == (1, 0)
    for u in (0.0, JUST_BELOW_ONE):
        assert decided(one_row(second, first, 0, [0.0, u], rule), backend) == (0, 1)


@pytest.mark.parametrize("rule", SAMPLED)
def test_zero_uniforms_never_let_an_impossible_token_through(rule, backend):
    """Bug: `<=` accepts, or an inverse CDF with `>=` returns, a token that the target forbids when u = 0."""
    assert decided(one_row([0.0, 0.0, 0.6, 0.4], [0.5, 0.2, 0.3, 0.0], 0, [0.0, 0.0], rule), backend) == (0, 2)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(("target_prob", "accepted"), [(0.3, 1), (0.0, 0)])
def test_draft_outside_its_own_law(rule, target_prob, accepted, backend):
    """Bug: a draft probability of 0 gives inf, or 0/0 = NaN, and NaN then spreads along the block's prefix weights."""
    inputs = one_row([target_prob, 1 - target_prob], [0.0, 1.0], 0, [JUST_BELOW_ONE * accepted, 0.0], rule)
    decision = verify(inputs, backend)
    assert decision.accepted_length.item() == accepted and decision.acceptance_probs.item() == accepted


@pytest.mark.parametrize("u", [0.0, 1e-12, 0.5, JUST_BELOW_ONE, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bonus_always_has_probability(u, dtype, backend):
    """Bug: u just below 1 (in float32 it rounds up to 1) falls off the cumulative sum, onto a forbidden or padded
    token."""
    torch.manual_seed(0)
    target_logits = torch.randn(32, 1, 70)
    target_logits[..., :5] = target_logits[..., -20:] = -math.inf
    decision = verify(no_drafts(target_logits, torch.full((32, 1), u, dtype=dtype)), backend)
    assert ((decision.bonus_ids >= 5) & (decision.bonus_ids < 50)).all()
    if u in (JUST_BELOW_ONE, 1.0):
        assert (decision.bonus_ids == 49).all()


def test_bonus_intervals_are_closed_on_the_left(backend):
    """Bug: backends that disagree about u on an edge between two tokens, tiles or splits, which is the later one's."""
    edges = torch.arange(32)
    decision = verify(no_drafts(torch.zeros(32, 1, 32), edges[:, None] / 32), backend)
    assert torch.equal(decision.bonus_ids, edges)


def test_bonus_follows_the_residual(backend):
    """Bug: the bonus is drawn from another law than the residual, here (0, 1/3, 2/3)."""
    grid = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    inputs = one_row([0.1, 0.4, 0.5], [0.7, 0.2, 0.1], 0, [0.0, 0.0], "token")
    uniforms = torch.stack([torch.full_like(grid, JUST_BELOW_ONE), grid], dim=1)
    decision = verify(repeated(inputs, uniforms), backend, rows=1024)
    assert torch.bincount(decision.bonus_ids, minlength=3).tolist() == [0, 1000, 2000]


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scenario_e2_rare_tokens_of_a_large_vocabulary(rule, dtype, backend):
    """Bug (E2): at V = 100k a softmax in bf16, or a float32 running sum, loses tokens of probability 1e-9."""
    vocab, rare = 100_000, 99_990
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(1, 2, vocab), torch.randn(1, 1, vocab)
    target_logits[..., rare:], draft_logits[..., rare:] = -8.0, -7.25
    target_logits, draft_logits = target_logits.to(dtype), draft_logits.to(dtype)
    target_prob, draft_prob = (logits[0, 0].double().softmax(-1)[rare] for logits in (target_logits, draft_logits))
    assert 1e-10 < target_prob < 1e-8
    # Aims the bonus draw at the middle of the second rare token of the row after the draft.
    bonus_probs = target_logits[0, 1].float().softmax(-1).double()
    aim = (bonus_probs[: rare + 1].sum() + 0.5 * bonus_probs[rare + 1]) / bonus_probs.sum()
    inputs = VerifyInputs(
        rule=rule,
        draft_ids=torch.tensor([[rare]]),
        draft_logits=draft_logits,
        target_logits=target_logits,
        uniforms=torch.stack([torch.zeros_like(aim), aim])[None],
    )
    decision = verify(inputs, backend, block=4096, rows=1)
    torch.testing.assert_close(decision.acceptance_probs[0, 0].double(), target_prob / draft_prob, rtol=1e-4, atol=0)
    assert decision.accepted_length.item() == 1
    if backend == "torch":
        assert decision.bonus_ids.item() == rare + 1
    else:  # the aim is half of 1e-9 away from its neighbours, and float32 partial sums are off by more
        assert rare - 200 <= decision.bonus_ids.item()


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_scenario_e2_target_rows_without_a_law(rule, value, backend):
    """Bug (E2): NaN or inf in one row trips a device assert, takes its healthy neighbours along, or yields a token
    outside the vocabulary."""
    healthy = random_inputs(0, batch=2, num_drafts=2, vocab=20, rule=rule)
    target_logits = healthy.target_logits.clone()
    target_logits[0] = value
    decision = verify(replace(healthy, target_logits=target_logits), backend)
    expected = verify(healthy, "torch")
    assert decision.accepted_length[1] == expected.accepted_length[1]
    assert decision.bonus_ids[1] == expected.bonus_ids[1]
    assert 0 <= decision.bonus_ids[0] < 20 and 0 <= decision.accepted_length[0] <= 2


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(("slot", "value"), [(0, NAN), (1, math.inf), (2, -math.inf)])
def test_scenario_e4_draft_law_that_is_no_law(rule, slot, value, backend):
    """Bug (E4): a float16 drafter that overflows to NaN or inf at one slot reaches the decision or the draw."""
    inputs = replace(random_inputs(slot, batch=32, num_drafts=3, vocab=20, rule=rule), lengths=None)
    draft_logits = inputs.draft_logits.clone()
    draft_logits[:, slot] = value
    decision = verify(replace(inputs, draft_logits=draft_logits), backend)
    assert (decision.accepted_length <= slot).all() and (decision.acceptance_probs[:, slot:] == 0).all()
    as_if_shorter = verify(replace(inputs, lengths=torch.full((32,), slot)), backend)
    kernel_kit.assert_same(decision, as_if_shorter)


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_point_mass_is_one_whatever_the_logits_hold(rule, backend):
    """Bug (A4): NaN in the logits of a copied draft ends verification there, or reaches its ratio."""
    inputs = random_inputs(3, batch=32, num_drafts=3, vocab=40, rule=rule, law="mixed")
    hidden = inputs.draft_logits.masked_fill(inputs.point_mass[..., None], NAN)
    decision = verify(replace(inputs, draft_logits=hidden), backend)
    kernel_kit.assert_same(decision, verify(inputs, backend))
    assert decision.accepted_length.max() >= 2
