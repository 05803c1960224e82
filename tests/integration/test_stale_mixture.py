"""The draft law mixed with what the verifier said on rejected rows: the law it must keep, and what it learns."""

import math
from dataclasses import replace

import kit
import pytest
import torch
from law import Loop, law_error, three_token_drafter, three_token_target

from hf_dflow import DFlowDecoder, DFlowGenerationConfig, StaleMixture, UnsupportedGenerationError
from hf_dflow.generation import mixture
from hf_dflow.generation.step import Proposal, VerifierFeedback

EXACT, BROKEN = 1e-9, 1e-3
SLOTS, VOCAB = 3, 6
TRAITS_WEIGHED = [-1.0, 0.5, 1.0, 0.7, -0.4, -0.8, 0.9, 0.6]  # all of them matter


@pytest.fixture(scope="module")
def target():
    return three_token_target()


class Watched(StaleMixture):
    """Counts, over all copies, the slots that were mixed and by how much their law moved."""

    mixed, moved = 0, 0.0

    def adjust_draft_logits(self, draft_logits, feedback):
        adjusted = super().adjust_draft_logits(draft_logits, feedback)
        if self._mixed is not None:
            Watched.mixed += int((self._mixed.weights > 0).sum())
            Watched.moved += float((adjusted.softmax(-1) - draft_logits.softmax(-1)).abs().sum())
        return adjusted


@pytest.mark.parametrize(("rule", "steps", "block_size"), [("token", 2, 3), ("block", 2, 3), ("block", 3, 2)])
@pytest.mark.parametrize("weight", [None, 0.4, TRAITS_WEIGHED], ids=["online", "fixed", "learned"])
def test_the_output_law_is_the_targets(monkeypatch, target, rule, steps, block_size, weight):
    """Bug (A4): a mixture that enters sampling and not ratio or residual, or whose weight sees the tokens it mixes."""
    Watched.mixed, Watched.moved = 0, 0.0
    loop = Loop(
        monkeypatch,
        target,
        three_token_drafter(target, block_size),
        verification=rule,
        acceptance_processors=[Watched(coefficients=weight) if isinstance(weight, list) else Watched(weight)],
    )
    assert law_error(loop, steps, block_size - 1) < EXACT
    assert Watched.mixed > 5 and Watched.moved > 0.1


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
def test_control_another_law_in_ratio_and_residual(monkeypatch, target, rule, processor):
    """Control (A4): q changed after sampling must be seen."""

    def other_law(inputs):
        fits = inputs.draft_ids.shape[1] and ForgetsTheMixture.own is not None
        return replace(inputs, draft_logits=ForgetsTheMixture.own) if fits else inputs

    drafter = three_token_drafter(target)
    loop = Loop(
        monkeypatch, target, drafter, verification=rule, alter=other_law, acceptance_processors=[processor(0.6)]
    )
    assert law_error(loop, 2) > BROKEN


@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_the_rejected_row_in_the_accept_test(monkeypatch, target, rule):
    """Control (METHOD 3.2): p_stale mixed into p, where it is forbidden, must be seen."""

    def stale_target(inputs):
        logits = inputs.target_logits.clone()
        if logits.shape[1] < 2:
            return inputs
        logits[:, 0] = torch.logaddexp(logits[:, 0].log_softmax(-1), logits[:, 1].log_softmax(-1))
        return replace(inputs, target_logits=logits)

    loop = Loop(
        monkeypatch, target, three_token_drafter(target), verification=rule, alter=stale_target, stale_mixture=True
    )
    assert law_error(loop, 1) > BROKEN


def feedback_of(stale: torch.Tensor, accepted: int = 0) -> VerifierFeedback:
    """Of a step with as many drafts as `stale` has rows; its rejected rows are the first of those."""
    slots = stale.shape[1]
    before = torch.randn(1, 1 + accepted, stale.shape[2], dtype=stale.dtype)  # the anchor's and accepted drafts' rows
    return VerifierFeedback(
        features=torch.zeros(1, slots, 4),
        is_fed=torch.arange(slots)[None] < slots - accepted,
        bonus_ids=torch.tensor([0]),
        rejected_ids=torch.tensor([1]),
        accepted_length=torch.tensor([accepted]),
        accepted=(accepted,),
        lengths=(slots,),
        step_target_logits=torch.cat([before, stale[:, : slots - accepted]], dim=1),
        step_draft_logits=torch.zeros_like(stale),
    )


class Outcome:
    def __init__(self, accepted, bonus):
        self.accepted_length, self.bonus_ids = torch.tensor([accepted]), torch.tensor([bonus])


