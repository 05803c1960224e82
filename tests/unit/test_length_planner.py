"""How many drafts a step verifies, by hand: what pays most, and what is learned from what was judged."""

import pytest
import torch
from internals import LengthPlanner, StepCosts, Uniforms


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


def test_numbers_of_a_cut_block_keep_the_bonus_last():
    """Bug: the bonus drawn with the number of a draft that was cut."""
    numbers = Uniforms(draft=torch.empty(1, 4), verify=torch.arange(5.0)[None])
    assert numbers.for_drafts(2).tolist() == [[0.0, 1.0, 4.0]]
    assert numbers.for_drafts(4) is numbers.verify
