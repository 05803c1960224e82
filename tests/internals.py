"""What tests build or replace inside hf_dflow/generation, all of it here: a changed inner name is changed once.

Most tests see what a caller sees and need none of this.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList

from hf_dflow.generation import (
    _compat,
    decoder,
    drafting,
    feedback,
    measure,
    mixture,
    pair,
    recurrent,
    selfcheck,
    step,
    verification,
)
from hf_dflow.generation._compat import STATIC_IS_CROPPABLE, capture_features
from hf_dflow.generation.cache import DraftCache, is_croppable
from hf_dflow.generation.configuration import OPTION_NAMES, resolve_options
from hf_dflow.generation.measure import measure_step_costs, step_costs
from hf_dflow.generation.policy.base import FIRST_PAUSE, LONGEST_PAUSE, PATIENCE, BackOff
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.lengths import TRIAL, LengthPlanner
from hf_dflow.generation.policy.trees import Worth, grow
from hf_dflow.generation.processors import POSITION_INDEPENDENT, PURE, PathProcessor
from hf_dflow.generation.recurrent import RecurrentStates, clamping_mixers
from hf_dflow.generation.selfcheck import check_of
from hf_dflow.generation.step import DraftTree, Proposal, Verification, VerifierFeedback
from hf_dflow.generation.strategy import WRAPPED
from hf_dflow.generation.uniforms import Uniforms

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "OPTION_NAMES",
    "PATIENCE",
    "POSITION_INDEPENDENT",
    "PURE",
    "STATIC_IS_CROPPABLE",
    "TRIAL",
    "WRAPPED",
    "BackOff",
    "DraftCache",
    "DraftTree",
    "LengthPlanner",
    "RecurrentStates",
    "StepCosts",
    "Uniforms",
    "Worth",
    "capture_features",
    "check_of",
    "clamping_mixers",
    "grow",
    "is_croppable",
    "measure_step_costs",
    "resolve_options",
    "step_costs",
]

MONITOR_LOGGER = "hf_dflow.generation.policy.monitor"
needs_croppable_static = pytest.mark.skipif(
    not STATIC_IS_CROPPABLE, reason="this transformers cannot crop static caches"
)


# -- data of a step


def proposal(token_ids: torch.Tensor, logits: torch.Tensor, lengths: list[int] | None = None) -> Proposal:
    """Drafts `[B, N]` with the law `[B, N, V]` that they were drawn from; row b counts `lengths[b]` of them."""
    is_finite = torch.ones(len(token_ids), dtype=torch.bool)
    return Proposal(token_ids, logits, is_finite, tuple(lengths or [token_ids.shape[1]] * len(token_ids)))


def one_row(step_data, row: int, length: int):
    """A proposal or a verification of one row, as if it were alone."""
    return step_data.row(row) if isinstance(step_data, Proposal) else step_data.row(row, length)


def verified(accepted: torch.Tensor, bonus_ids: torch.Tensor, raw_logits: torch.Tensor, features: torch.Tensor):
    """What a target forward decided: accepted lengths and bonus tokens `[B]` of logits `[B, N + 1, V]`."""
    is_number = torch.ones(len(accepted), dtype=torch.bool)
    return Verification(accepted, bonus_ids, raw_logits, torch.zeros_like(raw_logits), features, is_number)


def feedback_of(proposal, verification, lengths: list[int], accepted: list[int]) -> VerifierFeedback | None:
    """What the next step gets of this one, logits included."""
    assert list(proposal.lengths) == lengths
    return feedback.make_feedback(proposal, verification, accepted, with_logits=True)


def feedback_with(stale: torch.Tensor, accepted: int = 0) -> VerifierFeedback:
    """Of a step with as many drafts as `stale` `[1, N, V]` has rows; its rejected rows are the first of those."""
    slots = stale.shape[1]
    before = torch.randn(1, 1 + accepted, stale.shape[2], dtype=stale.dtype)  # the anchor's and accepted drafts' rows
    return VerifierFeedback(
        features=torch.zeros(1, slots, 4),
        is_fed=torch.arange(slots)[None] < slots - accepted,
        bonus_ids=torch.tensor([0]),
        rejected_ids=torch.tensor([1]),
        accepted_length=torch.tensor([accepted]),
        accepted=(accepted,),
        lengths=(slots,),
        step_target_logits=torch.cat([before, stale[:, : slots - accepted]], dim=1),
        step_draft_logits=torch.zeros_like(stale),
    )


# -- what a step is made to do


def replace_shift(monkeypatch, replacement: Callable) -> Callable:
    """Line rejected rows up by `replacement(rows, shift, lengths)`; returns what did it before."""
    honest = feedback.shift_left
    for module in (feedback, step):
        monkeypatch.setattr(module, "shift_left", replacement)
    return honest


def watch_drafting_rows(watch: Callable[[object, list[int]], None]) -> None:
    """For the rest of the process: `watch(drafter, rows of the caller's batch)` before each drafter forward."""
    slots = drafting.DraftSession.slots

    def watched(session, rows, *args):
        watch(session.drafter, [row.index for row in rows])
        return slots(session, rows, *args)

    drafting.DraftSession.slots = watched


def watch_chains(monkeypatch, watch: Callable[[Proposal], None]) -> None:
    """`watch(proposal)` of each chain that is drafted."""
    choose = drafting.DraftSession.choose

    def watched(session, *args):
        proposal = choose(session, *args)
        watch(proposal)
        return proposal

    monkeypatch.setattr(drafting.DraftSession, "choose", watched)


def corrupt_the_draft_law(monkeypatch) -> None:
    """Hand verification other logits than the drafts were drawn from."""
    choose = drafting.DraftSession.choose

    def corrupted(session, *args):
        proposal = choose(session, *args)
        return replace(proposal, logits=-proposal.logits)

    monkeypatch.setattr(drafting.DraftSession, "choose", corrupted)


def relay_of_the_same_step(monkeypatch) -> None:
    """Recompute the draft law from the target's rows of the very step that is being verified."""
    slots, decide = drafting.DraftSession.slots, verification.Verifier.__call__
    redraft = []

    def remembered(session, rows, lengths, feedback):
        redraft.append(lambda peek: session.choose(rows, slots(session, rows, lengths, peek), None).logits)
        return slots(session, rows, lengths, feedback)

    def peeking(verifier, rows, forward, uniforms):
        chain = forward.chain
        if chain.num_drafts:
            peek = VerifierFeedback(
                features=forward.features[:, 1:],
                is_fed=torch.ones_like(chain.token_ids, dtype=torch.bool),
                bonus_ids=rows[0].ids[:, -1],
                rejected_ids=chain.token_ids[:, 0],
                accepted_length=torch.zeros_like(rows[0].ids[:, 0]),
                accepted=(0,),
                lengths=chain.lengths,
            )
            forward = replace(forward, chain=replace(chain, logits=redraft[-1](peek)))
        return decide(verifier, rows, forward, uniforms)

    monkeypatch.setattr(drafting.DraftSession, "slots", remembered)
    monkeypatch.setattr(verification.Verifier, "__call__", peeking)


