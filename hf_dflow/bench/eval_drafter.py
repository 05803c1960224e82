"""`python -m hf_dflow.bench.eval_drafter`: what a drafter is worth on prompts that it was not trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_dflow import AcceptanceStatistics
from hf_dflow.bench.report import bootstrap_interval, pooled, run_conditions
from hf_dflow.bench.runners import STRATEGIES, Pair, Run, load_pair, run_strategy, use_threads
from hf_dflow.bench.workloads import HELD_OUT, Prompt, human_eval_prompts, read_prompts

SPECULATIVE = tuple(strategy for strategy in STRATEGIES if strategy != "plain")


@dataclass(frozen=True)
class Answer:
    """One prompt under every strategy."""

    prompt: Prompt
    runs: dict[str, Run]

    @property
    def is_identical(self) -> bool:
        return all(run.new_tokens == self.runs["plain"].new_tokens for run in self.runs.values())


def answer_all(pair: Pair, prompts: list[Prompt], max_new_tokens: int, console: Console) -> list[Answer]:
    """Decode every prompt with every strategy, one after the other."""
    answers = []
    for prompt in track(prompts, description="prompts", console=console):
        inputs = pair.encode(prompt.text)
        runs = {strategy: run_strategy(pair, inputs, strategy, max_new_tokens) for strategy in STRATEGIES}
        answers.append(Answer(prompt, runs))
    return answers


def statistics_of(answers: Sequence[Answer], strategy: str) -> list[AcceptanceStatistics]:
    """One record for each answer."""
    return [answer.runs[strategy].statistics for answer in answers]


def tokens_per_step(answers: Sequence[Answer]) -> dict[str, Any]:
    """Pooled tokens per step of both loops and their difference, with 95% intervals over prompts.

    A resample draws prompts, and both loops are read on the same ones: the difference is a paired one.
    """
    # [strategies, prompts] of accepted drafts and of steps
    accepted, steps = (
        np.array([[getattr(one, name) for one in statistics_of(answers, strategy)] for strategy in SPECULATIVE])
        for name in ("num_accepted_draft_tokens", "num_spec_steps")
    )

    def pooled_tokens_per_step(strategy: int, chosen: np.ndarray | slice) -> float:
        return 1.0 + float(accepted[strategy, chosen].sum() / max(steps[strategy, chosen].sum(), 1))

    def figure(statistic) -> dict[str, Any]:
        return {"value": statistic(slice(None)), "interval_95": bootstrap_interval(len(answers), statistic)}

    figures = {
        name: figure(lambda chosen, index=index: pooled_tokens_per_step(index, chosen))
        for index, name in enumerate(SPECULATIVE)
    }
    off, on = SPECULATIVE.index("dflash"), SPECULATIVE.index("dflow")
    figures["difference"] = figure(
        lambda chosen: pooled_tokens_per_step(on, chosen) - pooled_tokens_per_step(off, chosen)
    )
    return figures


def as_record(answers: list[Answer], **conditions: Any) -> dict[str, Any]:
    """Everything measured, and the conditions."""
    tasks = list(dict.fromkeys(answer.prompt.task for answer in answers))
    acceptance = {}
    for strategy in SPECULATIVE:
        total = pooled(statistics_of(answers, strategy))
        acceptance[strategy] = {
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_rate_per_position": total.acceptance_rate_per_position,
            "accepted_length_std": total.accepted_length_std,
            "target_forwards_per_token": total.target_forwards_per_token,
            "num_spec_steps": total.num_spec_steps,
            "num_output_tokens": total.num_output_tokens,
        }
    return {
        "tokens_per_step": tokens_per_step(answers),
        "tokens_per_step_by_task": {
            task: tokens_per_step([answer for answer in answers if answer.prompt.task == task]) for task in tasks
        },
        "acceptance": acceptance,
        "all_text_identical": all(answer.is_identical for answer in answers),
        "rows": [
            {
                "task": answer.prompt.task,
                "prompt": answer.prompt.text,
                "text_identical": answer.is_identical,
                "new_tokens": len(answer.runs["plain"].new_tokens),
                "tokens_per_step": {name: answer.runs[name].statistics.tokens_per_step for name in SPECULATIVE},
                "target_forwards": {name: answer.runs[name].target_forwards for name in STRATEGIES},
            }
            for answer in answers
        ],
        "conditions": run_conditions(prompts=len(answers), interval="95% bootstrap over prompts", **conditions),
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Print tokens per step for each task, then what was accepted where."""
    table = Table("task", *SPECULATIVE, "dflow − dflash", title="tokens per step [95% interval over prompts]")
    for task, figures in [*record["tokens_per_step_by_task"].items(), ("all", record["tokens_per_step"])]:
        table.add_row(task, *(_with_interval(figures[name]) for name in (*SPECULATIVE, "difference")))
    console.print(table)
    for strategy, figures in record["acceptance"].items():
        positions = " ".join(f"{rate:.3f}" for rate in figures["acceptance_rate_per_position"])
        console.print(
            f"{strategy}: {figures['target_forwards_per_token']:.3f} target forwards per token, "
            f"{figures['draft_acceptance_rate']:.1%} of drafts accepted; by position {positions}",
            highlight=False,
        )
    same = "identical to plain decoding" if record["all_text_identical"] else "[red]NOT identical to plain decoding[/]"
    console.print(f"All texts {same}.")


def _with_interval(figure: dict[str, Any]) -> str:
    low, high = figure["interval_95"]
    return f"{figure['value']:.3f} \\[{low:.3f}, {high:.3f}]"


def main(
    drafter: Annotated[Path | None, typer.Option(help="Drafter folder; the bundled one by default.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything here.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON file of {"task": ["prompt", …]}.')] = None,
    human_eval: Annotated[int, typer.Option(min=0, help="Add so many problems of the human-eval package.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
) -> None:
    """Measure a SmolLM2 drafter with the relay off and on, greedily; exit code 1 if any text differs."""
    use_threads(threads)
    workload = read_prompts(prompts or HELD_OUT) + (human_eval_prompts(human_eval) if human_eval else [])
    console = Console()
    pair = load_pair(drafter=drafter)
    answers = answer_all(pair, workload, max_new_tokens, console)
    record = as_record(answers, **pair.describe(), max_new_tokens=max_new_tokens)
    show(record, console)
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if record["all_text_identical"] else 1)


if __name__ == "__main__":
    typer.run(main)
