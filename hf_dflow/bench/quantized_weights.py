"""Bytes that quantized weights take, from a configuration's `quantization_config`: numbers, scales and zero points."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_dflow.errors import DFlowError

# Bytes of a matrix of so many outputs and inputs.
MatrixBytes = Callable[[int, int], int]
# Field of the modules that stay as they are, by method.
KEPT = {
    "gptq": (),
    "awq": ("modules_to_not_convert",),
    "fp8": ("modules_to_not_convert",),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "compressed-tensors": ("ignore",),
    "mxfp4": ("modules_to_not_convert",),
}
BLOCK_4BIT, BLOCK_NESTED, GROUP_MXFP4 = 64, 256, 32


def quantization_of_config(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a model's configuration, or of its text part."""
    for part in (config, config.get_text_config()):
        given = getattr(part, "quantization_config", None)
        if given is not None:
            if not isinstance(given, Mapping) and not hasattr(given, "to_dict"):
                raise DFlowError(f"quantization_config is {type(given).__name__}, not an object; correct config.json")
            return dict(given) if isinstance(given, Mapping) else given.to_dict()
    return None


def quantized_bytes(model: torch.nn.Module, given: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each weight of `model` that the quantization `given` stores in another way, by its name.

    Args:
        model (`PreTrainedModel`): On the meta device, not quantized.

    Raises:
        DFlowError: What is stored cannot be told from the configuration.
    """
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    if given.get("load_in_8bit") or given.get("load_in_4bit"):
        method = "bitsandbytes"
    if method not in KEPT:
        raise DFlowError(
            f"quantization {method!r}: this plan cannot tell what is stored; it knows {', '.join(KEPT)}. Measure it, "
            "or plan with the configuration that is not quantized"
        )
    try:
        return _quantized_bytes(model, given, method)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DFlowError(
            f"quantization {method!r}: its fields cannot be read ({type(error).__name__}: {error}); compare "
            "quantization_config in config.json with what transformers documents for this method"
        ) from error


def _quantized_bytes(model: torch.nn.Module, given: Mapping[str, Any], method: str) -> dict[str, int]:
    experts = _experts(model)
    if method == "mxfp4":
        return {
            name: _mxfp4(weight) for name, weight in experts.items() if not _is_kept(name, _kept(model, given), method)
        }
    if experts and method != "fp8":
        raise DFlowError(f"quantization {method!r} of experts in one tensor ({next(iter(experts))}): measure it")
    of_matrix = _scheme(method, given)
    kept = _kept(model, given) if method != "gptq" else _kept_by_gptq(model, given)
    stored = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and not _is_kept(name, kept, method):
            rows, columns = module.weight.shape
            if isinstance(module, Conv1D):
                rows, columns = columns, rows
            stored[f"{name}.weight"] = of_matrix(rows, columns)
    for name, weight in experts.items():
        if not _is_kept(name, kept, method):
            stored[name] = weight.shape[0] * of_matrix(weight.shape[1], weight.shape[2])
    return stored


def _experts(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Weights that hold a matrix for each expert; kernels of convolutions and position embeddings have three dimensions
    as well, and are stored as they are."""
    kernels = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d))
    }
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dim() == 3 and weight.shape[0] > 1 and id(weight) not in kernels
    }


def _kept(model: Any, given: Mapping[str, Any]) -> list[str]:
    """Modules that are not quantized: those that the configuration names, else transformers' own choice."""
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    fields = KEPT.get(method, KEPT["bitsandbytes"])
    named = next((given[field] for field in fields if given.get(field)), None)
    if method == "compressed-tensors":
        return list(named or [])
    return HfQuantizer.get_modules_to_not_convert(model, named, add_default_skips=method in ("awq", "fp8"))


def _kept_by_gptq(model: Any, given: Mapping[str, Any]) -> list[str]:
    """GPTQ quantizes the decoder layers, or named modules of them."""
    if given.get("dynamic"):
        raise DFlowError("quantization 'gptq' with rules for single modules ('dynamic') is not counted: measure it")
    inside = [name for group in given.get("modules_in_block_to_quantize") or [] for name in group]
    head = [] if given.get("lm_head") else ["lm_head", "embed_out", "output"]
    linears = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    others = [name for name in linears if inside and not any(name.endswith(f".{part}") for part in inside)]
    return [*head, *others]


