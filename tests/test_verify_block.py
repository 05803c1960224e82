"""`verify_block` against a scalar oracle, its invariances, and its errors."""

import math
import random

import pytest
import torch

from hf_dflow.kernels import RULES, SparseLogits, verify_block

SAMPLED = ("token", "block")
NAN = float("nan")
CONFIGS = [(rule, law) for rule in SAMPLED for law in ("dense", "sparse", "point_mass", "mixed")]
CONFIGS.append(("greedy", "dense"))


def oracle(target, draft, drafts, uniforms, rule):
    """The three rules of MATH.md, read aloud for one row of plain floats; `target` has one row more than `draft`."""
    n = len(drafts)
    vocab = range(len(target[0]))
    weights = [1.0]
    for i, x in enumerate(drafts):
        p, q = target[i][x], draft[i][x]
        grown = weights[i] * p
        weights.append(0.0 if grown == 0 else 1.0 if q == 0 else min(1.0, grown / q))
    accepted = 0
    if rule == "greedy":
        best = [row.index(max(row)) for row in target]
        while accepted < n and drafts[accepted] == best[accepted]:
            accepted += 1
        return accepted, best[accepted]
    if rule == "token":
        for i, x in enumerate(drafts):
            p, q = target[i][x], draft[i][x]
            if not uniforms[i] < (0.0 if p == 0 else 1.0 if q == 0 else min(1.0, p / q)):
                break
            accepted = i + 1
        weight = 1.0
    else:
        for i in range(1, n + 1):
            if i == n:
                h = weights[n]
            else:
                s = sum(max(weights[i] * target[i][x] - draft[i][x], 0.0) for x in vocab)
                h = 1.0 if s == 0 and weights[i] == 1 else s / (s + 1 - weights[i])
            if uniforms[i - 1] < h:
                accepted = i
        weight = weights[accepted]
    residual = list(target[accepted])
    if accepted < n:
        left_over = [max(weight * target[accepted][x] - draft[accepted][x], 0.0) for x in vocab]
        if sum(left_over) > 0:
            residual = left_over
    threshold = uniforms[-1] * math.fsum(residual)
    running = 0.0
    for x in vocab:
        running += residual[x]
        if running > threshold:
            return accepted, x
    return accepted, max(x for x in vocab if residual[x] > 0)


def random_case(seed: int, batch: int = 8, rule_law: tuple[str, str] = ("token", "dense")):
    """Keyword arguments for `verify_block` in float64, and the dense draft probabilities `[B, N, V]`."""
    rule, law = rule_law
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_drafts, vocab = rng.randint(0, 5), rng.randint(2, 7)
    target_logits = 2 * torch.randn(batch, num_drafts + 1, vocab, dtype=torch.float64)
    noise = rng.choice([0.0, 0.3, 2.0]) * torch.randn(batch, num_drafts, vocab, dtype=torch.float64)
    draft_logits = target_logits[:, :-1] + noise
    banned = torch.rand(batch, num_drafts + 1, vocab) < 0.2  # -inf as left by top-k or a grammar
    banned[..., 0] = False
    target_logits = target_logits.masked_fill(banned, -math.inf)
    if law == "sparse":
        top = draft_logits.topk(rng.randint(1, vocab), dim=-1)
        draft_law: SparseLogits | torch.Tensor | None = SparseLogits(top.indices, top.values)
        draft_probs = torch.zeros_like(draft_logits).scatter(-1, top.indices, top.values.softmax(-1))
    else:
        draft_law, draft_probs = draft_logits, draft_logits.softmax(-1)
    draft_ids = torch.zeros(batch, num_drafts, dtype=torch.long)
    if num_drafts:
        draft_ids = draft_probs.flatten(0, 1).multinomial(1).view(batch, num_drafts)
        off_support = torch.rand(batch, num_drafts) < 0.05
        draft_ids = torch.where(off_support, 0, draft_ids)
    point_mass = None
    if law in ("point_mass", "mixed"):
        where = torch.rand(batch, num_drafts) < (2.0 if law == "point_mass" else 0.5)
        one_hot = torch.zeros_like(draft_probs).scatter(-1, draft_ids[..., None], 1.0)
        draft_probs = torch.where(where[..., None], one_hot, draft_probs)
        point_mass, draft_law = (None, None) if law == "point_mass" else (where, draft_law)
    arguments = {
        "draft_ids": draft_ids,
        "draft_logits": draft_law,
        "target_logits": target_logits,
        "uniforms": torch.rand(batch, num_drafts + 1, dtype=torch.float64),
        "rule": rule,
        "lengths": torch.tensor([rng.randint(0, num_drafts) for _ in range(batch)]),
        "point_mass": point_mass,
    }
    return arguments, draft_probs


