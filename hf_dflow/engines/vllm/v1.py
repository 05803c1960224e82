"""Where DFlow hooks into vLLM's V1 model runner: three methods of the proposer of DFlash drafters.

The hooks act where the drafter is a DFlow drafter; any other is drafted by vLLM's methods untouched.
"""

from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import (
    apply_top_k_top_p,
    empty_exponential_noise_like,
    sample_with_exponential_noise,
)
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.spec_decode.dflash import DFlashProposer

from hf_dflow.engines.vllm.hooks import for_drafters, hook
from hf_dflow.engines.vllm.laws import greedy_drafts, sampled_drafts


def install(model_class: type) -> None:
    """Install the hooks for drafters of `model_class`, once in a process.

    Raises:
        [`EngineError`]: vLLM's methods are not those that the hooks were written for.
    """
    hook(
        DFlashProposer,
        "set_inputs_first_pass",
        (
            *("self", "target_token_ids", "next_token_ids", "target_positions", "target_hidden_states"),
            *("token_indices_to_sample", "cad", "num_rejected_tokens_gpu"),
        ),
        for_drafters(model_class, _set_inputs_first_pass),
    )
    hook(
        DFlashProposer,
        "_sample_draft_tokens",
        ("self", "hidden_states", "sampling_metadata"),
        for_drafters(model_class, _sample_draft_tokens),
    )
    hook(
        DFlashProposer,
        "_maybe_share_embeddings",
        ("self", "target_language_model"),
        for_drafters(model_class, _maybe_share_embeddings),
    )


def _maybe_share_embeddings(model, proposer, wrapped, args, kwargs):
    """Called once, with the target: the drafter takes its final norm too."""
    model.take_final_norm(*args, *kwargs.values())
    return wrapped(*args, **kwargs)


def _set_inputs_first_pass(model, proposer, wrapped, args, kwargs):
    """Feed the rejected rows, which vLLM passes on with the accepted ones, to the blocks that are drafted next."""
    _feed(model, proposer.num_speculative_tokens, *args, **kwargs)
    return wrapped(*args, **kwargs)


def _feed(
    model: Any,
    num_drafts: int,
    target_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    target_hidden_states: torch.Tensor,
    token_indices_to_sample: torch.Tensor | None,
    cad: Any,
    num_rejected_tokens_gpu: torch.Tensor | None,
) -> None:
    model.set_relay(
        context=target_hidden_states,
        ends=cad.query_start_loc[1:],
        num_rejected=num_rejected_tokens_gpu,
        verified_ids=target_token_ids,
        bonus_ids=next_token_ids,
        num_drafts=num_drafts,
    )


def _sample_draft_tokens(model, proposer, wrapped, args, kwargs):
    """Draft by the drafter's own law."""
    return _draft(model, proposer, *args, **kwargs)


def _draft(
    model: Any, proposer: Any, hidden_states: torch.Tensor, sampling_metadata: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drafts `(B * N,)` of slots with final states `(B * N, H)`, and probabilities `(B * N, V)` if they were drawn."""
    num_drafts = proposer.num_speculative_tokens
    hidden = hidden_states.view(-1, num_drafts, hidden_states.shape[-1])
    blocks = proposer.input_ids[: len(hidden) * (1 + num_drafts)].view(len(hidden), -1)
    anchor_ids = blocks[:, 0]
    if not proposer._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
        return greedy_drafts(model, hidden, anchor_ids).token_ids.flatten(), None
    temperature = sampling_metadata.temperature
    is_greedy = temperature < _SAMPLING_EPS
    temperature = torch.where(is_greedy, 1.0, temperature)[:, None]

    def process(logits: torch.Tensor) -> torch.Tensor:
        """As the target's law: temperature, then top-k and top-p."""
        logits = apply_top_k_top_p(logits / temperature, sampling_metadata.top_k, sampling_metadata.top_p)
        return logits.softmax(dim=-1)

    def draw(probabilities: torch.Tensor) -> torch.Tensor:
        noise = empty_exponential_noise_like(probabilities, proposer.use_fp64_gumbel)
        drawn = sample_with_exponential_noise(probabilities.clone(), noise.exponential_())
        return torch.where(is_greedy, probabilities.argmax(dim=-1), drawn)

    drafts = sampled_drafts(model, hidden, anchor_ids, process, draw)
    assert drafts.probabilities is not None
    return drafts.token_ids.flatten(), drafts.probabilities.flatten(0, 1)
