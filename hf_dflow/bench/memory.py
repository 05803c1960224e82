"""`hf-dflow plan`: memory of a target and its drafter, and how many sequences fit, from configurations.

Weights are counted on torch's meta device, which allocates nothing; the rest follows from shapes. No weights are read.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_dflow.errors import DFlowError, PairMismatchError
from hf_dflow.generation.cache import MAX_HOLES, DraftCache
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.model.loading import read_drafter_config

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
GIB = 2**30
BOUNDED = ("sliding_attention", "chunked_attention")  # layers that keep a window of the text


@dataclass(frozen=True)
class Load:
    """What is to be served.

    Args:
        max_model_len (`int`): Tokens of a sequence, prompt included.
        prompt_len (`int`, *optional*, defaults to half of it): Its prompt, one forward of the target.
        dtype (`str`, *optional*): Of weights and caches; the target's own by default.
        do_sample (`bool`, *optional*): Sampling in torch keeps probabilities beside logits.
        has_holes (`bool`, *optional*, defaults to `True`): Count the rejected slots that a batch of sequences at
            their own pace may hold before its cache is compacted.
        tensor_parallel_size, draft_tensor_parallel_size (`int`, *optional*, default to 1): GPUs that share matrices
            and heads of target and drafter; norms and biases lie on each.

    Raises:
        DFlowError: A number that cannot be served.
    """

    max_model_len: int
    prompt_len: int | None = None
    dtype: str | None = None
    do_sample: bool = False
    has_holes: bool = True
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1

    def __post_init__(self):
        if self.dtype is not None and self.dtype not in DTYPES:
            raise DFlowError(f"dtype {self.dtype} is unknown; use one of {', '.join(DTYPES)}")
        if min(self.max_model_len, self.tensor_parallel_size, self.draft_tensor_parallel_size) < 1:
            raise DFlowError(f"{self}: give lengths and numbers of GPUs from 1")
        if self.prompt_len is not None and not 1 <= self.prompt_len <= self.max_model_len:
            raise DFlowError(f"prompt_len {self.prompt_len}; give 1 … max_model_len, {self.max_model_len}")

    @property
    def prompt(self) -> int:
        return self.prompt_len or max(1, self.max_model_len // 2)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU. `*_row` are for each sequence of the batch.

    The three blocks: target (weights, cache), drafter (weights, cache), and what a step computes in between.
    """

    target_weights: int
    target_cache_row: int
    plain_buffers_row: int  # logits of a step without a drafter
    drafter_weights: int
    drafter_cache_row: int
    holes_row: int  # rejected slots in the target's cache
    verification_buffers_row: int  # logits of a block, drafted and verified
    relay_buffers_row: int  # states of all layers of a block, tapped ones, relayed ones
    prefill_buffers_row: int  # states of all layers of the prompt, which are gone before the first block

    @property
    def plain_fixed(self) -> int:
        return self.target_weights

    @property
    def plain_row(self) -> int:
        return self.target_cache_row + self.plain_buffers_row

    @property
    def drafting_fixed(self) -> int:
        return self.target_weights + self.drafter_weights

    @property
    def drafting_row(self) -> int:
        buffers = max(self.prefill_buffers_row, self.verification_buffers_row + self.relay_buffers_row)
        return self.target_cache_row + self.holes_row + self.drafter_cache_row + buffers

    def largest_batch(self, available: float) -> dict[str, int]:
        """How many sequences `available` bytes hold, with the drafter and without; 0 where not even the weights fit."""
        return {
            "plain": max(0, math.floor((available - self.plain_fixed) / self.plain_row)),
            "drafting": max(0, math.floor((available - self.drafting_fixed) / self.drafting_row)),
        }


def make_plan(target: PreTrainedConfig, drafter: DFlowDrafterConfig, load: Load) -> MemoryPlan:
    """Count, from two configurations.

    Raises:
        PairMismatchError: The two do not fit together.
        DFlowError: The target keeps something else than keys and values of attention.
    """
    text = target.get_text_config()
    dtype = DTYPES[load.dtype] if load.dtype else getattr(text, "dtype", None) or torch.float32
    size, vocab, hidden = dtype.itemsize, text.vocab_size, text.hidden_size
    if drafter.target_hidden_size != hidden or (drafter.num_target_layers or text.num_hidden_layers) != (
        text.num_hidden_layers
    ):
        raise PairMismatchError(
            f"this drafter was made for a target of hidden size {drafter.target_hidden_size} and "
            f"{drafter.num_target_layers} layers; the target has {hidden} and {text.num_hidden_layers}"
        )
    block, taps = drafter.block_size, len(drafter.target_layer_ids)
    drafts = drafter.drafts_per_block
    wide = max(size, 4)  # laws are computed in float32 or wider
    cache = cache_bytes(text, load.max_model_len + drafts, size, load.tensor_parallel_size)
    holes = math.ceil(cache * MAX_HOLES / (1 - MAX_HOLES)) if load.has_holes else 0
    # Logits of target and drafter; when sampling in torch once more, as processed.
    narrow, copies = size * (wide > size), wide * (2 if load.do_sample else 1)
    logits = vocab * ((narrow + copies) * (drafts + 1) + copies * drafts)
    states = hidden * size * (text.num_hidden_layers + 1 + taps)  # of a token; tapped ones once more, side by side
    relayed = drafts * size * taps * hidden if drafter.use_relay else 0
    head_dim, heads = drafter.head_dim, _shared(drafter.num_key_value_heads, load.draft_tensor_parallel_size)
    columns = DraftCache.capacity_for(load.prompt, load.max_model_len, block)
    return MemoryPlan(
        target_weights=weight_bytes(target_on_meta(target, dtype), load.tensor_parallel_size),
        target_cache_row=cache,
        plain_buffers_row=vocab * (narrow + copies),
        drafter_weights=weight_bytes(drafter_on_meta(drafter, dtype), load.draft_tensor_parallel_size),
        drafter_cache_row=2 * drafter.num_hidden_layers * heads * head_dim * size * columns,
        holes_row=holes,
        verification_buffers_row=logits,
        relay_buffers_row=(drafts + 1) * states + relayed,
        prefill_buffers_row=load.prompt * states,
    )


