"""`hf-dflow demo`: one target, three ways to decode, the same text."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_dflow.bench.report import run_conditions
from hf_dflow.bench.runners import STRATEGIES, Pair, Run, run_strategy
from hf_dflow.bench.workloads import Prompt

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


def compare(pair: Pair, prompts: list[Prompt], max_new_tokens: int) -> list[Comparison]:
    """Decode each prompt with each strategy in turn, so that a busy machine slows them alike."""
    for strategy in STRATEGIES:  # a first call pays for allocations that later ones reuse
        run_strategy(pair, pair.encode(prompts[0].text), strategy, WARM_UP_TOKENS)
    comparisons = []
    for prompt in prompts:
        inputs = pair.encode(prompt.text)
        runs = {strategy: run_strategy(pair, inputs, strategy, max_new_tokens) for strategy in STRATEGIES}
        text = str(pair.tokenizer.decode(runs["plain"].new_tokens, skip_special_tokens=True))
        comparisons.append(Comparison(prompt, text, runs))
    return comparisons


def as_record(comparisons: list[Comparison], **conditions: Any) -> dict[str, Any]:
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


def show(comparisons: list[Comparison], console: Console) -> None:
    """Print each prompt's text once, and the figures of each strategy under it."""
    for comparison in comparisons:
        console.rule()
        console.print(Text(f"{comparison.prompt.task}: {comparison.prompt.text}", style="bold"))
        console.print(comparison.text, markup=False, highlight=False)
        console.print(_table(comparison))
    console.print(_meaning(comparisons))


def _table(comparison: Comparison) -> Table:
    table = Table("strategy", "text")
    for heading in ("tokens/step", "accepted", "target forwards", "tokens", "seconds"):
        table.add_column(heading, justify="right")
    for strategy, run in comparison.runs.items():
        has_drafts = strategy != "plain"
        table.add_row(
            strategy,
            ("identical" if comparison.is_identical(strategy) else "DIFFERS") if has_drafts else "reference",
            f"{run.statistics.tokens_per_step:.2f}",
            f"{run.statistics.draft_acceptance_rate:.1%}" if has_drafts else "–",
            str(run.target_forwards),
            str(len(run.new_tokens)),
            f"{run.seconds:.2f}",
        )
    return table


def _meaning(comparisons: list[Comparison]) -> str:
    forwards = {s: sum(comparison.runs[s].target_forwards for comparison in comparisons) for s in STRATEGIES}
    is_identical = all(comparison.is_identical(strategy) for comparison in comparisons for strategy in STRATEGIES)
    result = "wrote exactly the target's own text" if is_identical else "DID NOT write the target's own text"
    return (
        f"DFlow {result} with {forwards['dflow']} target forwards; plain decoding needs {forwards['plain']}, the same "
        f"loop without feedback (dflash) {forwards['dflash']}. Counts carry over to other machines, seconds do not: "
        "checking eight tokens costs a CPU more than computing one, on a GPU nearly the same."
    )
