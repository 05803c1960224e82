"""SCENARIOS A3, E2 and E4 with the Triton kernels: equal, disjoint and one-hot laws, formats, and what is no law."""

import math

import kernel_kit
import pytest
import torch
from kernel_kit import assert_agrees, in_small_tiles, poison, random_arguments, tiled  # noqa: F401 - a fixture
from test_verify_block_numerics import logits_of, one_draft

from hf_dflow.kernels import SparseLogits, verify_block
from hf_dflow.kernels import torch_ops as reference

pytestmark = [kernel_kit.pytestmark_interpreter, pytest.mark.usefixtures("poison")]

RULES = ("token", "block")
BACKENDS = ("torch", "triton")
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
NAN = float("nan")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_scenario_a3_acceptance_rate_is_the_ratio(rule, backend):
    """Bug (A3): constant uniforms, or another denominator than the draft's probability, on one of the backends."""
    draws = 20_000
    torch.manual_seed(0)
    arguments = {
        "draft_ids": torch.zeros(draws, 1, dtype=torch.long),
        "draft_logits": logits_of([0.9, 0.1]).expand(draws, 1, 2),
        "target_logits": logits_of([0.1, 0.9], [0.1, 0.9]).expand(draws, 2, 2),
        "uniforms": torch.rand(draws, 2),
        "rule": rule,
    }
    with tiled(rows=4096):
        decision = verify_block(**arguments, backend=backend)
    assert 0.10 < decision.accepted_length.double().mean() < 0.122
    fallback = verify_block(**arguments, backend="auto")  # on a CPU: torch
    assert torch.equal(decision.accepted_length, fallback.accepted_length)
    assert torch.equal(decision.bonus_ids, fallback.bonus_ids)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scenario_e2_equal_laws_accept_everything(rule, dtype):
    """Bug (E2): p and q computed differently for the same logits, so that p = q rejects or leaves a residual."""
    torch.manual_seed(0)
    target_logits = (3 * torch.randn(4, 4, 50)).to(dtype)
    decision = in_small_tiles(
        draft_ids=torch.randint(50, (4, 3)),
        draft_logits=target_logits[:, :-1],
        target_logits=target_logits,
        uniforms=torch.full((4, 4), JUST_BELOW_ONE, dtype=torch.float64),
        rule=rule,
        return_residual=True,
    )
    assert (decision.acceptance_probs == 1).all() and (decision.accepted_length == 3).all()
    assert decision.acceptance_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert decision.residual_probs.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e2_laws_that_differ_by_rounding(rule):
    """Bug (E2): p = q (1 ± 1e-7): a probability turns negative or NaN, or the bonus has none."""
    torch.manual_seed(0)
    draft_logits = torch.randn(16, 4, 11)
    target_logits = torch.cat([draft_logits + 1e-7 * torch.randn(16, 4, 11), torch.randn(16, 1, 11)], dim=1)
    for u in (0.5, JUST_BELOW_ONE):
        decision = in_small_tiles(
            draft_ids=torch.randint(11, (16, 4)),
            draft_logits=draft_logits,
            target_logits=target_logits,
            uniforms=torch.full((16, 5), u, dtype=torch.float64),
            rule=rule,
            return_residual=True,
        )
        assert ((decision.acceptance_probs >= 0) & (decision.acceptance_probs <= 1)).all()
        assert (decision.residual_probs >= 0).all()
        assert (decision.residual_probs.sum(-1) - 1).abs().max() < 1e-5
        if u == 0.5:
            assert (decision.accepted_length == 4).all()


