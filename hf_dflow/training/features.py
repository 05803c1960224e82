"""Tapped target states of every training row, computed once and memory-mapped."""

import hashlib
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hf_dflow.errors import DFlowError
from hf_dflow.training.data import TrainingRow


class FeatureStore:
    """Features `[tokens, taps * target_hidden_size]` of each row, float32, in one file that survives a restart.

    Args:
        folder (`Path`): Where `features.f32` and `features.json` lie.
        rows (`list[TrainingRow]`): What the features belong to.
        target (`PreTrainedModel`): The frozen target.
        layer_ids (`list[int]`): Tapped layers; id *l* is `hidden_states[l + 1]`.

    Raises:
        DFlowError: The folder holds features of other rows, another target or other layers.
    """

    def __init__(self, folder: Path, rows: list[TrainingRow], target, layer_ids: list[int]):
        self.rows = rows
        self.target = target
        self.layer_ids = layer_ids
        self.width = len(layer_ids) * target.config.hidden_size
        self.starts = [0, *accumulate(len(row.token_ids) for row in rows)]
        self._provenance_path = folder / "features.json"
        folder.mkdir(parents=True, exist_ok=True)
        provenance = {
            "rows": hashlib.sha256(json.dumps([row.token_ids for row in rows]).encode()).hexdigest(),
            "target": _fingerprint(target),
            "layer_ids": layer_ids,
        }
        self._state: dict[str, Any] = {**provenance, "rows_done": 0}
        if self._provenance_path.exists():
            found = json.loads(self._provenance_path.read_text())
            differing = [key for key in provenance if found.get(key) != provenance[key]]
            if differing:
                raise DFlowError(f"{folder} holds features of other {', '.join(differing)}; use an empty folder")
            self._state = found
        mode: Literal["r+", "w+"] = "r+" if (folder / "features.f32").exists() else "w+"
        shape = (self.starts[-1], self.width)
        self.features = np.memmap(folder / "features.f32", dtype=np.float32, mode=mode, shape=shape)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Features `[tokens, width]` of row `index`."""
        return torch.from_numpy(np.array(self.features[self.starts[index] : self.starts[index + 1]]))

    @torch.no_grad()
    def fill(self, progress=lambda done, total: None) -> None:
        """Compute what is missing, row by row; may be stopped and continued."""
        for index in range(self._state["rows_done"], len(self.rows)):
            token_ids = torch.tensor([self.rows[index].token_ids], device=self.target.device)
            states = self.target(token_ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
            features = torch.cat([states[i + 1] for i in self.layer_ids], dim=-1)[0]
            self.features[self.starts[index] : self.starts[index + 1]] = features.float().cpu().numpy()
            if index % 50 == 49 or index + 1 == len(self.rows):
                self.features.flush()
                self._state["rows_done"] = index + 1
                self._provenance_path.write_text(json.dumps(self._state))
                progress(index + 1, len(self.rows))


def _fingerprint(target) -> str:
    """A hash of the target's configuration and of the column sums of each weight matrix."""
    digest = hashlib.sha256(target.config.to_json_string().encode())
    for parameter in target.parameters():
        digest.update(
            parameter.detach().float().flatten(1).sum(0).cpu().numpy().tobytes() if parameter.ndim > 1 else b""
        )
    return digest.hexdigest()