def cache_bytes(text: Any, tokens: int, size: int, gpus: int = 1) -> int:
    """Bytes of a target's keys and values of one sequence, on each of `gpus`.

    Args:
        text (`PreTrainedConfig`): The text part of a target's configuration.
        size (`int`): Bytes of a number.

    Raises:
        DFlowError: A layer keeps something else.
    """
    if getattr(text, "kv_lora_rank", None):
        raise DFlowError(f"{text.model_type} compresses keys and values, which this plan cannot count; measure it")
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window and getattr(text, "use_sliding_window", True) else "full_attention"]
        kinds = kinds * layers
    unknown = sorted(set(kinds) - {"full_attention", *BOUNDED})
    if unknown:
        raise DFlowError(
            f"{text.model_type} has layers of the kind {', '.join(unknown)}, from which rejected tokens cannot be "
            "taken out; use a target with attention layers only"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    column = 2 * _shared(heads, gpus) * head_dim * size
    reach = {"sliding_attention": window, "chunked_attention": getattr(text, "attention_chunk_size", None) or window}
    return sum(column * min(tokens, reach.get(kind) or tokens) for kind in kinds)


def weight_bytes(model: torch.nn.Module, gpus: int = 1) -> int:
    """Bytes of the parameters and persistent buffers, shared ones once; matrices divided among `gpus`."""
    tensors = {id(one): one for one in model.state_dict(keep_vars=True).values()}.values()
    return sum(math.ceil(t.nbytes / gpus) if t.dim() > 1 else t.nbytes for t in tensors)


def target_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A causal language model without storage."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def drafter_on_meta(config: DFlowDrafterConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A drafter without storage."""
    with torch.device("meta"):
        return DFlowDrafter._from_config(config, dtype=dtype)


def read_target(source: str | Path) -> PreTrainedConfig:
    """A target's configuration, from its folder, its config.json, or by its Hub name."""
    path = Path(source)
    return AutoConfig.from_pretrained(path.parent if path.is_file() else source)


def read_drafter(source: str | Path) -> DFlowDrafterConfig:
    """A drafter's configuration in any supported format, weights untouched.

    Raises:
        DFlowError: The format keeps in its weights what the plan must know.
    """
    path = Path(source)
    return read_drafter_config(path.parent if path.is_file() else source)


def _shared(heads: int, gpus: int) -> int:
    """Key-value heads on each GPU: divided, and repeated where there are fewer than GPUs."""
    return max(1, math.ceil(heads / gpus))


def as_record(plan: MemoryPlan, available: float, **conditions: Any) -> dict[str, Any]:
    """For JSON."""
    return {
        "bytes": asdict(plan),
        "available_bytes": int(available),
        "largest_batch": plan.largest_batch(available),
        "conditions": conditions,
    }


def show(plan: MemoryPlan, available: float, console: Console) -> None:
    """Print the blocks, and the largest batch with and without the drafter."""
    table = Table("block", title="bytes on each GPU")
    for heading in ("fixed", "each sequence"):
        table.add_column(heading, justify="right")
    rows = [
        ("target: weights, cache", plan.target_weights, plan.target_cache_row),
        ("drafter: weights, cache", plan.drafter_weights, plan.drafter_cache_row),
        ("rejected slots in the target's cache, at most", 0, plan.holes_row),
        ("verification: logits of a block", 0, plan.verification_buffers_row),
        ("relay and context features: states of target layers", 0, plan.relay_buffers_row),
        ("… of the prompt, before the first block", 0, plan.prefill_buffers_row),
    ]
    for name, fixed, each in rows:
        table.add_row(name, _size(fixed), _size(each))
    console.print(table)
    largest = plan.largest_batch(available)
    console.print(
        f"{_size(available)} to use: at most {largest['plain']} sequences without the drafter, {largest['drafting']} "
        "with it. The working memory of a forward's layers and the CUDA context are not counted: leave room for them.",
        highlight=False,
    )
    if not largest["drafting"]:
        console.print("[red]Not even one sequence fits with the drafter.[/]")


def _size(count: float) -> str:
    if not count:
        return "–"
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"
