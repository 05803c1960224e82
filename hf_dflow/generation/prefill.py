"""The prompts' target forward, whole or in chunks, and the context features of the tokens it computes."""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_dflow.generation import _compat
from hf_dflow.generation.cache import pack
from hf_dflow.generation.checks import check_first_outputs


def prefill(
    model: Any,
    token_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    target_layer_ids: list[int],
) -> tuple[Any, torch.Tensor]:
    """Run the target over what it has not seen of `token_ids` `[B, T]`.

    With `prefill_chunk_size` it runs chunk by chunk, as plain decoding does; features are kept from every chunk, so
    drafts do not depend on the size.

    Returns:
        `tuple[Any, torch.Tensor]`: Outputs of the last forward, whose last row of logits predicts the first token, and
        tapped states `[B, new tokens, taps * target_hidden_size]`.

    Raises:
        UnsupportedGenerationError: The first forward shows that the target cannot be rolled back.
    """
    new_tokens = uncached(token_ids, model_kwargs, config)
    width = token_ids.shape[1] if new_tokens is None else new_tokens
    chunk_size = config.prefill_chunk_size or width
    cached = int(_cache(model_kwargs).get_seq_length())
    features: list[torch.Tensor] = []
    outputs = None
    for start in range(0, width, chunk_size):
        end = min(start + chunk_size, width)
        kwargs = model_kwargs if end == width else _up_to(model_kwargs, width - end, cached + end)
        outputs = model(
            **{
                **_compat.model_inputs(
                    model,
                    token_ids[:, : token_ids.shape[1] - width + end],
                    kwargs,
                    new_tokens=None if new_tokens is None and start == 0 else end - start,
                    num_drafts=0,
                    is_prefill=True,
                ),
                "output_hidden_states": True,
            }
        )
        if start == 0:
            check_first_outputs(model, _cache(model_kwargs), outputs.hidden_states)
        _compat.crop(_cache(model_kwargs), 0)  # sliding layers that record their past shrink to the window
        features.append(_compat.capture_features(outputs.hidden_states, target_layer_ids))
    return outputs, torch.cat(features, dim=1)


def uncached(token_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> int | None:
    """How many of the prompt's tokens the target has not seen; `None` for all.

    Behind a filled cache `token_ids` may be the whole sequence or only what is new. As in `generate`'s own prefill the
    attention mask, which is always whole, tells which; a mask of ones has been dropped, its length noted.
    """
    cached = int(_cache(model_kwargs).get_seq_length())
    mask = model_kwargs.get("attention_mask")
    mask_length = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    is_whole = mask_length == token_ids.shape[1]
    return token_ids.shape[1] - cached if cached and is_whole else None


def prompt_context(
    features: torch.Tensor, attention_mask: torch.Tensor | None, cached: int
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Context features of the prompt without padding.

    Args:
        features (`torch.Tensor` of shape `(B, T, taps * target_hidden_size)`): Of all tokens that were computed now.
        attention_mask (`torch.Tensor` of shape `(B, cached + T)`, *optional*): 0 on padding.
        cached (`int`): Tokens that were in the cache before.

    Returns:
        `tuple`: Features `[B, longest, …]`, each row's packed to the left; how many each row has; the absolute position
        of each row's first.
    """
    batch, new_tokens = features.shape[:2]
    if attention_mask is None:
        return features, [new_tokens] * batch, [cached] * batch
    is_real = attention_mask.bool()
    is_new = is_real[:, -new_tokens:]
    totals, counts = torch.stack([is_real.sum(1), is_new.sum(1)]).tolist()
    packed = pack(features, is_new.to(features.device))[:, : max(counts)]
    return packed, counts, [total - count for total, count in zip(totals, counts, strict=True)]


def _up_to(model_kwargs: dict[str, Any], missing: int, mask_length: int) -> dict[str, Any]:
    """`model_kwargs` of a prompt that ends `missing` tokens earlier."""
    kwargs = dict(model_kwargs)
    for name in ("position_ids", "token_type_ids", "mm_token_type_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., : kwargs[name].shape[-1] - missing]
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = kwargs["attention_mask"][:, :mask_length]
    return kwargs


def _cache(model_kwargs: dict[str, Any]):
    return _compat.get_cache(model_kwargs)