def script_random_numbers(monkeypatch, uniforms: Callable, draw: Callable, verify: Callable) -> None:
    """`uniforms(num_drafts)` hands out numbers, `draw(logits, uniforms)` drafts, `verify(inputs, backend)` decides."""
    monkeypatch.setattr(decoder, "draw_uniforms", lambda generators, lengths, device: Uniforms(*uniforms(max(lengths))))
    monkeypatch.setattr(drafting, "draw_tokens", draw)
    monkeypatch.setattr(verification, "verify_block", verify)


def script_uniforms(monkeypatch, numbers: Iterator[float]) -> None:
    """A sampling call of one row takes its random numbers from `numbers`, in [0, 1): drafts, tests, bonus."""

    def scripted(generators, lengths, device):
        if generators[0] is None:
            return None
        (num_drafts,) = lengths
        drawn = torch.tensor([[next(numbers) for _ in range(2 * num_drafts + 1)]], dtype=torch.float64)
        return Uniforms(drawn[:, :num_drafts], drawn[:, num_drafts:])

    monkeypatch.setattr(decoder, "draw_uniforms", scripted)


# -- lengths and trees


def chosen_lengths(monkeypatch) -> list[int]:
    """Every length that a planner chooses from now on."""
    honest, lengths = LengthPlanner.choose, []

    def choosing(self, confidences):
        lengths.append(honest(self, confidences))
        return lengths[-1]

    monkeypatch.setattr(LengthPlanner, "choose", choosing)
    return lengths


