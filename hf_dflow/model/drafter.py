"""The drafter: a DFlash backbone (arXiv 2602.06036) and DFlow's verifier relay (arXiv 2609.06498)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from hf_dflow.errors import DrafterWeightsError
from hf_dflow.hub.publishing import PublishableDrafter
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.correction import CausalCorrection, CorrectedCandidates, ZeroLinear, head_scores
from hf_dflow.model.loading import LoadableDrafter
from hf_dflow.model.relay import DFlowRelay
from hf_dflow.model.selector import BlockConvolution, Candidates, CandidateSelector

# (layer index, keys [B, KV, L, D], values [B, KV, L, D]) of the block -> the same for all that the block may attend to,
# the block's own rows last. Serving, training and transformers' native loop differ in nothing but this function.
ExtendKeyValues = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# (layer index, number of keys) -> bool mask [B or 1, 1, L, keys], True where a query may look, or None for everywhere.
# Training may give FlexAttention's BlockMask instead, which then decides the implementation.
MaskForLayer = Callable[[int, int], Any]


def apply_rotary(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate `states` `[B, heads, T, D]` by the cosines and sines `[B, T, D]` of their absolute positions."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    return states * cos + rotate_half(states) * sin


class DFlowAttention(nn.Module):
    """Attention of the block over context K/V and itself; context features give keys and values, never queries."""

    def __init__(self, config: DFlowDrafterConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # masks are always explicit
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_values(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]):
        """Keys and values `[B, KV, T, D]` of `states` `[B, T, H]`."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        values = self.v_proj(states).view(shape).transpose(1, 2)
        return apply_rotary(keys, rotary), values

    def forward(self, hidden, rotary, extend: ExtendKeyValues, mask_for: MaskForLayer) -> torch.Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        queries = apply_rotary(self.q_norm(self.q_proj(hidden).view(shape)).transpose(1, 2), rotary)
        keys, values = extend(self.layer_idx, *self.key_values(hidden, rotary))
        mask = mask_for(self.layer_idx, keys.shape[-2])
        is_dense = mask is None or isinstance(mask, torch.Tensor)
        implementation = self.config._attn_implementation if is_dense else "flex_attention"
        if mask is not None and implementation == "eager":  # eager adds its mask
            mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, torch.finfo(queries.dtype).min)
        if not is_dense:  # which, unlike SDPA, does not bring the mixed dtypes of autocast together
            queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attend(self, queries, keys, values, mask, dropout=dropout, scaling=self.scaling, is_causal=False)
        return self.o_proj(output.reshape(*hidden.shape[:-1], -1))


class DFlowDecoderLayer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DFlowDrafterConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlowAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        convolves = config.conv_kernel_size is not None
        self.attention_conv = BlockConvolution(config) if convolves else None
        self.mlp_conv = BlockConvolution(config) if convolves else None

    def forward(self, hidden, rotary, extend: ExtendKeyValues, mask_for: MaskForLayer) -> torch.Tensor:
        def attend(states):
            return self.self_attn(states, rotary, extend, mask_for)

        hidden = hidden + self._convolved(self.attention_conv, attend, self.input_layernorm(hidden))
        return hidden + self._convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))

    @staticmethod
    def _convolved(convolution, sublayer, states: torch.Tensor) -> torch.Tensor:
        return sublayer(states) if convolution is None else convolution(sublayer, states)


class DFlowDrafter(LoadableDrafter, PublishableDrafter):
    """A block-diffusion drafter whose masked slots may start from what the verifier computed on rejected rows.

    It owns neither embedding nor LM head unless its configuration says so; callers hand in the target's.
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
        says: Any = config.draft_vocab_size or config.vocab_size
        self.lm_head: Any = nn.Linear(config.hidden_size, says, bias=False) if owns_head else None
        self.candidate_selector: Any = CandidateSelector(config) if config.selector_rank is not None else None
        corrects = config.correction_intermediate_size is not None
        self.causal_correction: Any = CausalCorrection(config) if corrects else None
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

    # -- what one forward is made of

    def embed(self, token_ids: torch.Tensor, target_embedding: Any) -> torch.Tensor:
        """Input embeddings `[..., H]` of `token_ids` `[...]`, in the drafter's dtype and on its device."""
        if self.embed_tokens is not None:
            token_ids = token_ids.to(self.device)
            is_known = token_ids < self.config.vocab_size  # the target may say tokens that a smaller drafter lacks
            embeds = self.embed_tokens(torch.where(is_known, token_ids, self.config.mask_token_id))
        else:
            weight: Any = getattr(target_embedding, "weight", None)
            if weight is not None and not weight.is_meta:
                token_ids = token_ids.to(weight.device)
            # The rows of an offloaded weight are had by the call alone, for which accelerate brings it.
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
        """What rejected rows add to the mask embeddings of the slots they feed, `[B, S, H]`.

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
    ) -> Candidates | CorrectedCandidates | None:
        """What a block's drafts are chosen from one after the other; `None` where the slots are independent.

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
        """Choose what a drafter with `draft_vocab_size` can say, and start its head as the target's rows.

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
        """Raise [`DrafterWeightsError`] unless `draft_token_ids` name tokens of the target, not the mask alone."""
        ids = self.draft_token_ids
        if ids is None:
            return
        in_range = bool((ids >= 0).all() and (ids < self.config.vocab_size).all())
        if not in_range or not bool((ids[1:] > ids[:-1]).all()) or ids.tolist() == [self.config.mask_token_id]:
            raise DrafterWeightsError(
                f"'draft_token_ids' must name {len(ids)} different tokens in [0, {self.config.vocab_size - 1}] in "
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
        if self.lm_head is not None:
            return hidden
        weight = getattr(target_head, "weight", None)  # a quantised head may expose none, or an integer one
        if weight is None:
            return hidden
        dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
        place = hidden.device if weight.is_meta else weight.device  # accelerate takes states to an offloaded head
        return hidden.to(device=place, dtype=dtype)

    @property
    def first_drafting_row(self) -> int:
        """The first row of a block that predicts a draft: the anchor's, or the first masked slot's."""
        return 0 if self.config.sample_from_anchor else 1

    def attention_mask(self, layer_idx: int, query_length: int, key_length: int, device=None) -> torch.Tensor | None:
        """Which of the last `key_length` positions each of the last `query_length` may look at.

        Returns a bool tensor `[1, 1, query_length, key_length]`, or `None` where everything is visible.
        """
        config = self.config
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        causal = config.sliding_is_causal if sliding else config.full_is_causal
        if not causal and (not sliding or key_length - 1 <= config.window_reach):
            return None
        offsets = torch.arange(query_length, device=device)[:, None]
        queries = key_length - query_length + offsets
        return self.visible(layer_idx, queries - torch.arange(key_length, device=device), offsets)[None, None]

    def visible(self, layer_idx: int, distance: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Whether a query may look at a key `distance` positions before it; negative is behind it. Any shape.

        `offsets` is the query's row within its block, in a shape that broadcasts with `distance`.
        """
        config = self.config
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        visible = torch.ones_like(distance, dtype=torch.bool)
        if config.sliding_is_causal if sliding else config.full_is_causal:
            visible &= distance >= 0
        if sliding and config.window_from_anchor:
            visible &= distance <= config.window_reach + offsets
        elif sliding:
            visible &= distance.abs() <= config.window_reach
        return visible

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
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = seen + torch.arange(new_context + block_length, device=context.device)[None]
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


__all__ = ["DFlowDrafter"]
