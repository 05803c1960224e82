"""`verify_block` where probabilities are equal, tiny, zero or no law at all: what broke other implementations."""

import math

import pytest
import torch

from hf_dflow.kernels import RULES, verify_block

SAMPLED = ("token", "block")
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
NAN = float("nan")
SUMS_TO_ONE = 1e-5  # float32 softmax over the largest vocabulary used here


def logits_of(*probs) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def one_draft(target_probs, draft_probs, draft_id: int, uniforms, **options):
    """One row, one draft: `target_probs` and `draft_probs` are lists over the vocabulary."""
    target_logits = logits_of(target_probs, target_probs)[None]
    return verify_block(
        draft_ids=torch.tensor([[draft_id]]),
        draft_logits=logits_of(draft_probs)[None],
        target_logits=target_logits,
        uniforms=torch.tensor([uniforms], dtype=torch.float64),
        return_residual=True,
        **options,
    )


@pytest.mark.parametrize("rule", SAMPLED)
def test_acceptance_rate_is_the_ratio(rule):
    """Bug (A3): constant uniforms, or the target's maximum in the denominator: p = 0.1, q = 0.9 accepted always."""
    draws = 20_000
    torch.manual_seed(0)
    decision = verify_block(
        draft_ids=torch.zeros(draws, 1, dtype=torch.long),
        draft_logits=logits_of([0.9, 0.1]).expand(draws, 1, 2),
        target_logits=logits_of([0.1, 0.9], [0.1, 0.9]).expand(draws, 2, 2),
        uniforms=torch.rand(draws, 2),
        rule=rule,
    )
    assert 0.10 < decision.accepted_length.double().mean() < 0.122


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_laws_accept_everything(rule, dtype):
    """Bug (E2): p == q leaves a zero residual and 0/0, and some u just below 1 is rounded up to 1 and rejects."""
    torch.manual_seed(0)
    target_logits = (3 * torch.randn(4, 4, 50)).to(dtype)
    uniforms = torch.full((4, 4), JUST_BELOW_ONE, dtype=torch.float64)
    decision = verify_block(
        draft_ids=torch.randint(50, (4, 3)),
        draft_logits=target_logits[:, :-1],
        target_logits=target_logits,
        uniforms=uniforms,
        rule=rule,
        return_residual=True,
    )
    assert (decision.acceptance_probs == 1).all() and (decision.accepted_length == 3).all()
    assert decision.acceptance_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert decision.residual_probs.isfinite().all()


def test_zero_residual_falls_back_to_target():
    """Bug (E2): a rejection at p == q (possible only through relaxed acceptance or rounding) divides by zero."""
    probs = [0.25, 0.75]
    decision = one_draft(probs, probs, 0, [0.5, 0.9], rule="token", acceptance_probs=torch.zeros(1, 1))
    assert decision.accepted_length.item() == 0 and decision.bonus_ids.item() == 1
    torch.testing.assert_close(decision.residual_probs[0], torch.tensor(probs, dtype=torch.float64))


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_laws_that_differ_by_rounding(rule, dtype):
    """Bug (E2): p = q (1 ± 1e-7): 1 - ratio cancels, the residual underflows, a probability turns negative or NaN."""
    torch.manual_seed(0)
    draft_logits = torch.randn(64, 4, 11, dtype=dtype)
    factor = 1 + 1e-7 * (2 * torch.randint(2, (64, 4, 11)) - 1).double()
    target_logits = torch.cat([draft_logits.double() + factor.log(), torch.randn(64, 1, 11)], dim=1).to(dtype)
    for last in (0.0, JUST_BELOW_ONE):
        for u in (0.5, JUST_BELOW_ONE):
            uniforms = torch.full((64, 5), u, dtype=torch.float64)
            uniforms[:, -1] = last
            decision = verify_block(
                draft_ids=torch.randint(11, (64, 4)),
                draft_logits=draft_logits,
                target_logits=target_logits,
                uniforms=uniforms,
                rule=rule,
                return_residual=True,
            )
            assert ((decision.acceptance_probs >= 0) & (decision.acceptance_probs <= 1)).all()
            assert (decision.residual_probs >= 0).all()
            assert (decision.residual_probs.sum(-1) - 1).abs().max() < SUMS_TO_ONE
            if u == 0.5:
                assert (decision.accepted_length == 4).all()


@pytest.mark.parametrize("rule", SAMPLED)
def test_one_hot_laws(rule):
    """Bug (E2): -inf logits make NaN; equal one-hots must accept, different ones reject and return the target's."""
    first, second = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    equal = one_draft(first, first, 0, [JUST_BELOW_ONE, JUST_BELOW_ONE], rule=rule)
    assert (equal.accepted_length.item(), equal.bonus_ids.item()) == (1, 0)
    different = one_draft(second, first, 0, [0.0, 0.0], rule=rule)
    assert (different.accepted_length.item(), different.bonus_ids.item()) == (0, 1)
    assert different.residual_probs.tolist() == [second]


