"""The drafter as vLLM runs it: its DFlash drafter, with a relay in the masked slots and a causal correction."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from hf_dflow.checkpoints.vllm import KEY, OWN_WEIGHTS, own_part_fields
from hf_dflow.engines.vllm import cpu
from hf_dflow.errors import DrafterWeightsError, EngineError
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.heads import CausalCorrection, CorrectedCandidates, head_scores
from hf_dflow.model.relay import DFlowRelay


class DFlowDraftLayers(DFlashQwen3Model):
    """The draft layers. Every row of a block may have something added to its embedding.

    A persistent buffer holds the additions, so that captured graphs read it at the address that they know.
    """

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        scheduler: Any = vllm_config.scheduler_config
        speculative: Any = vllm_config.speculative_config
        num_rows = max(
            scheduler.max_num_seqs * (1 + speculative.num_speculative_tokens),
            scheduler.max_num_batched_tokens,  # dummy runs may be wider than any block
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        additions = torch.zeros(num_rows, self.config.hidden_size, dtype=vllm_config.model_config.dtype)
        self.register_buffer("additions", additions, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed_input_ids(input_ids) + self.additions[: input_ids.shape[0]]

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        if not cpu.is_affected(all_k.device):
            return super()._normalize_context_k(all_k)
        return cpu.rms_norm_per_layer(all_k, self._k_norm_weights, self._rms_norm_eps)


class DFlowDraftModel(DFlashQwen3ForCausalLM):
    """DFlow's drafter, of a folder written by `hf-dflow export --to vllm`.

    Raises:
        [`EngineError`]: The settings or the version of vLLM cannot carry it.
    """

    model_cls = DFlowDraftLayers

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        speculative: Any = vllm_config.speculative_config
        _check_settings(speculative)
        if vllm_config.use_v2_model_runner:
            from hf_dflow.engines.vllm.v2 import install
        else:
            from hf_dflow.engines.vllm.v1 import install
        install(DFlowDraftModel)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        cpu.repair_sampling(next(self.parameters()).device)
        fields = own_part_fields(self.config.to_dict())
        config = DFlowDrafterConfig(
            hidden_size=self.config.hidden_size, rms_norm_eps=self.config.rms_norm_eps, **fields
        )
        self.relay = DFlowRelay(config) if config.use_relay else None
        has_correction = config.correction_intermediate_size is not None
        self.causal_correction = CausalCorrection(config) if has_correction else None
        self._taps: list[int] = self.config.dflash_config["target_layer_ids"]
        self._last_layer = speculative.target_model_config.hf_text_config.num_hidden_layers - 1
        self._final_norm: list[nn.Module] = []  # the target's; in a list, since it is no part of this model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the draft layers as vLLM does, and relay and correction beside them.

        Raises:
            [`DrafterWeightsError`]: A tensor of relay or correction is missing, unknown or of the wrong shape.
        """
        own: dict[str, torch.Tensor] = {}

        def others():
            for name, weight in weights:
                if name.startswith(OWN_WEIGHTS):
                    own[name] = weight
                else:
                    yield name, weight

        super().load_weights(others())
        expected = {name: weight for name, weight in self.named_parameters() if name.startswith(OWN_WEIGHTS)}
        problems = [f"{name} is missing" for name in sorted(expected.keys() - own.keys())]
        problems += [f"{name} is not a part of this drafter" for name in sorted(own.keys() - expected.keys())]
        problems += [
            f"{name} has the shape {tuple(own[name].shape)}, not {tuple(weight.shape)}"
            for name, weight in expected.items()
            if name in own and own[name].shape != weight.shape
        ]
        if problems:
            raise DrafterWeightsError(
                f"{self.draft_model_config.model}: {'; '.join(problems)}. Export the drafter again: hf-dflow export "
                "DRAFTER FOLDER --to vllm."
            )
        with torch.no_grad():
            for name, weight in expected.items():
                weight.copy_(own[name])

    def take_final_norm(self, target: nn.Module) -> None:
        """Remember the target's final norm where the drafter reads the target's last layer.

        What transformers returns as the states of that layer, and the drafter was trained with, carries the norm;
        what vLLM hands to a drafter does not.

        Raises:
            [`EngineError`]: The target has none in the usual place.
        """
        if self._last_layer not in self._taps:
            return
        norm = getattr(getattr(target, "model", None), "norm", None)
        if norm is None:
            raise EngineError(
                f"{self.draft_model_config.model} reads the target's last layer behind its final norm, and "
                f"{type(target).__name__} has no 'model.norm'. Train a drafter with other target_layer_ids for vLLM."
            )
        self._final_norm[:] = [norm]

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As vLLM's, which hands over the layers from the first to the last, and the last one without its norm."""
        states = dict(zip(sorted(self._taps), hidden_states.chunk(len(self._taps), dim=-1), strict=True))
        if self._last_layer in states:
            (norm,) = self._final_norm
            states[self._last_layer] = norm(states[self._last_layer].contiguous())
        if self._last_layer in states or list(states) != self._taps:
            hidden_states = torch.cat([states[layer] for layer in self._taps], dim=-1)
        return super().combine_hidden_states(hidden_states)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """As vLLM's, but that the mask token is never drafted."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            mask_token_id: Any = self.model.mask_token_id
            logits[:, mask_token_id] = -torch.inf
        return logits

    @torch.inference_mode()
    def set_relay(
        self,
        context: torch.Tensor,
        ends: torch.Tensor,
        num_rejected: torch.Tensor | None,
        verified_ids: torch.Tensor,
        bonus_ids: torch.Tensor,
        num_drafts: int,
    ) -> None:
        """Write what the next blocks' rows get from the rows that were just rejected; without a wait for the device.

        The rows of a request are the anchor and its drafts. With a accepted, row a predicted the bonus, and row
        a + 1 + i is the target's state at the position that draft i + 1 of the next block will be verified at.

        Args:
            context (`torch.Tensor` of shape `(T, hidden_size)`): The verified rows of all requests, after `fc`.
            ends (`torch.Tensor` of shape `(B,)`): Behind each request's last row.
            num_rejected (`torch.Tensor` of shape `(B,)`, *optional*): Its rejected rows, the last ones; `None`: no
                request had drafts.
            verified_ids (`torch.Tensor` of shape `(T,)`): The rows' tokens.
            bonus_ids (`torch.Tensor` of shape `(B,)`): The next blocks' anchors.
            num_drafts (`int`): Drafts of a next block.
        """
        if self.relay is None:
            return
        batch_size = bonus_ids.shape[0]
        blocks = self.model.additions[: batch_size * (1 + num_drafts)].view(batch_size, 1 + num_drafts, -1)
        if num_rejected is None:
            blocks.zero_()
            return
        last = context.shape[0] - 1
        first = (ends - num_rejected).long()  # the first rejected draft's row
        slots = torch.arange(num_drafts, device=context.device)
        is_fed = slots < num_rejected[:, None]
        states = self.model.hidden_norm(context[(first[:, None] + slots).clamp(max=last)])
        rejected_ids = verified_ids[first.clamp(max=last)]
        embeds = self.model.embed_tokens(torch.cat([bonus_ids, rejected_ids]).long().clamp(min=0))
        additions = self.relay(states, *embeds.split(batch_size))
        blocks[:, :1] = 0.0
        blocks[:, 1:] = torch.where(is_fed[..., None], additions, 0.0)

    def candidates(self, hidden: torch.Tensor, logits: torch.Tensor) -> CorrectedCandidates:
        """The candidates of blocks with final states `(B, N, H)` and logits `(B, N, V)`, corrected draft by draft."""
        assert self.causal_correction is not None
        return CorrectedCandidates(
            self.causal_correction, hidden, logits.float(), embed=self.model.embed_tokens, score=self._scores
        )

    def _scores(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What the LM head gives tokens `(B, K)` for `states` `(B, P, H)`, `(B, P, K)`, from all ranks' rows of it."""
        if get_tensor_model_parallel_world_size() == 1:
            head = nn.Linear(1, 1, bias=False)
            head.weight = self.lm_head.weight
            return head_scores(head, states, token_ids) * self.logits_processor.scale
        shard = self.lm_head.shard_indices
        rows = token_ids - shard.org_vocab_start_index
        is_here = (rows >= 0) & (token_ids < shard.org_vocab_end_index)
        weight = self.lm_head.weight[rows.where(is_here, 0)]
        scores = (states.to(weight) @ weight.mT) * is_here[:, None]
        return tensor_model_parallel_all_reduce(scores) * self.logits_processor.scale


def _check_settings(speculative: Any) -> None:
    """Refuse what would draft otherwise than the drafter was trained to."""
    config = speculative.draft_model_config.hf_config
    name = speculative.draft_model_config.model
    draft: dict[str, Any] = getattr(config, "dflash_config", None) or {}
    if not isinstance(draft.get("block_size"), int) or getattr(config, KEY, None) is None:
        raise EngineError(
            f"{name}/config.json lacks 'dflash_config.block_size' or '{KEY}'; export the drafter again: "
            "hf-dflow export DRAFTER FOLDER --to vllm."
        )
    given, drafts = speculative.num_speculative_tokens, draft["block_size"] - 1
    if speculative.method != "dflash":
        raise EngineError(
            f'{name}: the speculative config\'s "method" is {speculative.method!r}; give "dflash", which vLLM runs '
            "DFlow drafters by."
        )
    if given != drafts:
        raise EngineError(
            f'{name}: "num_speculative_tokens" is {given}; this drafter was trained for blocks of {drafts} drafts. '
            f"Give {drafts}."
        )
    if speculative.use_heterogeneous_vocab:
        raise EngineError(f'{name}: drop "use_heterogeneous_vocab"; a DFlow drafter shares its target\'s vocabulary.')
