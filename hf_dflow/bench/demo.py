"""`hf-dflow demo`: one target, three ways to decode, the same text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import Contestant, Mode, Run, decode
from hf_dflow.bench.workloads import Prompt
from hf_dflow.console import ResultTable, print_table

STRATEGIES = ("plain", "dflash", "dflow")
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Comparison:
    """One prompt under every strategy."""

    prompt: Prompt
    text: str
    runs: dict[str, Run]

    def is_identical(self, strategy: str) -> bool:
        """Whether `strategy` wrote what plain decoding wrote, token for token."""
        return self.runs[strategy].new_tokens == self.runs["plain"].new_tokens


def run_strategy(pair: Pair, inputs: dict[str, torch.Tensor], strategy: str, max_new_tokens: int) -> Run:
    """Decode greedily with one of [`STRATEGIES`]; "dflash" is this package's loop with the relay off.

    Args:
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of shape `(1, T)`.
    """
    use_relay = None if strategy == "dflow" else False
    contestant = Contestant(strategy, None if strategy == "plain" else pair.drafter, use_relay)
    return decode(pair.target, inputs, contestant, Mode(), max_new_tokens)


def compare(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Comparison]:
    """Decode each prompt with each strategy in turn, so that a busy machine slows all alike."""
    for strategy in STRATEGIES:  # a first call pays for allocations that later ones reuse
        run_strategy(pair, pair.encode(prompts[0].text), strategy, WARM_UP_TOKENS)
    comparisons = []
    for prompt in prompts:
        inputs = pair.encode(prompt.text)
        runs = {strategy: run_strategy(pair, inputs, strategy, max_new_tokens) for strategy in STRATEGIES}
        text = str(pair.tokenizer.decode(runs["plain"].new_tokens, skip_special_tokens=True))
        comparisons.append(Comparison(prompt, text, runs))
    return comparisons


def as_record(comparisons: Sequence[Comparison], **conditions: Any) -> dict[str, Any]:
    """What `--json` prints: `rows`, and the conditions they were measured under."""
    rows = [
        {
            "prompt": comparison.prompt.text,
            "strategy": strategy,
            "text_identical": comparison.is_identical(strategy),
            "tokens_per_step": round(run.statistics.tokens_per_step, 4),
            "draft_acceptance_rate": round(run.statistics.draft_acceptance_rate, 4),
            "target_forwards": run.target_forwards,
            "new_tokens": len(run.new_tokens),
            "seconds": round(run.seconds, 3),
        }
        for comparison in comparisons
        for strategy, run in comparison.runs.items()
    ]
    return {"rows": rows, "conditions": run_conditions(**conditions)}


def show(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print each prompt's text once, and the figures of each strategy under it."""
    for comparison in comparisons:
        console.rule()
        console.print(Text(f"{comparison.prompt.task}: {comparison.prompt.text}", style="bold"))
        console.print(Text(comparison.text))
        print_table(console, _table(comparison))
    console.print(_meaning(comparisons))


def _table(comparison: Comparison) -> ResultTable:
    rows = []
    for strategy, run in comparison.runs.items():
        has_drafts = strategy != "plain"
        same = "identical" if comparison.is_identical(strategy) else "DIFFERS"
        rows.append(
            [
                strategy,
                same if has_drafts else "reference",
                f"{run.statistics.tokens_per_step:.2f}",
                f"{run.statistics.draft_acceptance_rate:.1%}" if has_drafts else "–",
                str(run.target_forwards),
                str(len(run.new_tokens)),
                f"{run.seconds:.2f}",
            ]
        )
    measures = ("tokens/step", "accepted", "target forwards", "tokens", "seconds")
    return ResultTable("", ("strategy", "text"), measures, rows)


def _meaning(comparisons: Sequence[Comparison]) -> str:
    forwards = {s: sum(comparison.runs[s].target_forwards for comparison in comparisons) for s in STRATEGIES}
    is_identical = all(comparison.is_identical(strategy) for comparison in comparisons for strategy in STRATEGIES)
    result = "wrote exactly the target's own text" if is_identical else "DID NOT write the target's own text"
    return (
        f"DFlow {result} with {forwards['dflow']} target forwards; plain decoding needs {forwards['plain']}, the same "
        f"loop without feedback (dflash) {forwards['dflash']}. Counts carry over to other machines, seconds do not: "
        "verifying eight tokens costs a CPU more than computing one, a GPU nearly the same."
    )
