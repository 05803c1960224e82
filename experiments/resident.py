"""Features of all rows computed in batches and kept in the target's memory: for a GPU with room and no time to lose."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_dflow.generation._compat import capture_features
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import LiveFeatures

TOKENS_PER_BATCH = {"cpu": 2_048, "cuda": 32_768}


class ResidentFeatures(LiveFeatures):
    """What training reads of a [`FeatureStore`], up to the rounding of batched forwards.

    Args:
        rows, target, layer_ids, dtype, teacher_top_k: As in [`FeatureStore`].
    """

    def __init__(
        self, rows: list[TrainingRow], target: Any, layer_ids: list[int], *, dtype: str = "float32", teacher_top_k=0
    ):
        super().__init__(rows, target, layer_ids, dtype=dtype, teacher_top_k=teacher_top_k)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def fill(self, progress=lambda done, total: None) -> None:
        """Compute what is missing."""
        device = self.target.device
        room = TOKENS_PER_BATCH.get(device.type, TOKENS_PER_BATCH["cpu"])
        missing = [i for i in range(len(self.rows)) if i not in self._kept]
        missing.sort(key=lambda i: len(self.rows[i].token_ids))
        while missing:
            longest = len(self.rows[missing[-1]].token_ids)
            batch = missing[-max(1, room // longest) :]
            del missing[-len(batch) :]
            self._compute_batch(batch, device)
            progress(len(self._kept), len(self.rows))

    def _compute_batch(self, batch: list[int], device: torch.device) -> None:
        texts = [torch.tensor(self.rows[i].token_ids) for i in batch]
        output = self.target(
            pad_sequence(texts, batch_first=True).to(device),
            attention_mask=pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(device),
            output_hidden_states=True,
            use_cache=False,
            logits_to_keep=0 if self.teacher_top_k else 1,
        )
        features = capture_features(output.hidden_states, self.layer_ids).to(device, self.dtype)
        for place, i in enumerate(batch):
            length = len(texts[place])
            kept = {"features": features[place, :length].clone()}  # a view would keep the padding of its batch
            if self.teacher_top_k:
                top = output.logits[place, :length].float().softmax(dim=-1).topk(self.teacher_top_k, dim=-1)
                kept |= {"teacher_ids": top.indices.to(torch.int32), "teacher_probs": top.values.to(torch.float16)}
            self._kept[i] = kept

    def _read(self, index: int, name: str) -> torch.Tensor:
        if index not in self._kept:
            self.fill()
        return self._kept[index][name]
