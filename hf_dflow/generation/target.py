"""The target at work in one call: the prompts' forward, then one forward for each step's blocks."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_dflow.generation import _compat
from hf_dflow.generation.drafting import DraftBlock
from hf_dflow.generation.policy.trees import DraftTree, keep_path, tree_inputs
from hf_dflow.generation.prefill import prefill

if TYPE_CHECKING:
    from hf_dflow.generation.rows import DecodeState


class TargetSession:
    """Runs the target and taps its states. On a static cache, blocks run compiled where plain decoding compiles.

    Args:
        model (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`): Whose `compile_config`, `disable_compile` and `prefill_chunk_size` hold.
        target_layer_ids (`list[int]`): The layers that the drafter reads.
        full_length (`int`): Drafts of a block that nothing cuts short.
        max_length (`int`): Longest sequence, prompt included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        *,
        target_layer_ids: list[int],
        full_length: int,
        max_length: int,
    ):
        self.model, self.config, self.taps = model, generation_config, target_layer_ids
        self.full_length, self.max_length = full_length, max_length
        self._compiled: Any = None

    def open(self, model_kwargs: dict[str, Any]) -> None:
        """Decide whether blocks run compiled, which depends on the cache."""
        self._compiled = _compat.compiled_call(self.model, self.config, model_kwargs)

    def forward(self, state: "DecodeState", draft: DraftBlock) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """One target forward over anchors and drafts, or over the prompts.

        Returns:
            `tuple`: The target's outputs; its logits `[B, N + 1, V]` of anchors and drafts, those of the last token
            after the prompts; tapped states `[B, rows, taps * target_hidden_size]`.
        """
        num_drafts, device = draft.token_ids.shape[1], draft.token_ids.device
        state.num_target_forwards += 1
        if state.is_prefill:
            prompt_ids = torch.cat([row.ids for row in state.rows])
            outputs, features = prefill(self.model, prompt_ids, state.model_kwargs, self.config, self.taps)
            return outputs, outputs.logits[:, -1:].to(device), features.to(device)
        inputs = _compat.model_inputs(
            self.model,
            state.committed_ids(draft.token_ids),
            state.model_kwargs,
            new_tokens=num_drafts + 1,
            num_drafts=num_drafts,
            is_prefill=False,
            furthest=state.furthest_positions(draft.lengths),
        )
        inputs["output_hidden_states"] = True
        logits_of = slice(-num_drafts - 1, None)
        if self._compiled is not None and self._recurs(state, num_drafts):
            outputs = self._compiled(**inputs)
            logits = outputs.logits[:, logits_of].clone()  # a CUDA graph writes its next logits to the same place
        else:
            outputs = self.model(**inputs)
            logits = outputs.logits[:, logits_of]
        return outputs, logits.to(device), _compat.capture_features(outputs.hidden_states, self.taps).to(device)

    def forward_tree(
        self, state: "DecodeState", tree: DraftTree, block: DraftBlock
    ) -> tuple[Any, torch.Tensor, torch.Tensor, DraftBlock]:
        """One target forward over the anchor and all nodes of a tree, of which one path stays: that along which the
        target agrees longest, and its likeliest continuation. From there on the step is that of a chain.

        Args:
            block (`DraftBlock`): Whose `logits` `[1, N, V]` are those of the slots.

        Returns:
            `tuple`: As `forward`, of anchor and path; and the path as a block.
        """
        row, device = state.rows[0], block.token_ids.device
        state.num_target_forwards += 1
        cached = int(state.cache.get_seq_length())
        nodes = torch.tensor([tree.token_ids], device=device)
        inputs = _compat.model_inputs(
            self.model,
            state.committed_ids(nodes),
            state.model_kwargs,
            new_tokens=tree.size + 1,
            num_drafts=tree.size,
            is_prefill=False,
        )
        tree_inputs(inputs, tree, self.model, row.next_position, cached)
        inputs["output_hidden_states"] = True
        outputs = self.model(**inputs)
        logits = outputs.logits[:, -tree.size - 1 :]
        path = tree.path(logits[0].float().argmax(dim=-1).tolist())
        rows = torch.tensor([0, *path], device=logits.device)
        features = _compat.capture_features(outputs.hidden_states, self.taps)
        keep_path(state.cache, cached, [0, *path])
        _compat.crop(state.cache, tree.size - len(path))
        chain = DraftBlock(
            nodes[:, rows[1:].to(device) - 1], block.logits[:, : len(path)], block.is_finite, base_logits=None
        )
        return outputs, logits[:, rows].to(device), features[:, rows.to(features.device)].to(device), chain

    def _recurs(self, state: "DecodeState", num_drafts: int) -> bool:
        """Whether a forward has one of the two shapes that come again: a full block, and one token while drafting
        pauses. Blocks that a limit cuts short are of many lengths, each of which would compile for longer than it
        runs."""
        left = min(min(state.room_for(row), self.max_length - row.length - 1) for row in state.rows)
        return num_drafts == self.full_length or (num_drafts == 0 and left >= self.full_length)
