"""DFlowDecoder: the loop. What each line does lives in the module that it calls."""

import logging
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dflow.generation import _compat, batch
from hf_dflow.generation.checks import BATCHED, check_call, check_mode, check_target
from hf_dflow.generation.configuration import OPTION_NAMES, DFlowOptions, resolve_options
from hf_dflow.generation.drafting import DraftBlock, DraftSession
from hf_dflow.generation.feedback import make_feedback
from hf_dflow.generation.output import GenerateDFlowOutput
from hf_dflow.generation.pair import check_pair
from hf_dflow.generation.path import PathProcessor
from hf_dflow.generation.policy.lengths import StepCosts, step_costs
from hf_dflow.generation.policy.pausing import PATIENCE, Warnings
from hf_dflow.generation.policy.trees import AUTO, LARGEST_AUTO, Worth, check_tree, expansion, grow
from hf_dflow.generation.prefill import prompt_context
from hf_dflow.generation.rows import DecodeState, Row
from hf_dflow.generation.stopping import Emission, StopPlan
from hf_dflow.generation.target import TargetSession
from hf_dflow.generation.uniforms import cut, draw
from hf_dflow.generation.verification import Verification, Verifier, choose_backend, choose_rule
from hf_dflow.model.drafter import DFlowDrafter

logger = logging.getLogger(__name__)


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
        check_mode(generation_config, self.drafter)
        check_target(model)
        stop = StopPlan(stopping_criteria or StoppingCriteriaList(), generation_config.max_length)
        own_streamer = self.streamer if streamer is None else None
        has_streamer = streamer is not None or own_streamer is not None
        check_call(model, input_ids, synced_gpus, model_kwargs, generation_config, has_streamer, stop.asks_criteria)
        for name in BATCHED:  # the hooks of a spread target take them from anywhere; our rows are where the ids are
            if isinstance(model_kwargs.get(name), torch.Tensor):
                model_kwargs[name] = model_kwargs[name].to(input_ids.device)
        options = resolve_options(self.drafter, generation_config, self.options)
        check_pair(model, self.drafter, chat_mode=options.chat_mode)
        processors = logits_processor or LogitsProcessorList()
        rule = choose_rule(bool(generation_config.do_sample), options, PathProcessor(processors))
        costs = self._step_costs(model, options, input_ids.device)
        planned = costs if options.adaptive_length else None
        rows = batch.make_rows(input_ids, generation_config, options, processors, rule, planned)
        if own_streamer is not None:
            streamer = own_streamer
            streamer.put(input_ids.cpu())

        warnings = Warnings()

        def decode(some: list[Row], kwargs: dict[str, Any]) -> DecodeState:
            call = _Call(
                model=model,
                drafter=self.drafter,
                options=options,
                stop=stop,
                rule=rule,
                generation_config=generation_config,
                streamer=streamer,
                warnings=warnings,
                costs=costs,
                device=input_ids.device,  # where generate keeps ids and logits; a model may be spread, or offloaded
                batch_size=len(some),
            )
            return call.run(some, kwargs)

        return batch.decode_all(decode, rows, model, generation_config, model_kwargs)

    def _step_costs(self, model: PreTrainedModel, options: DFlowOptions, device: torch.device) -> StepCosts | None:
        longest = self.drafter.config.drafts_per_block
        if options.tree_budget == AUTO:
            longest = LARGEST_AUTO
        elif not options.adaptive_length:
            return None
        if options.step_costs is None:
            return step_costs(model, self.drafter, longest, device)
        return StepCosts.read(options.step_costs, longest)


