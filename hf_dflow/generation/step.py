"""The data of one decoding step, in the order in which it comes into being. Imports no neighbour."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class DraftTree:
    """Drafts that share prefixes. Node 0 is the anchor, and a node comes after its parent."""

    token_ids: list[int]  # [n] of nodes 1 … n
    parents: list[int]  # [n]
    depths: list[int]  # [n] 1 for a child of the anchor
    children: list[list[int]]  # [n + 1] likeliest first

    @property
    def size(self) -> int:
        """Drafted nodes."""
        return len(self.token_ids)

    def first(self, size: int) -> "DraftTree":
        """The tree of the first `size` nodes."""
        children = [[child for child in nodes if child <= size] for nodes in self.children[: size + 1]]
        return DraftTree(self.token_ids[:size], self.parents[:size], self.depths[:size], children)

    def visible(self, device: torch.device) -> torch.Tensor:
        """`[n + 1, n + 1]`: True where a node (row) sees another one, which is an ancestor or itself."""
        visible = torch.eye(self.size + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, 1):
            visible[node] |= visible[parent]
        return visible.to(device)

    def path(self, best_ids: list[int]) -> list[int]:
        """The nodes along which the target agrees, continued along the likeliest children.

        The rows behind the agreement were computed on the path's own tokens, so they are what the rejected rows of a
        chain are.

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


@dataclass(frozen=True)
class Proposal:
    """What a step verifies: for each row a chain of drafts, or for a single row a tree (a chain is a tree of one path).

    N is the largest number of drafts that a row has; it is 0 where nothing was drafted.
    """

    token_ids: torch.Tensor  # [B, N]; of a tree its nodes
    logits: torch.Tensor  # [B, N, V] processed, float32 or float64: the law of each draft; of a tree, of each slot
    is_finite: torch.Tensor  # [B] False where the drafter produced NaN or inf; the drafts are then arbitrary
    lengths: tuple[int, ...]  # how many drafts of each row count, on the host; the others are filling
    slot_logits: torch.Tensor | None = None  # [B, N, V] of the slots before any draft of the block was chosen
    tree: DraftTree | None = None

    @property
    def num_drafts(self) -> int:
        """N."""
        return self.token_ids.shape[1]

    @cached_property
    def row_lengths(self) -> torch.Tensor | None:
        """`lengths` `[B]` on the device; `None` where each row has N drafts."""
        if min(self.lengths) == self.num_drafts:
            return None
        return torch.tensor(self.lengths, device=self.token_ids.device)

    def confidences(self, is_sampled: bool) -> torch.Tensor:
        """`[B, N]`: the drafter's probability of each slot's most likely token.

        For sampled drafts it is that of the slots before any draft was chosen, so that a length which follows from it
        does not depend on the drafts.
        """
        logits = self.slot_logits if is_sampled and self.slot_logits is not None else self.logits
        return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()

    def cut(self, lengths: list[int]) -> "Proposal":
        """Only the first `lengths[b]` drafts of each row."""
        longest = max(lengths)
        return Proposal(self.token_ids[:, :longest], self.logits[:, :longest], self.is_finite, tuple(lengths))

    def row(self, row: int) -> "Proposal":
        """The proposal of one row, as if it were alone."""
        only, length = slice(row, row + 1), self.lengths[row]
        return Proposal(self.token_ids[only, :length], self.logits[only, :length], self.is_finite[only], (length,))


@dataclass(frozen=True)
class TargetForward:
    """A target forward over the prompts, or over the anchors and what was proposed behind them.

    Row i of the logits predicts the token after draft i; row 0 is the anchor's, or the prompt's last token's.
    """

    outputs: Any  # of the model
    logits: torch.Tensor  # [B, N + 1, V] raw
    features: torch.Tensor  # [B, rows, taps * target_hidden_size]; rows is N + 1, or the prompt's length at prefill
    chain: Proposal  # what is judged: the proposal itself, or the path of its tree that stays


@dataclass(frozen=True)
class Verification:
    """What a target forward decided. What lies behind the drafts of a row that has fewer than N means nothing."""

    accepted_length: torch.Tensor  # [B] drafts, the bonus not counted
    bonus_ids: torch.Tensor  # [B]
    raw_logits: torch.Tensor  # [B, N + 1, V] float32
    scores: torch.Tensor  # [B, up to N + 1, V] float32, processed; row by row only as far as plain decoding processes
    features: torch.Tensor  # [B, rows, taps * target_hidden_size]
    is_number: torch.Tensor  # [B] False where sampling would meet NaN
    is_stopped: tuple[
        bool, ...
    ] = ()  # [B] row by row: the last accepted draft ends the sequence; empty where not asked

    def row(self, row: int, length: int) -> "Verification":
        """The verification of one row with its `length` drafts, as if it were alone."""
        only = slice(row, row + 1)
        is_prefill = self.features.shape[1] != self.raw_logits.shape[1]
        return Verification(
            accepted_length=self.accepted_length[only],
            bonus_ids=self.bonus_ids[only],
            raw_logits=self.raw_logits[only, : length + 1],
            scores=self.scores[only, : length + 1],
            features=self.features[only] if is_prefill else self.features[only, : length + 1],
            is_number=self.is_number[only],
            is_stopped=self.is_stopped[only],
        )


