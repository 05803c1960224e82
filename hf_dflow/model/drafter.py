"""The drafter: a DFlash backbone (arXiv 2602.06036) with DFlow's verifier relay (arXiv 2609.06498)."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from hf_dflow.errors import DrafterWeightsError
from hf_dflow.hub.publishing import PublishableDrafter
from hf_dflow.model.backbone import BlockConvolution, DFlowDecoderLayer, ExtendKeyValues, MaskForLayer
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.heads import Candidates, CandidateSelector, CausalCorrection, CorrectedCandidates, head_scores
from hf_dflow.model.loading import LoadableDrafter
from hf_dflow.model.relay import DFlowRelay, ZeroLinear


class DFlowDrafter(LoadableDrafter, PublishableDrafter):
    """A block-diffusion drafter whose masked slots may start from what the verifier computed on rejected rows.

    Embedding and LM head are the target's, which callers pass in, unless the configuration gives it its own.
    """

    config_class = DFlowDrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "noise_embeds"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["DFlowDecoderLayer"]
    draft_token_ids: Any

    def __init__(self, config: DFlowDrafterConfig):
        config.check()
        super().__init__(config)
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers: Any = nn.ModuleList([DFlowDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]  # it reads rope_parameters and sizes
        self.relay: Any = DFlowRelay(config) if config.use_relay else None
        owns_embedding, owns_head = config.input_embedding == "own", config.output_head == "own"
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, config.hidden_size) if owns_embedding else None
        head_rows: Any = config.draft_vocab_size or config.vocab_size
        self.lm_head: Any = nn.Linear(config.hidden_size, head_rows, bias=False) if owns_head else None
        self.candidate_selector: Any = CandidateSelector(config) if config.selector_rank is not None else None
        has_correction = config.correction_intermediate_size is not None
        self.causal_correction: Any = CausalCorrection(config) if has_correction else None
        # Ids of the head's rows, ascending; -1 until they are set or loaded. Saved with the weights.
        unset = None if config.draft_vocab_size is None else torch.full((config.draft_vocab_size,), -1)
        self.register_buffer("draft_token_ids", unset)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, BlockConvolution):
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
            init.zeros_(module.kernel_projection.weight)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def embed(self, token_ids: torch.Tensor, target_embedding: Any) -> torch.Tensor:
        """Input embeddings `[..., H]` of `token_ids` `[...]`, in the drafter's dtype and on its device."""
        if self.embed_tokens is not None:
            token_ids = token_ids.to(self.device)
            is_known = token_ids < self.config.vocab_size  # a target may emit tokens that a smaller drafter lacks
            embeds = self.embed_tokens(torch.where(is_known, token_ids, self.config.mask_token_id))
        else:
            weight: Any = getattr(target_embedding, "weight", None)
            if weight is not None and not weight.is_meta:
                token_ids = token_ids.to(weight.device)
            # accelerate loads an offloaded weight for the module's call alone.
            if self.config.input_embedding == "target" or (weight is not None and weight.is_meta):
                embeds = target_embedding(token_ids)
            else:
                embeds = nn.functional.embedding(token_ids, weight)
        embeds = embeds.to(device=self.device, dtype=self.dtype)
        return embeds if self.config.input_embedding_scale == 1.0 else embeds * self.config.input_embedding_scale

    def project_context(self, features: torch.Tensor) -> torch.Tensor:
        """Context states `[B, T, H]` of tapped target states `[B, T, taps * target_hidden_size]`."""
        return self.hidden_norm(self.fc(features.to(device=self.device, dtype=self.dtype)))

    def relay_additions(
        self,
        features: torch.Tensor,
        bonus_ids: torch.Tensor,
        rejected_ids: torch.Tensor,
        target_embedding: Any,
    ) -> torch.Tensor:
        """Additions `[B, S, H]` of rejected rows to the mask embeddings of the slots they feed.

        Args:
            features (`torch.Tensor` of shape `(B, S, taps * target_hidden_size)`): Tapped target states of the rows.
            bonus_ids, rejected_ids (`torch.LongTensor` of shape `(B,)`): The next anchor and the first rejected draft.
            target_embedding (`nn.Module`): The target's.
        """
        bonus, rejected = (self.embed(token_ids, target_embedding) for token_ids in (bonus_ids, rejected_ids))
        return self.relay(self.project_context(features), bonus, rejected)

    def context_key_values(self, context: torch.Tensor, position_ids: torch.Tensor):
        """Keys and values `[B, KV, T, D]` of each layer for context states `[B, T, H]` at `position_ids` `[B, T]`."""
        rotary = self.rotary_emb(context, position_ids)
        return [layer.self_attn.key_values(context, rotary) for layer in self.layers]

    def draft_hidden(self, block_embeds, position_ids, extend: ExtendKeyValues, mask_for: MaskForLayer):
        """Final states `[B, L, H]` of a block of input embeddings `[B, L, H]` at absolute `position_ids` `[B, L]`."""
        hidden = block_embeds
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, extend, mask_for)
        return self.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor, target_head: nn.Module) -> torch.Tensor:
        """Draft logits `[..., vocab_size]` of final states `[..., H]`; rows past `vocab_size` (padding) are cut.

        With a reduced draft vocabulary all other tokens get -inf.
        """
        logits = (target_head if self.lm_head is None else self.lm_head)(self._for_head(hidden, target_head))
        logits = self.shape_logits(logits[..., : self.config.vocab_size])
        if self.draft_token_ids is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return everything.index_copy(-1, self.draft_token_ids, logits)

    def candidates(
        self, hidden: torch.Tensor, logits: torch.Tensor, target_embedding: nn.Module, target_head: nn.Module
    ) -> Candidates | None:
        """The candidates from which a block's drafts are chosen one by one; `None` where slots are independent.

        Args:
            hidden (`torch.Tensor` of shape `(B, N, H)`): Final states of the slots, finite.
            logits (`torch.Tensor` of shape `(B, N, V)`): Their logits; -inf for what must not be drafted.
            target_embedding, target_head (`nn.Module`): The target's.
        """
        if self.candidate_selector is not None:
            return self.candidate_selector.candidates(hidden, logits)
        if self.causal_correction is None:
            return None
        head = target_head if self.lm_head is None else self.lm_head

        def score(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
            return self.shape_logits(head_scores(head, self._for_head(states, target_head), token_ids))

        return CorrectedCandidates(
            self.causal_correction, hidden, logits, embed=lambda ids: self.embed(ids, target_embedding), score=score
        )

    def set_draft_vocabulary(self, token_ids: torch.Tensor, head_weight: torch.Tensor) -> None:
        """Choose the tokens of a drafter with `draft_vocab_size`, and start its head as the target's rows.

        Args:
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): Ids of the target's vocabulary, ascending.
            head_weight (`torch.Tensor` of shape `(rows, hidden_size)`): Weight of the target's LM head.

        Raises:
            [`DrafterWeightsError`]: The ids are no vocabulary of that size.
        """
        if self.draft_token_ids is None or self.draft_token_ids.shape != token_ids.shape:
            raise DrafterWeightsError(
                f"{len(token_ids)} draft tokens were given for draft_vocab_size {self.config.draft_vocab_size}; "
                "make the drafter with the size of its vocabulary."
            )
        self.draft_token_ids.copy_(token_ids)
        self.check_draft_vocabulary()
        with torch.no_grad():
            self.lm_head.weight.copy_(head_weight[token_ids.to(head_weight.device)])

    def check_draft_vocabulary(self) -> None:
        """Raise [`DrafterWeightsError`] unless `draft_token_ids` are tokens of the target, and not the mask alone."""
        ids = self.draft_token_ids
        if ids is None:
            return
        in_range = bool((ids >= 0).all() and (ids < self.config.vocab_size).all())
        if not in_range or not bool((ids[1:] > ids[:-1]).all()) or ids.tolist() == [self.config.mask_token_id]:
            raise DrafterWeightsError(
                f"'draft_token_ids' must hold {len(ids)} different tokens in [0, {self.config.vocab_size - 1}] in "
                "ascending order, and not the mask token alone; the file is damaged, or set_draft_vocabulary was "
                "never called."
            )

    def shape_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits of raw head outputs, same shape: the configuration's multiplier, then its soft-cap."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if not cap else cap * torch.tanh(logits / cap)

    def _for_head(self, hidden: torch.Tensor, target_head: nn.Module) -> torch.Tensor:
        """`hidden` in the dtype and on the device of the head that reads it."""
        if self.lm_head is not None:
            return hidden
        weight = getattr(target_head, "weight", None)  # a quantised head may expose none, or an integer one
        if weight is None:
            return hidden.to(_scales_dtype(target_head, hidden.dtype))
        dtype = weight.dtype if weight.is_floating_point() else _scales_dtype(target_head, hidden.dtype)
        device = hidden.device if weight.is_meta else weight.device  # accelerate moves states to an offloaded head
        return hidden.to(device=device, dtype=dtype)

    @property
    def first_drafting_row(self) -> int:
        """The first row of a block that predicts a draft: the anchor's, or the first masked slot's."""
        return 0 if self.config.sample_from_anchor else 1

    def attention_mask(self, layer_idx: int, query_length: int, key_length: int, device=None) -> torch.Tensor | None:
        """Which of the last `key_length` positions each of the last `query_length` sees.

        Returns a bool tensor `[1, 1, query_length, key_length]`, or `None` where everything is visible.
        """
        is_sliding, is_causal = self._attention_of(layer_idx)
        if not is_causal and (not is_sliding or key_length - 1 <= self.config.window_reach):
            return None
        offsets = torch.arange(query_length, device=device)[:, None]
        queries = key_length - query_length + offsets
        return self.visible(layer_idx, queries - torch.arange(key_length, device=device), offsets)[None, None]

    def visible(self, layer_idx: int, distance: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Whether a query sees a key `distance` positions before it (negative: after it), in any shape.

        `offsets` is the query's row within its block, in a shape that broadcasts with `distance`.
        """
        is_sliding, is_causal = self._attention_of(layer_idx)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if is_causal:
            visible &= distance >= 0
        if is_sliding and self.config.window_from_anchor:
            visible &= distance <= self.config.window_reach + offsets
        elif is_sliding:
            visible &= distance.abs() <= self.config.window_reach
        return visible

    def _attention_of(self, layer_idx: int) -> tuple[bool, bool]:
        """Whether a layer slides, and whether it is causal."""
        is_sliding = self.config.layer_types[layer_idx] == "sliding_attention"
        return is_sliding, self.config.sliding_is_causal if is_sliding else self.config.full_is_causal

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ) -> BaseModelOutput:
        r"""
        One plain DFlash forward, as transformers' `DFlashTokenCandidateGenerator` calls it.

        Args:
            noise_embeds (`torch.Tensor` of shape `(batch, block_size, hidden_size)`): Anchor and mask embeddings.
            context_hidden_states (`torch.Tensor` of shape `(batch, new_context, taps * target_hidden_size)`):
                Tapped target states of the rows accepted since the last call.
            position_ids (`torch.LongTensor` of shape `(batch, new_context + block_size)`, *optional*):
                Absolute positions; defaults to what follows the cache.
            attention_mask (`torch.Tensor` of shape `(batch, total_length)`, *optional*): 0 hides left padding.
            cache (`DFlashCache`, *optional*): Grown by context and block; the caller crops the block. Called
                `past_key_values` before transformers 5.24.

        Returns:
            [`~modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch, block_size, hidden_size)`.
        """
        cache = past_key_values if cache is None else cache
        context = self.project_context(context_hidden_states)
        new_context, block_length = context.shape[1], noise_embeds.shape[1]
        if position_ids is None:
            num_cached = 0 if cache is None else cache.get_seq_length()
            position_ids = num_cached + torch.arange(new_context + block_length, device=context.device)[None]
        context_key_values = self.context_key_values(context, position_ids[:, :new_context])

        def extend(layer_idx, keys, values):
            context_keys, context_values = context_key_values[layer_idx]
            keys = torch.cat([context_keys, keys], dim=-2)
            values = torch.cat([context_values, values], dim=-2)
            return (keys, values) if cache is None else cache.update(keys, values, layer_idx)

        def mask_for(layer_idx, key_length):
            mask = self.attention_mask(layer_idx, block_length, key_length, context.device)
            if attention_mask is None:
                return mask
            unpadded = attention_mask[:, None, None, -key_length:].bool()
            if mask is None:
                mask = unpadded.new_ones(1, 1, block_length, key_length)
            return mask & unpadded

        block_positions = position_ids[:, new_context:]
        hidden = self.draft_hidden(noise_embeds.to(self.dtype), block_positions, extend, mask_for)
        return BaseModelOutput(last_hidden_state=hidden)


def _scales_dtype(head: nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """The type in which a quantised head computes: that of its scales, where it shows any."""
    tensors = (*head.parameters(), *head.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1), otherwise)


AutoModel.register(DFlowDrafterConfig, DFlowDrafter, exist_ok=True)

__all__ = ["DFlowDrafter"]