@pytest.mark.parametrize("rule", SAMPLED)
def test_zero_uniforms_never_let_an_impossible_token_through(rule):
    """Bug: `u <= p` accepts, or an inverse CDF with `>=` returns, a token that the target forbids when u = 0."""
    decision = one_draft([0.0, 0.0, 0.6, 0.4], [0.5, 0.2, 0.3, 0.0], 0, [0.0, 0.0], rule=rule)
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (0, 2)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(("target_prob", "accepted"), [(0.3, 1), (0.0, 0)])
def test_draft_outside_its_own_law(rule, target_prob, accepted):
    """Bug: q(x) = 0 gives inf, or 0/0 = NaN, and NaN then spreads along the block's prefix weights."""
    decision = one_draft([target_prob, 1 - target_prob], [0.0, 1.0], 0, [JUST_BELOW_ONE * accepted, 0.0], rule=rule)
    assert decision.accepted_length.item() == accepted
    assert decision.acceptance_probs.item() == accepted


@pytest.mark.parametrize("u", [0.0, 1e-12, 0.5, JUST_BELOW_ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bonus_always_has_probability(u, dtype):
    """Bug: u just below 1 (in float32 it rounds up to 1) falls off the cumulative sum, onto a forbidden token."""
    torch.manual_seed(0)
    target_logits = torch.randn(256, 1, 1000)
    target_logits[..., :5] = target_logits[..., -5:] = -math.inf
    decision = verify_block(
        draft_ids=torch.zeros(256, 0, dtype=torch.long),
        draft_logits=None,
        target_logits=target_logits,
        uniforms=torch.full((256, 1), u, dtype=dtype),
        rule="token",
    )
    assert (target_logits[:, 0].gather(1, decision.bonus_ids[:, None]) > -math.inf).all()


def test_bonus_intervals_are_closed_on_the_left():
    """Bug: backends that disagree about u on a boundary: token x owns [c(x - 1), c(x))."""
    decision = one_draft([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 0, [0.0, 0.5], rule="token")
    assert decision.bonus_ids.item() == 1


def test_bonus_follows_the_residual():
    """Bug: the bonus drawn from another law than the reported one (the enumeration trusts the report)."""
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    uniforms = torch.stack([torch.full_like(grid, JUST_BELOW_ONE), grid], dim=1)
    decision = verify_block(
        draft_ids=torch.zeros(10_000, 1, dtype=torch.long),
        draft_logits=logits_of([0.7, 0.2, 0.1]).expand(10_000, 1, 3),
        target_logits=logits_of([0.1, 0.4, 0.5], [0.1, 0.4, 0.5]).expand(10_000, 2, 3),
        uniforms=uniforms,
        rule="token",
        return_residual=True,
    )
    shares = torch.bincount(decision.bonus_ids, minlength=3) / 10_000
    torch.testing.assert_close(shares.double(), decision.residual_probs[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(shares, torch.tensor([0.0, 1 / 3, 2 / 3]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rare_tokens_of_a_large_vocabulary(rule, dtype):
    """Bug (E2): at V = 100k a softmax in bf16, or a float32 running sum, loses tokens of probability 1e-9."""
    vocab, rare = 100_000, 99_990
    torch.manual_seed(0)
    target_logits = torch.randn(1, 2, vocab)
    target_logits[..., rare:] = -8.0
    draft_logits = torch.randn(1, 1, vocab)
    draft_logits[..., rare:] = -7.25
    target_logits, draft_logits = target_logits.to(dtype), draft_logits.to(dtype)
    target_probs, draft_probs = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    assert 1e-10 < target_probs[0, 0, rare] < 1e-8
    arguments = {
        "draft_ids": torch.tensor([[rare]]),
        "draft_logits": draft_logits,
        "target_logits": target_logits,
        "rule": rule,
        "return_residual": True,
    }
    # Aims the bonus draw at the middle of the second rare token of the row after the draft.
    bonus_probs = target_logits[0, 1].float().softmax(-1).double()
    aim = (bonus_probs[: rare + 1].sum() + 0.5 * bonus_probs[rare + 1]) / bonus_probs.sum()
    decision = verify_block(uniforms=torch.tensor([[0.0, aim]], dtype=torch.float64), **arguments)
    expected = target_probs[0, 0, rare] / draft_probs[0, 0, rare]
    torch.testing.assert_close(decision.acceptance_probs[0, 0].double(), expected, rtol=1e-4, atol=0)
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (1, rare + 1)
    rejected = verify_block(uniforms=torch.tensor([[0.9, 0.5]]), **arguments)
    assert rejected.accepted_length.item() == 0 and (rejected.residual_probs >= 0).all()
    assert abs(rejected.residual_probs.sum() - 1) < SUMS_TO_ONE


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_target_rows_without_a_law_do_not_crash(rule, value):
    """Bug (E2): NaN/inf target logits trip a device assert, or take the healthy rows of the batch with them."""
    torch.manual_seed(0)
    healthy = torch.randn(2, 3, 5)
    sick = healthy.clone()
    sick[0] = value
    arguments = {
        "draft_ids": torch.randint(5, (2, 2)),
        "draft_logits": torch.randn(2, 2, 5),
        "uniforms": torch.rand(2, 3),
        "rule": rule,
    }
    decision = verify_block(target_logits=sick, **arguments)
    reference = verify_block(target_logits=healthy, **arguments)
    assert decision.accepted_length[1] == reference.accepted_length[1]
    assert decision.bonus_ids[1] == reference.bonus_ids[1]
    assert 0 <= decision.bonus_ids[0] < 5 and 0 <= decision.accepted_length[0] <= 2
