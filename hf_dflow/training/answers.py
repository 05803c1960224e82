"""The target's own answers to prompts, in batches that waste little padding."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_dflow.errors import DFlowError

BATCHES_PER_WINDOW = 8  # prompts are sorted by length within a window


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    temperatures: tuple[float, ...] = (0.0,)  # batches take them in turn; 0 is greedy
    top_p: float = 1.0  # nucleus of batches that are not greedy
    max_new_tokens: int = 256  # answers are cut at this length
    batch_size: int = 32
    seed: int = 0  # of the order of the batches and of the sampled tokens

    def __post_init__(self):
        if not self.temperatures or not all(0 <= temperature < float("inf") for temperature in self.temperatures):
            raise DFlowError(f"temperatures {list(self.temperatures)}: give one or more, none below 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise DFlowError(f"top_p {self.top_p} must be above 0 and at most 1")
        if self.max_new_tokens < 1 or self.batch_size < 1:
            raise DFlowError(f"max_new_tokens {self.max_new_tokens} and batch {self.batch_size} must be at least 1")


@dataclass(frozen=True)
class Answer:
    """The target's answer; a finished one ends with the stop token."""

    token_ids: list[int]
    is_finished: bool


def plan_batches(lengths: list[int], batch_size: int, seed: int) -> list[list[int]]:
    """Indices of prompts by batch, a function of the arguments alone, so that a killed run can resume.

    Prompts are sorted by length within windows of eight batches, which saves padding. The batches of a window are
    shuffled: temperatures take turns, and each must see prompts of all lengths.
    """
    shuffler = random.Random(seed)
    batches = []
    window_size = BATCHES_PER_WINDOW * batch_size
    for start in range(0, len(lengths), window_size):
        window = sorted(range(start, min(start + window_size, len(lengths))), key=lambda i: lengths[i])
        window_batches = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        shuffler.shuffle(window_batches)
        batches += window_batches
    return batches


@torch.no_grad()
def answer_batch(
    model: Any, prompts: list[list[int]], sampling: Sampling, batch: int, eos_ids: set[int], pad_id: int
) -> list[Answer]:
    """Answers to prompts of token ids, drawn from the target's plain distribution.

    The settings that a target recommends for itself (repetition penalty, top-k …) do not apply: the drafter learns the
    target, not its settings.

    Args:
        model (`PreTrainedModel`): The target.
        batch (`int`): Number of the batch in the plan; chooses its temperature and seeds its draws.
        eos_ids (`set[int]`): Tokens that end an answer.
        pad_id (`int`): Pads short prompts; never attended to.
    """
    temperature = sampling.temperatures[batch % len(sampling.temperatures)]
    longest = max(len(prompt) for prompt in prompts)
    input_ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    attention_mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_p": sampling.top_p, "top_k": 0}
    torch.manual_seed(random.Random(f"{sampling.seed}/{batch}").getrandbits(63))
    with _plain_generation_config(model, eos_ids, pad_id):
        output = model.generate(
            torch.tensor(input_ids, device=model.device),
            attention_mask=torch.tensor(attention_mask, device=model.device),
            max_new_tokens=sampling.max_new_tokens,
            **options,
        )
    return [_until_end(token_ids, eos_ids) for token_ids in output[:, longest:].tolist()]


@contextmanager
def _plain_generation_config(model: PreTrainedModel, eos_ids: set[int], pad_id: int) -> Iterator[None]:
    """Within the block the model's generation config holds its stop tokens and nothing else."""
    original = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=sorted(eos_ids) or None, pad_token_id=pad_id)
    try:
        yield
    finally:
        model.generation_config = original


def _until_end(token_ids: list[int], eos_ids: set[int]) -> Answer:
    """The answer without the padding behind its stop token."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in eos_ids), None)
    return Answer(token_ids if end is None else token_ids[: end + 1], end is not None)
