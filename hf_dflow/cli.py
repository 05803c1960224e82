"""`hf-dflow`: the demo, a losslessness check, a look into a drafter's folder, and training."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# What needs torch is imported inside the commands: --help must not wait for it.
from hf_dflow.bench import commands as bench_commands
from hf_dflow.bench.options import (
    DrafterOption,
    HumanEvalOption,
    PromptFilesOption,
    ShareGptOption,
    TargetOption,
    TinyOption,
)
from hf_dflow.bench.tiny import given_or_tiny
from hf_dflow.console import JsonOption, ThreadsOption, errors_in_words, report_console, writable, write_json
from hf_dflow.errors import DFlowError
from hf_dflow.hub import commands as hub
from hf_dflow.training import commands as training

app = typer.Typer(help="Block-diffusion speculative decoding with verifier feedback.", no_args_is_help=True)


@app.command()
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    drafter: DrafterOption = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help='JSON file of {"task": ["prompt", …]}; three own ones by default.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 96,
    tiny: TinyOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Decode with SmolLM2-135M plainly, DFlash-style and with DFlow; exit code 1 if any text differs."""
    with errors_in_words():
        from hf_dflow.bench import demo as bench
        from hf_dflow.bench.runners import load_pair
        from hf_dflow.bench.workloads import DEMO, read_prompts
        from hf_dflow.console import use_threads

        use_threads(threads)
        target, own_drafter, own_prompts = given_or_tiny(tiny, None, drafter)
        workload = read_prompts(prompts or own_prompts or DEMO)
        pair = load_pair(target, own_drafter)
        comparisons = bench.compare(pair, workload, max_new_tokens)
        record = bench.as_record(comparisons, **pair.describe(), max_new_tokens=max_new_tokens)
        if as_json:
            typer.echo(json.dumps(record, indent=2))
        else:
            bench.show(comparisons, Console())
        if not all(row["text_identical"] for row in record["rows"]):
            raise typer.Exit(1)


@app.command()
def check(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON file of {"task": ["prompt", …]}.')] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    tiny: TinyOption = False,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="For the chat template.")] = None,
    threads: ThreadsOption = None,
) -> None:
    """Compare greedy text with and without a drafter; exit code 1 on a difference that is no rounding."""
    with errors_in_words():
        import torch

        from hf_dflow.bench.lossless import FAULT, compare_with_plain
        from hf_dflow.bench.runners import load_pair
        from hf_dflow.bench.workloads import DEMO, read_prompts
        from hf_dflow.console import use_threads
        from hf_dflow.generation.pair import check_pair

        use_threads(threads)
        types = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
        if dtype not in types:
            raise DFlowError(f"--dtype {dtype} is unknown; use one of {', '.join(types)}")
        target, drafter, own_prompts = given_or_tiny(tiny, target, drafter)
        workload = read_prompts(prompts or own_prompts or DEMO)
        pair = load_pair(target, drafter, types[dtype], thinking=thinking)
        check_pair(pair.target, pair.drafter, pair.tokenizer, pair.chat_mode)
        reports = []
        for prompt in workload:
            report = compare_with_plain(pair.target, pair.drafter, pair.encode(prompt.text), max_new_tokens)
            reports.append(report)
            typer.echo(f"{prompt.task}: {report} ({report.statistics})")
        if not any(report.statistics and report.statistics.num_accepted_draft_tokens for report in reports):
            typer.echo("No draft was accepted, so this shows little: is it the drafter of this target?")
        if any(report.verdict == FAULT for report in reports):
            raise typer.Exit(1)


