"""`python -m experiments.mixture_time`: the share of decoding time that the mixed draft law takes.

One run times the mixture's own calls and all of decoding, the prefill included. Two runs, with and without it, would
differ by more than that share.

On a CPU it is processor time summed over threads. A call that uses one thread where others use several takes a larger
share of wall-clock time, so give `--threads 1`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from experiments.common import BundledOption, with_interval
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.intervals import bootstrap_interval
from hf_dflow.bench.options import (
    DrafterOption,
    HumanEvalOption,
    PromptFilesOption,
    ShareGptOption,
    TargetOption,
)
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.workloads import Prompt, chosen_prompts, tasks_in_turn
from hf_dflow.checkpoints.names import check_name
from hf_dflow.console import JsonOption, ThreadsOption, errors_in_words, use_threads, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.generation.mixture import StaleMixture
from hf_dflow.generation.step import Proposal, Verification, VerifierFeedback


@dataclass
class Clock:
    """Seconds of one run, shared by the processor and its per-row copies."""

    mixture: float = 0.0  # seconds in its calls
    steps: int = 0

    def __deepcopy__(self, memo: dict) -> "Clock":
        return self


class ClockedMixture(StaleMixture):
    """A mixture that times its own calls."""

    def __init__(self, clock: Clock, device: torch.device, coefficients: list[float] | None):
        super().__init__(coefficients=coefficients)
        self.clock, self.device = clock, device

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started = _seconds(self.device)
        result = call(*arguments)
        self.clock.mixture += _seconds(self.device) - started
        return result

    def adjust_draft_logits(self, draft_logits: torch.Tensor, feedback: VerifierFeedback | None) -> torch.Tensor:
        return self._timed(super().adjust_draft_logits, draft_logits, feedback)

    def observe(self, proposal: Proposal, verification: Verification) -> None:
        self._timed(super().observe, proposal, verification)
        self.clock.steps += proposal.token_ids.shape[1] > 0


def _seconds(device: torch.device) -> float:
    """Processor time on a CPU, unaffected by other processes; on a GPU wall-clock time after all launched work."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(pair: Pair, prompts: list[Prompt], max_new_tokens: int, console: Console | None = None) -> dict[str, Any]:
    """The mixture's share of greedy decoding time, pooled over prompts.

    Returns:
        `dict`: `share` with its 95% bootstrap interval over prompts, `milliseconds_per_step` of the `mixture` and of
        `all`, the numbers of `prompts` and of `steps` with drafts, and which `weights` were used.

    Raises:
        DFlowError: No step drafted anything.
    """
    coefficients = (pair.drafter.config.fitted_decisions or {}).get("mixture")
    rows = []
    for number, prompt in track(list(enumerate(prompts)), "prompts", console=console, disable=console is None):
        clock = Clock()
        mixture = ClockedMixture(clock, pair.target.device, coefficients)
        clocked = Contestant(
            "clocked", pair.drafter, options={"stale_mixture": False, "acceptance_processors": [mixture]}
        )
        encoded, started = pair.encode(prompt.text), _seconds(pair.target.device)
        decode(pair.target, encoded, clocked, Mode(), max_new_tokens, number)
        rows.append((clock.mixture, _seconds(pair.target.device) - started, clock.steps))
    taken = np.array(rows).T
    mixture, total, steps = taken.sum(axis=1)
    if not steps:
        raise DFlowError(
            "no step drafted anything, so there is nothing to time; give more prompts or a larger --max-new-tokens"
        )
    interval = bootstrap_interval(taken.shape[1], lambda chosen: taken[0, chosen].sum() / taken[1, chosen].sum())
    return {
        "weights": "online" if coefficients is None else "learned",
        "prompts": len(prompts),
        "steps": int(steps),
        "milliseconds_per_step": {"mixture": 1e3 * mixture / steps, "all": 1e3 * total / steps},
        "share": {"value": mixture / total, "interval_95": interval},
    }


def main(
    drafter: DrafterOption = None,
    target: TargetOption = None,
    json_path: JsonOption = None,
    bundled: BundledOption = False,
    prompts: PromptFilesOption = None,
    human_eval: HumanEvalOption = 0,
    sharegpt: ShareGptOption = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    threads: ThreadsOption = None,
) -> None:
    """Decode greedily with a mixture that times itself."""
    workload = tasks_in_turn(
        chosen_prompts(is_bundled=bundled, files=prompts or [], human_eval=human_eval, sharegpt=sharegpt)
    )
    for name in filter(None, (target, drafter)):
        check_name(name)
    use_threads(threads)
    pair, console = load_pair(target, drafter), Console()
    record = measure(pair, workload, max_new_tokens, console)
    milliseconds = record["milliseconds_per_step"]
    console.print(
        f"the mixture ({record['weights']} weights) takes {with_interval(record['share'], '.2%')} of decoding time: "
        f"{milliseconds['mixture']:.2f} of {milliseconds['all']:.1f} ms a step",
        highlight=False,
    )
    record["conditions"] = run_conditions(**pair.describe(), max_new_tokens=max_new_tokens, dtype="float32")
    write_json(json_path, record)


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