def test_the_mixture_by_hand(monkeypatch):
    """Bug: weights that do not sum to one, a row in the slot beside its own, a cut tail whose mass is lost, or a slot
    that nothing feeds."""
    monkeypatch.setattr(mixture, "TOP_K", 2)
    generator = torch.Generator().manual_seed(0)
    q, stale = (torch.randn(1, SLOTS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    q[..., 5] = -torch.inf  # a token that the drafter cannot say, which the verifier likes
    stale[..., 5] = 4.0
    found = StaleMixture(0.3).adjust_draft_logits(q, feedback_of(stale, accepted=1)).softmax(-1)
    for slot in range(2):
        p = stale[0, slot].softmax(-1)
        best = max(range(5), key=lambda token: p[token])
        share = 0.3 * p[best]  # of the two likeliest, one cannot be said: the other has all of what is mixed in
        expected = (1 - share) * q[0, slot].softmax(-1)
        expected[best] += share
        torch.testing.assert_close(found[0, slot], expected)
    torch.testing.assert_close(found[0, 2], q[0, 2].softmax(-1))


def test_learned_weights_by_hand():
    """Bug: traits of another slot or law, or one of them that the weight does not hear of."""
    generator = torch.Generator().manual_seed(3)
    q, stale = (2 * torch.randn(1, SLOTS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    stale[0, 2] = 3 * q[0, 2]  # one slot where the likeliest tokens are the same
    found = StaleMixture(coefficients=TRAITS_WEIGHED).adjust_draft_logits(q, feedback_of(stale)).softmax(-1)
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
        torch.testing.assert_close(found[0, slot], (1 - weight) * own + weight * row, rtol=1e-5, atol=1e-6)
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
        logits = processor.adjust_draft_logits(q, feedback_of(stale))
        drafts = torch.tensor([[truth, 0, 3]])
        draft = Proposal(drafts, logits, torch.tensor([True]), (drafts.shape[1],))
        processor.observe(draft, Outcome(1, truth))  # the first draft was right, the bonus stands in slot 2
    ended = processor.learned_weights
    moved = (ended != began).nonzero()[:, 0].tolist()
    assert len(moved) == 2, "slots 1 and 2 and no others"
    if is_right:
        assert (ended[moved] > (0.5 if not agrees else began[moved])).all()
    else:
        assert (ended[moved] < 0.25 * began[moved]).all()
    assert float(processor._counts.sum()) == mixture.NUM_BUCKETS * mixture.PRIOR_COUNT + 120


@pytest.mark.parametrize("value", [True, 0.9])
def test_greedy_text_is_the_targets_and_blocks_are_accepted_in_part(value):
    """Bug: a mixture that proposes the mask token, or that the greedy rule takes for the target."""
    target, prompt = kit.tiny_target("llama"), kit.prompt_of(9)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, 40, pattern=[2, 0, 4, 1])
    config = DFlowGenerationConfig(stale_mixture=value, do_sample=False, return_dict_in_generate=True)
    output = target.generate(prompt, generation_config=config, assistant_model=drafter, max_new_tokens=40)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 40))
    kit.assert_not_vacuous(output.statistics)
    assert output.statistics.lossless


@pytest.mark.parametrize(
    "switch",
    [{"adaptive_length": True, "step_costs": {"draft": 0.1, "verify": [1.0 + 0.1 * n for n in range(8)]}},
     {"tree_budget": 9}],
    ids=["adaptive", "tree"],
)  # fmt: skip
def test_it_goes_with_blocks_that_are_cut_and_with_trees(switch):
    """Bug: slots that were mixed and then not verified, looked up among the drafts that were."""
    target, prompt = kit.tiny_target("llama"), kit.prompt_of(9)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, 60)
    config = DFlowGenerationConfig(stale_mixture=True, do_sample=False, return_dict_in_generate=True, **switch)
    output = target.generate(prompt, generation_config=config, assistant_model=drafter, max_new_tokens=60)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 60))
    steps = list(zip(output.statistics.per_step_accepted, output.statistics.per_step_drafted, strict=True))
    assert max(accepted for accepted, _ in steps) >= 2 and any(accepted < drafted for accepted, drafted in steps[:-1])


@pytest.mark.parametrize("value", [0.0, 1.5, "on", float("nan"), -0.1])
def test_impossible_weights_are_refused(value):
    """Bug: a weight of 150% and logarithms of negative numbers; a zero that somebody took for learning."""
    drafter = kit.tiny_drafter(kit.tiny_target("llama"), 4)
    with pytest.raises(UnsupportedGenerationError, match="stale_mixture="):
        DFlowDecoder(drafter, stale_mixture=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1.0, 0.9, None])
def test_a_law_is_a_law_at_any_weight_and_width(dtype, weight):
    """Bug: probabilities that add up to a little more than 1, of which a full weight leaves less than nothing: NaN."""
    generator = torch.Generator().manual_seed(0)
    for vocab in range(3, 60):
        own, stale = (5.0 * torch.randn(1, SLOTS, vocab, generator=generator) for _ in range(2))
        mixed = StaleMixture(weight).adjust_draft_logits(own.to(dtype), feedback_of(stale.to(dtype)))
        assert mixed.dtype == dtype and not mixed.isnan().any() and not mixed.isposinf().any()
        exact = StaleMixture(weight).adjust_draft_logits(own.to(dtype).double(), feedback_of(stale.to(dtype).double()))
        apart = (mixed.double().softmax(-1) - exact.softmax(-1)).abs().sum(-1) / 2
        assert apart.max() < (1e-5 if dtype == torch.float32 else 0.02)
        if weight == 1.0:
            assert torch.allclose(mixed.float().softmax(-1), stale.to(dtype).float().softmax(-1), atol=0.02)
