"""The draft layers of DFlash (arXiv 2602.06036), with the convolutions that DFlash 2 adds around each sublayer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from hf_dflow.model.configuration import DFlowDrafterConfig

# (layer index, keys [B, KV, L, D], values [B, KV, L, D]) of the block -> the same for everything that the block attends
# to, the block's own rows last. Decoding, training and transformers' native loop differ in nothing but this function.
ExtendKeyValues = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# (layer index, number of keys) -> bool mask [B or 1, 1, L, keys], True where a query sees a key; None: everywhere.
# Training may return FlexAttention's BlockMask instead, which then decides the implementation.
MaskForLayer = Callable[[int, int], Any]


def apply_rotary(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate `states` `[B, heads, T, D]` by the cosines and sines `[B, T, D]` of their absolute positions."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    return states * cos + rotate_half(states) * sin


class DFlowAttention(nn.Module):
    """Attention of the block to the context and itself; context features give keys and values, never queries."""

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

    def queries(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Queries `[B, heads, T, D]` of `states` `[B, T, H]`."""
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim)))
        return apply_rotary(queries.transpose(1, 2), rotary)

    def key_values(self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]):
        """Keys and values `[B, KV, T, D]` of `states` `[B, T, H]`."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return apply_rotary(keys, rotary), values

    def forward(self, hidden, rotary, extend: ExtendKeyValues, mask_for: MaskForLayer) -> torch.Tensor:
        queries = self.queries(hidden, rotary)
        keys, values = extend(self.layer_idx, *self.key_values(hidden, rotary))
        mask = mask_for(self.layer_idx, keys.shape[-2])
        is_dense = mask is None or isinstance(mask, torch.Tensor)
        implementation = self.config._attn_implementation if is_dense else "flex_attention"
        if mask is not None and implementation == "eager":  # eager adds its mask
            mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, torch.finfo(queries.dtype).min)
        if not is_dense:  # FlexAttention, unlike SDPA, does not unify the mixed dtypes of autocast
            queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attend(self, queries, keys, values, mask, dropout=dropout, scaling=self.scaling, is_causal=False)
        return self.o_proj(output.flatten(2))


class BlockConvolution(nn.Module):
    """DFlash 2: a causal convolution along the block before a sublayer, and another one after it.

    With taps o = 0 … K - 1, `y[t, c] = sum_o (base[o, c] + dynamic[t, o, group(c)]) * x[t - o, c]`; positions before
    the block count as zero. Both dynamic kernels come from the sublayer's input, one number for each group of channels.
    Context features do not pass through it. A new one is the identity. Weight names are those of z-lab's
    `DFlash2DraftModel` (PyPI dflash 0.1.0).
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        assert taps is not None and self.group_size is not None
        self.base_kernel = nn.Parameter(torch.empty(2, taps, config.hidden_size))
        num_dynamic = 2 * taps * (config.hidden_size // self.group_size)
        self.kernel_projection = nn.Linear(config.hidden_size, num_dynamic, bias=False)

    def forward(self, sublayer: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        """`sublayer` of `states` `[B, L, H]`, convolved on both sides."""
        dynamic = self.kernel_projection(states).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        before, after = (self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return _convolve(sublayer(_convolve(states, before)), after)


def _convolve(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """`states` `[B, L, H]` under a kernel for each position, `[B, L, K, H]`."""
    taps = kernel.shape[2]
    padded = nn.functional.pad(states, (0, 0, taps - 1, 0))
    shifted = padded.unfold(1, taps, 1).flip(-1).transpose(-1, -2)  # [B, L, K, H]: entry o is position t - o
    return (kernel * shifted).sum(dim=2)


class DFlowDecoderLayer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DFlowDrafterConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlowAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_convolutions = config.conv_kernel_size is not None
        self.attention_conv = BlockConvolution(config) if has_convolutions else None
        self.mlp_conv = BlockConvolution(config) if has_convolutions else None

    def forward(self, hidden, rotary, extend: ExtendKeyValues, mask_for: MaskForLayer) -> torch.Tensor:
        return self.run(hidden, lambda states: self.self_attn(states, rotary, extend, mask_for))

    def run(self, hidden: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The layer `[B, L, H]` of a block `[B, L, H]`, with the given attention sublayer."""
        for norm, convolution, sublayer in (
            (self.input_layernorm, self.attention_conv, attend),
            (self.post_attention_layernorm, self.mlp_conv, self.mlp),
        ):
            states = norm(hidden)
            hidden = hidden + (sublayer(states) if convolution is None else convolution(sublayer, states))
        return hidden
