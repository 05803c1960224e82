"""The target that answers: loading it, where it stops, and what tells it from any other."""

import hashlib
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dflow.errors import DFlowError

DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLED_WEIGHTS = 256  # of each tensor; training moves nearly every weight, so these few tell two models apart


def load_target(name: str, dtype: str = "auto", revision: str | None = None) -> PreTrainedModel:
    """A frozen target, on the GPU if there is one; "auto" is bfloat16 there and float32 on a CPU.

    Raises:
        DFlowError: The dtype is unknown.
    """
    if dtype not in DTYPES:
        raise DFlowError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), revision=revision)
    return model.to(device).eval().requires_grad_(False)


def stop_ids(name: str, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> set[int]:
    """Tokens at which the target stops: those of its generation config, and the tokenizer's own."""
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # it has no such file
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(name, revision=revision))
    configured = generation.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return {token_id for token_id in [*several, tokenizer.eos_token_id] if token_id is not None}


def describe_target(name: str, revision: str | None, model: PreTrainedModel | None) -> dict[str, Any]:
    """Name, revision (the commit, where the Hub knows one), dtype and a digest of the weights, as JSON.

    Without `model` (nothing was asked) the last two are `None`.
    """
    config = AutoConfig.from_pretrained(name, revision=revision) if model is None else model.config
    return {
        "name": name,
        "revision": getattr(config, "_commit_hash", None) or revision,
        "dtype": None if model is None else str(model.dtype).removeprefix("torch."),
        "weights": None if model is None else _weights_digest(model),
    }


def _weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights = parameter.detach().flatten()
        stride = max(1, weights.numel() // SAMPLED_WEIGHTS)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(weights[::stride].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def inner_model(target: Any) -> Any:
    """The decoder without its head inside a causal language model, and inside PEFT's wrapping of one."""
    base = target.get_base_model() if hasattr(target, "get_base_model") else target
    return getattr(base, base.base_model_prefix, base)
