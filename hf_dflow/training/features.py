"""Tapped target states of every training row, computed once, in memory-mapped safetensors shards."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_dflow.errors import DFlowError
from hf_dflow.training.data import TrainingRow

ROWS_PER_SHARD = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Teacher:
    """The target's own next-token distribution behind each token of a row, its likeliest K tokens."""

    ids: torch.Tensor  # [T, K]
    probs: torch.Tensor  # [T, K] float32; what is missing to 1 lies on tokens that were not kept


class FeatureStore:
    """Features `[tokens, taps * target_hidden_size]` of each row, and on request the target's distribution.

    A shard appears under its name when it is whole, so filling may be killed and continued.

    Args:
        folder (`Path`): Where `features.json` and the shards lie.
        rows (`list[TrainingRow]`): What the features belong to.
        target (`PreTrainedModel`): The frozen target; its dtype is part of the provenance.
        layer_ids (`list[int]`): Tapped layers; id *l* is `hidden_states[l + 1]`.
        dtype (`str`, *optional*, defaults to `"float32"`): What features are stored in.
        teacher_top_k (`int`, *optional*, defaults to 0): Tokens kept of each distribution; 0 stores none.

    Raises:
        DFlowError: The folder holds features of other rows, another target, other layers or settings.
    """

    def __init__(
        self,
        folder: Path,
        rows: list[TrainingRow],
        target,
        layer_ids: list[int],
        *,
        dtype: str = "float32",
        teacher_top_k: int = 0,
    ):
        if dtype not in DTYPES:
            raise DFlowError(f"features cannot be stored as {dtype}; use one of {', '.join(DTYPES)}")
        self.folder, self.rows, self.target, self.layer_ids = folder, rows, target, layer_ids
        self.dtype, self.teacher_top_k = DTYPES[dtype], teacher_top_k
        self.width = len(layer_ids) * target.config.get_text_config().hidden_size
        self._shards: dict[int, Any] = {}
        provenance = {
            "rows": hashlib.sha256(json.dumps([row.token_ids for row in rows]).encode()).hexdigest(),
            "target": _fingerprint(target),
            "layer_ids": layer_ids,
            "dtype": dtype,
            "teacher_top_k": teacher_top_k,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "features.json"
        if path.exists():
            found = json.loads(path.read_text())
            differing = [key for key in provenance if found.get(key) != provenance[key]]
            if differing:
                raise DFlowError(f"{folder} holds features of other {', '.join(differing)}; use an empty folder")
        else:
            path.write_text(json.dumps(provenance))

    def __getitem__(self, index: int) -> torch.Tensor:
        """Features `[tokens, width]` of row `index`."""
        return self._read(index, "features")

    def teacher(self, index: int) -> Teacher | None:
        """The target's distribution behind each token of row `index`, or `None` where it was not stored."""
        if not self.teacher_top_k:
            return None
        return Teacher(self._read(index, "teacher_ids").long(), self._read(index, "teacher_probs").float())

    @torch.no_grad()
    def fill(self, progress=lambda done, total: None) -> None:
        """Compute the shards that are missing."""
        for number in range(-(-len(self.rows) // ROWS_PER_SHARD)):
            if self._path(number).exists():
                continue
            first = number * ROWS_PER_SHARD
            computed = [self._compute(row) for row in self.rows[first : first + ROWS_PER_SHARD]]
            partial = self.folder / "partial.safetensors"
            save_file({key: torch.cat([one[key] for one in computed]) for key in computed[0]}, partial)
            partial.rename(self._path(number))
            progress(first + len(computed), len(self.rows))

    def _compute(self, row: TrainingRow) -> dict[str, torch.Tensor]:
        token_ids = torch.tensor([row.token_ids], device=self.target.device)
        keep = 0 if self.teacher_top_k else 1
        output = self.target(token_ids, output_hidden_states=True, use_cache=False, logits_to_keep=keep)
        features = torch.cat([output.hidden_states[i + 1] for i in self.layer_ids], dim=-1)[0]
        tensors = {"features": features.to("cpu", self.dtype)}
        if self.teacher_top_k:
            top = output.logits[0].float().softmax(dim=-1).topk(self.teacher_top_k, dim=-1)
            tensors["teacher_ids"] = top.indices.to("cpu", torch.int32)
            tensors["teacher_probs"] = top.values.to("cpu", torch.float16)
        return tensors

    def _read(self, index: int, name: str) -> torch.Tensor:
        number = index // ROWS_PER_SHARD
        if number not in self._shards:
            self._shards[number] = safe_open(self._path(number), framework="pt")
        lengths = [len(row.token_ids) for row in self.rows[number * ROWS_PER_SHARD : index + 1]]
        return self._shards[number].get_slice(name)[sum(lengths[:-1]) : sum(lengths)]

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"


def _fingerprint(target) -> str:
    """A hash of the target's configuration and of the column sums of each weight matrix."""
    digest = hashlib.sha256(target.config.to_json_string().encode())
    for parameter in target.parameters():
        digest.update(
            parameter.detach().float().flatten(1).sum(0).cpu().numpy().tobytes() if parameter.ndim > 1 else b""
        )
    return digest.hexdigest()