@dataclass(frozen=True)
class Emission:
    """What enters one row's output."""

    new_ids: torch.Tensor  # [1, n]
    tokens: list[int]  # the same on the host
    accepted: int  # how many of them are drafts
    is_last: bool  # the sequence ends here

    @property
    def count(self) -> int:
        """Emitted tokens."""
        return len(self.tokens)

    def offered(self, proposal: Proposal, row: int) -> int:
        """How many of a row's drafts were judged: where the sequence ends, none behind its end."""
        if not self.is_last:
            return proposal.lengths[row]
        if proposal.tree is not None:
            return sum(depth <= self.count for depth in proposal.tree.depths)
        return min(proposal.lengths[row], self.count)


@dataclass(frozen=True)
class VerifierFeedback:
    """What the target computed on rejected drafts, lined up with the slots of the next block.

    Target row j predicts position j + 1, a slot predicts its own position, and the next anchor sits at position a + 1
    behind `a` accepted drafts. So rejected row j (j = a + 1 … N) feeds slot j - a, and slots 1 … N - a are fed.
    """

    features: torch.Tensor  # [B, N, taps * target_hidden_size]; entry i feeds slot i + 1
    is_fed: torch.Tensor  # [B, N]
    bonus_ids: torch.Tensor  # [B] the next anchors
    rejected_ids: torch.Tensor  # [B] the first rejected draft; meaningless where nothing is fed
    accepted_length: torch.Tensor  # [B]
    accepted: tuple[int, ...]  # the same on the host
    lengths: tuple[int, ...]  # drafts of each row in that step, at most N, on the host
    step_target_logits: torch.Tensor | None = None  # [B, N + 1, V] raw, as the step left them; only for who reads them
    step_draft_logits: torch.Tensor | None = None  # [B, N, V] processed, likewise

    @cached_property
    def target_logits(self) -> torch.Tensor | None:
        """`[B, N, V]`, raw, of the rejected rows: computed behind a wrong prefix. `None` where nobody reads them."""
        if self.step_target_logits is None:
            return None
        return shift_left(self.step_target_logits[:, 1:], self.accepted_length, self._row_lengths)[0]

    @cached_property
    def draft_logits(self) -> torch.Tensor | None:
        """`[B, N, V]`: the draft law of the slots' positions one step ago."""
        if self.step_draft_logits is None:
            return None
        # Draft i predicted position i; slot s of the next block sits at position a + 1 + s.
        return shift_left(self.step_draft_logits, self.accepted_length + 1, self._row_lengths)[0]

    @property
    def fed_logits(self) -> torch.Tensor | None:
        """`[1, N - a, V]`: those of `target_logits` that feed slots, without a copy. Only for a single row.

        Raises:
            ValueError: There are several rows.
        """
        if self.step_target_logits is None:
            return None
        if len(self.lengths) != 1:
            raise ValueError(
                f"fed_logits of {len(self.lengths)} rows: each feeds its own number; use row(i).fed_logits"
            )
        return self.step_target_logits[:, 1 + self.accepted[0] : 1 + self.lengths[0]]

    def row(self, row: int) -> "VerifierFeedback | None":
        """The feedback of one row, as if it were alone; `None` where it drafted nothing."""
        if not self.lengths[row]:
            return None
        only, length = slice(row, row + 1), self.lengths[row]
        target_logits, draft_logits = self.step_target_logits, self.step_draft_logits
        return VerifierFeedback(
            features=self.features[only, :length],
            is_fed=self.is_fed[only, :length],
            bonus_ids=self.bonus_ids[only],
            rejected_ids=self.rejected_ids[only],
            accepted_length=self.accepted_length[only],
            accepted=self.accepted[only],
            lengths=(length,),
            step_target_logits=None if target_logits is None else target_logits[only, : length + 1],
            step_draft_logits=None if draft_logits is None else draft_logits[only, :length],
        )

    def select(self, rows: torch.Tensor, kept: list[int]) -> "VerifierFeedback":
        """Only the rows `kept`, given on the device as well."""
        target_logits, draft_logits = self.step_target_logits, self.step_draft_logits
        return VerifierFeedback(
            features=self.features[rows.to(self.features.device)],
            is_fed=self.is_fed[rows],
            bonus_ids=self.bonus_ids[rows],
            rejected_ids=self.rejected_ids[rows],
            accepted_length=self.accepted_length[rows],
            accepted=tuple(self.accepted[row] for row in kept),
            lengths=tuple(self.lengths[row] for row in kept),
            step_target_logits=None if target_logits is None else target_logits[rows],
            step_draft_logits=None if draft_logits is None else draft_logits[rows],
        )

    @property
    def _row_lengths(self) -> torch.Tensor | None:
        if min(self.lengths) == self.is_fed.shape[1]:
            return None
        return torch.tensor(self.lengths, device=self.is_fed.device)


def shift_left(
    rows: torch.Tensor, shift: torch.Tensor, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move row `shift[b] + i` of each batch entry to index `i`.

    Args:
        rows (`torch.Tensor` of shape `(B, T, ...)`): What to move.
        shift (`torch.LongTensor` of shape `(B,)`): By how much.
        lengths (`torch.LongTensor` of shape `(B,)`, *optional*, defaults to T): How many rows each entry has.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The moved rows, same shape, and `(B, T)` which of them exist.
    """
    source = shift[:, None] + torch.arange(rows.shape[1], device=rows.device)
    if lengths is None:
        exists, index = source < rows.shape[1], source.clamp(max=rows.shape[1] - 1)
    else:
        exists, index = source < lengths[:, None], source.clamp(max=lengths[:, None] - 1).clamp(min=0)
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], index], exists
