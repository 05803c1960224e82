"""`hf-dflow plan`: memory of a target and its drafter, and how many sequences fit, from their configurations.

Weights are counted on torch's meta device, which allocates nothing; the rest follows from shapes. No weights are read.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from hf_dflow.bench.pairs import dtype_named
from hf_dflow.bench.quantized_weights import quantization_of_config, quantized_bytes
from hf_dflow.console import Presentation, Remark, ResultTable
from hf_dflow.errors import DFlowError, PairMismatchError
from hf_dflow.generation._compat import cache_argument
from hf_dflow.generation.cache import MAX_HOLES, DraftCache
from hf_dflow.generation.recurrent import is_recurrent
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.model.loading import read_drafter_config

GIB = 2**30


@dataclass(frozen=True)
class Load:
    """What is to be served.

    Args:
        max_model_len (`int`): Tokens of a sequence, prompt included.
        prompt_len (`int`, *optional*, defaults to half of it): Tokens of its prompt, one forward of the target.
        dtype (`str`, *optional*): Of weights and caches; the target's own by default.
        do_sample (`bool`, *optional*): Sampling in torch keeps probabilities beside logits.
        has_holes (`bool`, *optional*, defaults to `True`): Count the rejected columns that the cache of a batch may
            hold before it is compacted.
        tensor_parallel_size, draft_tensor_parallel_size (`int`, *optional*, default to 1): GPUs that share matrices
            and heads of target and drafter; norms and biases lie on each.
    """

    max_model_len: int
    prompt_len: int | None = None
    dtype: str | None = None
    do_sample: bool = False
    has_holes: bool = True
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1

    def __post_init__(self):
        if self.dtype is not None:
            dtype_named(self.dtype)
        if min(self.max_model_len, self.tensor_parallel_size, self.draft_tensor_parallel_size) < 1:
            raise DFlowError(f"{self}: give lengths and numbers of GPUs from 1")
        if self.prompt_len is not None and not 1 <= self.prompt_len <= self.max_model_len:
            raise DFlowError(f"prompt_len {self.prompt_len}; give 1 … max_model_len, {self.max_model_len}")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU; `*_row` are for each sequence of the batch.

    There are three blocks: the target (weights, cache), the drafter (weights, cache), and the buffers of a step.
    """

    target_weights: int
    target_cache_row: int
    plain_buffers_row: int  # logits of a step without a drafter
    drafter_weights: int
    drafter_cache_row: int
    holes_row: int  # rejected columns of the target's cache
    states_row: int  # of recurrent layers
    rollback_row: int  # copies of these states, and what their mixers read in a block
    verification_buffers_row: int  # logits of a block, drafted and verified
    relay_buffers_row: int  # states of all layers of a block, tapped ones, relayed ones
    prefill_buffers_row: int  # states of all layers of the prompt, freed before the first block

    @property
    def plain_row(self) -> int:
        return self.target_cache_row + self.states_row + self.plain_buffers_row

    @property
    def drafting_fixed(self) -> int:
        return self.target_weights + self.drafter_weights

    @property
    def drafting_row(self) -> int:
        buffers = max(self.prefill_buffers_row, self.verification_buffers_row + self.relay_buffers_row)
        cached = self.target_cache_row + self.holes_row + self.states_row + self.rollback_row
        return cached + self.drafter_cache_row + buffers

    def largest_batch(self, available: float) -> dict[str, int]:
        """How many sequences fit into `available` bytes, with the drafter and without; 0 if the weights do not fit."""
        return {
            "plain": max(0, math.floor((available - self.target_weights) / self.plain_row)),
            "drafting": max(0, math.floor((available - self.drafting_fixed) / self.drafting_row)),
        }


