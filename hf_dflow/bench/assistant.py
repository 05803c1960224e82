"""A classic draft model as the assistant of transformers' own assisted generation, which `bench run` compares with."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_dflow.errors import DFlowError

BORROWED = "borrowed_embedding.json"  # marks a folder without embedding and head, which are the target's


def load_draft_model(folder: str | Path, target: PreTrainedModel) -> PreTrainedModel:
    """The model in `folder`, whole or without embedding and head, in the target's dtype and on its device."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DFlowError(f"{folder} holds no safetensors file; give the folder of a trained draft model")
    weights = {name: value for path in files for name, value in load_file(path).items()}
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    borrowed = (folder / BORROWED).exists()
    borrow_embedding(model, target)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    shared = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in parameters if id(parameter) in shared}
    is_tied = len(shared) == 1
    wrong = [name for name in missing if not (name in names and (borrowed or is_tied))] + list(unexpected)
    if wrong:
        raise DFlowError(f"{folder}: its weights do not fit its configuration: {', '.join(sorted(wrong))}")
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.to(target.device).eval()


@torch.no_grad()
def borrow_embedding(model: Any, target: Any) -> None:
    """Copy embedding and head from the target into `model`, and freeze them there."""
    for part in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = getattr(model, part)(), getattr(target, part)()
        ours.weight.copy_(theirs.weight)
        if getattr(theirs, "bias", None) is not None:
            ours.bias.copy_(theirs.bias)
        ours.requires_grad_(False)
