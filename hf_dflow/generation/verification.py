"""One target forward over anchor and drafts, and what it decides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation.acceptance import AcceptanceContext, AcceptanceProcessor
from hf_dflow.generation.configuration import DFlowOptions
from hf_dflow.generation.drafting import DraftBlock
from hf_dflow.generation.path import PathProcessor
from hf_dflow.kernels import check_backend, verify_block

# (new token ids [1, k], their score rows [1, k, V]) -> whether the sequence ends with the k-th, given that it did not
# end before. Asked once for each token, as plain decoding asks its stopping criteria.
EndsWith = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class Verification:
    """A target forward and its decision. Row i predicts the token after draft i; row 0 is the anchor's.

    With lazy processors `scores` has only the rows that plain decoding would have processed.
    """

    accepted_length: torch.Tensor  # [B] drafts, bonus not counted
    bonus_ids: torch.Tensor  # [B]
    raw_logits: torch.Tensor  # [B, N + 1, V] float32
    scores: torch.Tensor  # [B, up to N + 1, V] float32, processed
    features: torch.Tensor  # [B, rows, taps * target_hidden_size]; rows is N + 1, or the prompt's length at prefill
    is_number: torch.Tensor  # [B] False where sampling would meet NaN
    is_stopped: bool = False  # rows were judged one by one, and the sequence ends with the last accepted draft


class Verifier:
    """Decides under one rule for one call.

    Args:
        rule (`str`): "greedy", "token" or "block".
        path (`PathProcessor`): The call's logits processors.
        processors (`list[AcceptanceProcessor]`): The call's acceptance processors.
        backend (`str`, *optional*, defaults to `"auto"`): Of `verify_block`.
    """

    def __init__(self, rule: str, path: PathProcessor, processors: list[AcceptanceProcessor], backend: str = "auto"):
        self.rule, self.path, self.backend = rule, path, backend
        self.relaxing = [processor for processor in processors if processor.is_lossy]

    def __call__(
        self,
        prefix_ids: torch.Tensor,
        draft: DraftBlock,
        target_logits: torch.Tensor,
        features: torch.Tensor,
        uniforms: torch.Tensor | None,
        ends: EndsWith,
    ) -> Verification:
        """Accept or reject.

        Args:
            prefix_ids (`torch.LongTensor` of shape `(B, T)`): Committed tokens.
            draft (`DraftBlock`): N drafts, 0 at prefill.
            target_logits (`torch.Tensor` of shape `(B, N + 1, V)`): Raw logits of anchor and drafts.
            features (`torch.Tensor` of shape `(B, rows, taps * target_hidden_size)`): Tapped states of all rows.
            uniforms (`torch.Tensor` of shape `(B, N + 1)`, *optional*): Numbers in [0, 1); unused when greedy.
            ends (`EndsWith`): Asked, where rows are judged one by one, whether an accepted draft ends the sequence.
        """
        raw_logits = target_logits.float()  # plain generation compares in float32, whatever the model computes in
        path_ids = torch.cat([prefix_ids, draft.token_ids], dim=1)
        is_stopped = False
        if self.path.is_lazy:
            accepted, bonus, scores, is_stopped = self._one_by_one(path_ids, draft, raw_logits, uniforms, ends)
        else:
            scores = self.path.target(path_ids, raw_logits)
            accepted, bonus = self._decide(draft.token_ids, draft.logits, scores, uniforms)
        return Verification(
            accepted_length=accepted,
            bonus_ids=bonus,
            raw_logits=raw_logits,
            scores=scores,
            features=features,
            is_number=self._is_number(scores, accepted),
            is_stopped=is_stopped,
        )

    def _decide(
        self,
        draft_ids: torch.Tensor,
        draft_logits: torch.Tensor,
        scores: torch.Tensor,
        uniforms: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: dict[str, Any] = {
            "draft_ids": draft_ids,
            "draft_logits": draft_logits,
            "target_logits": scores,
            "uniforms": uniforms,
            "rule": self.rule,
            "backend": self.backend,
        }
        decision = verify_block(**arguments)
        if self.relaxing and draft_ids.shape[1]:
            probs = decision.acceptance_probs
            for processor in self.relaxing:
                probs = processor.adjust_acceptance(AcceptanceContext(draft_ids, scores[:, :-1], draft_logits, probs))
            decision = verify_block(**arguments, acceptance_probs=probs)
        return decision.accepted_length, decision.bonus_ids

    def _one_by_one(
        self,
        path_ids: torch.Tensor,
        draft: DraftBlock,
        raw_logits: torch.Tensor,
        uniforms: torch.Tensor | None,
        ends: EndsWith,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """Process a row only once all drafts before it are accepted: the processors see what plain decoding shows."""
        num_drafts = draft.token_ids.shape[1]
        prefix_length = path_ids.shape[1] - num_drafts
        rows: list[torch.Tensor] = []
        count, is_stopped = 0, False  # drafts accepted so far
        while True:
            rows.append(self.path.target_row(path_ids[:, : prefix_length + count], raw_logits[:, count]))
            judged = slice(count, min(count + 1, num_drafts))  # the next draft, or none behind the last
            row_scores = torch.stack([rows[-1]] * (1 + judged.stop - judged.start), dim=1)
            row_uniforms = None if uniforms is None else torch.cat([uniforms[:, judged], uniforms[:, -1:]], dim=1)
            accepted, bonus = self._decide(
                draft.token_ids[:, judged], draft.logits[:, judged], row_scores, row_uniforms
            )
            if not int(accepted[0]):
                break
            count += 1
            is_stopped = ends(draft.token_ids[:, :count], torch.stack(rows, dim=1))
            if is_stopped:  # a grammar must not be asked what follows the end
                break
        return torch.full_like(accepted, count), bonus, torch.stack(rows, dim=1), is_stopped

    def _is_number(self, scores: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Plain sampling refuses NaN and +inf, plain greedy decoding does not."""
        if self.rule == "greedy":
            return torch.ones_like(accepted, dtype=torch.bool)
        is_judged = torch.arange(scores.shape[1], device=scores.device) <= accepted[:, None]
        top = scores.amax(dim=-1)  # NaN wins a maximum, and a row of -inf has no law
        return (top.isfinite() | ~is_judged).all(dim=-1)


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
