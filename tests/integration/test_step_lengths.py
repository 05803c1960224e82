"""Step lengths that adapt: what they may depend on, what they cost, and what they learn."""

import internals
import kit
import pytest
import torch
from batches import following, generate, new_tokens_of, plain_ids
from internals import LONGEST_PAUSE, TRIAL, measure_step_costs, step_costs
from law import Loop, law_error, three_token_drafter

from hf_dflow import DFlowGenerationConfig

EXACT, BROKEN = 1e-9, 1e-3
CALIBRATED = {"calibration": {"sampled": [[0.3, 1.2], [-0.2, 0.8], [0.0, 1.0]]}}
COSTS = {"draft": 0.1, "verify": [1.0, 1.3, 1.7]}
LONG = 200
# As measured for SmolLM2-135M on two CPU cores: a forward over 8 tokens costs twice one over 1.
CPU = {"draft": 25.0, "verify": [88.0, 100.0, 115.0, 130.0, 145.0, 160.0, 173.0, 187.0]}


@pytest.fixture
def chosen(monkeypatch):
    """Every length that a planner chooses."""
    return internals.chosen_lengths(monkeypatch)


CORRECTION = {"correction_intermediate_size": 8, "correction_top_k": 2}


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        ("token", {}),
        ("block", {}),
        ("block", CORRECTION),
        ("token", {"fitted_decisions": CALIBRATED}),
    ],
)
def test_the_output_law_is_the_targets(monkeypatch, three_tokens, chosen, rule, fields):
    """Bug (A4, METHOD 3.3): a length that depends on the drafts it cuts, or numbers of the cut ones in later tests."""
    drafter = three_token_drafter(three_tokens, **fields)
    if drafter.causal_correction is not None:
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.4)
    loop = Loop(monkeypatch, three_tokens, drafter, verification=rule, adaptive_length=True, step_costs=COSTS)
    assert law_error(loop, 2) < EXACT
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_a_cut_that_looks_at_the_drafts(monkeypatch, three_tokens, chosen, rule):
    """Control (A4): the block cut by the probability of what was sampled must be seen."""
    internals.confidences_of_the_drafts(monkeypatch)
    drafter = three_token_drafter(three_tokens)
    loop = Loop(monkeypatch, three_tokens, drafter, verification=rule, adaptive_length=True, step_costs=COSTS)
    assert law_error(loop, 1) > BROKEN
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("looks", [False, True])
def test_control_a_cut_by_laws_that_follow_the_drafts(monkeypatch, three_tokens, chosen, looks):
    """Control (A4): where each draft conditions on the previous one, a later slot's law tells what was sampled before
    it; a cut of the first slot by that must be seen, and a cut by the backbone's own law must not be."""
    drafter = three_token_drafter(three_tokens, correction_intermediate_size=8, correction_top_k=3)
    torch.manual_seed(1)
    torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=1.0)
    if looks:
        internals.confidences_behind_the_drafts(monkeypatch)
    costs = {"draft": 0.0, "verify": [1.0, 1.8, 1.85]}
    loop = Loop(monkeypatch, three_tokens, drafter, verification="token", adaptive_length=True, step_costs=costs)
    error = law_error(loop, 1)
    assert error > BROKEN and len(set(chosen)) > 1 if looks else error < EXACT


def test_greedy_text_is_the_targets(chosen, target):
    """Bug: a cut block whose cache, feedback or records are those of the whole one."""
    prompt = kit.prompt_of(9)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, 80, pattern=[2, 5, 0, 4, 1, 3])
    output = kit.decode(target, drafter, prompt, 80, adaptive_length=True, step_costs=CPU, output_scores=True)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 80))
    kit.assert_not_vacuous(output.statistics)
    assert len(output.scores) == 80
    assert len(set(chosen)) > 1 and output.statistics.lossless


