"""What every checkpoint layout has in common. A layout turns files into configuration values and tensors, no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hf_dflow.errors import DrafterConfigError

# Fields that the draft layers share with Qwen3, by whether a file must give them.
LAYER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LAYER_DEFAULTS = ("hidden_act", "rms_norm_eps", "initializer_range", "attention_bias", "attention_dropout")
MOST_LAYERS = 1024  # lists as long as the number of layers are made before the weights are compared with it
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one tensor in a safetensors header."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """One way to store a drafter as config.json and safetensors.

    Layouts are recognised by the content of config.json, never by the name of a repository.
    """

    description: str  # for error messages
    renamed: Mapping[str, str] = {}  # stored tensor name -> ours, where they differ
    training_only: tuple[str, ...] = ()  # stored tensors that drafting does not need
    holds_own_parts = False  # whether relay and causal correction, which other formats lack, are among its weights
    needs_weights = False  # whether the fields depend on which tensors are stored

    def matches(self, raw: Mapping[str, Any]) -> bool:
        """Whether the content `raw` of a config.json claims this layout."""
        raise NotImplementedError

    def read_fields(
        self, raw: Mapping[str, Any], path: str, stored: Mapping[str, StoredTensor], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Fields of [`DFlowDrafterConfig`] in the content `raw` of the config.json at `path`.

        Args:
            raw (`dict`): The file's content.
            path (`str`): Folder or repository, for messages.
            stored (`dict`): Headers of the weights, under their stored names.
            overrides (`dict`): Fields that the caller sets: the file need not give them. They are not merged here.

        Raises:
            [`DrafterConfigError`]: A key is missing, contradictory or unknown; the message names it.
        """
        raise NotImplementedError

    def rename(self, name: str) -> str | None:
        """Our name of a stored tensor; `None` for one that only training needs."""
        return None if name in self.training_only else self.renamed.get(name, name)

    def convert_weights(self, tensors: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """Stored tensors under our names."""
        names = {name: self.rename(name) for name in tensors}
        return {ours: tensors[name] for name, ours in names.items() if ours is not None}


class OwnLayout(Layout):
    """This package's own: config.json holds the fields of [`DFlowDrafterConfig`], the weights have our names."""

    holds_own_parts = True
    model_type = "dflow_drafter"
    description = f"'model_type': '{model_type}' (this package)"

    def matches(self, raw):
        return raw.get("model_type") == self.model_type

    def read_fields(self, raw, path, stored, overrides):
        if "vocab_size" not in {**raw, **overrides}:  # null is valid, the target's; a missing key is not
            refuse(path, "'vocab_size' is missing and has no safe default; add it")
        return dict(raw)


@dataclass(frozen=True)
class Export:
    """A drafter in another layout, to be written."""

    layout: Layout
    config: dict[str, Any]  # of config.json
    weights: dict[str, torch.Tensor]


def refuse(path: str, problem: str) -> NoReturn:
    """Raise [`DrafterConfigError`] about the config.json at `path`."""
    raise DrafterConfigError(f"{path}/config.json: {problem}.")


def check_layer_count(path: str, num_layers: Any) -> None:
    """Refuse a `num_hidden_layers` that no drafter has."""
    if type(num_layers) is not int or not 0 < num_layers <= MOST_LAYERS:
        refuse(path, f"'num_hidden_layers' is {num_layers!r}; give a whole number from 1 to {MOST_LAYERS}")


def refuse_export(layout: str, obstacles: Mapping[str, bool]) -> None:
    """Raise [`DrafterConfigError`] listing the `obstacles` that hold, if any does."""
    present = [obstacle for obstacle, holds in obstacles.items() if holds]
    if present:
        raise DrafterConfigError(f"the {layout} layout cannot express this drafter: {'; '.join(present)}.")
