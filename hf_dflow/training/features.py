"""The target's states for every training row: cached once in memory-mapped shards, or computed on demand."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

from hf_dflow.errors import DFlowError
from hf_dflow.generation._compat import cache_argument, capture_features
from hf_dflow.generation.recurrent import clamping_mixers, steps_of_any_size
from hf_dflow.text import give_usual_modes
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.frozen_target import describe_target, inner_model

ROWS_PER_SHARD = 64
OPEN_SHARDS = 64  # a process may open about a thousand files
NOT_COMPARED = ("transformers_version", "_name_or_path", "_commit_hash", "architectures")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Teacher:
    """The target's next-token distribution behind each token of a row, its K likeliest tokens."""

    ids: torch.Tensor  # [T, K]
    probs: torch.Tensor  # [T, K] float32; the rest of 1 lies on tokens that were not kept


class LiveFeatures:
    """Computes a row's features when an update asks for them: no disk, but one target forward for each row drawn.

    Args:
        rows (`list[TrainingRow]`): Rows that the features belong to.
        target (`PreTrainedModel`): The frozen target.
        layer_ids (`list[int]`): Tapped layers; id *l* is `hidden_states[l + 1]`.
        dtype (`str`, *optional*, defaults to `"float32"`): Data type of the features.
        teacher_top_k (`int`, *optional*, defaults to 0): Tokens kept of each distribution; 0 keeps none.

    Raises:
        DFlowError: `dtype` is unknown.
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
        if dtype not in DTYPES:
            raise DFlowError(f"features cannot be stored as {dtype}; use one of {', '.join(DTYPES)}")
        self.rows, self.target, self.layer_ids = rows, target, layer_ids
        self.dtype, self.teacher_top_k = DTYPES[dtype], teacher_top_k
        self.width = len(layer_ids) * target.config.get_text_config().hidden_size
        self._last: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    def __getitem__(self, index: int) -> torch.Tensor:
        """Features `[tokens, width]` of row `index`."""
        return self._read(index, "features")

    def teacher(self, index: int) -> Teacher | None:
        """The target's distribution behind each token of row `index`, or `None` where it is not kept."""
        if not self.teacher_top_k:
            return None
        return Teacher(self._read(index, "teacher_ids").long(), self._read(index, "teacher_probs").float())

    def fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute in advance what can be; here nothing."""

    def _read(self, index: int, name: str) -> torch.Tensor:
        if self._last[0] != index:
            with torch.no_grad():
                self._last = index, self._compute(self.rows[index])
        return self._last[1][name]

    def _compute(self, row: TrainingRow) -> dict[str, torch.Tensor]:
        outputs = self._outputs(row)
        features = torch.cat([capture_features(output.hidden_states, self.layer_ids)[0] for output in outputs])
        tensors = {"features": features.to("cpu", self.dtype)}
        if self.teacher_top_k:
            logits = torch.cat([output.logits[0] for output in outputs])
            top = logits.float().softmax(dim=-1).topk(self.teacher_top_k, dim=-1)
            tensors["teacher_ids"] = top.indices.to("cpu", torch.int32)
            tensors["teacher_probs"] = top.values.to("cpu", torch.float16)
        return tensors

    def _outputs(self, row: TrainingRow) -> list[Any]:
        """The target's outputs on a row: of one forward, or of one over the prompt and one over the answer, where the
        target computes them in different ways."""
        token_ids = torch.tensor([row.token_ids], device=self.target.device)
        options = {"output_hidden_states": True, "logits_to_keep": 0 if self.teacher_top_k else 1}
        clamping = clamping_mixers(self.target) if row.prompt_length else []
        if not clamping:
            return [self.target(token_ids, use_cache=False, **options)]
        held = {cache_argument(inner_model(self.target)): DynamicCache(config=self.target.config.get_text_config())}
        prompt = self.target(token_ids[:, : row.prompt_length], use_cache=True, **held, **options)
        with steps_of_any_size(clamping):
            return [prompt, self.target(token_ids[:, row.prompt_length :], use_cache=True, **held, **options)]


class FeatureStore(LiveFeatures):
    """The features of [`LiveFeatures`], computed once and kept in a folder.

    A shard gets its name when it is complete, so a killed `fill` can be resumed; a shard that is damaged all the same
    is computed again by the next `fill`.

    Args:
        folder (`Path`): For `features.json` and the shards.
        rows, target, layer_ids, dtype, teacher_top_k: As in [`LiveFeatures`]; with the target's weights,
            configuration and dtype they are the folder's provenance.

    Raises:
        DFlowError: The folder holds features of other rows, another target, other layers or settings.
    """

    def __init__(
        self,
        folder: Path,
        rows: list[TrainingRow],
        target: Any,
        layer_ids: list[int],
        *,
        dtype: str = "float32",
        teacher_top_k: int = 0,
    ):
        super().__init__(rows, target, layer_ids, dtype=dtype, teacher_top_k=teacher_top_k)
        self.folder = folder
        self._shards: dict[int, Any] = {}
        provenance = {
            "rows": hashlib.sha256(json.dumps([row.token_ids for row in rows]).encode()).hexdigest(),
            "target": describe_target(target.config._name_or_path, None, target) | {"config": _config_digest(target)},
            "layer_ids": list(layer_ids),
            "dtype": dtype,
            "teacher_top_k": teacher_top_k,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "features.json"
        if path.exists():
            _check_provenance(path, provenance)
        else:
            partial = folder / "partial.json"
            partial.write_text(json.dumps(provenance, indent=1), encoding="utf-8")
            partial.rename(path)

    @torch.no_grad()
    def fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute the shards that are missing or damaged."""
        for number in range(-(-len(self.rows) // ROWS_PER_SHARD)):
            if self._is_complete(number):
                continue
            self._shards.pop(number, None)
            by_row = [self._compute(row) for row in self._rows_of(number)]
            partial = self.folder / "partial.safetensors"
            save_file({name: torch.cat([tensors[name] for tensors in by_row]) for name in by_row[0]}, partial)
            give_usual_modes([partial])
            partial.rename(self._path(number))
            progress(number * ROWS_PER_SHARD + len(by_row), len(self.rows))

    def _rows_of(self, number: int) -> list[TrainingRow]:
        return self.rows[number * ROWS_PER_SHARD : (number + 1) * ROWS_PER_SHARD]

    def _is_complete(self, number: int) -> bool:
        """Whether the shard holds what its rows need; a file that was cut or overwritten does not."""
        if not self._path(number).exists():
            return False
        tokens = sum(len(row.token_ids) for row in self._rows_of(number))
        names = ["features"] + ["teacher_ids", "teacher_probs"] * bool(self.teacher_top_k)
        try:
            with safe_open(self._path(number), framework="pt") as shard:
                return all(shard.get_slice(name).get_shape()[0] == tokens for name in names)
        except (SafetensorError, OSError):
            return False

    def _read(self, index: int, name: str) -> torch.Tensor:
        number = index // ROWS_PER_SHARD
        if number not in self._shards:
            if len(self._shards) == OPEN_SHARDS:
                del self._shards[next(iter(self._shards))]
            self._shards[number] = self._open(number)
        lengths = [len(row.token_ids) for row in self.rows[number * ROWS_PER_SHARD : index + 1]]
        return self._shards[number].get_slice(name)[sum(lengths[:-1]) : sum(lengths)]

    def _open(self, number: int) -> Any:
        try:
            return safe_open(self._path(number), framework="pt")
        except (SafetensorError, OSError) as error:
            raise DFlowError(f"{self._path(number)} is missing or damaged ({error}); call fill() first") from error

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"


def _config_digest(target: Any) -> str:
    """A hash of the fields of the target's configuration that affect its computation."""
    config = target.config.get_text_config().to_dict()
    compared = {key: config[key] for key in sorted(config) if key not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, default=str).encode()).hexdigest()


def _check_provenance(path: Path, expected: dict[str, Any]) -> None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored_target = stored["target"]
        same_target = all(stored_target[key] == expected["target"][key] for key in ("weights", "dtype", "config"))
    except (ValueError, KeyError, TypeError) as error:
        raise DFlowError(f"{path} does not say what the features belong to; use an empty folder") from error
    differing = [key for key in expected if key != "target" and stored.get(key) != expected[key]]
    if not same_target:
        names = [
            f"{target['name'] or 'a model'} ({target['revision'] or 'local'}, {target['dtype']})"
            for target in (stored_target, expected["target"])
        ]
        differing.insert(0, f"target: {names[0]}, and this is {names[1]} with other weights, configuration or dtype")
    if differing:
        raise DFlowError(f"{path.parent} holds features of other {', '.join(differing)}; use an empty folder")
