"""`python -m experiments.batch`: time and memory of a batch against those of its rows decoded alone.

Same target, drafter, prompts and tokens, in one process, in turn. Run it on an idle machine.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.common import pass_or_fail
from hf_dflow import DFlowGenerationConfig
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.workloads import HELD_OUT, Prompt, read_prompts
from hf_dflow.console import JsonOption, ThreadsOption, use_threads, write_json

BATCH_SIZE = 8
MAX_TIME_RATIO = 0.6  # seconds of the batch over the sum of its rows alone
MAX_HOLES = 0.25  # share of the target cache's columns that its longest row does not need


@dataclass(frozen=True)
class Decoded:
    """New tokens of each row, the time of the call, and the size of the target's cache before each step."""

    rows: list[list[int]]
    seconds: float
    target_forwards: int
    tokens_per_step: float
    steps: int  # of all rows
    columns: list[tuple[int, int]]  # (columns of the cache, tokens of its longest row) before each step


def decode(pair: Pair, prompts: list[Prompt], max_new_tokens: int) -> Decoded:
    """Decode `prompts` as one batch, padded on the left."""
    inputs = pair.encode_batch([prompt.text for prompt in prompts])
    config = DFlowGenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=pair.tokenizer.pad_token_id,
    )
    target: Any = pair.target
    columns: list[tuple[int, int]] = []

    def record_columns(module, args, kwargs):
        if (mask := kwargs.get("attention_mask")) is not None:
            cached = mask[:, : -kwargs["input_ids"].shape[1]]
            if cached.shape[1]:
                columns.append((cached.shape[1], int(cached.sum(1).max())))

    handle = target.register_forward_pre_hook(record_columns, with_kwargs=True)
    try:
        start = time.perf_counter()
        output = target.generate(**inputs, assistant_model=pair.drafter, generation_config=config)
        seconds = time.perf_counter() - start
    finally:
        handle.remove()
    counts = [row.num_output_tokens for row in output.statistics.per_row]
    written = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    rows = [row[:count] for row, count in zip(written, counts, strict=True)]
    told = output.statistics
    return Decoded(rows, seconds, told.num_target_forwards, told.tokens_per_step, told.num_spec_steps, columns)


def measure(pair: Pair, prompts: list[Prompt], repeats: int, max_new_tokens: int) -> dict[str, Any]:
    """Time the batch and its rows in turn; figures, goals, and whether the goals are met."""
    decode(pair, prompts, 8)  # warm-up: a first call pays for allocations
    ratios, batches, singles = [], [], []
    for _ in range(repeats):
        batches.append(decode(pair, prompts, max_new_tokens))
        singles.append([decode(pair, [prompt], max_new_tokens) for prompt in prompts])
        ratios.append(batches[-1].seconds / sum(single.seconds for single in singles[-1]))
    batch, alone = batches[0], singles[0]
    same = [ours == single.rows[0] for ours, single in zip(batch.rows, alone, strict=True)]
    holes = max((1 - longest / width for width, longest in batch.columns), default=0.0)
    config = pair.target.config.get_text_config()
    size = next(pair.target.parameters()).element_size()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    column = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size
    widest = max((width for width, _ in batch.columns), default=0)
    return {
        "batch_size": len(prompts),
        "seconds_batch": median(decoded.seconds for decoded in batches),
        "seconds_alone": median(sum(single.seconds for single in repeat) for repeat in singles),
        "ratios": ratios,
        "median_ratio": median(ratios),
        "target_forwards": {"batch": batch.target_forwards, "alone": sum(single.target_forwards for single in alone)},
        "tokens_per_step": batch.tokens_per_step,
        "steps": batch.steps,
        "new_tokens": sum(len(row) for row in batch.rows),
        "rows_with_the_same_text": sum(same),
        "largest_share_of_holes": holes,
        "target_cache_bytes": {"column_of_a_row": column, "row_at_its_widest": column * widest},
        "goals": {"median_ratio": MAX_TIME_RATIO, "largest_share_of_holes": MAX_HOLES},
        "passed": median(ratios) <= MAX_TIME_RATIO and holes <= MAX_HOLES,
    }


def show(record: dict[str, Any], console: Console) -> None:
    """Print the figures, and each goal with PASS or FAIL."""
    forwards, cache_bytes = record["target_forwards"], record["target_cache_bytes"]
    console.print(
        f"{pass_or_fail(record['median_ratio'] <= MAX_TIME_RATIO)} a batch of {record['batch_size']} takes "
        f"{record['seconds_batch']:.1f} s, its rows alone {record['seconds_alone']:.1f} s: ratio "
        f"{record['median_ratio']:.2f}, goal ≤ {MAX_TIME_RATIO}"
    )
    console.print(
        f"{pass_or_fail(record['largest_share_of_holes'] <= MAX_HOLES)} holes in the target's cache: at most "
        f"{record['largest_share_of_holes']:.0%} of the columns, goal ≤ {MAX_HOLES:.0%}; "
        f"{cache_bytes['row_at_its_widest'] / 2**20:.1f} MiB a row at its widest"
    )
    console.print(
        f"{forwards['batch']} target forwards instead of {forwards['alone']}, {record['tokens_per_step']:.2f} tokens "
        f"per step, {record['rows_with_the_same_text']} of {record['batch_size']} rows with the same text "
        "(float32 may flip near ties)"
    )


def main(
    json_path: JsonOption = None,
    drafter: Annotated[Path | None, typer.Option(help="Drafter folder; the bundled one by default.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON file of {"task": ["prompt", …]}.')] = None,
    batch_size: Annotated[int, typer.Option(min=2)] = BATCH_SIZE,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    threads: ThreadsOption = None,
) -> None:
    """Decode a batch with SmolLM2, and its rows alone; exit code 1 if a goal is missed."""
    use_threads(threads)
    workload = read_prompts(prompts or HELD_OUT)
    workload = workload[:: max(1, len(workload) // batch_size)][:batch_size]  # of all tasks
    pair = load_pair(drafter=drafter)
    record = measure(pair, workload, repeats, max_new_tokens)
    record["conditions"] = run_conditions(**pair.describe(), repeats=repeats, max_new_tokens=max_new_tokens)
    show(record, Console())
    write_json(json_path, record)
    raise typer.Exit(0 if record["passed"] else 1)


if __name__ == "__main__":
    typer.run(main)
