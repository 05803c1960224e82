"""DFlowDecoder: the loop. What each line does lives in the module that it calls."""

import copy
import logging
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dflow.generation import _compat
from hf_dflow.generation.checks import check_call, check_first_outputs, check_mode, check_pair, check_target
from hf_dflow.generation.configuration import DFlowOptions, resolve_options
from hf_dflow.generation.drafting import DraftBlock, DraftSession
from hf_dflow.generation.feedback import make_feedback
from hf_dflow.generation.output import GenerateDFlowOutput
from hf_dflow.generation.path import PathProcessor
from hf_dflow.generation.records import Records
from hf_dflow.generation.state import DecodeState, Emission
from hf_dflow.generation.stopping import StopPlan
from hf_dflow.generation.verification import Verification, Verifier, choose_backend, choose_rule
from hf_dflow.modeling_dflow import DFlowDrafter

logger = logging.getLogger(__name__)


class DFlowDecoder:
    """Block-diffusion speculative decoding with verifier feedback, usable as `generate(custom_generate=...)`.

    `model.generate(..., assistant_model=drafter, speculation_type="dflow")` runs the same object. A callable given to
    `custom_generate` receives no streamer and no options, so they are bound here. The decoder holds no state between
    calls.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        streamer (`BaseStreamer`, *optional*): Gets the prompt, then committed tokens one by one.
        options: Fields of [`DFlowGenerationConfig`]; they win over its values.
    """

    def __init__(self, drafter: DFlowDrafter, streamer=None, **options):
        unknown = set(options) - set(DFlowOptions.__dataclass_fields__)
        if unknown:
            allowed = ", ".join(DFlowOptions.__dataclass_fields__)
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
        check_call(input_ids.shape[0], synced_gpus, model_kwargs)
        check_pair(model, self.drafter)
        if streamer is None and self.streamer is not None:
            streamer = self.streamer
            streamer.put(input_ids.cpu())
        call = _Call(
            model=model,
            drafter=self.drafter,
            options=resolve_options(self.drafter, generation_config, self.options),
            logits_processor=logits_processor or LogitsProcessorList(),
            stopping_criteria=stopping_criteria or StoppingCriteriaList(),
            generation_config=generation_config,
            streamer=streamer,
        )
        return call.run(input_ids, model_kwargs)


