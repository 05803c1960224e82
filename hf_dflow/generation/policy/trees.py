"""Tree drafts at temperature 0: one block's marginals give many paths, and one target forward judges them all.

The likeliest nodes of the product of a block's marginals form a tree (DDTree, arXiv 2604.12989): a child is never
likelier than its parent, so best-first growth finds them. Where each draft conditions on the previous one, a node's
children have the law that follows its token. The target sees each node behind its own ancestors, as in SpecInfer
(arXiv 2305.09781).
"""

import heapq
import math

from hf_dflow.generation.policy.base import DraftPolicy, Expand, HowMuch
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.step import DraftTree

AUTO = "auto"  # the budget that follows from what a step costs
LARGEST_AUTO = 64  # nodes of it, at most
LARGEST_TREE = 512  # nodes of any budget


class Worth:
    """Decides, node by node, where a tree ends: at the size that gives most expected tokens per second.

    Nodes come in falling probability. A path's is the drafter's own, so the size follows from the draft law alone.

    Args:
        costs (`StepCosts`): Of a step with up to so many nodes as it has times of verification.
    """

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self.expected = [1.0]  # tokens of a step with 0, 1, … nodes
        self.best_size, self._best_rate = 1, 0.0  # one at least: what was drafted is paid for

    def ends(self, probability: float) -> bool:
        """Whether no number of further nodes, none likelier than `probability`, would raise the best rate so far."""
        verify, size = self.costs.verify, len(self.expected) - 1
        return all(
            (self.expected[-1] + more * probability) / (self.costs.draft + verify[size + more]) <= self._best_rate
            for more in range(1, len(verify) - size)
        )

    def add(self, probability: float) -> None:
        """One more node."""
        self.expected.append(self.expected[-1] + probability)
        size = len(self.expected) - 1
        rate = self.expected[-1] / (self.costs.draft + self.costs.verify[size])
        if rate > self._best_rate:
            self.best_size, self._best_rate = size, rate


def grow(expand: Expand, anchor_id: int, depth: int, budget: int, worth: Worth | None = None) -> DraftTree:
    """The `budget` likeliest nodes of at most `depth` drafts.

    Args:
        expand (`Expand`): What may follow.
        anchor_id (`int`): The token that all paths follow.
        depth, budget (`int`): Drafts of the longest path, and of all together.
        worth (`Worth`, *optional*): Ends the tree earlier.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    children: list[list[int]] = [[]]
    scores = [0.0]
    options = {0: expand(0, anchor_id)}
    waiting = [(-options[0][1][0], 0, 0, 0)]  # cost, order of arrival, parent, rank among its children
    arrived = 0
    while waiting and len(token_ids) < budget:
        cost, _, parent, rank = heapq.heappop(waiting)
        if worth is not None:
            if worth.ends(math.exp(-cost)):
                break
            worth.add(math.exp(-cost))
        tokens, _ = options[parent]
        token_ids.append(tokens[rank])
        parents.append(parent)
        depths.append(1 if parent == 0 else depths[parent - 1] + 1)
        scores.append(-cost)
        node = len(token_ids)
        children[parent].append(node)
        children.append([])
        wanted = []
        if rank + 1 < len(tokens):
            wanted.append((parent, rank + 1))
        if depths[-1] < depth:
            options[node] = expand(depths[-1], tokens[rank])
            wanted.append((node, 0))
        for of, place in wanted:
            if place < len(options[of][1]) and options[of][1][place] > -math.inf:
                arrived += 1
                heapq.heappush(waiting, (-(scores[of] + options[of][1][place]), arrived, of, place))
    tree = DraftTree(token_ids, parents, depths, children)
    return tree if worth is None else tree.first(worth.best_size)


class TreeDrafts(HowMuch):
    """Verifies a tree of a fixed number of drafts, or of as many as pay.

    Args:
        pausing (`DraftPolicy`): Decides whether a step drafts at all.
        budget (`int`): Drafts, at most.
        costs (`StepCosts`, *optional*): Ends each tree where these say that more drafts do not pay.
    """

    grows_trees = True

    def __init__(self, pausing: DraftPolicy, budget: int, costs: StepCosts | None = None):
        super().__init__(pausing)
        self.budget, self.costs = budget, costs

    def grow(self, expand: Expand, anchor_id: int, depth: int) -> DraftTree:
        worth = None if self.costs is None else Worth(self.costs)
        return grow(expand, anchor_id, depth, self.budget, worth)
