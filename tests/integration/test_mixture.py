"""The draft law mixed with what the verifier said on rejected rows: the law it must keep, and what it learns."""

import math
from dataclasses import replace

import internals
import kit
import pytest
import torch
from internals import feedback_with
from law import Loop, law_error, three_token_drafter

from hf_dflow import StaleMixture

EXACT, BROKEN = 1e-9, 1e-3
SLOTS, VOCAB = 3, 6
TRAITS_WEIGHED = [-1.0, 0.5, 1.0, 0.7, -0.4, -0.8, 0.9, 0.6]  # all of them matter


class Watched(StaleMixture):
    """Counts, over all copies, the slots that were mixed and by how much their law moved."""

    mixed, moved = 0, 0.0

    def adjust_draft_logits(self, draft_logits, feedback):
        adjusted = super().adjust_draft_logits(draft_logits, feedback)
        if internals.mixed_slots(self) is not None:
            Watched.mixed += internals.mixed_slots(self)
            Watched.moved += float((adjusted.softmax(-1) - draft_logits.softmax(-1)).abs().sum())
        return adjusted


@pytest.mark.parametrize(
    ("weight", "rule", "steps", "block_size"),
    [
        (None, "token", 2, 3),
        (None, "block", 3, 2),
        (0.4, "block", 2, 3),
        (0.4, "token", 2, 2),
        (TRAITS_WEIGHED, "token", 2, 3),
        (TRAITS_WEIGHED, "block", 2, 2),
    ],
    ids=["online", "online", "fixed", "fixed", "learned", "learned"],
)
def test_the_output_law_is_the_targets(monkeypatch, three_tokens, rule, steps, block_size, weight):
    """Bug (A4): a mixture that enters sampling and not ratio or residual, or whose weight sees the tokens it mixes."""
    Watched.mixed, Watched.moved = 0, 0.0
    processor = Watched(coefficients=weight) if isinstance(weight, list) else Watched(weight)
    drafter = three_token_drafter(three_tokens, block_size)
    loop = Loop(monkeypatch, three_tokens, drafter, verification=rule, acceptance_processors=[processor])
    assert law_error(loop, steps, block_size - 1) < EXACT
    assert Watched.mixed > 5 and Watched.moved > 0.1, (Watched.mixed, Watched.moved)


class ForgetsTheMixture(StaleMixture):
    """What verification is told in a negative control: the drafter's own law."""

    own = None

    def adjust_draft_logits(self, draft_logits, feedback):
        ForgetsTheMixture.own = draft_logits.double()
        return super().adjust_draft_logits(draft_logits, feedback)


class SharpensAfterwards(StaleMixture):
    def adjust_draft_logits(self, draft_logits, feedback):
        ForgetsTheMixture.own = 2.0 * super().adjust_draft_logits(draft_logits, feedback).double()
        return ForgetsTheMixture.own / 2.0


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("processor", [ForgetsTheMixture, SharpensAfterwards])
def test_control_another_law_in_ratio_and_residual(monkeypatch, three_tokens, rule, processor):
    """Control (A4): q changed after sampling must be seen."""

    def other_law(inputs):
        fits = inputs.draft_ids.shape[1] and ForgetsTheMixture.own is not None
        return replace(inputs, draft_logits=ForgetsTheMixture.own) if fits else inputs

    options = {"verification": rule, "alter": other_law, "acceptance_processors": [processor(0.6)]}
    loop = Loop(monkeypatch, three_tokens, three_token_drafter(three_tokens, 2), **options)
    assert law_error(loop, 2, 1) > BROKEN


@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_the_rejected_row_in_the_accept_test(monkeypatch, three_tokens, rule):
    """Control (METHOD 3.2): p_stale mixed into p, where it is forbidden, must be seen."""

    def stale_target(inputs):
        logits = inputs.target_logits.clone()
        if logits.shape[1] < 2:
            return inputs
        logits[:, 0] = torch.logaddexp(logits[:, 0].log_softmax(-1), logits[:, 1].log_softmax(-1))
        return replace(inputs, target_logits=logits)

    options = {"verification": rule, "alter": stale_target, "stale_mixture": True}
    loop = Loop(monkeypatch, three_tokens, three_token_drafter(three_tokens), **options)
    assert law_error(loop, 1) > BROKEN


class Outcome:
    def __init__(self, accepted, bonus):
        self.accepted_length, self.bonus_ids = torch.tensor([accepted]), torch.tensor([bonus])


