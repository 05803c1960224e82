"""Two faults of vLLM 0.32.0 on a CPU, and what stands in for them where a DFlow drafter is loaded."""

import torch

from hf_dflow.engines.vllm.plugin import vllm_version

AFFECTED = ("0.32.0",)


def is_affected(device: torch.device) -> bool:
    """Whether the kernels at work have these faults."""
    return device.type == "cpu" and vllm_version() in AFFECTED


def rms_norm_per_layer(keys: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the keys `(L, T, KV, D)` of L draft layers with weights `(L, D)`.

    The kernel `rms_norm` gives all layers the first one's weights.
    """
    scale = torch.rsqrt(keys.float().square().mean(-1, keepdim=True) + eps)
    return (keys.float() * scale * weights[:, None, None].float()).to(keys.dtype)


def repair_sampling(device: torch.device) -> None:
    """Let verification at a temperature above 0 see the temperature, in this process.

    The kernel behind `expand_batch_to_tokens` rounds each request's temperature and top_p to whole numbers and writes
    into a copy, so that sampled text does not have the target's law.
    """
    if not is_affected(device):
        return
    from vllm.v1.sample import rejection_sampler

    from hf_dflow.engines.vllm.hooks import hook

    parameters = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
    hook(rejection_sampler, "expand_batch_to_tokens", parameters, _expand)


def _expand(wrapped, instance, args, kwargs):
    return _expand_batch_to_tokens(*args, **kwargs)


def _expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """Each request's value `x` `(B,)` as often as it has tokens, `(num_tokens,)`; see vLLM's function of that name."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.long(), output_size=num_tokens)
