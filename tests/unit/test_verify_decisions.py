"""`verify_block` on both backends: against a scalar oracle, at edges of shape and memory, and its errors."""

import math
from dataclasses import replace

import kernel_kit
import pytest
import torch
from kernel_kit import BACKENDS, NAN, assert_same, each_tensor, no_drafts, random_inputs, verify

from hf_dflow.kernels import RULES, VerifyInputs, verify_block

pytestmark = [kernel_kit.ignore_numpy_warnings, pytest.mark.parametrize("backend", BACKENDS)]

SAMPLED = ("token", "block")
CONFIGS = [(rule, law) for rule in SAMPLED for law in ("dense", "point mass", "mixed")] + [("greedy", "dense")]


def oracle(target, draft, drafts, uniforms, rule):
    """The three rules of MATH.md, read aloud for one row of plain floats; `target` has one row more than `draft`."""

    def capped_ratio(target_prob, draft_prob):
        return 0.0 if target_prob == 0 else 1.0 if draft_prob == 0 else min(1.0, target_prob / draft_prob)

    def residual(weight, i):
        return [max(weight * target[i][x] - draft[i][x], 0.0) for x in range(len(target[i]))]

    num_drafts, accepted, weight = len(drafts), 0, 1.0
    if rule == "greedy":
        best = [row.index(max(row)) for row in target]
        while accepted < num_drafts and drafts[accepted] == best[accepted]:
            accepted += 1
        return accepted, best[accepted]
    if rule == "token":
        for i, x in enumerate(drafts):
            if not uniforms[i] < capped_ratio(target[i][x], draft[i][x]):
                break
            accepted = i + 1
    else:
        weights = [1.0]
        for i, x in enumerate(drafts):
            weights.append(capped_ratio(weights[i] * target[i][x], draft[i][x]))
        for i in range(1, num_drafts + 1):
            probability = weights[i]
            if i < num_drafts:
                surplus = sum(residual(weights[i], i))
                total = surplus + 1 - weights[i]
                probability = surplus / total if total else 1.0
            if uniforms[i - 1] < probability:
                accepted = i
        weight = weights[accepted]
    law = target[accepted]
    if accepted < num_drafts and sum(residual(weight, accepted)) > 0:
        law = residual(weight, accepted)
    running, threshold = 0.0, uniforms[-1] * math.fsum(law)
    for x, probability in enumerate(law):
        running += probability
        if running > threshold:
            return accepted, x
    return accepted, max(x for x, probability in enumerate(law) if probability > 0)


def draft_probs_of(inputs: VerifyInputs) -> torch.Tensor:
    one_hot = torch.nn.functional.one_hot(inputs.draft_ids, inputs.target_logits.shape[-1]).double()
    if inputs.draft_logits is None:
        return one_hot
    probs = inputs.draft_logits.softmax(-1)
    return probs if inputs.point_mass is None else torch.where(inputs.point_mass[..., None], one_hot, probs)


@pytest.mark.parametrize("config", CONFIGS)
def test_decisions_equal_the_scalar_oracle(config, backend):
    """Bug: any slip in batching, row offsets, ragged lengths, off-support drafts or the inverse CDF."""
    rule, law = config
    longest = 0
    for seed in range(40 if backend == "torch" else 6):
        sizes = {"batch": 8 if backend == "torch" else 32, "num_drafts": seed % 6, "vocab": 2 + seed % 7}
        inputs = random_inputs(seed, **sizes, rule=rule, law=law, dtype=torch.float64)
        decision = verify(inputs, backend)
        target_probs, draft_probs = inputs.target_logits.softmax(-1), draft_probs_of(inputs)
        for row, length in enumerate(inputs.lengths.tolist()):
            uniforms = inputs.uniforms[row].tolist()
            expected = oracle(
                target_probs[row, : length + 1].tolist(),
                draft_probs[row, :length].tolist(),
                inputs.draft_ids[row, :length].tolist(),
                uniforms[:length] + uniforms[-1:],
                rule,
            )
            decided = (int(decision.accepted_length[row]), int(decision.bonus_ids[row]))
            assert decided == expected, f"seed {seed}, row {row}"
            longest = max(longest, decided[0])
    assert longest >= 2


