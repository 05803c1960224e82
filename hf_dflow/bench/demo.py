"""`hf-dflow demo`: one target, three ways to decode, the same text."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from hf_dflow.bench.answers import Answer, NotRun, Plan, answer_all
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.pairs import Pair
from hf_dflow.bench.strategies import Contestant, Mode
from hf_dflow.bench.workloads import Prompt
from hf_dflow.console import ResultTable, print_table

STRATEGIES = ("plain", "dflash", "dflow")
MEASURES = ("text", "tokens/step", "accepted", "target forwards", "tokens", "seconds")


def compare(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
    """Decode each prompt greedily with each of [`STRATEGIES`]; "dflash" is this package's loop with the relay off.

    A `KeyboardInterrupt` after the first prompt ends it: the answers are those that were finished.
    """
    contestants = [Contestant("dflash", pair.drafter, use_relay=False), Contestant("dflow", pair.drafter)]
    plan = Plan(contestants, [Mode()], max_new_tokens, with_plain=True)
    answers: list[Answer] = []
    try:
        for call in enumerate(prompts):
            warmed: NotRun | None = {} if answers else None
            answers += answer_all(pair.target, pair.encode_batch, [call], plan, not_run=warmed)
    except KeyboardInterrupt:
        if not answers:
            raise
    return answers


def as_record(answers: Sequence[Answer], **conditions: Any) -> dict[str, Any]:
    """What `--json` prints: `rows`, and the conditions they were measured under."""
    rows = [
        {
            "prompt": answer.prompt.text,
            "strategy": strategy,
            "text_identical": is_identical(answer, strategy),
            "tokens_per_step": round(answer.runs[strategy].statistics.tokens_per_step, 4),
            "draft_acceptance_rate": round(answer.runs[strategy].statistics.draft_acceptance_rate, 4),
            "target_forwards": answer.runs[strategy].target_forwards,
            "new_tokens": len(answer.runs[strategy].new_tokens),
            "seconds": round(answer.runs[strategy].seconds, 3),
        }
        for answer in answers
        for strategy in STRATEGIES
    ]
    return {"rows": rows, "conditions": run_conditions(**conditions)}


def is_identical(answer: Answer, strategy: str) -> bool:
    """Whether `strategy` wrote what plain decoding wrote, token for token."""
    return answer.runs[strategy].new_tokens == answer.runs["plain"].new_tokens


def show(pair: Pair, answers: Sequence[Answer], console: Console) -> None:
    """Print each prompt's text once, and the figures of each strategy under it."""
    for answer in answers:
        console.rule()
        console.print(Text(f"{answer.prompt.task}: {answer.prompt.text}", style="bold"))
        console.print(Text(str(pair.tokenizer.decode(answer.runs["plain"].new_tokens, skip_special_tokens=True))))
        rows = [[strategy, *_cells(answer, strategy)] for strategy in STRATEGIES]
        print_table(console, ResultTable("", ("strategy",), MEASURES, rows))
    forwards = {s: sum(answer.runs[s].target_forwards for answer in answers) for s in STRATEGIES}
    is_same = all(is_identical(answer, strategy) for answer in answers for strategy in STRATEGIES)
    result = "wrote exactly the target's own text" if is_same else "DID NOT write the target's own text"
    console.print(
        f"DFlow {result} with {forwards['dflow']} target forwards; plain decoding needs {forwards['plain']}, the same "
        f"loop without feedback (dflash) {forwards['dflash']}. Counts carry over to other machines, seconds do not: "
        "verifying eight tokens costs a CPU more than computing one, a GPU nearly the same."
    )


def _cells(answer: Answer, strategy: str) -> list[str]:
    run, is_plain = answer.runs[strategy], strategy == "plain"
    same = "identical" if is_identical(answer, strategy) else "DIFFERS"
    return [
        "reference" if is_plain else same,
        f"{run.statistics.tokens_per_step:.2f}",
        "–" if is_plain else f"{run.statistics.draft_acceptance_rate:.1%}",
        str(run.target_forwards),
        str(len(run.new_tokens)),
        f"{run.seconds:.2f}",
    ]