def confidences_of_the_drafts(monkeypatch) -> None:
    """Cut blocks by the probability of what was sampled."""

    def of_the_drafts(block, is_sampled):
        return block.logits.softmax(-1).gather(-1, block.token_ids[..., None])[..., 0]

    monkeypatch.setattr(Proposal, "confidences", of_the_drafts)


def confidences_behind_the_drafts(monkeypatch) -> None:
    """Cut blocks by the slots' laws behind the drafts that were sampled before them."""
    honest = Proposal.confidences
    monkeypatch.setattr(Proposal, "confidences", lambda block, is_sampled: honest(block, False))


def measured_costs(target) -> dict:
    """Costs that were measured for `target`, by drafter and devices."""
    return measure._MEASURED[target]


def one_child_for_each_node(monkeypatch) -> None:
    monkeypatch.setattr(drafting, "CHILDREN", 1)


def forget_checks() -> None:
    """Let every target be measured anew."""
    selfcheck._CHECKED.clear()


# -- caches


def no_holes(monkeypatch) -> None:
    """Let no target hold rows that advance at their own pace."""
    monkeypatch.setattr(_compat, "holds_holes", lambda *_: False)


def holds_holes(target) -> bool:
    """Whether rows of a batch can advance at their own pace in a dynamic cache of `target`."""
    return _compat.holds_holes(target, _compat.DynamicCache(config=target.config.get_text_config()))


def watch_draft_caches(monkeypatch) -> list:
    """Weak references to the draft caches of all calls from now on."""
    caches, init = [], DraftCache.__init__

    def remembered(cache, *args, **kwargs):
        init(cache, *args, **kwargs)
        caches.append(weakref.ref(cache))

    monkeypatch.setattr(DraftCache, "__init__", remembered)
    return caches


def draft_cache_numbers(drafter, features: torch.Tensor, counts: list[int]) -> int:
    """How many numbers a draft cache keeps of context features `[B, T, taps * H]`, of which row b has `counts[b]`."""
    cache = DraftCache(drafter, len(counts))
    cache.append_context(features, [0] * len(counts), counts)
    return sum(part.numel() for pair in cache._buffers for part in pair)


# -- processors, mixture and pairs


def path_processor(*processors) -> PathProcessor:
    return PathProcessor(LogitsProcessorList(processors))


def mixture_looks_at(monkeypatch, num_tokens: int) -> None:
    """Of a rejected row, the mixture looks at its `num_tokens` likeliest."""
    monkeypatch.setattr(mixture, "TOP_K", num_tokens)


def mixture_counts(processor) -> float:
    """How many slots a mixture has counted, beyond what it begins with."""
    return float(processor._counts.sum()) - mixture.NUM_BUCKETS * mixture.PRIOR_COUNT


def mixed_slots(processor) -> int | None:
    """How many slots a mixture mixed in its last step; `None` where no row was rejected before it."""
    return None if processor._mixed is None else int((processor._mixed.weights > 0).sum())


def pair_warnings(monkeypatch) -> list[str]:
    """What the pair check warns of; each text counts once, as `warning_once` has it."""
    texts: list[str] = []
    monkeypatch.setattr(pair.logger, "warning_once", lambda text: text in texts or texts.append(text))
    return texts


def watch_fingerprints(monkeypatch) -> list:
    """The tokenizers whose fingerprints the pair check computes from now on."""
    hashed, compute = [], pair.tokenizer_fingerprint
    monkeypatch.setattr(pair, "tokenizer_fingerprint", lambda tokenizer: hashed.append(tokenizer) or compute(tokenizer))
    return hashed


def may_be_padding(drafter_config, target_config) -> bool:
    return pair._may_be_padding(drafter_config, target_config)


def watch_blocks(monkeypatch) -> list[tuple[int, torch.Tensor]]:
    """Of every block that is drafted for one row from now on: where its anchor stands, and the slots' logits."""
    blocks, block_hidden = [], drafting.DraftSession.block_hidden

    def watched(session, anchor_ids, anchor_positions, feedback):
        hidden = block_hidden(session, anchor_ids, anchor_positions, feedback)
        blocks.append((anchor_positions[0], session.drafter.compute_logits(hidden, session.head)))
        return hidden

    monkeypatch.setattr(drafting.DraftSession, "block_hidden", watched)
    return blocks


def keep_time_steps_clamped(monkeypatch, smallest: float) -> None:
    """Negative control: blocks clamp time steps as prompts do."""
    monkeypatch.setattr(recurrent, "ANY_SIZE", (smallest, float("inf")))