@pytest.mark.parametrize("config", CONFIGS)
def test_what_lies_beyond_lengths_is_ignored(config, backend):
    """Bug: NaN or an out-of-range id in an unused slot leaks into the decision, or is used as an address."""
    rule, law = config
    clean = random_inputs(2, batch=32, num_drafts=4, vocab=40, rule=rule, law=law)
    beyond = torch.arange(5) > clean.lengths[:, None]  # rows of the target
    unused = beyond[:, 1:]  # slots of the draft
    poisoned = replace(
        clean,
        target_logits=clean.target_logits.masked_fill(beyond[..., None], NAN),
        draft_ids=clean.draft_ids.masked_fill(unused, -(10**12)),
        draft_logits=None if law == "point mass" else clean.draft_logits.masked_fill(unused[..., None], NAN),
        uniforms=clean.uniforms.masked_fill(torch.nn.functional.pad(unused, (0, 1)), NAN),
    )
    decision = verify(poisoned, backend)
    assert_same(decision, verify(clean, backend))
    assert unused.any() and (decision.acceptance_probs[unused] == 0).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_do_not_see_each_other(config, backend):
    """Bug (B3): a row's decision changes with its neighbours or with the number of programs that share its row; also
    batch 1 squeezed away (A2)."""
    rule, law = config
    inputs = random_inputs(9, batch=5, num_drafts=3, vocab=70, rule=rule, law=law)
    together = verify(inputs, backend, rows=4)
    for row in range(5) if backend == "torch" else (0, 4):
        alone = verify(each_tensor(inputs, lambda tensor: tensor[row : row + 1]), backend, programs=1)  # noqa: B023
        assert alone.accepted_length.tolist() == together.accepted_length[row : row + 1].tolist()
        assert alone.bonus_ids.tolist() == together.bonus_ids[row : row + 1].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_scenario_e3_strided_and_padded_inputs(rule, backend):
    """Bug (E3): a view (padded vocabulary, transposed batch, every second entry, expanded draft) read as contiguous, or
    an input overwritten."""
    torch.manual_seed(0)
    views = VerifyInputs(
        rule=rule,
        draft_ids=torch.randint(37, (3, 3)).T,
        draft_logits=torch.randn(3, 1, 74)[..., ::2].expand(3, 3, 37),
        target_logits=torch.randn(4, 3, 64).transpose(0, 1)[..., :37],
        uniforms=torch.rand(4, 3).T,
        lengths=torch.tensor([3, 9, 1, 9, 3, 9])[::2],
        point_mass=torch.tensor([[True, False, False]] * 3).T,
    )
    for inputs in (views, replace(views, draft_logits=torch.randn(3, 3, 64)[..., :37])):
        copies = each_tensor(inputs, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        assert_same(verify(inputs, backend), verify(copies, "torch"), tolerance=5e-6)
        for name, tensor in vars(copies).items():
            assert not isinstance(tensor, torch.Tensor) or torch.equal(getattr(inputs, name), tensor)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["dense", "point mass"])
def test_nothing_to_verify(rule, law, backend):
    """Bug: an empty block, row or batch indexes slot -1, reduces over nothing, or launches an empty grid."""
    empty_block = random_inputs(5, batch=4, num_drafts=0, vocab=33, rule=rule, law=law)
    decision = verify(empty_block, backend)
    assert decision.accepted_length.tolist() == [0] * 4 and decision.acceptance_probs.shape == (4, 0)
    if rule == "greedy":
        assert decision.bonus_ids.tolist() == empty_block.target_logits[:, 0].argmax(-1).tolist()
    drafted = random_inputs(5, batch=4, num_drafts=3, vocab=33, rule=rule, law=law)
    empty_rows = verify(replace(drafted, lengths=torch.zeros(4, dtype=torch.long)), backend)
    assert empty_rows.accepted_length.tolist() == [0] * 4 and (empty_rows.acceptance_probs == 0).all()
    assert verify(each_tensor(drafted, lambda tensor: tensor[:0]), backend).bonus_ids.shape == (0,)