def assert_same(left, right):
    assert torch.equal(left.accepted_length, right.accepted_length)
    assert torch.equal(left.bonus_ids, right.bonus_ids)
    torch.testing.assert_close(left.acceptance_probs, right.acceptance_probs, rtol=0, atol=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_decisions_equal_the_scalar_oracle(config):
    """Bug: any slip in batching, row offsets, ragged lengths, off-support drafts or the inverse CDF."""
    for seed in range(40):
        arguments, draft_probs = random_case(seed, rule_law=config)
        decision = verify_block(**arguments)
        target_probs = arguments["target_logits"].softmax(-1)
        for row, length in enumerate(arguments["lengths"].tolist()):
            uniforms = arguments["uniforms"][row].tolist()
            expected = oracle(
                target_probs[row, : length + 1].tolist(),
                draft_probs[row, :length].tolist(),
                arguments["draft_ids"][row, :length].tolist(),
                uniforms[:length] + uniforms[-1:],
                config[0],
            )
            got = (int(decision.accepted_length[row]), int(decision.bonus_ids[row]))
            assert got == expected, f"seed {seed}, row {row}"


@pytest.mark.parametrize("config", CONFIGS)
def test_what_lies_beyond_lengths_is_ignored(config):
    """Bug: NaN or an out-of-range id in an unused slot leaks into the decision or trips an index check."""
    for seed in range(20):
        clean, _ = random_case(seed, rule_law=config)
        _, num_drafts = clean["draft_ids"].shape
        beyond = torch.arange(num_drafts + 1) > clean["lengths"][:, None]  # rows of the target
        unused = beyond[:, 1:]  # slots of the draft
        poisoned = dict(clean)
        poisoned["target_logits"] = clean["target_logits"].masked_fill(beyond[..., None], NAN)
        poisoned["draft_ids"] = clean["draft_ids"].masked_fill(unused, -100)
        law = clean["draft_logits"]
        if isinstance(law, SparseLogits):
            ids, logits = law.ids.masked_fill(unused[..., None], 10**6), law.logits.masked_fill(unused[..., None], NAN)
            poisoned["draft_logits"] = SparseLogits(ids, logits)
        elif law is not None:
            poisoned["draft_logits"] = law.masked_fill(unused[..., None], NAN)
        uniforms = clean["uniforms"].clone()
        uniforms[:, :num_drafts] = uniforms[:, :num_drafts].masked_fill(unused, NAN)
        poisoned["uniforms"] = uniforms
        decision = verify_block(**poisoned)
        assert_same(decision, verify_block(**clean))
        assert (decision.acceptance_probs[unused] == 0).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_do_not_see_each_other(config):
    """Bug (B3): a row's decision changes with its neighbours; also batch 1 squeezed away (A2)."""
    for seed in range(5):
        arguments, _ = random_case(seed, rule_law=config)
        together = verify_block(**arguments)
        for row in range(arguments["draft_ids"].shape[0]):
            alone = {k: v[row : row + 1] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
            law = arguments["draft_logits"]
            if isinstance(law, SparseLogits):
                alone["draft_logits"] = SparseLogits(law.ids[row : row + 1], law.logits[row : row + 1])
            decision = verify_block(**alone)
            assert decision.accepted_length[0] == together.accepted_length[row]
            assert decision.bonus_ids[0] == together.bonus_ids[row]


@pytest.mark.parametrize("rule", RULES)
def test_strides_do_not_matter(rule):
    """Bug: a view (padded vocabulary, transposed batch, expanded draft) read as if contiguous; inputs overwritten."""
    torch.manual_seed(0)
    target_logits = torch.randn(4, 3, 16).transpose(0, 1)[..., :13]  # [3, 4, 13]
    draft_logits = torch.randn(3, 1, 26)[..., ::2].expand(3, 3, 13)
    views = {
        "draft_ids": torch.randint(13, (3, 3)).T,
        "draft_logits": draft_logits,
        "target_logits": target_logits,
        "uniforms": torch.rand(4, 3).T,
    }
    copies = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    assert_same(verify_block(rule=rule, **views), verify_block(rule=rule, **copies))
    assert all(torch.equal(views[name], copies[name]) for name in views)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["dense", "sparse", "none"])
def test_nothing_to_verify(rule, law):
    """Bug: an empty block (N = 0, or lengths = 0) indexes slot -1, or reduces over nothing."""
    target_logits = torch.randn(2, 1, 5)
    sparse = SparseLogits(torch.zeros(2, 0, 2, dtype=torch.long), torch.zeros(2, 0, 2))
    decision = verify_block(
        draft_ids=torch.zeros(2, 0, dtype=torch.long),
        draft_logits={"dense": torch.zeros(2, 0, 5), "sparse": sparse, "none": None}[law],
        target_logits=target_logits,
        uniforms=torch.zeros(2, 1),
        rule=rule,
        return_residual=True,
    )
    assert decision.accepted_length.tolist() == [0, 0] and decision.acceptance_probs.shape == (2, 0)
    assert decision.bonus_ids.tolist() == (target_logits[:, 0].argmax(-1).tolist() if rule == "greedy" else [0, 0])
    assert decision.residual_probs.shape == (2, 5)


def test_greedy_ties_fall_as_in_plain_generation():
    """Bug (A8): casting before the argmax, or another reduction, breaks ties differently from `generate`."""
    target_logits = torch.tensor([[[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]], dtype=torch.bfloat16)
    decision = verify_block(
        draft_ids=torch.tensor([[1]]), draft_logits=None, target_logits=target_logits, uniforms=None, rule="greedy"
    )
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (1, 0)


def test_greedy_with_given_acceptance():
    """Bug: relaxed greedy acceptance that still stops at the first mismatch, or takes the bonus from another row."""
    target_logits = torch.eye(4)[None]  # the choices are 0, 1, 2, 3
    decision = verify_block(
        draft_ids=torch.tensor([[3, 3, 3]]),
        draft_logits=None,
        target_logits=target_logits,
        uniforms=None,
        rule="greedy",
        acceptance_probs=torch.tensor([[1.0, 1.0, 0.0]]),
        return_residual=True,
    )
    assert (decision.accepted_length.item(), decision.bonus_ids.item()) == (2, 2)
    assert decision.residual_probs.tolist() == [[0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("config", CONFIGS)
def test_never_waits_for_the_device(config):
    """Bug: `.item()`, `bool(tensor)`, `nonzero` or a boolean index stalls the GPU; meta tensors refuse them."""
    arguments, _ = random_case(3, rule_law=config)
    arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    law = arguments["draft_logits"]
    if isinstance(law, SparseLogits):
        arguments["draft_logits"] = SparseLogits(law.ids.to("meta"), law.logits.to("meta"))
    decision = verify_block(return_residual=True, **arguments)
    batch, num_drafts = arguments["draft_ids"].shape
    assert decision.accepted_length.shape == decision.bonus_ids.shape == (batch,)
    assert decision.acceptance_probs.shape == (batch, num_drafts)
    assert decision.residual_probs.shape == (batch, arguments["target_logits"].shape[-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "typical"}, "'greedy', 'token', 'block'"),
        ({"rule": "block", "acceptance_probs": torch.ones(2, 3)}, "whole prefixes"),
        ({"uniforms": None}, "needs `uniforms`"),
        ({"uniforms": torch.rand(2, 3)}, r"`uniforms` has shape \(2, 3\) but \(2, 4\)"),
        ({"draft_logits": torch.randn(2, 3, 6)}, "`draft_logits` has shape"),
        ({"target_logits": torch.randn(2, 3, 5)}, "`target_logits` has shape"),
        ({"target_logits": torch.randn(2, 20)}, "must have shape"),
        ({"lengths": torch.tensor([3])}, "`lengths` has shape"),
        (
            {"draft_logits": SparseLogits(torch.zeros(2, 3, 0, dtype=torch.long), torch.zeros(2, 3, 0))},
            "lists no token",
        ),
        ({"draft_logits": SparseLogits(torch.zeros(2, 3, 2, dtype=torch.long), torch.zeros(2, 3, 1))}, "logits` has"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    """Bug: a shape that broadcasts into a wrong decision, or a rule name that silently means another."""
    arguments = {
        "draft_ids": torch.zeros(2, 3, dtype=torch.long),
        "draft_logits": torch.randn(2, 3, 5),
        "target_logits": torch.randn(2, 4, 5),
        "uniforms": torch.rand(2, 4),
        "rule": "token",
    }
    with pytest.raises(ValueError, match=message):
        verify_block(**{**arguments, **changes})