class _Call:
    """One call of the decoder: its collaborators, and the loop over them."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        drafter: DFlowDrafter,
        options: DFlowOptions,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer,
    ):
        self.model, self.drafter, self.options = model, drafter, options
        self.config, self.streamer = generation_config, streamer
        self.do_sample = bool(generation_config.do_sample)
        path = PathProcessor(logits_processor)
        processors = copy.deepcopy(options.all_processors)  # what they learn belongs to this call
        self.acceptance_processors = processors
        self.stop = StopPlan(stopping_criteria, generation_config.max_length)
        rule, backend = choose_rule(self.do_sample, options, path), choose_backend(options, model.device)
        self.verifier = Verifier(rule, path, processors, backend)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.device = model.device
        self.session = DraftSession(
            drafter,
            embedding,
            head,
            vocab_size=_compat.logits_width(model, head),
            path=path,
            processors=processors,
            use_relay=bool(options.use_relay),
            device=self.device,
        )
        self.records = Records(generation_config)

    def run(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> GenerateDFlowOutput | torch.Tensor:
        state = self._start(input_ids, model_kwargs)
        try:
            self._loop(state)
        finally:
            state.give_cache_back()
        return self._result(state)

    def _loop(self, state: DecodeState) -> None:
        while not state.is_finished:
            draft_uniforms, verify_uniforms = self._uniforms(num_drafts := self._num_drafts(state))
            # 1. the first turn drafts nothing and verifies nothing: its target forward is the prefill
            # 2. draft a block from anchor, context features and feedback
            draft = self._draft(state, num_drafts, draft_uniforms)
            # 3. verify it with one target forward
            outputs, verification = self._verify(state, draft, verify_uniforms)
            # 4. clip what would be emitted, before any state changes
            emission = self._clip(state, draft, verification)
            # 5. commit
            self._commit(state, draft, verification, outputs, emission)
            # 6. turn the verification into feedback, and let processors learn
            self._feed_back(state, draft, verification)
            # 7. record, stream
            self._record(state, draft, emission)
        if self.streamer is not None:
            self.streamer.end()

    # -- the lines of the loop

    def _start(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> DecodeState:
        cache = _compat.get_cache(model_kwargs)
        assert cache is not None  # checked before
        cache.activate_past_recording()
        mask = model_kwargs.get("attention_mask")
        padding = 0 if mask is None else int((mask[0] == 0).sum())
        cached = cache.get_seq_length()
        if cached:
            logger.warning(
                "The target cache already holds %d tokens; their states are gone, so drafting starts with the context "
                "that is computed from here on.",
                cached,
            )
        state = DecodeState(
            input_ids, model_kwargs, next_position=max(0, cached - padding), padding=padding, cached_rows=cached
        )
        state.statistics.verification = self.verifier.rule
        state.statistics.lossless = not self.verifier.relaxing
        if self.verifier.relaxing:
            names = ", ".join(type(processor).__name__ for processor in self.verifier.relaxing)
            logger.warning("%s makes acceptance lossy: the text may differ from the target's own.", names)
        return state

    def _num_drafts(self, state: DecodeState) -> int:
        """How many drafts to verify: none at prefill, and none that the length limit would cut anyway."""
        room = self.stop.max_length - state.input_ids.shape[1]
        if state.is_prefill or not state.can_draft:
            return 0
        if not self.session.has_room(state.next_position):
            logger.warning(
                "The sequence passes the drafter's max_position_embeddings of %d; decoding goes on without drafts.",
                self.drafter.config.max_position_embeddings,
            )
            state.can_draft = False
            return 0
        return max(0, min(self.options.num_draft_tokens or 0, room - 1))

    def _uniforms(self, num_drafts: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Fresh random numbers for N drafts, N acceptance tests and the bonus; greedy decoding draws none.

        float64 where there is one: a float32 uniform moves in steps of 6e-8, as large as rare tokens' probabilities.
        """
        if not self.do_sample:
            return None, None
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        uniforms = torch.rand(1, 2 * num_drafts + 1, dtype=dtype, device=self.device)
        return uniforms[:, :num_drafts], uniforms[:, num_drafts:]

    def _draft(self, state: DecodeState, num_drafts: int, uniforms: torch.Tensor | None) -> DraftBlock:
        if num_drafts == 0:
            return self.session.nothing(state.input_ids.shape[0])
        return self.session.draft(state.input_ids, state.next_position, num_drafts, state.feedback, uniforms)

    def _verify(self, state: DecodeState, draft: DraftBlock, uniforms: torch.Tensor | None) -> tuple[Any, Verification]:
        num_drafts = draft.token_ids.shape[1]
        inputs = _compat.model_inputs(
            self.model,
            torch.cat([state.input_ids, draft.token_ids], dim=1),
            state.model_kwargs,
            new_tokens=self._uncached(state) if state.is_prefill else num_drafts + 1,
            num_drafts=num_drafts,
            is_prefill=state.is_prefill,
        )
        outputs = self.model(**{**inputs, "output_hidden_states": True})
        if state.is_prefill:
            check_first_outputs(self.model, state.cache, outputs.hidden_states)
        verification = self.verifier(
            state.input_ids,
            draft,
            outputs.logits[:, -num_drafts - 1 :].to(self.device),
            _compat.capture_features(outputs.hidden_states, self.drafter.config.target_layer_ids),
            uniforms,
            lambda new_ids, rows: self.stop.ends(state.input_ids, new_ids, self.records.scores_with(rows)),
        )
        return outputs, verification

    def _clip(self, state: DecodeState, draft: DraftBlock, verification: Verification) -> Emission:
        """The step's new tokens, cut where the sequence ends.

        The only wait for the device in a step: everything that the host must know comes over in one tensor.
        """
        columns = [verification.accepted_length, verification.bonus_ids, draft.is_finite, verification.is_number]
        packed = torch.cat([torch.stack([column.long() for column in columns], dim=1), draft.token_ids], dim=1)
        accepted, bonus, is_finite, is_number, *draft_tokens = packed.tolist()[0]
        if not is_number:
            raise RuntimeError(
                "The target's probabilities contain NaN or inf, so nothing can be sampled; plain sampling raises here "
                "too. remove_invalid_values=True replaces them."
            )
        if not is_finite:
            logger.warning(
                "The drafter produced non-finite values (dtype %s); decoding goes on without drafts. A wider dtype, "
                "bfloat16 or float32, usually mends it.",
                self.drafter.dtype,
            )
            state.can_draft = False
        new_ids = torch.cat([draft.token_ids[:, :accepted], verification.bonus_ids[:, None]], dim=1)
        new_tokens = [*draft_tokens[:accepted], bonus]
        if verification.is_stopped:
            count, is_last = accepted, True
        else:
            count, is_last = self.stop.clip(
                state.input_ids,
                new_ids,
                new_tokens,
                lambda count: self.records.scores_with(verification.scores[:, :count]),
                asked=accepted if self.verifier.path.is_lazy else 0,
            )
        return Emission(new_ids[:, :count], new_tokens[:count], min(accepted, count), is_last)

    def _commit(
        self, state: DecodeState, draft: DraftBlock, verification: Verification, outputs, emission: Emission
    ) -> None:
        """Append tokens, keep the target's rows before the new anchor, hand their features to the drafter."""
        count = emission.count
        state.is_finished = emission.is_last
        _compat.crop(state.cache, 0 if state.is_prefill else draft.token_ids.shape[1] + 1 - count)
        state.cached_rows = state.cache.get_seq_length()
        features = verification.features
        features = features[:, self._padded_rows(state) :] if state.is_prefill else features[:, :count]
        if state.can_draft and not state.is_finished:
            self.session.cache.append_context(features, state.next_position)
        state.next_position += features.shape[1]
        self.records.add(verification, outputs, count, state.is_prefill)
        state.input_ids = torch.cat([state.input_ids, emission.new_ids.to(state.input_ids.device)], dim=1)
        state.model_kwargs = _compat.advance(self.model, outputs, state.model_kwargs, count)

    def _feed_back(self, state: DecodeState, draft: DraftBlock, verification: Verification) -> None:
        needs_logits = bool(self.acceptance_processors)
        wanted = (self.session.use_relay or needs_logits) and state.can_draft and not state.is_finished
        state.feedback = make_feedback(draft, verification, with_logits=needs_logits) if wanted else None
        for processor in self.acceptance_processors:
            processor.observe(draft, verification)

    def _record(self, state: DecodeState, draft: DraftBlock, emission: Emission) -> None:
        state.is_prefill = False
        state.statistics.record(drafted=draft.token_ids.shape[1], accepted=emission.accepted, emitted=emission.count)
        if self.streamer is not None:
            for token in emission.tokens:
                self.streamer.put(torch.tensor([token]))

    # -- helpers

    def _result(self, state: DecodeState) -> GenerateDFlowOutput | torch.Tensor:
        state.statistics.per_row = [copy.copy(state.statistics)]
        if not self.config.return_dict_in_generate:
            return state.input_ids
        return self.records.output(state.input_ids, state.cache, state.statistics)

    def _uncached(self, state: DecodeState) -> int | None:
        """How many of the prompt's tokens the target has not seen; `None` for all.

        Behind a filled cache `input_ids` may be the whole sequence or only what is new. As in `generate`'s own prefill
        the attention mask, which is always whole, tells which; a mask of ones has been dropped, its length noted.
        """
        cached = state.cache.get_seq_length()
        mask = state.model_kwargs.get("attention_mask")
        mask_length = getattr(self.config, "_mask_length", -1) if mask is None else mask.shape[1]
        is_whole = mask_length == state.input_ids.shape[1]
        return state.input_ids.shape[1] - cached if cached and is_whole else None

    @staticmethod
    def _padded_rows(state: DecodeState) -> int:
        return state.padding if state.next_position == 0 else 0