def test_the_mixture_by_hand(monkeypatch):
    """Bug: weights that do not sum to one, a row in the slot beside its own, a cut tail whose mass is lost, or a slot
    that nothing feeds."""
    internals.mixture_looks_at(monkeypatch, 2)
    generator = torch.Generator().manual_seed(0)
    q, stale = (torch.randn(1, SLOTS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    q[..., 5] = -torch.inf  # a token that the drafter cannot say, which the verifier likes
    stale[..., 5] = 4.0
    actual = StaleMixture(0.3).adjust_draft_logits(q, feedback_with(stale, accepted=1)).softmax(-1)
    for slot in range(2):
        p = stale[0, slot].softmax(-1)
        best = max(range(5), key=lambda token: p[token])
        share = 0.3 * p[best]  # of the two likeliest, one cannot be said: the other has all of what is mixed in
        expected = (1 - share) * q[0, slot].softmax(-1)
        expected[best] += share
        torch.testing.assert_close(actual[0, slot], expected)
    torch.testing.assert_close(actual[0, 2], q[0, 2].softmax(-1))


def test_learned_weights_by_hand():
    """Bug: traits of another slot or law, or one of them that the weight does not hear of."""
    generator = torch.Generator().manual_seed(3)
    q, stale = (2 * torch.randn(1, SLOTS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    stale[0, 2] = 3 * q[0, 2]  # one slot where the likeliest tokens are the same
    actual = StaleMixture(coefficients=TRAITS_WEIGHED).adjust_draft_logits(q, feedback_with(stale)).softmax(-1)
    for slot in range(SLOTS):
        own, row = q[0, slot].softmax(-1), stale[0, slot].softmax(-1)
        best = int(row.argmax())
        traits = [
            1.0,
            float(slot > 0),
            slot / 8,
            float(best == int(own.argmax())),
            float(-(row * row.log()).sum()),
            float(own.max()),
            float(own[best]),
            float(row[best]),
        ]
        logit = sum(weight * trait for weight, trait in zip(TRAITS_WEIGHED, traits, strict=True))
        weight = min(0.9, 1 / (1 + math.exp(-logit)))
        torch.testing.assert_close(actual[0, slot], (1 - weight) * own + weight * row, rtol=1e-5, atol=1e-6)
    assert int(q[0, 0].argmax()) != int(stale[0, 0].argmax()), "and one where they are not"


@pytest.mark.parametrize(("is_right", "agrees"), [(True, False), (False, False), (True, True)])
def test_the_weight_goes_where_the_rejected_rows_are_right(is_right, agrees):
    """Bug: a weight that does not move, moves the wrong way, or learns from drafts behind the first failure."""
    processor = StaleMixture()
    began = processor.learned_weights.clone()
    q = torch.zeros(1, SLOTS, VOCAB)
    q[..., 2] = 1.0
    stale = torch.zeros(1, SLOTS, VOCAB)
    stale[..., 2 if agrees else 4] = 6.0
    truth = (2 if agrees else 4) if is_right else 1
    for _ in range(60):
        logits = processor.adjust_draft_logits(q, feedback_with(stale))
        drafts = torch.tensor([[truth, 0, 3]])
        # The first draft was right, and the bonus stands in slot 2.
        processor.observe(internals.proposal(drafts, logits), Outcome(1, truth))
    ended = processor.learned_weights
    moved = (ended != began).nonzero()[:, 0].tolist()
    assert len(moved) == 2, "slots 1 and 2 and no others"
    if is_right:
        assert (ended[moved] > (0.5 if not agrees else began[moved])).all()
    else:
        assert (ended[moved] < 0.25 * began[moved]).all()
    assert internals.mixture_counts(processor) == 120


@pytest.mark.parametrize("value", [True, 0.9])
def test_greedy_text_is_the_targets_and_blocks_are_accepted_in_part(value, target):
    """Bug: a mixture that proposes the mask token, or that the greedy rule takes for the target."""
    prompt = kit.prompt_of(9)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, 40, pattern=[2, 0, 4, 1])
    output = kit.decode(target, drafter, prompt, 40, stale_mixture=value)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 40))
    kit.assert_not_vacuous(output.statistics)
    assert output.statistics.lossless


@pytest.mark.parametrize(
    "switch",
    [{"adaptive_length": True, "step_costs": {"draft": 0.1, "verify": [1.0 + 0.1 * n for n in range(8)]}},
     {"tree_budget": 9}],
    ids=["adaptive", "tree"],
)  # fmt: skip
def test_it_works_with_blocks_that_are_cut_and_with_trees(switch, target):
    """Bug: slots that were mixed and then not verified, looked up among the drafts that were."""
    prompt = kit.prompt_of(9)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, 60)
    output = kit.decode(target, drafter, prompt, 60, stale_mixture=True, **switch)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 60))
    steps = list(zip(output.statistics.per_step_accepted, output.statistics.per_step_drafted, strict=True))
    assert max(accepted for accepted, _ in steps) >= 2 and any(accepted < drafted for accepted, drafted in steps[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1.0, 0.9, None])
def test_a_law_is_a_law_at_any_weight_and_width(dtype, weight):
    """Bug: probabilities that add up to a little more than 1, of which a full weight leaves less than nothing: NaN."""
    generator = torch.Generator().manual_seed(0)
    for vocab in range(3, 60):
        own, stale = (5.0 * torch.randn(1, SLOTS, vocab, generator=generator) for _ in range(2))
        own, stale = own.to(dtype), stale.to(dtype)
        mixed = StaleMixture(weight).adjust_draft_logits(own, feedback_with(stale))
        assert mixed.dtype == dtype and not mixed.isnan().any() and not mixed.isposinf().any()
        exact = StaleMixture(weight).adjust_draft_logits(own.double(), feedback_with(stale.double()))
        apart = (mixed.double().softmax(-1) - exact.softmax(-1)).abs().sum(-1) / 2
        assert apart.max() < (1e-5 if dtype == torch.float32 else 0.02)
        if weight == 1.0:
            assert torch.allclose(mixed.float().softmax(-1), stale.float().softmax(-1), atol=0.02)