def make_plan(target: PreTrainedConfig, drafter: DFlowDrafterConfig, load: Load) -> MemoryPlan:
    """Count the memory of a pair from its two configurations."""
    text = target.get_text_config()
    dtype = dtype_named(load.dtype) if load.dtype else getattr(text, "dtype", None) or torch.float32
    size, vocab, hidden, num_layers = dtype.itemsize, text.vocab_size, text.hidden_size, text.num_hidden_layers
    if drafter.target_hidden_size != hidden or (drafter.num_target_layers or num_layers) != num_layers:
        raise PairMismatchError(
            f"this drafter was made for a target of hidden size {drafter.target_hidden_size} and "
            f"{drafter.num_target_layers} layers; the target has {hidden} and {num_layers}"
        )
    drafts, taps = drafter.drafts_per_block, len(drafter.target_layer_ids)
    prompt_len = load.prompt_len or max(1, load.max_model_len // 2)
    tokens = load.max_model_len + drafts
    if recurrent := is_recurrent_config(text):
        held = recurrent_cache(text, dtype, load.tensor_parallel_size)
    else:
        held = RecurrentCache(0, 0, 0)
    cache = held.column * tokens if recurrent else cache_bytes(text, tokens, size, load.tensor_parallel_size)
    # Probabilities are computed in float32 or wider. Of each logit there are: the raw one where that is narrower, the
    # converted one, and when sampling in torch its probability.
    law_size = max(size, 4)
    raw, converted = size * (law_size > size), law_size * (2 if load.do_sample else 1)
    states = hidden * size * (num_layers + 1 + taps)  # of a token; the tapped ones a second time, side by side
    heads = _heads_per_gpu(drafter.num_key_value_heads, load.draft_tensor_parallel_size)
    columns = DraftCache.capacity_for(prompt_len, load.max_model_len, drafter.block_size)
    return MemoryPlan(
        target_weights=target_bytes(target, dtype, load.tensor_parallel_size),
        target_cache_row=cache,
        plain_buffers_row=vocab * (raw + converted),
        drafter_weights=drafter_bytes(drafter, dtype, load.draft_tensor_parallel_size),
        drafter_cache_row=2 * drafter.num_hidden_layers * heads * drafter.head_dim * size * columns,
        holes_row=math.ceil(cache * MAX_HOLES / (1 - MAX_HOLES)) if load.has_holes else 0,
        states_row=held.states,
        rollback_row=held.states + held.num_layers * (drafts + 1) * hidden * size,
        verification_buffers_row=vocab * ((raw + converted) * (drafts + 1) + converted * drafts),
        relay_buffers_row=(drafts + 1) * states + (drafts * size * taps * hidden if drafter.use_relay else 0),
        prefill_buffers_row=prompt_len * states,
    )


def cache_bytes(text: Any, tokens: int, size: int, gpus: int = 1) -> int:
    """Bytes of a target's keys and values of one sequence, on each of `gpus`.

    Args:
        text (`PreTrainedConfig`): The text part of a target's configuration.
        size (`int`): Bytes of a number.
    """
    if getattr(text, "kv_lora_rank", None):
        raise DFlowError(f"{text.model_type} compresses keys and values, which this plan cannot count; measure it")
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        is_sliding = window and getattr(text, "use_sliding_window", True)
        layer_types = ["sliding_attention" if is_sliding else "full_attention"] * text.num_hidden_layers
    longest = {
        "full_attention": tokens,
        "sliding_attention": window or tokens,
        "chunked_attention": getattr(text, "attention_chunk_size", None) or window or tokens,
    }
    if unknown := sorted(set(layer_types) - set(longest)):
        raise DFlowError(
            f"{text.model_type} has layers of the kind {', '.join(unknown)}, from which rejected tokens cannot be "
            "removed; use a target with attention layers only"
        )
    heads = _cached_heads(text)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    column = 2 * _heads_per_gpu(heads, gpus) * head_dim * size
    return sum(column * min(tokens, longest[layer_type]) for layer_type in layer_types)


@dataclass(frozen=True)
class RecurrentCache:
    """What the cache of a target with recurrent layers holds of one sequence, in bytes on one GPU."""

    num_layers: int  # that are recurrent
    states: int  # of these layers, however long the sequence is
    column: int  # keys and values of a token


def is_recurrent_config(text: Any) -> bool:
    """Whether a target of this text configuration has recurrent layers."""
    return any(map(is_recurrent, DynamicCache(config=text).layers))


def recurrent_cache(text: Any, dtype: torch.dtype, gpus: int = 1) -> RecurrentCache:
    """What a target with recurrent layers caches: a forward over two tokens without any numbers shows it.

    Args:
        text (`PreTrainedConfig`): The text part of a target's configuration.
    """
    cache = DynamicCache(config=text)
    layers: list[Any] = cache.layers
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        raise DFlowError(
            f"{text.model_type} has recurrent layers beside sliding windows, which this plan cannot count; measure it"
        )
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=dtype)
            named: Any = {cache_argument(model): cache}
            model(torch.zeros(1, 2, dtype=torch.long), use_cache=True, **named)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise DFlowError(
            f"the cache of {text.model_type} cannot be counted without weights ({str(error).splitlines()[0]}); "
            "measure it"
        ) from error
    recurrent = [layer for layer in layers if is_recurrent(layer)]
    states = sum(
        math.ceil(state.nbytes / gpus)
        for layer in recurrent
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
        if state is not None
    )
    if not states:
        raise DFlowError(
            f"the recurrent layers of {text.model_type} keep their states outside of its cache; measure it"
        )
    keyed = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    columns = [2 * _heads_per_gpu(layer.keys.shape[1], gpus) * layer.keys[0, 0, 0].nbytes for layer in keyed]
    return RecurrentCache(len(recurrent), states, sum(columns))


