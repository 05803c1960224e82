"""Runs a model without leaving a trace: no hook of the caller's fires, and nothing about the model stays changed."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# Hooks of these packages place weights, capture states or compute a part of the model. All others are the caller's.
LIBRARIES = {"torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "torchao"}
LIBRARIES |= {"compressed_tensors", "optimum", "awq", "gptqmodel"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ONE_AT_A_TIME = threading.RLock()  # random generators and compilation are the process's
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def in_turn(model: nn.Module) -> Any:
    """A lock for what changes `model` for a while, if only its hooks: threads that share a model take turns."""
    return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def untouched(model: nn.Module, *, with_hooks: bool = False) -> Iterator[None]:
    """Run `model` in evaluation mode and without gradients; afterwards it is as it was.

    Put back are the attributes and buffers of all modules, hooks and training mode, and the random generators of CPU
    and of the model's devices.

    Args:
        with_hooks (`bool`, *optional*, defaults to `False`): Whether the caller's forward hooks fire.
    """
    with in_turn(model), _ONE_AT_A_TIME, ExitStack() as stack:
        held = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
        stack.callback(_put_back, held)
        for module, _, _ in held:
            for name in HOOKS:
                hooks = getattr(module, name).items()
                kept = OrderedDict((key, hook) for key, hook in hooks if with_hooks or _is_library(hook))
                vars(module)[name] = kept
            vars(module)["training"] = False
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")}
        kind = next((device.type for device in devices), "cuda")
        stack.enter_context(
            torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind)
        )
        if "torch._dynamo" in sys.modules:  # a forward that the caller compiled is not compiled for our few lengths
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        yield


def has_own_hooks(model: nn.Module) -> bool:
    """Whether a forward of `model` runs hooks of the caller's."""
    return any(not _is_library(hook) for module in model.modules() for name in HOOKS for hook in _hooks(module, name))


def _hooks(module: nn.Module, name: str) -> list[Any]:
    return list(getattr(module, name).values())


def _is_library(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return (getattr(function, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _put_back(held: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for module, attributes, buffers in held:
        _restore(vars(module), attributes)
        _restore(module._buffers, buffers)


def _restore(current: dict[str, Any], held: dict[str, Any]) -> None:
    """Make `current` equal to `held`; what both hold is never missing, as another thread may be running the model."""
    for name in current.keys() - held.keys():
        del current[name]
    current.update(held)
