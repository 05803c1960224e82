"""The Triton kernels at ties, edges and extremes: blocks empty or long, uniforms of 0 and 1, slots nobody uses."""

import math

import kernel_kit
import pytest
import torch
from kernel_kit import assert_agrees, in_small_tiles, poison, random_arguments, tiled  # noqa: F401 - a fixture
from test_verify_block_numerics import one_draft

from hf_dflow.kernels import SparseLogits, verify_block

pytestmark = [kernel_kit.pytestmark_interpreter, pytest.mark.usefixtures("poison")]

RULES = ("token", "block")
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
NAN = float("nan")


@pytest.mark.parametrize("programs", [1, 10**6])
def test_greedy_ties_fall_on_the_first(programs):
    """Bug: a tie within a tile, between tiles or between splits falls on another token than torch's argmax."""
    target_logits = torch.zeros(1, 2, 70, dtype=torch.bfloat16)
    target_logits[0, 0, [5, 21, 50]] = 3.0  # two tiles apart, and the same lane of the next tile
    target_logits[0, 1, [40, 41]] = 3.0  # one tile
    with tiled(block=16, programs=programs):
        decision = verify_block(
            draft_ids=torch.tensor([[5]]),
            draft_logits=None,
            target_logits=target_logits,
            uniforms=None,
            rule="greedy",
            backend="triton",
        )
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (1, 40)


def test_greedy_takes_nan_for_the_maximum_as_torch_does():
    """Bug: a target that overflows says other tokens than plain generation would."""
    target_logits = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0))
    target_logits[0, 0, [20, 30]] = NAN
    target_logits[1, 0, 7] = math.inf
    ids = torch.zeros(3, 0, dtype=torch.long)
    decision = assert_agrees(
        draft_ids=ids, draft_logits=None, target_logits=target_logits, uniforms=None, rule="greedy"
    )
    assert decision.bonus_ids.tolist()[:2] == [20, 7]


@pytest.mark.parametrize("rule", RULES)
def test_a_point_mass_is_one_whatever_the_logits_hold(rule):
    """Bug (A4): NaN in the logits of a looked-up draft ends verification there, or reaches its ratio."""
    arguments = random_arguments(3, batch=8, num_drafts=3, vocab=40, rule=rule, law="mixed")
    arguments["draft_logits"] = arguments["draft_logits"].masked_fill(arguments["point_mass"][..., None], NAN)
    assert assert_agrees(**arguments).accepted_length.max() >= 2


def test_intervals_of_the_bonus_are_closed_on_the_left():
    """Bug: u on the edge between two splits, or two tokens, goes to the earlier one: token x owns [c(x - 1), c(x))."""
    for edge in range(0, 32, 8):
        decision = assert_agrees(
            draft_ids=torch.zeros(1, 0, dtype=torch.long),
            draft_logits=None,
            target_logits=torch.zeros(1, 1, 32),
            uniforms=torch.tensor([[edge / 32]]),
            rule="token",
        )
        assert decision.bonus_ids.item() == edge


@pytest.mark.parametrize("rule", RULES)
def test_zero_uniforms_never_let_an_impossible_token_through(rule, monkeypatch):
    """Bug: `u <= p`, or an inverse CDF with `>=`, takes a token that the target forbids when u = 0."""
    monkeypatch.setattr("test_verify_block_numerics.verify_block", in_small_tiles)
    decision = one_draft([0.0, 0.0, 0.6, 0.4], [0.5, 0.2, 0.3, 0.0], 0, [0.0, 0.0], rule=rule)
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (0, 2)


@pytest.mark.parametrize("rule", RULES)
def test_the_last_uniform_below_one_still_meets_a_token(rule):
    """Bug: u = 1 - 2**-53 (or 1 after rounding) falls off the cumulative sum, onto a forbidden or padded entry."""
    target_logits = torch.randn(8, 1, 70, generator=torch.Generator().manual_seed(0))
    target_logits[..., :5] = target_logits[..., -20:] = -math.inf
    for u in (JUST_BELOW_ONE, 1.0):
        decision = in_small_tiles(
            draft_ids=torch.zeros(8, 0, dtype=torch.long),
            draft_logits=None,
            target_logits=target_logits,
            uniforms=torch.full((8, 1), u, dtype=torch.float64),
            rule=rule,
        )
        assert (decision.bonus_ids == 49).all()


@pytest.mark.parametrize("rule", ("greedy", *RULES))
def test_lengths_from_one_to_sixteen(rule):
    """Bug: N = 15 and 16 lie on either side of a power of two, N = 1 has no inner slot."""
    for num_drafts in range(1, 17):
        arguments = random_arguments(num_drafts, batch=4, num_drafts=num_drafts, vocab=33, rule=rule)
        assert_agrees(**arguments)
        assert_agrees(**{**arguments, "lengths": None})


@pytest.mark.parametrize("rule", ("greedy", *RULES))
def test_empty_rows_and_empty_batches(rule):
    """Bug: N = 0, a row of length 0 or a batch of nothing indexes slot -1 or launches an empty grid."""
    arguments = random_arguments(5, batch=4, num_drafts=0, vocab=33, rule=rule)
    assert assert_agrees(**arguments).acceptance_probs.shape == (4, 0)
    arguments = random_arguments(5, batch=4, num_drafts=3, vocab=33, rule=rule)
    assert assert_agrees(**{**arguments, "lengths": torch.zeros(4)}).accepted_length.tolist() == [0] * 4
    nobody = {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    assert in_small_tiles(**nobody).bonus_ids.shape == (0,)


@pytest.mark.parametrize("law", ["dense", "sparse", "mixed"])
def test_what_lies_beyond_lengths_is_ignored(law):
    """Bug: NaN, or an id far out of range, in an unused slot leaks into the decision or is used as an address."""
    for rule in RULES:
        clean = random_arguments(2, batch=8, num_drafts=4, vocab=40, rule=rule, law=law)
        beyond = torch.arange(5) > clean["lengths"][:, None]
        unused = beyond[:, 1:]
        poisoned = dict(clean)
        poisoned["target_logits"] = clean["target_logits"].masked_fill(beyond[..., None], NAN)
        poisoned["draft_ids"] = clean["draft_ids"].masked_fill(unused, -(10**12))
        draft = clean["draft_logits"]
        if law == "sparse":
            ids = draft.ids.masked_fill(unused[..., None], 10**12)
            poisoned["draft_logits"] = SparseLogits(ids, draft.logits.masked_fill(unused[..., None], NAN))
        else:
            poisoned["draft_logits"] = draft.masked_fill(unused[..., None], NAN)
        first, second = in_small_tiles(**clean), in_small_tiles(**poisoned)
        assert torch.equal(first.accepted_length, second.accepted_length)
        assert torch.equal(first.bonus_ids, second.bonus_ids)
        assert torch.equal(first.acceptance_probs, second.acceptance_probs)
