"""Step lengths that adapt: what they may depend on, what they cost, and what they learn."""

import pytest
import torch
from batches import following, generate, new_tokens_of, said
from kit import (
    HostileDrafter,
    PatternDrafter,
    assert_not_vacuous,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)
from law import Loop, law_error, three_token_drafter, three_token_target
from test_fallback import TurnsGood

from hf_dflow import DFlowDecoder, DFlowGenerationConfig, UnsupportedGenerationError
from hf_dflow.generation import measure
from hf_dflow.generation.measure import measure_step_costs, step_costs
from hf_dflow.generation.policy.base import LONGEST_PAUSE
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.lengths import TRIAL, LengthPlanner
from hf_dflow.generation.step import Proposal
from hf_dflow.generation.uniforms import Uniforms

EXACT, BROKEN = 1e-9, 1e-3
CALIBRATED = {"calibration": {"sampled": [[0.3, 1.2], [-0.2, 0.8], [0.0, 1.0]]}}
COSTS = {"draft": 0.1, "verify": [1.0, 1.3, 1.7]}
LONG = 200
# As measured for SmolLM2-135M on two CPU cores: a forward over 8 tokens costs twice one over 1.
CPU = {"draft": 25.0, "verify": [88.0, 100.0, 115.0, 130.0, 145.0, 160.0, 173.0, 187.0]}


@pytest.fixture
def chosen(monkeypatch):
    """Every length that a planner chose."""
    honest, lengths = LengthPlanner.choose, []

    def choosing(self, confidences):
        lengths.append(honest(self, confidences))
        return lengths[-1]

    monkeypatch.setattr(LengthPlanner, "choose", choosing)
    return lengths


@pytest.fixture(scope="module")
def law_target():
    return three_token_target()


@pytest.mark.parametrize(
    "fields", [{}, {"correction_intermediate_size": 8, "correction_top_k": 2}, {"fitted_decisions": CALIBRATED}]
)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_law_is_the_targets(monkeypatch, law_target, chosen, rule, fields):
    """Bug (A4, METHOD 3.3): a length that depends on the drafts it cuts, or numbers of the cut ones in later tests."""
    drafter = three_token_drafter(law_target, **fields)
    if drafter.causal_correction is not None:
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.4)
    loop = Loop(monkeypatch, law_target, drafter, verification=rule, adaptive_length=True, step_costs=COSTS)
    assert law_error(loop, 2) < EXACT
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_control_a_cut_that_looks_at_the_drafts(monkeypatch, law_target, chosen, rule):
    """Control (A4): the block cut by the probability of what was sampled must be seen."""

    def of_the_drafts(block, is_sampled):
        return block.logits.softmax(-1).gather(-1, block.token_ids[..., None])[..., 0]

    monkeypatch.setattr(Proposal, "confidences", of_the_drafts)
    loop = Loop(
        monkeypatch, law_target, three_token_drafter(law_target), verification=rule, adaptive_length=True,
        step_costs=COSTS,
    )  # fmt: skip
    assert law_error(loop, 1) > BROKEN
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("looks", [False, True])
def test_control_a_cut_by_laws_that_follow_the_drafts(monkeypatch, law_target, chosen, looks):
    """Control (A4): where slots hear of each other, a later slot's law tells what was sampled before it; a cut of the
    first slot by that must be seen, and the backbone's own law must not be."""
    drafter = three_token_drafter(law_target, correction_intermediate_size=8, correction_top_k=3)
    torch.manual_seed(1)
    torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=1.0)
    honest = Proposal.confidences
    monkeypatch.setattr(Proposal, "confidences", lambda block, is_sampled: honest(block, is_sampled and not looks))
    costs = {"draft": 0.0, "verify": [1.0, 1.8, 1.85]}
    loop = Loop(monkeypatch, law_target, drafter, verification="token", adaptive_length=True, step_costs=costs)
    error = law_error(loop, 1)
    assert error > BROKEN and len(set(chosen)) > 1 if looks else error < EXACT


def test_the_length_pays_most_by_hand():
    """Bug: a slot's chance without those before it, the draft's cost left out, a first length at which it stops."""
    planner = LengthPlanner(StepCosts(0.0, (1.0, 1.01, 1.5, 1.51, 9.0)))
    assert planner.choose([0.9, 0.9, 0.9, 0.9]) == 3  # 1.9 / 1.01 < 3.439 / 1.51, past a second draft that does not pay
    assert planner.choose([0.5, 0.01, 0.9, 0.9]) == 1
    assert planner.choose([0.001, 1.0, 1.0, 1.0]) == 0
    expensive = LengthPlanner(StepCosts(5.0, (1.0, 1.4, 1.8)))
    assert expensive.choose([0.6, 0.6]) == 2  # the draft is paid for whatever is verified of it


def test_confidence_is_calibrated_by_what_was_judged():
    """Bug: drafts behind a failure counted as failures, or an overconfident drafter believed for ever."""
    planner = LengthPlanner(StepCosts(0.0, (1.0, 1.1, 1.2, 1.3)))
    assert planner.acceptance(0, 0.9) == pytest.approx(0.9)
    for _ in range(40):
        planner.choose([0.9, 0.9, 0.9])
        planner.learn(3, 0)
    assert planner.acceptance(0, 0.9) < 0.2
    assert planner.acceptance(1, 0.9) == pytest.approx(0.9), "it was never judged"
    for _ in range(60):
        planner.choose([0.9, 0.9, 0.9])
        planner.learn(3, 3)
    assert planner.acceptance(0, 0.9) > 0.9, "the past is forgotten"


