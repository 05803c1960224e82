"""Wrapping a method of vLLM, after a look at whether it is still the one that the plugin was written for."""

import inspect
from collections.abc import Callable
from typing import Any

import wrapt

from hf_dflow.engines.vllm.plugin import TESTED, vllm_version
from hf_dflow.errors import EngineError

MARK = "_hf_dflow_hook"


def hook(owner: Any, name: str, parameters: tuple[str, ...], wrapper: Callable[..., Any]) -> None:
    """Wrap `owner.name` once.

    Args:
        owner (`type` or module): Where the function is looked up.
        name (`str`): Its name.
        parameters (`tuple[str, ...]`): The names of its parameters, in order.
        wrapper (`Callable`): `(wrapped, instance, args, kwargs)`, as wrapt calls it.

    Raises:
        [`EngineError`]: There is no such function, or it takes other parameters.
    """
    function = inspect.getattr_static(owner, name, None)
    if getattr(function, MARK, False):
        return
    where = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', owner.__name__)}.{name}".lstrip(".")
    if function is None:
        raise EngineError(f"{where} is not there{_versions()}")
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise EngineError(f"{where} takes ({', '.join(found)}), not ({', '.join(parameters)}){_versions()}")
    wrapped = wrapt.FunctionWrapper(function, wrapper)
    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)


def for_drafters(model_class: type, act: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper for `hook` that calls `act(model, instance, wrapped, args, kwargs)` where the drafter of `instance`,
    its attribute `model`, is a `model_class`, and `wrapped` where it is any other.
    """

    def wrapper(wrapped, instance, args, kwargs):
        model = instance.model
        model = model.unwrap() if hasattr(model, "unwrap") else model  # of a wrapper that captures graphs
        if not isinstance(model, model_class):
            return wrapped(*args, **kwargs)
        return act(model, instance, wrapped, args, kwargs)

    return wrapper


def _versions() -> str:
    return (
        f", so DFlow cannot draft in this vLLM ({vllm_version()}). Tested: {', '.join(TESTED)}, unchanged; another "
        "plugin or a patched build may have replaced it."
    )
