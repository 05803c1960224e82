"""DFlowDecoder: the loop. What each line does lives in the module that it calls."""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import _compat, checks
from hf_dflow.generation.configuration import OPTION_NAMES, resolve_options
from hf_dflow.generation.drafting import DraftSession
from hf_dflow.generation.feedback import make_feedback
from hf_dflow.generation.output import GenerateDFlowOutput, assemble
from hf_dflow.generation.plan import CallPlan, make_plan
from hf_dflow.generation.policy.base import PATIENCE
from hf_dflow.generation.rows import DecodeState, Row
from hf_dflow.generation.step import Emission, Proposal, TargetForward, Verification, VerifierFeedback
from hf_dflow.generation.target import TargetSession
from hf_dflow.generation.uniforms import Uniforms, draw_uniforms
from hf_dflow.generation.verification import Verifier
from hf_dflow.logs import get_logger
from hf_dflow.model.drafter import DFlowDrafter

logger = get_logger(__name__)


class DFlowDecoder:
    """Block-diffusion speculative decoding with verifier feedback, usable as `generate(custom_generate=...)`.

    `model.generate(..., assistant_model=drafter, speculation_type="dflow")` runs the same object. A callable given to
    `custom_generate` receives no streamer and no options, so they are bound here. The decoder holds no state between
    calls.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        streamer (`BaseStreamer`, *optional*): Gets the prompt, then committed tokens one by one. One sequence only.
        options: Fields of [`DFlowGenerationConfig`]; they win over its values.
    """

    def __init__(self, drafter: DFlowDrafter, streamer=None, **options):
        unknown = set(options) - set(OPTION_NAMES)
        if unknown:
            allowed = ", ".join(OPTION_NAMES)
            raise TypeError(f"DFlowDecoder got unknown options {sorted(unknown)}; allowed: {allowed}")
        resolve_options(drafter, GenerationConfig(), options)  # a bad value is refused here, not at the first call
        self.drafter, self.streamer, self.options = drafter, streamer, options

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        synced_gpus: bool = False,
        streamer=None,
        tokenizer=None,
        **model_kwargs,
    ) -> GenerateDFlowOutput | torch.Tensor:
        """Decode; arguments are what `generate` hands to a decoding method.

        Returns:
            [`GenerateDFlowOutput`] with `return_dict_in_generate=True`, else `torch.LongTensor` of shape `(batch, T)`.

        Raises:
            UnsupportedGenerationError, PairMismatchError: Before any forward.
        """
        if generation_config is None:
            raise TypeError("DFlowDecoder is called by generate(custom_generate=DFlowDecoder(drafter)), not by hand.")
        if synced_gpus:
            raise UnsupportedGenerationError(f"{checks.FLAG} does not support synced_gpus=True; set it to False.")
        for name in _compat.BATCHED:  # a spread target takes them from anywhere; the rows are where the ids are
            if isinstance(model_kwargs.get(name), torch.Tensor):
                model_kwargs[name] = model_kwargs[name].to(input_ids.device)
        plan = make_plan(
            self.drafter,
            self.options,
            model=model,
            input_ids=input_ids,
            processors=logits_processor or LogitsProcessorList(),
            criteria=stopping_criteria or StoppingCriteriaList(),
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            streamer=streamer or self.streamer,
            tokenizer=tokenizer,
        )
        rows = plan.make_rows(input_ids)
        if streamer is None and self.streamer is not None:  # generate itself puts the prompt into its own streamer
            self.streamer.put(input_ids.cpu())
        return self._decode(plan, rows, model_kwargs)

    def _decode(
        self, plan: CallPlan, rows: list[Row], model_kwargs: dict[str, Any]
    ) -> GenerateDFlowOutput | torch.Tensor:
        """Decode all rows together where the target allows it, else one after the other.

        Either way a row's text, statistics and random numbers are those of a call for it alone.
        """
        cache, warn_once = _compat.get_cache(model_kwargs), WarnOnce()
        together = len(rows) == 1 or plan.row_by_row is None
        if not together:
            checks.check_rows_alone(plan.model, model_kwargs)
            logger.warning_once(
                f"{type(plan.model).__name__} with {type(cache).__name__} decodes a batch row by row: its rows cannot "
                "advance at their own pace in one cache."
                + (f" With a masked hole before them, {plan.row_by_row}." if plan.row_by_row else "")
            )
        loops = []
        for group in [rows] if together else [[row] for row in rows]:
            kwargs = model_kwargs if together else _inputs_of(group[0].index, plan, model_kwargs)
            loops.append(BlockLoop(plan, group, kwargs, warn_once))
            loops[-1].run()
        return assemble(
            plan,
            rows,
            loops[0].target.cache if together else None,
            num_target_forwards=sum(loop.target.num_forwards for loop in loops),
            num_draft_forwards=sum(loop.state.num_draft_forwards for loop in loops),
        )


