"""The ways to decode that are compared, and one call that runs any of them: a prompt in, tokens and counts out."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import SAMPLING_RULES, DFlowGenerationConfig
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.model.drafter import DFlowDrafter

PLAIN = "plain"


@dataclass(frozen=True)
class Mode:
    """How tokens are chosen: greedily at temperature 0, else sampled from the target's unmodified distribution.

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
        """Options of `generate`. The target's own defaults for sampling (top-k, top-p) are switched off."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


def modes_of(temperatures: Sequence[float], rules: Sequence[str]) -> list[Mode]:
    """Greedy decoding once, and each temperature above 0 with each verification rule."""
    unknown = [rule for rule in rules if rule not in SAMPLING_RULES]
    if unknown or not rules:
        raise DFlowError(f"--verification {', '.join(unknown)}: use one or more of {', '.join(SAMPLING_RULES)}")
    wrong = [temperature for temperature in temperatures if not 0 <= temperature < math.inf]
    if wrong:
        raise DFlowError(f"--temperature {wrong[0]:g}: use 0 for greedy decoding, or a number above 0")
    return [
        Mode(temperature, rule)
        for temperature in dict.fromkeys(temperatures)
        for rule in (rules if temperature else [None])
    ]


@dataclass(frozen=True)
class Contestant:
    """One way to decode.

    Args:
        name (`str`): In tables and records.
        model (`DFlowDrafter` or `PreTrainedModel`, *optional*): A drafter, or a classic draft model for transformers'
            own assisted generation; without one the target decodes alone.
        use_relay (`bool`, *optional*): Of a drafter; its own default otherwise.
        lookup_tokens (`int`, *optional*, defaults to 0): Without a model: drafts in a step of transformers' prompt
            lookup, which copies what followed an earlier occurrence of the last tokens.
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
    def is_transformers(self) -> bool:
        """Whether transformers' assisted generation runs it, which keeps no statistics."""
        is_classic = self.model is not None and not isinstance(self.model, DFlowDrafter)
        return is_classic or self.is_their_loop or self.lookup_tokens > 0

    def why_not(self, mode: Mode, batch_size: int = 1) -> str | None:
        """Why it cannot decode `batch_size` prompts together in `mode`; `None` if it can."""
        if self.is_transformers and batch_size > 1:
            return "transformers' assisted generation takes one sequence at a time"
        if self.is_transformers and mode.verification == "block":
            return "transformers' assisted generation verifies token by token"
        if self.options.get("tree_budget") and (mode.temperature or batch_size > 1):
            return "a tree is for greedy decoding of one sequence"
        return None

    def arguments(self, mode: Mode, max_new_tokens: int) -> dict[str, Any]:
        """Arguments of `generate`."""
        options = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **mode.options()}
        if self.lookup_tokens:
            return {**options, "prompt_lookup_num_tokens": self.lookup_tokens}
        if self.is_their_loop:
            return {**options, "assistant_model": self.model, "speculation_type": "dflash"}
        if self.model is None:
            return options
        if self.is_transformers:
            return {**options, "assistant_model": self.model}
        rule = mode.verification if mode.temperature else None
        own = {"use_relay": self.use_relay, "num_draft_tokens": self.num_draft_tokens, "verification": rule}
        config = DFlowGenerationConfig(**{**options, **own, **self.options})
        return {"assistant_model": self.model, "generation_config": config}


def classic_contestant(name: str, model: PreTrainedModel, num_draft_tokens: int) -> Contestant:
    """A causal language model in transformers' assisted generation, which always drafts so many tokens in a step."""
    config: Any = model.generation_config
    config.num_assistant_tokens = num_draft_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return Contestant(name, model)


@dataclass
class Run:
    """One decoded answer, of a call that decoded it alone or in a batch.

    Args:
        target_forwards (`int`): Of the call, counted at the model, whatever the strategy reports.
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
        """Its share of the call's seconds: the shares of all answers add up to the time that passed."""
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
    batch_size, prompt_length = inputs["input_ids"].shape
    arguments = contestant.arguments(mode, max_new_tokens)
    steps = StepCounter(prompt_length)
    if contestant.is_transformers:
        arguments["streamer"] = steps
    if mode.temperature:
        torch.manual_seed(seed)
    generate: Any = target.generate
    with ExitStack() as stack:
        forward_ends, draft_forward_ends = (
            stack.enter_context(count_forwards(model)) for model in (target, contestant.model)
        )
        stack.enter_context(steps.watch(target))
        start = time.perf_counter()
        output = generate(**inputs, **arguments)
        new_tokens = output.sequences[:, prompt_length:].tolist()  # waits for the device
        seconds = time.perf_counter() - start
    answers = [_until_eos(tokens, target) for tokens in new_tokens]
    if contestant.is_transformers:
        steps.statistics.num_draft_forwards = len(draft_forward_ends)
        steps.statistics.verification = mode.verification or "greedy"
        statistics = [steps.statistics]
    elif contestant.model is None:
        statistics = [AcceptanceStatistics() for _ in answers]
    else:
        statistics = output.statistics.per_row if batch_size > 1 else [output.statistics]
    call_tokens = sum(map(len, answers))
    first_token_seconds = forward_ends[0] - start
    return [
        Run(answer, len(forward_ends), seconds, row, first_token_seconds, batch_size, call_tokens)
        for answer, row in zip(answers, statistics, strict=True)
    ]


def _until_eos(tokens: list[int], target: Any) -> list[int]:
    """The tokens of a row without the padding behind its EOS."""
    eos = target.generation_config.eos_token_id
    eos = set(eos if isinstance(eos, list) else [eos])
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]


@contextmanager
def count_forwards(model: torch.nn.Module | None) -> Iterator[list[float]]:
    """A list that receives the time at the end of each forward of `model`."""
    ends: list[float] = []
    if model is None:
        yield ends
        return
    handle = model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        yield ends
    finally:
        handle.remove()


class StepCounter(BaseStreamer):
    """Counts the steps of transformers' assisted generation, which keeps no statistics.

    The target's input shows which drafts a step verifies; what is streamed after it, how many were accepted.
    """

    def __init__(self, prompt_length: int):
        self.statistics = AcceptanceStatistics()
        self._not_drafted = prompt_length  # tokens of the next forward that are no drafts
        self._drafts: torch.Tensor | None = None  # of the last forward, `[n]`
        self._has_prompt = False

    @contextmanager
    def watch(self, target: torch.nn.Module) -> Iterator[None]:
        """Observe each forward of `target`."""

        def observe(_, args, kwargs):
            input_ids = kwargs.get("input_ids", args[0] if args else None)
            self._drafts = None if input_ids is None else input_ids[0, self._not_drafted :]

        handle = target.register_forward_pre_hook(observe, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then the tokens of each step: accepted drafts and one of the target's own."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        tokens = value.flatten().tolist()
        drafts = [] if self._drafts is None else self._drafts.tolist()
        accepted = 0
        while accepted < min(len(tokens), len(drafts)) and tokens[accepted] == drafts[accepted]:
            accepted += 1
        self.statistics.record(drafted=len(drafts), accepted=accepted, emitted=len(tokens))
        self._not_drafted = 1
        if not drafts:
            self._drafts = None

    def end(self) -> None:
        """Leave out what the last step drafted behind the end of the text."""
        if self._drafts is not None:
            steps = self.statistics
            judged = min(steps.per_step_drafted[-1], steps.per_step_emitted[-1])
            steps.per_step_offered[-1] = steps.per_step_positions[-1] = judged
