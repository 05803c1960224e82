"""Tree drafts at temperature 0: one block's marginals give many paths, and one target forward judges them all.

The likeliest nodes of the product of a block's marginals form a tree (DDTree, arXiv 2604.12989): a child is never
likelier than its parent, so best-first growth finds them. Where drafts hear of each other, a node's children have the
law that follows its token. The target sees each node behind its own ancestors, as in SpecInfer (arXiv 2305.09781).
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat
from hf_dflow.generation.policy.lengths import StepCosts

if TYPE_CHECKING:
    from hf_dflow.generation.drafting import Slots

ATTENTION = ("eager", "sdpa")  # what takes a mask of any shape
CHILDREN = 16  # of a node that are looked at
AUTO = "auto"  # the budget that follows from what a step costs
LARGEST_AUTO = 64  # nodes of it, at most


@dataclass(frozen=True)
class DraftTree:
    """Drafts that share prefixes. Node 0 is the anchor; nodes come behind their parents."""

    token_ids: list[int]  # [n] of nodes 1 … n
    parents: list[int]  # [n]
    depths: list[int]  # [n] 1 for a child of the anchor
    children: list[list[int]]  # [n + 1] likeliest first

    @property
    def size(self) -> int:
        """Drafted nodes."""
        return len(self.token_ids)

    def first(self, size: int) -> "DraftTree":
        """The tree of the first `size` nodes; parents come before their children."""
        children = [[child for child in of if child <= size] for of in self.children[: size + 1]]
        return DraftTree(self.token_ids[:size], self.parents[:size], self.depths[:size], children)

    def visible(self, device: torch.device) -> torch.Tensor:
        """`[n + 1, n + 1]` True where a node (row) sees another: its ancestors and itself."""
        seen = torch.eye(self.size + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, 1):
            seen[node] |= seen[parent]
        return seen.to(device)

    def path(self, best_ids: list[int]) -> list[int]:
        """Nodes behind the anchor along which the target agrees, and on from there along the likeliest children.

        What lies behind the agreement was computed on the path's own tokens: its rows are what a rejected chain's are.

        Args:
            best_ids (`list[int]` of length `n + 1`): The target's most likely token behind each node.
        """
        path, node, agrees = [], 0, True
        while self.children[node]:
            agreeing = [child for child in self.children[node] if self.token_ids[child - 1] == best_ids[node]]
            agrees = agrees and bool(agreeing)
            node = agreeing[0] if agrees else self.children[node][0]
            path.append(node)
        return path


# Slot (from 0), the token before it -> the slot's likeliest tokens and their log-probabilities, in falling order.
Expand = Callable[[int, int], tuple[list[int], list[float]]]


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
            if place < len(options[of][1]) and options[of][1][place] > -torch.inf:
                arrived += 1
                heapq.heappush(waiting, (-(scores[of] + options[of][1][place]), arrived, of, place))
    tree = DraftTree(token_ids, parents, depths, children)
    return tree if worth is None else tree.first(worth.best_size)


def expansion(slots: "Slots", vocab_size: int) -> Expand:
    """How a block's slots continue a path: alike behind every token, or as the slot's candidates say."""
    width = min(CHILDREN, vocab_size)
    if slots.candidates is None:
        top = slots.logits[0].log_softmax(dim=-1).topk(width, dim=-1)
        tokens, log_probs = top.indices.tolist(), top.values.tolist()
        return lambda slot, previous: (tokens[slot], log_probs[slot])
    device, candidates = slots.device, slots.candidates

    def expand(slot: int, previous: int) -> tuple[list[int], list[float]]:
        law = candidates.logits(slot, torch.tensor([previous], device=device), vocab_size)[0]
        top = law.log_softmax(dim=-1).topk(width)
        return top.indices.tolist(), top.values.tolist()

    return expand


def tree_inputs(inputs: dict[str, Any], tree: DraftTree, model: Any, anchor_position: int, cached: int) -> None:
    """Turn the inputs of a forward over anchor and nodes as one chain into those of the tree, in place.

    Args:
        inputs (`dict`): With `attention_mask` `[1, T]` or none.
        anchor_position (`int`): Absolute, padding not counted.
        cached (`int`): Rows in the target's cache.
    """
    device = inputs["input_ids"].device
    depths = torch.tensor([0, *tree.depths], device=device)
    inputs["position_ids"] = (anchor_position + depths)[None]
    committed = torch.ones(1, cached, dtype=torch.bool, device=device)
    if inputs.get("attention_mask") is not None:
        committed = inputs["attention_mask"][:, :cached].bool()
    visible = torch.cat([committed.expand(tree.size + 1, -1), tree.visible(device)], dim=1)[None, None]
    blocked = torch.finfo(model.dtype).min
    inputs["attention_mask"] = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, blocked)


def keep_path(cache: Any, cached: int, rows: list[int]) -> None:
    """Leave only `rows` (0 is the anchor's) of what a tree's forward added behind the first `cached` rows."""
    for layer in cache.layers:
        if type(layer).__name__ == "DummyLayer":  # its keys are another layer's
            continue
        index = cached + torch.tensor(rows, device=layer.keys.device)
        for states in (layer.keys, layer.values):
            states[:, :, cached : cached + len(rows)] = states.index_select(2, index)


def check_tree(model: Any, cache: Any, batch_size: int, do_sample: bool, returns_states: bool) -> None:
    """Refuse, before any forward, what a tree cannot be judged on.

    Raises:
        UnsupportedGenerationError: Naming it.
    """
    attention = model.config.get_text_config()._attn_implementation
    reasons = {
        "sampling (a tree has no rule that keeps the law)": do_sample,
        f"{batch_size} sequences at once": batch_size != 1,
        f"attn_implementation '{attention}'": attention not in ATTENTION,
        f"{type(model).__name__} and {type(cache).__name__}, which are not full attention on a dynamic cache": (
            not _compat.holds_holes(model, cache)
        ),
        "output_hidden_states or output_attentions": returns_states,
    }
    found = [name for name, holds in reasons.items() if holds]
    if found:
        raise UnsupportedGenerationError(
            f"tree_budget does not go with {'; '.join(found)}; leave tree_budget out, or decode one sequence greedily "
            "on a target with full attention ('eager' or 'sdpa') and a dynamic cache."
        )
