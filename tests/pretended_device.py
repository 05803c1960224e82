"""A device of its own made of CPU memory, to find tensors on the wrong device where there is no GPU.

Loaded as a pytest plugin (`-p pretended_device`), in a process of its own: torch has room for one such backend, and
takes it for the machine's accelerator from then on. Tensors on it compute on the CPU, and refuse what CUDA refuses:
operands of two devices (but for scalars on the CPU, copies, and CPU indices into a tensor of the device), another
device's generator, and a look at their memory without a copy. It says nothing of kernels, streams or memory.
"""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretended"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default)


class _Backend(_DummyBackendModule):
    """What torch and transformers ask any accelerator's module for."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def synchronize(self, device=None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state, device=None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    manual_seed = manual_seed_all


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())


class PretendedTensor(torch.Tensor):
    """A CPU tensor that says it is elsewhere."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False):
        if device is None:  # accelerate makes parameters anew by their class, wherever they are
            return torch.nn.Parameter(held, requires_grad)
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=device, **layout)
        tensor.held = held
        return tensor

    def __init__(self, *_, **__):
        pass  # torch's takes no options

    def __repr__(self, **_) -> str:
        return f"{self.device}: {self.held}"

    def tolist(self) -> list:  # torch refuses it to all subclasses
        return self.held.tolist()

    def untyped_storage(self):  # whose address tells shared weights, when a model is saved
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees operations that are given the device and no tensor of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if PretendedTensor not in types and kwargs.get("device") is None:
            return func(*args, **kwargs)  # as CPU text is most of a test
        return _run(func, args, kwargs)


class _Generators(TorchFunctionMode):
    """Sees a call's generator as it was given: operations get a copy that no longer says where it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        tensors = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
        place = torch.device(kwargs.get("device") or (tensors or ["cpu"])[0])
        if generator is not None and generator.device.type != place.type:
            raise RuntimeError(f"Expected a generator of {place}, got one of {generator.device} in {func}")
        return func(*args, **kwargs)


class PretendedGenerator(torch.Generator):
    """A CPU generator that says it is elsewhere."""

    device = torch.device(NAME, 0)


class _AnyGenerator:
    """Stands for `torch.Generator`, which cannot be made for a backend in Python."""

    made_for_cpu = torch.Generator

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return PretendedGenerator() if torch.device(device).type == NAME else cls.made_for_cpu(device)


def _held(value: Any, met: list[torch.Tensor] | None = None) -> Any:
    """The CPU tensors of an operation's arguments, whose tensors are added to `met`."""
    if isinstance(value, (list, tuple)):
        return type(value)([_held(one, met) for one in value])  # torch's own tree_map takes five times as long
    if isinstance(value, torch.Tensor) and met is not None:
        met.append(value)
    return value.held if isinstance(value, PretendedTensor) else value


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_placed(one, device) for one in value])
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, PretendedTensor)
    return PretendedTensor(value, device) if is_plain else value


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


def _result_device(func, args: tuple, named: Any, tensors: list[torch.Tensor]) -> torch.device:
    if func is aten.copy_.default:
        return args[0].device
    if named is not None:
        return _indexed(named)
    return next((tensor.device for tensor in tensors if isinstance(tensor, PretendedTensor)), torch.device("cpu"))


def _run(func, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `func` gives, on the device that CUDA would leave it on."""
    tensors: list[torch.Tensor] = []
    held_args = _held(args, tensors)
    held_kwargs = {name: _held(value, tensors) for name, value in kwargs.items()}
    device = _result_device(func, args, kwargs.get("device"), tensors)
    met = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, PretendedTensor)}
    if func in INDEXING and isinstance(args[0], PretendedTensor):
        values = args[2] if len(args) > 2 else args[0]
        if isinstance(values, PretendedTensor) or not values.dim():
            met.discard(torch.device("cpu"))
    if len(met) > 1 and func not in COPIES:
        raise RuntimeError(f"Expected all tensors to be on the same device, {met} met in {func}")
    if device.type != NAME:
        return func(*held_args, **held_kwargs)
    if "device" in kwargs:
        held_kwargs["device"] = torch.device("cpu")
    result = func(*held_args, **held_kwargs)
    placed = _placed(result, device)
    return placed if func is aten._to_copy.default else return_and_correct_aliasing(func, args, kwargs, placed)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> torch.Tensor:
    return PretendedTensor(torch.empty(size, dtype=dtype, device="cpu"), _indexed(device))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None) -> torch.Tensor:
    return PretendedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), _indexed(device))


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _held(destination).copy_(_held(source))
    return destination


# `torch.tensor(…, device=…)` comes here past the two classes above.
LIBRARY = torch.library.Library("aten", "IMPL", "PrivateUse1")
LIBRARY.impl("empty.memory_format", _empty)
LIBRARY.impl("empty_strided", _empty_strided)
LIBRARY.impl("_copy_from", _copy_from)


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    """The device, for as long as a test runs."""
    monkeypatch.setattr(torch, "Generator", _AnyGenerator)
    with _Generators(), _Factories():
        yield
