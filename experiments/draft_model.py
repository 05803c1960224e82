"""A classic draft model: a small causal language model of the target's architecture, to train and save.

Embedding and head are frozen copies of the target's, so that only its layers count as its size.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_dflow.bench.assistant import BORROWED, borrow_embedding
from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.frozen_target import inner_model


def drafter_size(drafter: DFlowDrafter) -> int:
    """Parameters of a drafter without embedding and head."""
    return sum(
        weight.numel() for name, weight in drafter.named_parameters() if not name.startswith(("embed", "lm_head"))
    )


def matching_layers(target: PreTrainedModel, parameters: int) -> int:
    """The number of target layers whose size is nearest to `parameters`; at least one, at most all."""
    layers = _layers(target)
    mean = sum(weight.numel() for weight in layers.parameters()) / len(layers)
    return min(len(layers), max(1, round(parameters / mean)))


def new_draft_model(
    target: PreTrainedModel, num_layers: int, seed: int = 0, initialise_from_target: bool = False
) -> PreTrainedModel:
    """A float32 model of the target's architecture with fewer layers.

    Args:
        initialise_from_target (`bool`, *optional*, defaults to `False`): Copy the layers from the target's, evenly
            spread from the first to the last, and everything that is not a layer.

    Raises:
        DFlowError: The target has fewer layers.
    """
    total = len(_layers(target))
    if not 1 <= num_layers <= total:
        raise DFlowError(f"num_layers is {num_layers}; the target has {total} layers, so use 1 … {total}")
    chosen = [round(i * (total - 1) / max(1, num_layers - 1)) for i in range(num_layers)]
    config: Any = copy.deepcopy(target.config.get_text_config())
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == total:  # one entry a layer: its kind, its window …
            setattr(config, key, [value[i] for i in chosen])
    config.num_hidden_layers = num_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if initialise_from_target:
        theirs: Any = target.state_dict()
        own = {key: theirs[key] for key, value in model.state_dict().items() if _fits(theirs.get(key), value)}
        model.load_state_dict(own, strict=False)
        for layer, i in zip(_layers(model), chosen, strict=True):
            layer.load_state_dict(_layers(target)[i].state_dict())
    borrow_embedding(model, target)
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def _fits(theirs: torch.Tensor | None, ours: torch.Tensor) -> bool:
    return theirs is not None and theirs.shape == ours.shape


def _layers(model: Any) -> torch.nn.ModuleList:
    base = inner_model(model)
    layers = next((child for child in base.children() if isinstance(child, torch.nn.ModuleList)), None)
    if layers is None:
        raise DFlowError(f"{type(base).__name__} has no list of layers from which to build a smaller model")
    return layers


def save_draft_model(
    model: Any, folder: Path, dtype: torch.dtype, *, with_embedding: bool = True, max_shard_size: str = "5GB"
) -> None:
    """Write a finished draft model.

    Args:
        with_embedding (`bool`, *optional*, defaults to `True`): Without it, only the trained weights are written, and
            [`~hf_dflow.bench.assistant.load_draft_model`] takes embedding and head from the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if with_embedding:
        copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return
    weights = {
        name: weight.detach().to("cpu", dtype) for name, weight in model.named_parameters() if weight.requires_grad
    }
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_torch_state_dict(weights, folder, max_shard_size=max_shard_size)
    (folder / BORROWED).write_text('{"embedding and head": "those of the target"}\n')
