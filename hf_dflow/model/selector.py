"""What DFlash 2 adds to a drafter: convolutions around each sublayer, and a selector that picks the drafts in order.

The layout, and the names of the weights, are those of z-lab's `DFlash2DraftModel` (PyPI dflash 0.1.0).
"""

from collections.abc import Callable

import torch
from torch import nn

from hf_dflow.model.configuration import DFlowDrafterConfig


class BlockConvolution(nn.Module):
    """A causal convolution along the block before a sublayer, and another one behind it.

    With taps o = 0 … K - 1, `y[t, c] = sum_o (base[o, c] + dynamic[t, o, group(c)]) * x[t - o, c]`; what stands before
    the block counts as zero. Both dynamic kernels come from the sublayer's input, one number for each group of
    channels. Context features do not pass through it. A new one hands its input on.
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        assert taps is not None and self.group_size is not None
        self.base_kernel = nn.Parameter(torch.empty(2, taps, config.hidden_size))
        numbers = 2 * taps * (config.hidden_size // self.group_size)
        self.kernel_projection = nn.Linear(config.hidden_size, numbers, bias=False)

    def forward(self, sublayer: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        """`sublayer` of `states` `[B, L, H]`, convolved on both sides."""
        dynamic = self.kernel_projection(states).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        before, behind = (self.base_kernel + dynamic.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return _convolve(sublayer(_convolve(states, before)), behind)


def _convolve(states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """`states` `[B, L, H]` under a kernel of their own for each position, `[B, L, K, H]`."""
    taps = kernel.shape[2]
    padded = nn.functional.pad(states, (0, 0, taps - 1, 0))
    shifted = padded.unfold(1, taps, 1).flip(-1).transpose(-1, -2)  # [B, L, K, H]: entry o is position t - o
    return (kernel * shifted).sum(dim=2)


class CandidateSelector(nn.Module):
    """Picks drafts one after the other among each slot's most likely tokens, by what was picked before.

    A candidate c of slot i scores `logit_i(c) + sum_r (P[previous, r] * (W h_i)_r * S[c, r])`. The law of a draft is
    the softmax over its candidates alone, so every other token has a draft probability of zero.
    """

    def __init__(self, config: DFlowDrafterConfig):
        super().__init__()
        rank, vocab_size = config.selector_rank, config.vocab_size
        assert rank is not None and vocab_size is not None and config.selector_top_k is not None
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def candidates(self, hidden: torch.Tensor, logits: torch.Tensor) -> "Candidates":
        """The `top_k` tokens of each slot, from its final state `[B, N, H]` and its logits `[B, N, V]`."""
        scores, token_ids = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        # A target may have padded ids without a row here; their logit is -inf, whatever is added to it.
        rows = self.successor_codebook(token_ids.clamp(max=self.successor_codebook.num_embeddings - 1))
        return Candidates(self, token_ids, scores, rows * self.hidden_projection(hidden)[:, :, None])


class Candidates:
    """What a selector chooses from in one block; made by [`CandidateSelector.candidates`]."""

    def __init__(self, selector: CandidateSelector, token_ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor):
        self._selector = selector
        self._token_ids, self._scores, self._rows = token_ids, scores, rows  # [B, N, K], [B, N, K], [B, N, K, R]

    def logits(self, slot: int, previous_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[B, vocab_size]` of a slot behind `previous_ids` `[B]`; -inf for all but the candidates."""
        codebook = self._selector.predecessor_codebook
        is_known = previous_ids < codebook.num_embeddings  # the target may say tokens that a smaller drafter lacks
        previous = codebook(previous_ids.where(is_known, 0)) * is_known[:, None]
        scores = self._scores[:, slot] + (self._rows[:, slot] * previous[:, None]).sum(dim=-1)
        nothing = scores.new_full((len(scores), vocab_size), -torch.inf)
        return nothing.scatter(-1, self._token_ids[:, slot], scores)
