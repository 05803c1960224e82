"""How a tree of drafts grows, what its nodes see, and which path stays."""

import itertools
import math

import pytest
import torch
from internals import DraftTree, StepCosts, Worth, grow


@pytest.mark.parametrize("budget", [1, 4, 12, 40])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_likeliest_nodes_grow(budget, depth):
    """Bug: a child without its parent, a sibling left out, or another order than that of probability."""
    generator = torch.Generator().manual_seed(budget)
    log_probs = torch.randn(3, 4, generator=generator).log_softmax(-1).sort(descending=True).values.tolist()
    tree = grow(lambda slot, previous: ([10, 11, 12, 13], log_probs[slot]), 5, depth, budget)
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(4), repeat=length)]
    scores = {path: sum(log_probs[slot][rank] for slot, rank in enumerate(path)) for path in paths}
    grown = []
    for node in range(1, tree.size + 1):
        path, at = [], node
        while at:
            path.insert(0, tree.token_ids[at - 1] - 10)
            at = tree.parents[at - 1]
        grown.append(tuple(path))
    assert grown == sorted(paths, key=lambda path: -scores[path])[:budget]
    assert tree.depths == [len(path) for path in grown]


def test_children_follow_their_parents_token():
    """Bug: slots that hear of each other expanded behind another path's token."""
    asked = []

    def expand(slot, previous):
        asked.append((slot, previous))
        return [previous + 1, previous + 2], [math.log(0.6), math.log(0.4)]

    tree = grow(expand, 100, 2, 5)
    assert set(asked) <= {(0, 100), (1, 101), (1, 102)}
    assert all(
        token - (100 if parent == 0 else tree.token_ids[parent - 1]) in (1, 2)
        for token, parent in zip(tree.token_ids, tree.parents, strict=True)
    )


@pytest.mark.parametrize("costs", [[1.0] * 65, [1.0 + 0.02 * n for n in range(65)], [1.0 + 0.9 * n for n in range(65)]])
def test_a_tree_ends_where_more_does_not_pay(costs):
    """Bug: an end at the first node that does not pay, past a dear step to a cheap one, or nodes of negative worth."""
    costs = [cost + 0.5 * (index > 3) for index, cost in enumerate(costs)]  # a kernel's tile ends there
    generator = torch.Generator().manual_seed(3)
    log_probs = (2 * torch.randn(5, 4, generator=generator)).log_softmax(-1).sort(descending=True).values.tolist()

    def expand(slot, previous):
        return [10, 11, 12, 13], log_probs[slot]

    whole = grow(expand, 5, 5, 64)
    scores = [0.0]
    for token, parent, depth in zip(whole.token_ids, whole.parents, whole.depths, strict=True):
        scores.append(scores[parent] + log_probs[depth - 1][token - 10])
    expected = list(itertools.accumulate([1.0, *(math.exp(score) for score in scores[1:])]))
    best = max(range(1, 65), key=lambda size: expected[size] / (0.3 + costs[size]))
    tree = grow(expand, 5, 5, 64, Worth(StepCosts(0.3, tuple(costs))))
    assert tree.size == best
    assert tree.token_ids == whole.token_ids[:best] and tree.parents == whole.parents[:best]
    assert all(child <= best for children in tree.children for child in children)
    assert len(tree.children) == best + 1


HAND = DraftTree([7, 8, 9, 6], [0, 0, 1, 3], [1, 1, 2, 3], [[1, 2], [3], [], [4], []])


def test_the_first_nodes_know_no_others():
    """Bug: children behind the cut, which the kept path would follow."""
    first = HAND.first(2)
    assert first == DraftTree([7, 8], [0, 0], [1, 1], [[1, 2], [], []])
    assert first.path([7, 9, 0]) == [1]


def test_a_node_sees_its_ancestors_and_itself():
    """Bug: siblings that see each other, which a wrong draft would then condition."""
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert HAND.visible(torch.device("cpu")).long().tolist() == rows


@pytest.mark.parametrize(
    ("best", "path"),
    [
        ([7, 9, 0, 6, 0], [1, 3, 4]),  # all of it
        ([8, 0, 0, 0, 0], [2]),  # the other branch, which ends
        ([7, 5, 0, 6, 0], [1, 3, 4]),  # fails at the second; goes on along what was drafted there
        ([5, 9, 0, 6, 0], [1, 3, 4]),  # fails at once; agreement further on counts for nothing
    ],
)
def test_the_path_that_stays(best, path):
    """Bug: a path that returns to the likeliest one though the target agreed with another, or stops at a failure."""
    assert HAND.path(best) == path
