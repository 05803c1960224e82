"""One target forward over anchor and drafts, and what it decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.acceptance import AcceptanceContext
from hf_dflow.generation.configuration import DFlowOptions
from hf_dflow.generation.drafting import DraftBlock
from hf_dflow.generation.path import PathProcessor
from hf_dflow.kernels import check_backend, verify_block

if TYPE_CHECKING:
    from hf_dflow.generation.rows import Row

# (row, new token ids [1, k], their score rows [1, k, V]) -> whether the row ends with the k-th, given that it did not
# end before. Asked once for each token, as plain decoding asks its stopping criteria.
EndsWith = Callable[["Row", torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class Verification:
    """A target forward and its decision. Row i predicts the token after draft i; row 0 is the anchor's.

    With lazy processors `scores` has only the rows that plain decoding would have processed. Where a row of the batch
    verifies fewer drafts than N, what lies behind them means nothing.
    """

    accepted_length: torch.Tensor  # [B] drafts, bonus not counted
    bonus_ids: torch.Tensor  # [B]
    raw_logits: torch.Tensor  # [B, N + 1, V] float32
    scores: torch.Tensor  # [B, up to N + 1, V] float32, processed
    features: torch.Tensor  # [B, rows, taps * target_hidden_size]; rows is N + 1, or the prompt's length at prefill
    is_number: torch.Tensor  # [B] False where sampling would meet NaN
    is_stopped: tuple[bool, ...] = ()  # [B] judged one by one, it ends with the last accepted draft; empty: none does

    def row(self, row: int, length: int) -> "Verification":
        """The verification of one row, as if it were alone, with its `length` drafts."""
        one = slice(row, row + 1)
        return Verification(
            accepted_length=self.accepted_length[one],
            bonus_ids=self.bonus_ids[one],
            raw_logits=self.raw_logits[one, : length + 1],
            scores=self.scores[one, : length + 1],
            features=self.features[one, : length + 1],
            is_number=self.is_number[one],
            is_stopped=self.is_stopped[one],
        )


class Verifier:
    """Decides under one rule for one call.

    Args:
        rule (`str`): "greedy", "token" or "block".
        backend (`str`, *optional*, defaults to `"auto"`): Of `verify_block`.
    """

    def __init__(self, rule: str, backend: str = "auto"):
        self.rule, self.backend = rule, backend

    def __call__(
        self,
        rows: "list[Row]",
        lengths: list[int],
        draft: DraftBlock,
        target_logits: torch.Tensor,
        features: torch.Tensor,
        uniforms: torch.Tensor | None,
        ends: EndsWith,
    ) -> Verification:
        """Accept or reject.

        Args:
            rows (`list[Row]`): B rows.
            lengths (`list[int]`): How many drafts each row verifies, at most N.
            draft (`DraftBlock`): N drafts, 0 at prefill.
            target_logits (`torch.Tensor` of shape `(B, N + 1, V)`): Raw logits of anchor and drafts.
            features (`torch.Tensor` of shape `(B, rows, taps * target_hidden_size)`): Tapped states of all rows.
            uniforms (`torch.Tensor` of shape `(B, N + 1)`, *optional*): Numbers in [0, 1); unused when greedy.
            ends (`EndsWith`): Asked, where rows are judged one by one, whether an accepted draft ends the sequence.
        """
        raw_logits = target_logits.float()  # plain generation compares in float32, whatever the model computes in
        stopped: tuple[bool, ...] = ()
        if rows[0].path.is_lazy:
            accepted, bonus, scores, stopped = self._one_by_one(rows, lengths, draft, raw_logits, uniforms, ends)
        else:
            scores = self._process(rows, lengths, draft, raw_logits)
            accepted, bonus = self._decide(rows, lengths, draft, scores, uniforms)
        return Verification(
            accepted_length=accepted,
            bonus_ids=bonus,
            raw_logits=raw_logits,
            scores=scores,
            features=features,
            is_number=self._is_number(scores, accepted),
            is_stopped=stopped,
        )

    def _process(
        self, rows: "list[Row]", lengths: list[int], draft: DraftBlock, raw_logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores `[B, N + 1, V]`: each row of logits after the processors, on the prefix it follows."""
        if rows[0].path.drafts_at_once:  # of one kind for all rows
            return rows[0].path.target(draft.token_ids, raw_logits)
        scores = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            path_ids = torch.cat([row.ids, draft.token_ids[i : i + 1, :length]], dim=1)
            scores.append(row.path.target(path_ids, raw_logits[i : i + 1, : length + 1]))
        return _stack(scores, raw_logits.shape[1])

    def _decide(
        self,
        rows: "list[Row]",
        lengths: list[int],
        draft: DraftBlock,
        scores: torch.Tensor,
        uniforms: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: dict[str, Any] = {
            "draft_ids": draft.token_ids,
            "draft_logits": draft.logits,
            "target_logits": scores,
            "uniforms": uniforms,
            "rule": self.rule,
            "backend": self.backend,
            "lengths": draft.lengths,
        }
        decision = verify_block(**arguments)
        if draft.token_ids.shape[1] and any(one.is_lossy for one in rows[0].acceptance_processors):
            probs = decision.acceptance_probs.clone()
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                own = draft.row(i, length)
                for processor in row.acceptance_processors if length else []:
                    if processor.is_lossy:
                        context = AcceptanceContext(
                            own.token_ids, scores[i : i + 1, :length], own.logits, probs[i : i + 1, :length]
                        )
                        probs[i : i + 1, :length] = processor.adjust_acceptance(context)
            decision = verify_block(**arguments, acceptance_probs=probs)
        return decision.accepted_length, decision.bonus_ids

    def _one_by_one(
        self,
        rows: "list[Row]",
        lengths: list[int],
        draft: DraftBlock,
        raw_logits: torch.Tensor,
        uniforms: torch.Tensor | None,
        ends: EndsWith,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[bool, ...]]:
        """Judge each row's drafts one after the other."""
        judged = []
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            one = slice(i, i + 1)
            row_uniforms = None if uniforms is None else uniforms[one]
            judged.append(self._judge(row, draft.row(i, length), raw_logits[one], row_uniforms, ends))
        accepted, bonus, scores, stopped = zip(*judged, strict=True)
        longest = max(row_scores.shape[1] for row_scores in scores)
        return torch.cat(accepted), torch.cat(bonus), _stack(scores, longest), stopped

    def _judge(
        self, row: "Row", draft: DraftBlock, raw_logits: torch.Tensor, uniforms: torch.Tensor | None, ends: EndsWith
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Process a row only once all drafts before it are accepted: the processors see what plain decoding shows."""
        num_drafts = draft.token_ids.shape[1]
        path_ids = torch.cat([row.ids, draft.token_ids], dim=1)
        scores: list[torch.Tensor] = []
        count, is_stopped = 0, False  # drafts accepted so far
        while True:
            scores.append(row.path.target_row(path_ids[:, : row.length + count], raw_logits[:, count]))
            judged = slice(count, min(count + 1, num_drafts))  # the next draft, or none behind the last
            next_draft = DraftBlock(draft.token_ids[:, judged], draft.logits[:, judged], draft.is_finite)
            num_judged = judged.stop - judged.start
            row_scores = torch.stack([scores[-1]] * (1 + num_judged), dim=1)
            row_uniforms = None if uniforms is None else torch.cat([uniforms[:, judged], uniforms[:, -1:]], dim=1)
            accepted, bonus = self._decide([row], [num_judged], next_draft, row_scores, row_uniforms)
            if not int(accepted[0]):
                break
            count += 1
            is_stopped = ends(row, draft.token_ids[:, :count], torch.stack(scores, dim=1))
            if is_stopped:  # a grammar must not be asked what follows the end
                break
        return torch.full_like(accepted, count), bonus, torch.stack(scores, dim=1), is_stopped

    def _is_number(self, scores: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Plain sampling refuses NaN and +inf, plain greedy decoding does not."""
        if self.rule == "greedy":
            return torch.ones_like(accepted, dtype=torch.bool)
        is_judged = torch.arange(scores.shape[1], device=scores.device) <= accepted[:, None]
        top = scores.amax(dim=-1)  # NaN wins a maximum, and a row of -inf has no law
        return (top.isfinite() | ~is_judged).all(dim=-1)


def _stack(scores: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Scores `[1, n, V]` of each row as `[B, width, V]`; what a row lacks is 0 and read by nobody."""
    return torch.cat([torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in scores])


def choose_rule(do_sample: bool, options: DFlowOptions, path: PathProcessor) -> str:
    """The verification rule of a call.

    Raises:
        UnsupportedGenerationError: Block verification was asked for, which processors of unknown kind do not survive.
    """
    if not do_sample:
        return "greedy"
    if path.is_lazy and options.verification == "block":
        raise UnsupportedGenerationError(
            f"verification='block' judges all rows at once, which {', '.join(path.unknown)} may not survive (it is not "
            "known to be a pure function); use verification='token'."
        )
    needs_token = path.is_lazy or any(processor.is_lossy for processor in options.all_processors)
    return options.verification or ("token" if needs_token else "block")


def choose_backend(options: DFlowOptions, device: torch.device) -> str:
    """What verifies the blocks of a call whose target is on `device`.

    Raises:
        UnsupportedGenerationError: Triton was asked for and cannot run there.
    """
    backend = options.kernel_backend or "auto"
    try:
        check_backend(backend, device)
    except ValueError as error:
        raise UnsupportedGenerationError(f"kernel_backend='{backend}': {error}") from error
    return backend