class BlockLoop:
    """Decodes rows together, each to its end.

    Args:
        plan (`CallPlan`): Of the call.
        rows (`list[Row]`): Decoded in place.
        model_kwargs (`dict`): What the target's forward gets for these rows.
        warn_once (`WarnOnce`): Of the call.
    """

    def __init__(self, plan: CallPlan, rows: list[Row], model_kwargs: dict[str, Any], warn_once: "WarnOnce"):
        self.plan, self.warn_once = plan, warn_once
        self.state = DecodeState(list(rows))
        self.target = TargetSession(plan, model_kwargs)
        head = plan.model.get_output_embeddings()
        self.draft = DraftSession(
            plan.drafter,
            plan.model.get_input_embeddings(),
            head,
            vocab_size=_compat.logits_width(plan.model, head),
            use_relay=bool(plan.options.use_relay),
            use_correction=bool(plan.options.use_correction),
            device=plan.device,
            batch_size=len(rows),
        )
        self.verify = Verifier(plan.rule, plan.backend, plan.stop.ends)
        self.monitor = plan.options.monitor

    def run(self) -> None:
        """Decode. The cache, which may be the caller's, holds committed tokens only afterwards, also after an error."""
        if self.target.cached_rows:
            logger.warning_once(  # without the number, so that the turns of a conversation do not repeat it
                "The target cache already holds tokens; their states are gone, so drafting starts with the context "
                "that is computed from here on."
            )
        try:
            while self.state.rows:
                self._step()
        finally:
            self.target.close()
        if self.plan.streamer is not None:
            self.plan.streamer.end()

    def _step(self) -> None:
        state, rows = self.state, self.state.rows
        started = self._clock()
        limits = self._limits()
        uniforms = draw_uniforms([row.generator for row in rows], limits, self.plan.device)
        # 1. the first step drafts nothing: its target forward is the prefill
        # 2. draft: anchor, context features and feedback become a proposal
        proposal = self._propose(limits, uniforms)
        # 3. verify it with one target forward
        forward = self.target.forward(rows, proposal)
        verification = self.verify(rows, forward, uniforms)
        # 4. clip what would be emitted, before any state changes
        emissions = self._clip(forward.chain, verification)
        # 5. commit tokens, caches and context features
        self._commit(forward, verification, emissions)
        # 6. turn the verification into feedback, and let processors learn
        state.feedback = self._feed_back(forward.chain, verification, emissions)
        # 7. record, stream, learn; rows that have ended leave
        self._record(proposal, forward.chain, emissions, started)
        self._drop_finished()

    # -- the lines of a step

    def _clock(self) -> float | None:
        """When a step began, for a monitor; the prefill is not one of its steps."""
        return self.monitor.monitor.clock() if self.monitor is not None and self.target.has_prefilled else None

    def _limits(self) -> list[int]:
        """How many drafts each row may verify: none at prefill, and none that its length limit would cut anyway."""
        if not self.target.has_prefilled:
            return [0] * len(self.state.rows)
        return [self._limit(row) for row in self.state.rows]

    def _limit(self, row: Row) -> int:
        left = self.plan.stop.max_length - row.length - 1
        limit = min(self.plan.options.num_draft_tokens or 0, left, self.target.room_behind(row))
        if limit <= 0 or row.policy.is_off:
            return 0
        if not self.draft.has_room(row.next_position):
            longest = self.plan.drafter.config.max_position_embeddings
            self.warn_once(
                f"The sequence passes the drafter's max_position_embeddings of {longest}; decoding continues without "
                "drafts."
            )
            row.policy.is_off = True
        return limit if row.policy.may_draft() else 0

    def _propose(self, limits: list[int], uniforms: Uniforms | None) -> Proposal:
        rows = self.state.rows
        if not max(limits):
            return self.draft.empty(len(rows))
        self.state.num_draft_forwards += 1
        slots = self.draft.slots(rows, limits, self.state.feedback)
        policy = rows[0].policy  # of one kind for all rows
        if policy.grows_trees:
            return slots.as_tree(policy.grow(slots.expansion(), int(rows[0].ids[0, -1]), limits[0]))
        proposal = self.draft.choose(rows, slots, None if uniforms is None else uniforms.draft)
        if not policy.reads_confidences:
            return proposal
        confidences = proposal.confidences(is_sampled=self.plan.do_sample).tolist()
        lengths = [
            row.policy.num_verified(values[:limit]) if limit else 0
            for row, limit, values in zip(rows, limits, confidences, strict=True)
        ]
        return proposal.cut(lengths)

    def _clip(self, chain: Proposal, verification: Verification) -> list[Emission]:
        """Each row's new tokens, cut where its sequence ends.

        The only wait for the device in a step: everything that the host must know arrives in one tensor.
        """
        columns = [verification.accepted_length, verification.bonus_ids, chain.is_finite, verification.is_number]
        packed = torch.cat([torch.stack([column.long() for column in columns], dim=1), chain.token_ids], dim=1)
        emissions = []
        for index, (row, numbers) in enumerate(zip(self.state.rows, packed.tolist(), strict=True)):
            accepted, bonus, is_finite, is_number, *draft_tokens = numbers
            if not is_number:
                raise RuntimeError(
                    "The target's probabilities contain NaN or inf, so nothing can be sampled; plain sampling raises "
                    "here too. remove_invalid_values=True replaces them."
                )
            if not is_finite and chain.lengths[index]:
                self.warn_once(
                    f"The drafter produced non-finite values (dtype {self.plan.drafter.dtype}); decoding continues "
                    "without drafts. A wider dtype, bfloat16 or float32, usually mends it."
                )
                row.policy.is_off = True
            new_tokens = [*draft_tokens[:accepted], bonus]
            emissions.append(self.plan.stop.clip(index, row, new_tokens, chain.token_ids, verification))
        return emissions

    def _commit(self, forward: TargetForward, verification: Verification, emissions: list[Emission]) -> None:
        """Append tokens, keep the target's rows before the new anchors, hand their features to the drafter."""
        rows, target = self.state.rows, self.target
        is_prefill = not target.has_prefilled
        features, counts = verification.features, [emission.count for emission in emissions]
        if is_prefill:
            features, counts, first_positions = target.prompt_context(features)
            for row, position in zip(rows, first_positions, strict=True):
                row.next_position = position
        for index, (row, emission) in enumerate(zip(rows, emissions, strict=True)):
            row.records.add(
                index,
                emission.count,
                verification=verification,
                forward=forward,
                is_prefill=is_prefill,
                columns=target.columns,
                cached_tokens=target.cached_tokens(row),
            )
        target.keep(rows, forward, emissions)
        is_drafting = [
            not (row.policy.is_off or emission.is_last) for row, emission in zip(rows, emissions, strict=True)
        ]
        self.draft.extend_context(
            features[:, : max(counts)],
            [row.next_position for row in rows],
            [count if drafts else 0 for count, drafts in zip(counts, is_drafting, strict=True)],
        )
        for row, emission, count in zip(rows, emissions, counts, strict=True):
            row.next_position += count
            row.ids = torch.cat([row.ids, emission.new_ids.to(row.ids.device)], dim=1)
            row.is_finished = emission.is_last

    def _feed_back(
        self, chain: Proposal, verification: Verification, emissions: list[Emission]
    ) -> VerifierFeedback | None:
        rows, reads_logits = self.state.rows, bool(self.plan.options.all_processors)
        is_read = any(not (row.policy.is_off or row.is_finished) for row in rows)
        for index, row in enumerate(rows):
            if row.acceptance_processors:
                drafts, judged = chain.row(index), verification.row(index, chain.lengths[index])
                for processor in row.acceptance_processors:
                    processor.observe(drafts, judged)
        if not is_read or not (self.draft.use_relay or reads_logits):
            return None
        accepted = [emission.accepted for emission in emissions]
        return make_feedback(chain, verification, accepted, with_logits=reads_logits)

    def _record(self, proposal: Proposal, chain: Proposal, emissions: list[Emission], started: float | None) -> None:
        if self.monitor is not None and started is not None:
            seconds = self.monitor.monitor.clock() - started  # without what a streamer takes
            self.monitor.end_step(
                [emission.offered(proposal, index) for index, emission in enumerate(emissions)],
                [emission.accepted for emission in emissions],
                seconds,
                emitted=[emission.count for emission in emissions],
            )
        for index, (row, emission) in enumerate(zip(self.state.rows, emissions, strict=True)):
            positions = emission.offered(chain, index)
            row.statistics.record(
                drafted=proposal.lengths[index],
                accepted=emission.accepted,
                emitted=emission.count,
                offered=emission.offered(proposal, index),
                positions=positions,
            )
            if row.policy.learn(positions, emission.accepted):
                self.warn_once(
                    f"None of the drafts of {PATIENCE} steps was accepted; decoding continues without drafts, and "
                    "tries the drafter again now and then."
                )
            if self.plan.streamer is not None:
                for token in emission.tokens:
                    self.plan.streamer.put(torch.tensor([token]))

    def _drop_finished(self) -> None:
        """Rows that have ended leave the batch, which then costs nothing for them."""
        state, rows = self.state, self.state.rows
        kept = [index for index, row in enumerate(rows) if not row.is_finished]
        if kept and len(kept) < len(rows):
            selection = torch.tensor(kept, device=rows[0].ids.device)
            state.feedback = None if state.feedback is None else state.feedback.select(selection, kept)
            self.target.select(selection)
            self.draft.cache.select(selection, kept)
        state.rows = [rows[index] for index in kept]
        if kept:
            self.target.squeeze(state.rows)


class WarnOnce:
    """Logs each warning of a call once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning(text)


def _inputs_of(row: int, plan: CallPlan, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the target gets for one row alone, with a fresh cache of the kind that was asked for."""
    kwargs = dict(model_kwargs)
    for name in _compat.BATCHED:
        value = kwargs.get(name)
        if value is not None and value.shape[-2] > 1:  # positions may have a leading dimension of their own
            kwargs[name] = value[..., row : row + 1, :]
    if kwargs.get("attention_mask") is not None and bool((kwargs["attention_mask"] == 1).all()):
        kwargs["attention_mask"] = None  # as generate does: a mask of ones costs time
    _compat.fresh_cache(plan.model, plan.generation_config, kwargs)
    return kwargs