def _cached_heads(text: Any) -> int:
    """Key-value heads that transformers caches for a layer.

    Multi-query models (Falcon-7B, GPT-BigCode) have one; Falcon's newer architecture repeats its heads beforehand.
    """
    if getattr(text, "new_decoder_architecture", False):
        return text.num_attention_heads
    if getattr(text, "multi_query", False):
        return 1
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def target_bytes(config: PreTrainedConfig, dtype: torch.dtype, gpus: int = 1) -> int:
    """Bytes of a target's weights on each GPU, as its quantization stores them.

    Args:
        dtype (`torch.dtype`): Of what is not quantized.
    """
    given = quantization_of_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return _weight_bytes(model, gpus, {} if given is None else quantized_bytes(model, given))


def drafter_bytes(config: DFlowDrafterConfig, dtype: torch.dtype, gpus: int = 1) -> int:
    """Bytes of a drafter's weights on each GPU."""
    with torch.device("meta"):
        return _weight_bytes(DFlowDrafter._from_config(config, dtype=dtype), gpus)


def _weight_bytes(model: torch.nn.Module, gpus: int, quantized: Mapping[str, int] | None = None) -> int:
    """Bytes of the parameters and persistent buffers, shared ones once; matrices divided among `gpus`.

    Args:
        quantized (`dict[str, int]`, *optional*): Bytes of those that are stored in another way.
    """
    tensors: dict[int, tuple[torch.Tensor, int]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (tensor, (quantized or {}).get(name, tensor.nbytes)))
    return sum(math.ceil(count / gpus) if tensor.dim() > 1 else count for tensor, count in tensors.values())


def read_target(source: str | Path) -> PreTrainedConfig:
    """A target's configuration, from its folder, its config.json, or by its Hub name."""
    path = Path(source)
    return AutoConfig.from_pretrained(path.parent if path.is_file() else source)


def read_drafter(source: str | Path) -> DFlowDrafterConfig:
    """A drafter's configuration in any supported format; no weights are read."""
    path = Path(source)
    return read_drafter_config(path.parent if path.is_file() else source)


def _heads_per_gpu(heads: int, gpus: int) -> int:
    """Key-value heads on each GPU: divided, and repeated where there are fewer heads than GPUs."""
    return max(1, math.ceil(heads / gpus))


def as_record(plan: MemoryPlan, available: float, **conditions: Any) -> dict[str, Any]:
    """The plan for JSON."""
    return {
        "bytes": asdict(plan),
        "available_bytes": int(available),
        "largest_batch": plan.largest_batch(available),
        "conditions": conditions,
    }


def present(record: dict[str, Any]) -> Presentation:
    """The memory blocks, and the largest batch with and without the drafter."""
    count, largest = record["bytes"], record["largest_batch"]
    blocks = [
        ("target: weights, cache", count["target_weights"], count["target_cache_row"]),
        ("drafter: weights, cache", count["drafter_weights"], count["drafter_cache_row"]),
        ("states of recurrent layers", 0, count.get("states_row", 0)),  # records of before hold none
        ("… their copies, and what advances them", 0, count.get("rollback_row", 0)),
        ("rejected columns of the target's cache, at most", 0, count["holes_row"]),
        ("verification: logits of a block", 0, count["verification_buffers_row"]),
        ("relay and context features: states of target layers", 0, count["relay_buffers_row"]),
        ("… of the prompt, before the first block", 0, count["prefill_buffers_row"]),
    ]
    rows = [
        [name, in_units(fixed), in_units(each)]
        for name, fixed, each in blocks
        if fixed or each or "recurrent" not in name
    ]
    remarks = [
        Remark(
            f"{in_units(record['available_bytes'])} to use: at most {largest['plain']} sequences without the drafter, "
            f"{largest['drafting']} with it. The working memory of a forward's layers and the CUDA context are not "
            "counted: leave room for them."
        )
    ]
    if not largest["drafting"]:
        remarks.append(Remark("Not even one sequence fits with the drafter.", "red"))
    table = ResultTable("bytes on each GPU", ("block",), ("fixed", "each sequence"), rows)
    return Presentation("Memory", [table], remarks)


def in_units(count: float) -> str:
    """Bytes in the largest unit of which there is one."""
    if not count:
        return "–"
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"