@app.command()
def probe(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON file of {"task": ["prompt", …]}.')] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    tiny: TinyOption = False,
    json_path: JsonOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Say how much the reuse of rejected rows could win at most, for any DFlash or DFlow drafter, by task."""
    with errors_in_words():
        from hf_dflow.bench import probe as bench
        from hf_dflow.bench.runners import load_pair
        from hf_dflow.bench.workloads import HELD_OUT, read_prompts
        from hf_dflow.console import use_threads

        use_threads(threads)
        target, drafter, own_prompts = given_or_tiny(tiny, target, drafter)
        workload = read_prompts(prompts or own_prompts or HELD_OUT)
        record = bench.probe_prompts(load_pair(target, drafter), workload, max_new_tokens)
        bench.show(record, report_console())
        write_json(json_path, record)


@app.command()
def calibrate(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter saved by this package; its config changes.")],
    target: TargetOption = None,
    bundled: Annotated[
        bool, typer.Option("--bundled", help="Bundled prompts of six tasks, on which nothing is measured; the default.")
    ] = False,
    prompts: PromptFilesOption = None,
    human_eval: HumanEvalOption = 0,
    sharegpt: ShareGptOption = 0,
    skip: Annotated[int, typer.Option(min=0, help="Of other prompts, leave out so many: those you measure on.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and show; the folder stays as it is.")] = False,
    json_path: JsonOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Fit what stale_mixture="learned" and adaptive_length take from a drafter, on prompts you do not measure on."""
    with errors_in_words():
        from collections import Counter

        from hf_dflow.bench import calibrate as bench
        from hf_dflow.bench.report import run_conditions
        from hf_dflow.bench.runners import load_pair
        from hf_dflow.bench.workloads import FITTING, chosen_prompts, read_prompts, tasks_in_turn
        from hf_dflow.console import use_threads

        bench.own_config(drafter)
        if not dry_run:
            writable(drafter / bench.CONFIG)
        workload, others = [], prompts or human_eval or sharegpt
        if skip and not others:
            raise DFlowError(f"--skip {skip} is of --prompts, --human-eval and --sharegpt; name some, or leave it out")
        if others:
            chosen = chosen_prompts(files=prompts or [], human_eval=human_eval, sharegpt=sharegpt)
            workload = tasks_in_turn(chosen)[skip:]
            if not workload:
                raise DFlowError(f"--skip {skip} leaves none of {len(chosen)} prompts; skip fewer, or give more")
        if bundled or not others:
            workload += [prompt for prompt in tasks_in_turn(read_prompts(FITTING)) if prompt not in workload]
        use_threads(threads)
        pair = load_pair(target, drafter)
        result = bench.fit(pair, workload, max_new_tokens, Console())
        typer.echo(json.dumps(result, indent=1))
        if json_path is not None:
            decoding = ", ".join(mode.name for mode in bench.MODES.values())
            tasks = dict(Counter(prompt.task for prompt in workload))
            told = {"prompts": len(workload), "tasks": tasks, "max_new_tokens": max_new_tokens, "decoding": decoding}
            conditions = run_conditions(**told, **pair.describe())
            record = {**result, "conditions": {**conditions, "skipped_prompts": skip}}
            write_json(json_path, record)
        if not dry_run:
            bench.keep(drafter, result["fitted_decisions"])


@app.command()
def info(drafter: Annotated[str, typer.Argument(help="Folder or Hub name.")]) -> None:
    """Show what a drafter was made for."""
    with errors_in_words():
        import hf_dflow

        model = hf_dflow.DFlowDrafter.from_pretrained(drafter)
        config = model.config
        table = Table("property", "value")
        width, candidates = config.correction_intermediate_size, config.correction_top_k
        relay_is_active = model.relay is not None and bool(model.relay.down_proj.weight.any())
        properties = {
            "block size": f"{config.block_size} ({config.drafts_per_block} drafts a step)",
            "draft layers": ", ".join(config.layer_types),
            "parameters": f"{sum(p.numel() for p in model.parameters()):,} ({config.dtype})",
            "relay": "trained" if relay_is_active else "at zero" if model.relay is not None else "none",
            "causal correction": "none" if width is None else f"width {width}, {candidates} candidates",
            "target": f"hidden size {config.target_hidden_size}, {config.num_target_layers or 'any number of'} layers",
            "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
            "mask token id": str(config.mask_token_id),
        }
        for name, value in properties.items():
            table.add_row(name, value)
        Console().print(table)


app.command()(errors_in_words()(hub.drafters))
app.command()(errors_in_words()(hub.export))
app.command()(errors_in_words()(hub.publish))
app.add_typer(hub.card, name="card")
app.add_typer(bench_commands.app, name="bench")
app.command()(errors_in_words()(bench_commands.plan))
app.command()(errors_in_words()(bench_commands.cost))
app.command()(errors_in_words()(training.data))
app.command()(errors_in_words()(training.train))


if __name__ == "__main__":
    app()