def _is_kept(name: str, kept: list[str], method: str) -> bool:
    """Whether a module is one of `kept`, or inside one; how they are named is the method's."""
    if method not in ("gptq", "compressed-tensors"):
        return not should_convert_module(name, kept)
    for key in kept:
        if key.startswith("re:"):
            if re.match(key[3:], name):
                return True
        elif name == key or f".{key}." in f".{name}.":
            return True
    return False


def _scheme(method: str, given: Mapping[str, Any]) -> MatrixBytes:
    """How a method stores a matrix."""
    if method in ("gptq", "awq"):
        bits, group = given.get("bits", given.get("w_bit", 4)), given.get("group_size", given.get("q_group_size", 128))
        return lambda rows, columns: _grouped_integers(rows, columns, bits, group, has_order=method == "gptq")
    if method == "fp8":
        block = given.get("weight_block_size")
        extra = 4 if given.get("activation_scheme") == "static" else 0
        return lambda rows, columns: rows * columns + 4 * _blocks(rows, columns, block) + extra
    if method == "fbgemm_fp8":
        return lambda rows, columns: rows * columns + 4 * rows
    if method == "bitsandbytes" and given.get("load_in_8bit"):
        return lambda rows, columns: rows * columns + 4 * rows
    if method == "bitsandbytes":
        return lambda rows, columns: _four_bits(rows * columns, is_nested=bool(given.get("bnb_4bit_use_double_quant")))
    return _compressed(given)


def _grouped_integers(rows: int, columns: int, bits: int, group: int, *, has_order: bool) -> int:
    """Packed numbers, and for each group and output a scale in 16 bits and a packed zero point."""
    groups = 1 if group < 1 else math.ceil(columns / group)
    packed = rows * columns * bits // 8 + groups * rows * bits // 8
    return packed + 2 * groups * rows + (4 * columns if has_order else 0)


def _blocks(rows: int, columns: int, block: Any) -> int:
    return 1 if not block else math.ceil(rows / block[0]) * math.ceil(columns / block[1])


def _four_bits(count: int, *, is_nested: bool) -> int:
    """bitsandbytes: a maximum for each block of 64, in float32 or quantized itself; tables of values."""
    blocks = math.ceil(count / BLOCK_4BIT)
    maxima = blocks + 4 * math.ceil(blocks / BLOCK_NESTED) + 4 * 256 + 4 if is_nested else 4 * blocks
    return math.ceil(count / 2) + maxima + 4 * 16


def _mxfp4(weight: torch.Tensor) -> int:
    """Two numbers in a byte, and a scale of one byte for each group of 32."""
    return weight.numel() // 2 + weight.numel() // GROUP_MXFP4


def _compressed(given: Mapping[str, Any]) -> MatrixBytes:
    """compressed-tensors, with one group of linear layers."""
    groups = list((given.get("config_groups") or {}).values())
    sparse = (given.get("sparsity_config") or {}).get("format", "dense")
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"] or sparse != "dense" or not groups[0].get("weights"):
        raise DFlowError(
            "quantization 'compressed-tensors': this plan counts one group of weights that targets Linear, not sparse; "
            "measure it"
        )
    weights, kind = groups[0]["weights"], groups[0].get("format") or given.get("format")
    bits, strategy, size = weights["num_bits"], weights["strategy"], weights.get("group_size")
    is_packed = kind == "pack-quantized"
    if kind not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise DFlowError(f"quantization 'compressed-tensors' in the format {kind!r} is not counted: measure it")

    def of_matrix(rows: int, columns: int) -> int:
        scales = {
            "tensor": 1,
            "channel": rows,
            "group": rows * math.ceil(columns / size) if size else rows,
            "block": _blocks(rows, columns, weights.get("block_structure")),
        }
        if strategy not in scales:
            raise DFlowError(f"quantization 'compressed-tensors' with the strategy {strategy!r}: measure it")
        count = scales[strategy]
        numbers = 4 * rows * math.ceil(columns * bits / 32) + 16 if is_packed else rows * columns
        zeros = 0 if weights.get("symmetric", True) else math.ceil(count * bits / 8) if is_packed else count
        return numbers + 2 * count + zeros

    return of_matrix
