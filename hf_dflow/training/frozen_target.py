"""The frozen target: how it is loaded, where it stops, how it is told from any other, and what lies inside it."""

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter

DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLED_WEIGHTS = 256  # of each tensor; training moves nearly every weight, so these few tell two models apart


def load_frozen_target(
    name: str, dtype: str = "auto", revision: str | None = None, device: torch.device | str | None = None
) -> Any:
    """A target without gradients; transformers puts a PEFT adapter onto its base model where `name` holds one.

    Args:
        dtype (`str`, *optional*, defaults to `"auto"`): "auto" is bfloat16 on a GPU and float32 on a CPU.
        device (`torch.device`, *optional*): By default the GPU if there is one.

    Raises:
        DFlowError: The dtype is unknown.
    """
    if dtype not in DTYPES:
        raise DFlowError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), revision=revision)
    return target.to(device).eval().requires_grad_(False)


def stop_ids(name: str, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> set[int]:
    """Tokens at which the target stops: those of its generation config and the tokenizer's own."""
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # there is no such file
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name, revision=revision))
    configured = generation.eos_token_id
    token_ids = configured if isinstance(configured, list) else [configured]
    return {token_id for token_id in [*token_ids, tokenizer.eos_token_id] if token_id is not None}


def describe_target(name: str, revision: str | None, model: PreTrainedModel | None) -> dict[str, Any]:
    """Name, revision (the commit, where the Hub knows one), dtype and a digest of the weights, as JSON.

    Without `model` dtype and digest are `None`.
    """
    config = AutoConfig.from_pretrained(name, revision=revision) if model is None else model.config
    return {
        "name": name,
        "revision": getattr(config, "_commit_hash", None) or revision,
        "dtype": None if model is None else str(model.dtype).removeprefix("torch."),
        "weights": None if model is None else weights_digest(model),
    }


def weights_digest(model: nn.Module) -> str:
    """A hash of names, shapes and evenly sampled weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights = parameter.detach().flatten()
        stride = max(1, weights.numel() // SAMPLED_WEIGHTS)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(weights[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def inner_model(target: Any) -> Any:
    """The decoder without its head inside a causal language model, and inside PEFT's wrapper of one."""
    base = target.get_base_model() if hasattr(target, "get_base_model") else target
    return getattr(base, base.base_model_prefix, base)


@torch.no_grad()
def linear_head(drafter: DFlowDrafter, target: Any) -> Any:
    """The LM head that the drafter trains against, with all of its computation in `weight` and `bias`.

    That is the drafter's own head or the target's. Only an `nn.Linear` shows its computation in its weight; a head with
    an adapter or a quantised weight is evaluated on unit vectors and rebuilt as a linear layer.
    """
    if drafter.lm_head is not None:
        return drafter.lm_head
    head = target.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.is_floating_point():
        return head
    width, options = drafter.config.hidden_size, {"dtype": target.dtype, "device": target.device}
    bias = head(torch.zeros(1, width, **options))[0]
    columns = [(head(unit_vectors) - bias).T for unit_vectors in torch.eye(width, **options).split(256)]
    linear = nn.Linear(width, len(bias), device="meta")
    linear.weight = nn.Parameter(torch.cat(columns, dim=1), requires_grad=False)
    linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
