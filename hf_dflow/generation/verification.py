"""What a target forward decides: which drafts are accepted, and the bonus token."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hf_dflow.generation.acceptance import AcceptanceContext
from hf_dflow.generation.rows import Row
from hf_dflow.generation.step import Proposal, TargetForward, Verification
from hf_dflow.generation.uniforms import Uniforms
from hf_dflow.kernels import VerifyInputs, verify_block

# (row, new token ids [1, k], their scores [1, k, V]) -> whether the row ends with the k-th, given that it did not end
# before. Asked once for each token, as plain decoding asks its stopping criteria.
EndsWith = Callable[[Row, torch.Tensor, torch.Tensor], bool]


class Verifier:
    """Decides under one rule for one call.

    Args:
        rule (`str`): "greedy", "token" or "block".
        backend (`str`): Of `verify_block`.
        ends (`EndsWith`): Asked, where drafts are judged one by one, whether an accepted draft ends the sequence.
    """

    def __init__(self, rule: str, backend: str, ends: EndsWith):
        self.rule, self.backend, self.ends = rule, backend, ends

    def __call__(self, rows: list[Row], forward: TargetForward, uniforms: Uniforms | None) -> Verification:
        """Accept or reject the drafts of a forward.

        Args:
            rows (`list[Row]`): B rows.
            forward (`TargetForward`): Over anchors and N drafts, or over the prompts.
            uniforms (`Uniforms`, *optional*): For at least N drafts; `None` when greedy.
        """
        raw_logits = forward.logits.float()  # plain decoding compares in float32, whatever the model computes in
        numbers = None if uniforms is None else uniforms.for_drafts(forward.chain.num_drafts)
        stopped: tuple[bool, ...] = ()
        if rows[0].path.is_lazy:
            accepted, bonus, scores, stopped = self._judge_rows(rows, forward.chain, raw_logits, numbers)
        else:
            scores = self._process(rows, forward.chain, raw_logits)
            accepted, bonus = self._decide(rows, forward.chain, scores, numbers)
        return Verification(
            accepted_length=accepted,
            bonus_ids=bonus,
            raw_logits=raw_logits,
            scores=scores,
            features=forward.features,
            is_number=self._is_number(scores, accepted),
            is_stopped=stopped,
        )

    def _process(self, rows: list[Row], chain: Proposal, raw_logits: torch.Tensor) -> torch.Tensor:
        """Scores `[B, N + 1, V]`: each row of logits after the processors, on the prefix that it follows."""
        if rows[0].path.drafts_at_once:  # of one kind for all rows
            return rows[0].path.target(chain.token_ids, raw_logits)
        scores = []
        for index, (row, length) in enumerate(zip(rows, chain.lengths, strict=True)):
            path_ids = torch.cat([row.ids, chain.token_ids[index : index + 1, :length]], dim=1)
            scores.append(row.path.target(path_ids, raw_logits[index : index + 1, : length + 1]))
        return _stack(scores, raw_logits.shape[1])

    def _decide(
        self, rows: list[Row], chain: Proposal, scores: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted lengths `[B]` and bonus tokens `[B]`."""
        inputs = VerifyInputs(
            rule=self.rule,
            draft_ids=chain.token_ids,
            draft_logits=chain.logits,
            target_logits=scores,
            uniforms=uniforms,
            lengths=chain.row_lengths,
        )
        decision = verify_block(inputs, self.backend)
        if chain.num_drafts and any(processor.is_lossy for processor in rows[0].acceptance_processors):
            relaxed = self._relax(rows, chain, scores, decision.acceptance_probs)
            decision = verify_block(replace(inputs, acceptance_probs=relaxed), self.backend)
        return decision.accepted_length, decision.bonus_ids

    def _relax(self, rows: list[Row], chain: Proposal, scores: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Acceptance probabilities `[B, N]` after each row's lossy processors."""
        probs = probs.clone()
        for index, (row, length) in enumerate(zip(rows, chain.lengths, strict=True)):
            only = slice(index, index + 1)
            for processor in row.acceptance_processors if length else []:
                if processor.is_lossy:
                    drafts = chain.row(index)
                    context = AcceptanceContext(
                        drafts.token_ids, scores[only, :length], drafts.logits, probs[only, :length]
                    )
                    probs[only, :length] = processor.adjust_acceptance(context)
        return probs

    def _judge_rows(
        self, rows: list[Row], chain: Proposal, raw_logits: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[bool, ...]]:
        """Judge each row's drafts one after the other."""
        judged = []
        for index, row in enumerate(rows):
            only = slice(index, index + 1)
            row_uniforms = None if uniforms is None else uniforms[only]
            judged.append(self._judge_row(row, chain.row(index), raw_logits[only], row_uniforms))
        accepted, bonus, scores, stopped = zip(*judged, strict=True)
        longest = max(row_scores.shape[1] for row_scores in scores)
        return torch.cat(accepted), torch.cat(bonus), _stack(scores, longest), stopped

    def _judge_row(
        self, row: Row, chain: Proposal, raw_logits: torch.Tensor, uniforms: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Process a row of logits only once all drafts before it are accepted: processors that keep state then see what
        plain decoding shows them."""
        path_ids = torch.cat([row.ids, chain.token_ids], dim=1)
        scores: list[torch.Tensor] = []
        count, is_stopped = 0, False  # drafts accepted so far
        while True:
            scores.append(row.path.target_row(path_ids[:, : row.length + count], raw_logits[:, count]))
            judged = slice(count, min(count + 1, chain.num_drafts))  # the next draft, or none behind the last
            num_judged = judged.stop - judged.start
            draft = Proposal(chain.token_ids[:, judged], chain.logits[:, judged], chain.is_finite, (num_judged,))
            row_scores = torch.stack([scores[-1]] * (1 + num_judged), dim=1)
            numbers = None if uniforms is None else torch.cat([uniforms[:, judged], uniforms[:, -1:]], dim=1)
            accepted, bonus = self._decide([row], draft, row_scores, numbers)
            if not int(accepted[0]):
                break
            count += 1
            is_stopped = self.ends(row, chain.token_ids[:, :count], torch.stack(scores, dim=1))
            if is_stopped:  # a grammar must not be asked what follows the end
                break
        return torch.full_like(accepted, count), bonus, torch.stack(scores, dim=1), is_stopped

    def _is_number(self, scores: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """`[B]`: plain sampling refuses NaN and +inf, plain greedy decoding does not."""
        if self.rule == "greedy":
            return torch.ones_like(accepted, dtype=torch.bool)
        is_judged = torch.arange(scores.shape[1], device=scores.device) <= accepted[:, None]
        top = scores.amax(dim=-1)  # NaN wins a maximum, and a row of -inf has no law
        return (top.isfinite() | ~is_judged).all(dim=-1)


def _stack(scores: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Scores `[1, n, V]` of each row as `[B, width, V]`; what a row lacks is 0 and read by nobody."""
    return torch.cat([torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in scores])