def test_greedy_ties_fall_as_in_plain_generation(backend):
    """Bug (A8): casting before the argmax, or another reduction within a tile, between tiles or between splits, breaks
    ties differently from `generate`."""
    target_logits = torch.zeros(1, 2, 70, dtype=torch.bfloat16)
    target_logits[0, 0, [5, 21, 50]] = 3.0  # two tiles apart, and the same lane of the next tile
    target_logits[0, 1, [40, 41]] = 3.0  # one tile
    inputs = VerifyInputs(
        rule="greedy",
        draft_ids=torch.tensor([[5]]),
        draft_logits=None,
        target_logits=target_logits,
        uniforms=None,
    )
    for programs in (1, 10**6):
        decision = verify(inputs, backend, programs=programs)
        assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (1, 40)


def test_greedy_takes_nan_for_the_maximum(backend):
    """Bug: a target that overflows decodes other tokens than plain generation would."""
    target_logits = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0))
    target_logits[0, 0, [20, 30]] = NAN
    target_logits[1, 0, 7] = math.inf
    assert verify(no_drafts(target_logits, None, "greedy"), backend).bonus_ids.tolist()[:2] == [20, 7]


def test_greedy_with_given_acceptance(backend):
    """Bug: relaxed greedy acceptance that still stops at the first mismatch, or takes the bonus from another row."""
    inputs = VerifyInputs(
        rule="greedy",
        draft_ids=torch.tensor([[3, 3, 3]]),
        draft_logits=None,
        target_logits=torch.eye(4)[None],  # the choices are 0, 1, 2, 3
        uniforms=None,
        acceptance_probs=torch.tensor([[1.0, 1.0, 0.0]]),
    )
    decision = verify(inputs, backend)
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (2, 2)


@pytest.mark.parametrize("config", CONFIGS)
def test_never_waits_for_the_device(config, backend):
    """Bug: `.item()`, `bool(tensor)`, `nonzero` or a boolean index stalls the GPU; meta tensors refuse them."""
    rule, law = config
    inputs = random_inputs(3, batch=4, num_drafts=3, vocab=5, rule=rule, law=law)
    inputs = each_tensor(inputs, lambda tensor: tensor.to("meta"))
    if backend == "torch":
        decision = verify_block(inputs, backend)
    else:
        decision = kernel_kit.triton_verify.plan_verification(inputs).decision
    assert decision.accepted_length.shape == decision.bonus_ids.shape == (4,)
    assert decision.acceptance_probs.shape == (4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "typical"}, "'greedy', 'token', 'block'"),
        ({"rule": "block", "acceptance_probs": torch.ones(2, 3)}, "whole prefixes"),
        ({"uniforms": None}, "needs `uniforms`"),
        ({"uniforms": torch.rand(2, 3)}, r"`uniforms` has shape \(2, 3\) but \(2, 4\)"),
        ({"uniforms": torch.rand(2, 4, device="meta")}, "`uniforms` is on meta"),
        ({"draft_logits": torch.randn(2, 3, 6)}, "`draft_logits` has shape"),
        ({"target_logits": torch.randn(2, 3, 5)}, "`target_logits` has shape"),
        ({"target_logits": torch.randn(2, 20)}, "must have shape"),
        ({"lengths": torch.tensor([3])}, "`lengths` has shape"),
        ({"point_mass": torch.ones(2, 4, dtype=torch.bool)}, "`point_mass` has shape"),
    ],
)
def test_wrong_inputs_are_named(changes, message, backend):
    """Bug: a shape that broadcasts into a wrong decision or makes a kernel read past a tensor, an address of another
    device, or a rule name that silently means another."""
    inputs = random_inputs(0, batch=2, num_drafts=3, vocab=5, rule="token")
    with pytest.raises(ValueError, match=message):
        verify(replace(inputs, **changes), backend)
