"""Features computed when an update asks for them: no disk, and one target forward more for each row drawn."""

from typing import Any

import torch

from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import DTYPES, FeatureStore


class LiveFeatures(FeatureStore):
    """What training reads of a [`FeatureStore`], with the same values. The last row's are kept.

    Args:
        rows, target, layer_ids, dtype, teacher_top_k: As in [`FeatureStore`].
    """

    def __init__(
        self,
        rows: list[TrainingRow],
        target: Any,
        layer_ids: list[int],
        *,
        dtype: str = "float32",
        teacher_top_k: int = 0,
    ):
        self.rows, self.target, self.layer_ids = rows, target, layer_ids
        self.dtype, self.teacher_top_k = DTYPES[dtype], teacher_top_k
        self.width = len(layer_ids) * target.config.get_text_config().hidden_size
        self._last: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    def fill(self, progress=lambda done, total: None) -> None:
        """Nothing to do ahead."""

    def _read(self, index: int, name: str) -> torch.Tensor:
        if self._last[0] != index:
            with torch.no_grad():
                self._last = index, self._compute(self.rows[index])
        return self._last[1][name]