def test_scenario_e2_zero_residual_falls_back_to_the_target():
    """Bug (E2): a rejection at p == q, possible only through relaxed acceptance, divides by zero."""
    probs = logits_of([0.25, 0.75])[None].float()
    decision = in_small_tiles(
        draft_ids=torch.tensor([[0]]),
        draft_logits=probs,
        target_logits=probs.expand(1, 2, 2),
        uniforms=torch.tensor([[0.5, 0.9]]),
        rule="token",
        acceptance_probs=torch.zeros(1, 1),
        return_residual=True,
    )
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (0, 1)
    torch.testing.assert_close(decision.residual_probs[0], torch.tensor([0.25, 0.75]))


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e2_one_hot_laws(rule, monkeypatch):
    """Bug (E2): -inf logits make NaN; equal one-hots must accept, disjoint ones reject and return the target's."""
    monkeypatch.setattr("test_verify_block_numerics.verify_block", in_small_tiles)
    first, second = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    equal = one_draft(first, first, 0, [JUST_BELOW_ONE, JUST_BELOW_ONE], rule=rule)
    assert (equal.accepted_length.item(), equal.bonus_ids.item()) == (1, 0)
    disjoint = one_draft(second, first, 0, [0.0, 0.0], rule=rule)
    assert (disjoint.accepted_length.item(), disjoint.bonus_ids.item()) == (0, 1)
    assert disjoint.residual_probs.tolist() == [second]


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e2_rare_tokens_of_a_large_vocabulary(rule):
    """Bug (E2): at V = 100k a float32 running sum loses tokens of probability 1e-9."""
    vocab, rare = 100_000, 99_990
    torch.manual_seed(0)
    target_logits, draft_logits = torch.randn(1, 2, vocab), torch.randn(1, 1, vocab)
    target_logits[..., rare:], draft_logits[..., rare:] = -8.0, -7.25
    bonus_probs = target_logits[0, 1].softmax(-1).double()
    aim = (bonus_probs[: rare + 1].sum() + 0.5 * bonus_probs[rare + 1]) / bonus_probs.sum()
    decision = verify_block(
        draft_ids=torch.tensor([[rare]]),
        draft_logits=draft_logits,
        target_logits=target_logits,
        uniforms=torch.stack([torch.zeros_like(aim), aim])[None],
        rule=rule,
        backend="triton",
    )
    # The aim is half of 1e-9 away from its neighbours, float32 partial sums are off by more: near is all one can ask.
    assert decision.accepted_length.item() == 1 and rare - 200 <= decision.bonus_ids.item()
    expected = target_logits[0, 0].double().softmax(-1)[rare] / draft_logits[0, 0].double().softmax(-1)[rare]
    torch.testing.assert_close(decision.acceptance_probs[0, 0].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rule", ("greedy", *RULES))
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_scenario_e2_target_rows_without_a_law(rule, value):
    """Bug (E2): NaN or inf in one row takes its neighbours along, or yields a token outside the vocabulary."""
    torch.manual_seed(0)
    healthy = torch.randn(2, 3, 20)
    sick = healthy.clone()
    sick[0] = value
    arguments = {
        "draft_ids": torch.randint(20, (2, 2)),
        "draft_logits": torch.randn(2, 2, 20),
        "uniforms": torch.rand(2, 3),
        "rule": rule,
    }
    decision = in_small_tiles(target_logits=sick, **arguments)
    reference_decision = reference.verify_block(target_logits=healthy, **arguments)
    assert decision.accepted_length[1] == reference_decision.accepted_length[1]
    assert decision.bonus_ids[1] == reference_decision.bonus_ids[1]
    assert 0 <= decision.bonus_ids[0] < 20 and 0 <= decision.accepted_length[0] <= 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["dense", "sparse"])
def test_scenario_e4_draft_law_that_is_no_law(rule, law):
    """Bug (E4): a float16 drafter that overflows to NaN or inf at one slot reaches the decision or the draw."""
    for broken_slot, value in ((0, NAN), (1, math.inf), (2, -math.inf)):
        arguments = random_arguments(broken_slot, batch=8, num_drafts=3, vocab=20, rule=rule, law=law)
        draft = arguments["draft_logits"]
        logits = (draft.logits if law == "sparse" else draft).clone()
        logits[:, broken_slot] = value
        arguments["draft_logits"] = SparseLogits(draft.ids, logits) if law == "sparse" else logits
        decision = assert_agrees(**{**arguments, "lengths": None})
        assert (decision.accepted_length <= broken_slot).all()
        assert (decision.acceptance_probs[:, broken_slot:] == 0).all()


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scenario_e4_every_pair_of_number_formats(target_dtype, draft_dtype):
    """Bug (E4): target and draft logits of different formats are read as one format."""
    arguments = random_arguments(1, batch=8, num_drafts=3, vocab=40, rule="block")
    arguments["target_logits"] = arguments["target_logits"].to(target_dtype)
    arguments["draft_logits"] = arguments["draft_logits"].to(draft_dtype)
    assert assert_agrees(**arguments).acceptance_probs.dtype == torch.float32