def adaptive(new_tokens) -> DFlowGenerationConfig:
    return DFlowGenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
        adaptive_length=True,
        step_costs=CPU,
    )


def seconds_of(statistics) -> float:
    """Of a decoded text after its prompt, by the costs above; plain decoding takes 88 for each token."""
    forwards = list(statistics.per_step_drafted)
    plain = statistics.num_target_forwards - len(forwards)
    return statistics.num_draft_forwards * CPU["draft"] + sum(CPU["verify"][n] for n in forwards) + 88.0 * plain


def test_a_hostile_drafter_costs_a_tenth_at_most():
    """Bug (H3): drafts of a sure and always wrong drafter verified again and again."""
    drafter = following(kit.HostileDrafter, [1], LONG)
    output = generate([1], drafter, LONG, generation_config=adaptive(LONG))
    assert new_tokens_of(output, 0, [1]) == plain_ids(1, LONG)
    assert TRIAL <= output.statistics.num_draft_forwards <= TRIAL + 8, "it pauses, for longer each time"
    assert seconds_of(output.statistics) <= 1.1 * 88.0 * LONG


def test_a_drafter_that_turns_good_is_found_again(chosen):
    """Bug (H3): what was learned of a bad drafter holds for ever, since nothing is verified and so nothing learned."""
    drafter = following(kit.TurnsGood, [1], LONG)
    drafter.good_from = 60
    output = generate([1], drafter, LONG, generation_config=adaptive(LONG))
    assert new_tokens_of(output, 0, [1]) == plain_ids(1, LONG)
    accepted = output.statistics.per_step_accepted
    assert max(accepted) >= 5
    waited = output.statistics.num_target_forwards - 60
    assert waited < LONGEST_PAUSE + 40, "most of the text after the turn is drafted again"


def test_rows_of_a_batch_decide_alone():
    """Bug (B3): lengths, or what was learned, that one row has from its neighbour."""
    rows, tokens = [0, 1, 2], 60
    pattern = [2, 5, 0, 4, 1, 3]
    together = generate(
        rows, following(kit.PatternDrafter, rows, tokens, pattern=pattern), tokens, generation_config=adaptive(tokens)
    )
    drafted = []
    for i, row in enumerate(rows):
        alone = generate(
            [row],
            following(kit.PatternDrafter, [row], tokens, pattern=pattern),
            tokens,
            generation_config=adaptive(tokens),
        )
        assert new_tokens_of(together, i, rows) == new_tokens_of(alone, 0, [row])
        one, other = together.statistics.per_row[i], alone.statistics.per_row[0]
        assert (one.per_step_drafted, one.per_step_accepted) == (other.per_step_drafted, other.per_step_accepted)
        drafted += one.per_step_drafted
    assert len(set(drafted)) > 1


def test_the_costs_are_measured_once_for_a_pair():
    """Bug: seconds of measuring in every call, times of another pair, or costs that fall with length."""
    target = kit.tiny_target()
    drafter = kit.tiny_drafter(target, 6)
    costs = step_costs(target, drafter)
    assert len(costs.verify) == 6 and list(costs.verify) == sorted(costs.verify) and costs.draft > 0
    assert step_costs(target, drafter) is costs
    assert step_costs(target, kit.tiny_drafter(target, 4)) is not costs
    assert step_costs(target, drafter, device=torch.device("cpu")) is costs
    moved = internals.measured_costs(target)[drafter]
    moved[torch.device("cpu"), torch.device("cuda:0")] = moved.pop((torch.device("cpu"), torch.device("cpu")))
    assert step_costs(target, drafter) is not costs, "what was measured on another device"
    sliding = kit.shared_target("gemma_sliding")
    assert len(measure_step_costs(sliding, kit.tiny_drafter(sliding, 4), repeats=1).verify) == 4
    prompt = kit.prompt_of(7)
    output = kit.decode(target, drafter, prompt, 20, adaptive_length=True)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, 20))
