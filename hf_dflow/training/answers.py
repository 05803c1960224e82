"""The target's own answers to prompts, in batches that waste little padding."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_dflow.errors import DFlowError
from hf_dflow.training.grouped_attention import grouped_attention

WINDOW = 8  # batches that are sorted by length together


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Args:
        temperatures (`tuple[float, ...]`): Taken in turn, one a batch; 0 is greedy.
        top_p (`float`): Nucleus, for batches that are not greedy.
        max_new_tokens (`int`): At which an answer is cut.
        batch_size (`int`): Prompts a batch.
        seed (`int`): Of the order and the draws.

    Raises:
        DFlowError: A value is out of its range.
    """

    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    max_new_tokens: int = 256
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self):
        if not self.temperatures or not all(0 <= one < float("inf") for one in self.temperatures):
            raise DFlowError(f"temperatures {list(self.temperatures)}: give one or more, none below 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise DFlowError(f"top_p {self.top_p} must be above 0 and at most 1")
        if self.max_new_tokens < 1 or self.batch_size < 1:
            raise DFlowError(f"max_new_tokens {self.max_new_tokens} and batch {self.batch_size} must be at least 1")

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "temperatures": list(self.temperatures)}


@dataclass(frozen=True)
class Answer:
    """What the target wrote; a finished one ends with the token at which it stopped."""

    token_ids: list[int]
    is_finished: bool


def plan_batches(lengths: list[int], batch_size: int, seed: int) -> list[list[int]]:
    """Indices of prompts by batch. It depends on nothing but the arguments, so that a run can go on where it ended.

    Prompts are sorted by length within windows of eight batches, which saves padding; batches of a window are
    shuffled, or the temperatures that take turns would each get prompts of their own length.
    """
    order = random.Random(seed)
    batches = []
    for start in range(0, len(lengths), WINDOW * batch_size):
        window = sorted(range(start, min(start + WINDOW * batch_size, len(lengths))), key=lambda i: lengths[i])
        cut = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        order.shuffle(cut)
        batches += cut
    return batches


@torch.no_grad()
def answer_batch(
    model: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    batch: int,
    eos_ids: set[int],
    pad_id: int,
) -> list[Answer]:
    """Answers to prompts of token ids, drawn from the target's plain distribution.

    Settings that a target recommends for itself (repetition penalty, top-k …) are not applied: a drafter learns the
    target, not those settings.

    Args:
        model (`PreTrainedModel`): The target.
        batch (`int`): The batch's number in the plan; chooses its temperature and its random draws.
        eos_ids (`set[int]`): Tokens that end an answer.
        pad_id (`int`): Token to fill short prompts up with; never attended to.
    """
    temperature = sampling.temperatures[batch % len(sampling.temperatures)]
    longest = max(len(prompt) for prompt in prompts)
    rows = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    attends = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    drawing: dict[str, Any] = {"do_sample": False}
    if temperature:
        drawing = {"do_sample": True, "temperature": temperature, "top_p": sampling.top_p, "top_k": 0}
    torch.manual_seed(random.Random(f"{sampling.seed}/{batch}").getrandbits(63))
    with grouped_attention(model), _plain_generation(model, eos_ids, pad_id):
        output = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(attends, device=model.device),
            max_new_tokens=sampling.max_new_tokens,
            **drawing,
        )
    return [_cut(token_ids, eos_ids) for token_ids in output[:, longest:].tolist()]


@contextmanager
def _plain_generation(model: PreTrainedModel, eos_ids: set[int], pad_id: int) -> Iterator[None]:
    """Within the block the model's own generation config says where to stop and nothing else."""
    usual = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=sorted(eos_ids) or None, pad_token_id=pad_id)
    try:
        yield
    finally:
        model.generation_config = usual


def _cut(token_ids: list[int], eos_ids: set[int]) -> Answer:
    """Padding behind the end cut off."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in eos_ids), None)
    return Answer(token_ids if end is None else token_ids[: end + 1], end is not None)