class _Call:
    """Rows that are decoded together: their collaborators, and the loop over them."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        drafter: DFlowDrafter,
        options: DFlowOptions,
        stop: StopPlan,
        rule: str,
        generation_config: GenerationConfig,
        streamer,
        warnings: Warnings,
        costs: StepCosts | None,
        device: torch.device,
        batch_size: int,
    ):
        self.model, self.drafter, self.options, self.stop = model, drafter, options, stop
        self.config, self.streamer, self.device = generation_config, streamer, device
        self.costs = costs
        self.do_sample, self.monitor = bool(generation_config.do_sample), options.monitor
        self.verifier, self.warnings = Verifier(rule, choose_backend(options, device)), warnings
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.session = DraftSession(
            drafter,
            embedding,
            head,
            vocab_size=_compat.logits_width(model, head),
            use_relay=bool(options.use_relay),
            use_correction=bool(options.use_correction),
            device=self.device,
            batch_size=batch_size,
        )
        self.target = TargetSession(
            model,
            generation_config,
            target_layer_ids=drafter.config.target_layer_ids,
            full_length=options.num_draft_tokens or 0,
            max_length=stop.max_length,
        )

    def run(self, rows: list[Row], model_kwargs: dict[str, Any]) -> DecodeState:
        """Decode `rows` to their ends, each in place."""
        state = self._start(rows, model_kwargs)
        try:
            self._loop(state)
        finally:
            state.give_cache_back()
        return state

    def _loop(self, state: DecodeState) -> None:
        while state.rows:
            lengths = self._lengths(state)
            draft_uniforms, verify_uniforms = self._uniforms(state.rows, lengths)
            # 1. the first turn drafts nothing and verifies nothing: its target forward is the prefill
            # 2. draft a block from anchor, context features and feedback
            draft = self._draft(state, lengths, draft_uniforms)
            lengths, draft, verify_uniforms = self._shorten(state, lengths, draft, verify_uniforms)
            # 3. verify it with one target forward
            if state.tree is None:
                outputs, verification = self._verify(state, lengths, draft, verify_uniforms)
            else:
                lengths, draft, outputs, verification = self._verify_tree(state, draft)
            # 4. clip what would be emitted, before any state changes
            emissions = self._clip(state, lengths, draft, verification)
            # 5. commit
            self._commit(state, draft, verification, outputs, emissions)
            # 6. turn the verification into feedback, and let processors learn
            self._feed_back(state, lengths, draft, verification, emissions)
            # 7. record, stream; rows that have ended leave
            self._record(state, lengths, emissions)
            del outputs, verification  # a prompt's states of all layers need not outlive the prefill
        if self.streamer is not None:
            self.streamer.end()

    # -- the lines of the loop

    def _start(self, rows: list[Row], model_kwargs: dict[str, Any]) -> DecodeState:
        is_returned = bool(self.config.return_dict_in_generate)
        state = DecodeState(rows, model_kwargs, is_returned=is_returned, backend=self.verifier.backend)
        state.cache.activate_past_recording()
        self.target.open(model_kwargs)
        if self.options.tree_budget is not None:
            asks = [getattr(self.config, name, None) for name in ("output_hidden_states", "output_attentions")]
            returns_states = bool(self.config.return_dict_in_generate) and any(asks)
            check_tree(self.model, state.cache, len(rows), self.do_sample, returns_states)
        state.cached_rows = int(state.cache.get_seq_length())
        if state.cached_rows:
            logger.warning(
                "The target cache already holds %d tokens; their states are gone, so drafting starts with the context "
                "that is computed from here on.",
                state.cached_rows,
            )
        return state

    def _lengths(self, state: DecodeState) -> list[int]:
        """How many drafts each row verifies: none at prefill, and none that its length limit would cut anyway."""
        if state.is_prefill:
            return [0] * len(state.rows)
        self._step_began = self.monitor.monitor.clock() if self.monitor else 0.0
        return [self._length(row, state.room_for(row)) for row in state.rows]

    def _length(self, row: Row, room: int) -> int:
        most = min(self.options.num_draft_tokens or 0, self.stop.max_length - row.length - 1, room)
        if most <= 0 or row.policy.is_off:
            return 0
        if not self.session.has_room(row.next_position):
            self.warnings.say(
                "The sequence passes the drafter's max_position_embeddings of %d; decoding goes on without drafts.",
                self.drafter.config.max_position_embeddings,
            )
            row.policy.is_off = True
        return most if row.policy.may_draft() else 0

    def _uniforms(self, rows: list[Row], lengths: list[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Fresh random numbers for the drafts, and for acceptance tests and bonus; greedy decoding draws none."""
        if not self.do_sample:
            return None, None
        return draw([row.generator for row in rows], lengths, self.device)

    def _draft(self, state: DecodeState, lengths: list[int], uniforms: torch.Tensor | None) -> DraftBlock:
        if not max(lengths):
            return self.session.nothing(len(state.rows))
        state.num_draft_forwards += 1
        if self.options.tree_budget is not None:
            return self._draft_tree(state, lengths)
        return self.session.draft(state.rows, lengths, state.feedback, uniforms)

    def _shorten(
        self, state: DecodeState, lengths: list[int], draft: DraftBlock, uniforms: torch.Tensor | None
    ) -> tuple[list[int], DraftBlock, torch.Tensor | None]:
        """Leave out drafts that are not expected to pay. The confidences are one more wait for the device in a step."""
        if not self.options.adaptive_length or not max(lengths):
            return lengths, draft, uniforms
        confidences = draft.confidences(is_sampled=self.do_sample).tolist()
        shorter = []
        for row, length, values in zip(state.rows, lengths, confidences, strict=True):
            assert row.planner is not None
            shorter.append(row.planner.choose(values[:length]) if length else 0)
        return shorter, draft.cut(shorter), cut(uniforms, max(shorter))

    def _draft_tree(self, state: DecodeState, lengths: list[int]) -> DraftBlock:
        """Grow the block's tree; what is returned holds the slots' laws, and no drafts yet."""
        slots = self.session.slots(state.rows, lengths, state.feedback)
        expand = expansion(slots, slots.logits.shape[-1])
        anchor_id = int(state.rows[0].ids[0, -1])
        budget, worth = self.options.tree_budget, None
        if budget == AUTO:
            assert self.costs is not None
            budget, worth = LARGEST_AUTO, Worth(self.costs)
        assert isinstance(budget, int)
        state.tree = grow(expand, anchor_id, lengths[0], budget, worth)
        return DraftBlock(slots.logits.argmax(dim=-1), slots.logits, slots.is_finite)

    def _verify_tree(self, state: DecodeState, block: DraftBlock) -> tuple[list[int], DraftBlock, Any, Verification]:
        """Verify all nodes in one forward, then judge the path that stays as the chain that it is."""
        assert state.tree is not None
        outputs, logits, features, chain = self.target.forward_tree(state, state.tree, block)
        lengths = [chain.token_ids.shape[1]]
        return lengths, chain, outputs, self._judge(state, lengths, chain, logits, features, None)

    def _verify(
        self, state: DecodeState, lengths: list[int], draft: DraftBlock, uniforms: torch.Tensor | None
    ) -> tuple[Any, Verification]:
        outputs, logits, features = self.target.forward(state, draft)
        return outputs, self._judge(state, lengths, draft, logits, features, uniforms)

    def _judge(self, state: DecodeState, lengths: list[int], draft: DraftBlock, logits, features, uniforms):
        return self.verifier(
            state.rows,
            lengths,
            draft,
            logits,
            features,
            uniforms,
            lambda row, new_ids, scores: self.stop.ends(row.ids, new_ids, row.records.scores_with(scores)),
        )

    def _clip(
        self, state: DecodeState, lengths: list[int], draft: DraftBlock, verification: Verification
    ) -> list[Emission]:
        """Each row's new tokens, cut where its sequence ends.

        The only wait for the device in a step: everything that the host must know comes over in one tensor.
        """
        columns = [verification.accepted_length, verification.bonus_ids, draft.is_finite, verification.is_number]
        packed = torch.cat([torch.stack([column.long() for column in columns], dim=1), draft.token_ids], dim=1)
        emissions = []
        for i, (row, told) in enumerate(zip(state.rows, packed.tolist(), strict=True)):
            accepted, bonus, is_finite, is_number, *draft_tokens = told
            if not is_number:
                raise RuntimeError(
                    "The target's probabilities contain NaN or inf, so nothing can be sampled; plain sampling raises "
                    "here too. remove_invalid_values=True replaces them."
                )
            if not is_finite and lengths[i]:
                self.warnings.say(
                    "The drafter produced non-finite values (dtype %s); decoding goes on without drafts. A wider "
                    "dtype, bfloat16 or float32, usually mends it.",
                    self.drafter.dtype,
                )
                row.policy.is_off = True
            emissions.append(self.stop.cut(i, row, [*draft_tokens[:accepted], bonus], draft, verification))
        return emissions

    def _commit(
        self, state: DecodeState, draft: DraftBlock, verification: Verification, outputs, emissions: list[Emission]
    ) -> None:
        """Append tokens, keep the target's rows before the new anchors, hand their features to the drafter."""
        features, counts = verification.features, [emission.count for emission in emissions]
        if state.is_prefill:
            mask = state.model_kwargs.get("attention_mask")
            features, counts, firsts = prompt_context(features, mask, state.cached_rows)
            for row, first in zip(state.rows, firsts, strict=True):
                row.next_position = first
        state.keep_records(verification, outputs, emissions)
        state.keep_columns(self.model, outputs, draft.token_ids.shape[1], emissions)
        drafting = [not (row.policy.is_off or end.is_last) for row, end in zip(state.rows, emissions, strict=True)]
        wanted = [count if drafts else 0 for count, drafts in zip(counts, drafting, strict=True)]
        positions = [row.next_position for row in state.rows]
        self.session.cache.append_context(features[:, : max(counts)], positions, wanted)
        for row, emission, count in zip(state.rows, emissions, counts, strict=True):
            row.next_position += count
            row.ids = torch.cat([row.ids, emission.new_ids.to(row.ids.device)], dim=1)
            row.is_finished = emission.is_last

    def _feed_back(
        self,
        state: DecodeState,
        lengths: list[int],
        draft: DraftBlock,
        verification: Verification,
        emissions: list[Emission],
    ) -> None:
        needs_logits = bool(self.options.all_processors)
        is_read = any(not (row.policy.is_off or row.is_finished) for row in state.rows)
        wanted = (self.session.use_relay or needs_logits) and is_read
        accepted = [emission.accepted for emission in emissions]
        state.feedback = make_feedback(draft, verification, lengths, accepted, needs_logits) if wanted else None
        for i, (row, length) in enumerate(zip(state.rows, lengths, strict=True)):
            if row.acceptance_processors:
                seen = draft.row(i, length), verification.row(i, length)
                for processor in row.acceptance_processors:
                    processor.observe(*seen)

    def _record(self, state: DecodeState, lengths: list[int], emissions: list[Emission]) -> None:
        if self.monitor is not None and not state.is_prefill:
            seconds = self.monitor.monitor.clock() - self._step_began  # what a streamer takes is not the step's
            self.monitor.end_step(lengths, [emission.accepted for emission in emissions], seconds)
        state.is_prefill = False
        tree, state.tree = state.tree, None
        for row, length, emission in zip(state.rows, lengths, emissions, strict=True):
            drafted = length if tree is None else tree.size
            row.statistics.record(drafted=drafted, accepted=emission.accepted, emitted=emission.count)
            if row.planner is not None and row.planner.learn(length, emission.accepted):
                row.policy.pause()
            if length and row.policy.learn(emission.accepted):
                self.warnings.say(
                    "None of the drafts of %d steps was accepted; decoding goes on without drafts, and tries the "
                    "drafter again now and then.",
                    PATIENCE,
                )
            if self.streamer is not None:
                for token in emission.tokens:
                    self.streamer.put(torch.tensor([token]))
        kept = state.drop_finished()
        if kept is not None:
            self.session.cache.select(*kept)