def test_a_pause_ends_with_a_draft_that_is_verified():
    """Bug: nothing is verified, so nothing is learned, and a drafter that turned good is never believed again."""
    planner = LengthPlanner(StepCosts(0.5, (1.0, 1.9, 2.8)))
    while True:
        verified = planner.choose([0.9, 0.9])
        if planner.learn(verified, 0):
            break
    assert planner.choose([0.9, 0.9]) == 1
    bold = LengthPlanner(StepCosts(0.5, (1.0, 1.9, 2.8)), judged=planner.judged, accepted=planner.accepted)
    assert bold.choose([0.9, 0.9]) == 0, "what was judged alone would verify nothing"


def decode(target, drafter, prompt, new_tokens, **options):
    config = DFlowGenerationConfig(do_sample=False, return_dict_in_generate=True, adaptive_length=True, **options)
    return target.generate(prompt, generation_config=config, assistant_model=drafter, max_new_tokens=new_tokens)


def test_greedy_text_is_the_targets(chosen):
    """Bug: a cut block whose cache, feedback or records are those of the whole one."""
    target, prompt = tiny_target("llama"), prompt_of(9)
    drafter = scripted(PatternDrafter, target, prompt, 80, pattern=[2, 5, 0, 4, 1, 3])
    output = decode(target, drafter, prompt, 80, step_costs=CPU, output_scores=True)
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 80))
    assert_not_vacuous(output.statistics)
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
    drafter = following(HostileDrafter, [1], LONG)
    output = generate([1], drafter, LONG, generation_config=adaptive(LONG))
    assert new_tokens_of(output, 0, [1]) == said(1, LONG)
    assert TRIAL <= output.statistics.num_draft_forwards <= TRIAL + 8, "it pauses, for longer each time"
    assert seconds_of(output.statistics) <= 1.1 * 88.0 * LONG


def test_a_drafter_that_turns_good_is_found_again(chosen):
    """Bug (H3): what was learned of a bad drafter holds for ever, since nothing is verified and so nothing learned."""
    drafter = following(TurnsGood, [1], LONG)
    drafter.good_from = 60
    output = generate([1], drafter, LONG, generation_config=adaptive(LONG))
    assert new_tokens_of(output, 0, [1]) == said(1, LONG)
    accepted = output.statistics.per_step_accepted
    assert max(accepted) >= 5
    waited = output.statistics.num_target_forwards - 60
    assert waited < LONGEST_PAUSE + 40, "most of the text after the turn is drafted again"


def test_rows_of_a_batch_decide_alone():
    """Bug (B3): lengths, or what was learned, that one row has from its neighbour."""
    rows, tokens = [0, 1, 2], 60
    pattern = [2, 5, 0, 4, 1, 3]
    together = generate(
        rows, following(PatternDrafter, rows, tokens, pattern=pattern), tokens, generation_config=adaptive(tokens)
    )
    drafted = []
    for i, row in enumerate(rows):
        alone = generate(
            [row], following(PatternDrafter, [row], tokens, pattern=pattern), tokens, generation_config=adaptive(tokens)
        )
        assert new_tokens_of(together, i, rows) == new_tokens_of(alone, 0, [row])
        one, other = together.statistics.per_row[i], alone.statistics.per_row[0]
        assert (one.per_step_drafted, one.per_step_accepted) == (other.per_step_drafted, other.per_step_accepted)
        drafted += one.per_step_drafted
    assert len(set(drafted)) > 1


def test_the_costs_are_measured_once_for_a_pair(monkeypatch):
    """Bug: seconds of measuring in every call, times of another pair, or costs that fall with length."""
    target, drafter = tiny_target("llama"), tiny_drafter(tiny_target("llama"), 6)
    costs = step_costs(target, drafter)
    assert len(costs.verify) == 6 and list(costs.verify) == sorted(costs.verify) and costs.draft > 0
    assert step_costs(target, drafter) is costs
    assert step_costs(target, tiny_drafter(target, 4)) is not costs
    assert step_costs(target, drafter, device=torch.device("cpu")) is costs
    moved = measure._MEASURED[target][drafter]
    moved[torch.device("cpu"), torch.device("cuda:0")] = moved.pop((torch.device("cpu"), torch.device("cpu")))
    assert step_costs(target, drafter) is not costs, "what was measured on another device"
    sliding = tiny_target("gemma_sliding")
    assert len(measure_step_costs(sliding, tiny_drafter(sliding, 4), repeats=1).verify) == 4
    prompt = prompt_of(7)
    output = decode(target, drafter, prompt, 20)
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 20))
    assert dflow_greedy(target, drafter, prompt, max_new_tokens=20).sequences.equal(output.sequences)


def test_numbers_of_a_cut_block_keep_the_bonus_last():
    """Bug: the bonus drawn with the number of a draft that was cut."""
    numbers = Uniforms(draft=torch.empty(1, 4), verify=torch.arange(5.0)[None])
    assert numbers.for_drafts(2).tolist() == [[0.0, 1.0, 4.0]]
    assert numbers.for_drafts(4) is numbers.verify


@pytest.mark.parametrize(
    "costs",
    [
        {"draft": 1.0},
        {"draft": 1.0, "verify": [1.0, 2.0]},
        {"draft": -1.0, "verify": [1.0] * 8},
        {"draft": 1.0, "verify": [0.0] * 8},
        {"draft": 1.0, "verify": ["1"] * 8},
        5,
    ],
)
def test_impossible_costs_are_refused(costs):
    """Bug: a division by zero, or a length past the last known cost, in the middle of a text."""
    with pytest.raises(UnsupportedGenerationError, match="step_costs"):
        DFlowDecoder(tiny_drafter(tiny_target("llama"), 8), adaptive_length=True, step_costs=costs)
