"""The same prompts decoded in several ways by turns: what is asked of the contestants, and their answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers

from hf_dflow.bench.strategies import PLAIN, Contestant, Mode, Run, decode_rows
from hf_dflow.bench.workloads import Prompt

SEED_STRIDE = 1_000_003  # so that no two prompts of a run draw the same random numbers
WARM_UP_TOKENS = 12  # a block and the beginning of the next, so that a loop that fails does so before it counts
LONGEST_REASON = 160  # characters of another project's error message
NotRun = dict[str, dict[str, str]]  # mode -> contestant -> why it is left out


@dataclass(frozen=True)
class Answer:
    """One prompt in one mode with one seed, by every contestant.

    Args:
        batch (`str`, *optional*): Identifies the prompts that were decoded together; their answers share their times.
    """

    prompt: Prompt
    mode: Mode
    seed: int
    runs: dict[str, Run]
    batch: str | None = None

    @property
    def timed_with(self) -> str:
        """The unit that intervals of times resample: its batch, else its prompt."""
        return self.batch or self.prompt.digest


@dataclass(frozen=True)
class Plan:
    """What is asked of the contestants.

    Args:
        contestants (`list[Contestant]`): All decode each prompt, one after the other.
        modes (`list[Mode]`): Greedy, sampled, or both.
        max_new_tokens (`int`): Longest answer.
        seeds (`list[int]`, *optional*, defaults to `[0]`): Sampled answers are drawn once with each.
        with_plain (`bool`, *optional*, defaults to `False`): The target alone decodes as well, for its seconds.
        check_identity (`int`, *optional*, defaults to 0): On so many prompts, the target alone decodes its greedy text.
    """

    contestants: list[Contestant]
    modes: list[Mode]
    max_new_tokens: int
    seeds: Sequence[int] = (0,)
    with_plain: bool = False
    check_identity: int = 0

    def left_out(self, mode: Mode, batch_size: int) -> dict[str, str]:
        """The contestants that cannot decode so many prompts at a time in `mode`, and why."""
        reasons = {contestant.name: contestant.why_not(mode, batch_size) for contestant in self.contestants}
        return {name: reason for name, reason in reasons.items() if reason}


def answer_all(
    target: Any,
    encode: Callable[[Sequence[str]], dict],
    calls: Iterable[tuple[int, Prompt | tuple[Prompt, ...]]],
    plan: Plan,
    is_over: Callable[[], bool] = lambda: False,
    *,
    not_run: NotRun | None = None,
) -> list[Answer]:
    """Answers to numbered prompts, or batches of them, until `is_over`; whole prompts and batches only.

    Args:
        encode (`Callable`): Turns texts into `input_ids` and `attention_mask`, see [`Pair.encode_batch`].
        not_run (`dict`, *optional*): What [`warm_up`] returned. Without it, a first call warms up where times count.
    """
    answers: list[Answer] = []
    for number, call in calls:
        prompts = call if isinstance(call, tuple) else (call,)
        inputs = encode([prompt.text for prompt in prompts])
        if not answers and plan.with_plain and not_run is None:
            not_run = warm_up(target, inputs, plan)
        answers += answer_prompts(target, inputs, prompts, number, plan, not_run)
        if is_over():
            break
    return answers


def answer_prompts(
    target: Any, inputs: dict, prompts: Sequence[Prompt], number: int, plan: Plan, not_run: NotRun | None = None
) -> list[Answer]:
    """Answers of all contestants to the prompts of one call, by turns, so that a busy machine slows all alike.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` `[B, T]` of the prompts.
        number (`int`): Of the call in the workload; it decides which contestant begins.
        not_run (`dict`, *optional*): Contestants that are left out of a mode, see [`warm_up`].
    """
    answers = []
    batch = None if len(prompts) == 1 else " ".join(prompt.digest for prompt in prompts)
    for mode in plan.modes:
        left_out = plan.left_out(mode, len(prompts)) | (not_run or {}).get(mode.name, {})
        contestants = [contestant for contestant in plan.contestants if contestant.name not in left_out]
        if plan.with_plain or (not mode.temperature and number < plan.check_identity):
            contestants.append(Contestant(PLAIN))
        first = number % max(1, len(contestants))
        contestants = contestants[first:] + contestants[:first]
        for seed in plan.seeds if mode.temperature else [0]:
            draws = seed * SEED_STRIDE + number
            rows = {
                contestant.name: decode_rows(target, inputs, contestant, mode, plan.max_new_tokens, draws)
                for contestant in contestants
            }
            for row, prompt in enumerate(prompts):
                answers.append(Answer(prompt, mode, seed, {name: runs[row] for name, runs in rows.items()}, batch))
    return answers


def warm_up(target: Any, inputs: dict, plan: Plan) -> NotRun:
    """Decode once with every contestant, to pay for what later calls reuse and to find out which of them fail.

    Returns:
        `dict`: For each mode, the contestants that are left out of it, and why.
    """
    batch_size, not_run = inputs["input_ids"].shape[0], {}
    for mode in plan.modes:
        not_run[mode.name] = plan.left_out(mode, batch_size)
        for contestant in [*plan.contestants, Contestant(PLAIN)]:
            if contestant.name in not_run[mode.name]:
                continue
            try:
                decode_rows(target, inputs, contestant, mode, min(WARM_UP_TOKENS, plan.max_new_tokens))
            except Exception as error:
                # A loop of transformers may fail in some releases; the others are measured all the same.
                if not contestant.is_transformers:
                    raise
                reason = " ".join(str(error).split())[:LONGEST_REASON]
                not_run[mode.name][contestant.name] = (
                    f"transformers {transformers.__version__} fails: {type(error).__name__}: {reason}"
                )
    return not_run
