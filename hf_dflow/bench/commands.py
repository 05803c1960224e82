"""`hf-dflow demo`, `check`, `probe`, `calibrate`, `plan` and `cost`: their options, and what is done with them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

# What needs torch is imported inside the commands: --help must not wait for it.
from hf_dflow.bench.cost import Hosted, SelfHosted
from hf_dflow.bench.options import (
    HumanEvalOption,
    PairOptions,
    PromptFileOption,
    PromptFilesOption,
    ShareGptOption,
    TargetOption,
)
from hf_dflow.console import (
    INTERRUPTED,
    STDOUT,
    JsonOption,
    SafeConsole,
    ThreadsOption,
    say,
    takes_option_groups,
    writable,
    write_and_show,
    write_json,
)
from hf_dflow.errors import DFlowError


@takes_option_groups
def demo(
    pair_options: PairOptions,
    prompts: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    json_path: JsonOption = None,
) -> None:
    """Decode with SmolLM2-135M plainly, DFlash-style and with DFlow; exit code 1 if any text differs."""
    from hf_dflow.bench import demo as bench
    from hf_dflow.bench.workloads import DEMO, read_prompts

    workload = read_prompts(prompts or pair_options.own_prompts or DEMO)
    pair = pair_options.load()
    answers = bench.compare(pair, workload, max_new_tokens)
    record = bench.as_record(answers, **pair.describe(), max_new_tokens=max_new_tokens)
    record["interrupted"] = len(answers) < len(workload)
    try:
        write_json(json_path, record)
    finally:
        # Prompts and answers are prose, which a pipe gets in lines of 80 columns as well.
        bench.show(pair, answers, SafeConsole(stderr=json_path == STDOUT))
    if not all(row["text_identical"] for row in record["rows"]):
        raise typer.Exit(1)
    if record["interrupted"]:
        raise typer.Exit(INTERRUPTED)


@takes_option_groups
def check(
    pair_options: PairOptions,
    prompts: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    json_path: JsonOption = None,
) -> None:
    """Compare greedy text with and without a drafter; exit code 1 on a difference that is no rounding."""
    from hf_dflow.bench.conditions import run_conditions
    from hf_dflow.bench.lossless import FAULT, compare_with_plain
    from hf_dflow.bench.workloads import DEMO, read_prompts
    from hf_dflow.generation.checks import can_hold_holes, can_hold_trees
    from hf_dflow.generation.pair import check_pair
    from hf_dflow.generation.selfcheck import check_of

    workload = read_prompts(prompts or pair_options.own_prompts or DEMO)
    pair = pair_options.load()
    check_pair(pair.target, pair.drafter, pair.tokenizer, pair.chat_mode)
    has_full_attention = can_hold_holes(pair.target)
    self_check = str(check_of(pair.target, holes=has_full_attention, tree=can_hold_trees(pair.target)))
    to_stderr = json_path == STDOUT
    say(self_check, err=to_stderr)
    if not has_full_attention:
        say("  rows of a batch are decoded one by one, without trees: not all layers are full attention", err=to_stderr)
    reports: list[Any] = []
    rows: list[dict[str, Any]] = []
    try:
        for prompt in workload:
            report = compare_with_plain(pair.target, pair.drafter, pair.encode(prompt.text), max_new_tokens)
            reports.append(report)
            rows.append({**prompt.as_record(), **report.as_record()})
            say(f"{prompt.task}: {report} ({report.statistics})", err=to_stderr)
    except KeyboardInterrupt:
        if not rows:
            raise
    is_interrupted = len(rows) < len(workload)
    if not any(report.statistics and report.statistics.num_accepted_draft_tokens for report in reports):
        say("No draft was accepted, so this shows little: is it the drafter of this target?", err=to_stderr)
    conditions = run_conditions(**pair.describe(), max_new_tokens=max_new_tokens, prompts=len(rows))
    record = {"rows": rows, "self_check": self_check, "conditions": conditions, "interrupted": is_interrupted}
    write_json(json_path, record)
    if any(report.verdict == FAULT for report in reports):
        raise typer.Exit(1)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)


@takes_option_groups
def probe(
    pair_options: PairOptions,
    prompts: PromptFileOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    json_path: JsonOption = None,
) -> None:
    """Say how much the reuse of rejected rows could win at most, for any DFlash or DFlow drafter, by task."""
    from hf_dflow.bench import probe as bench
    from hf_dflow.bench.workloads import HELD_OUT, read_prompts

    workload = read_prompts(prompts or pair_options.own_prompts or HELD_OUT)
    record = bench.probe_prompts(pair_options.load(), workload, max_new_tokens)
    write_and_show(json_path, record, bench.present(record))
    if record["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def calibrate(
    drafter: Annotated[
        Path,
        typer.Argument(help="Folder of a drafter saved by this package, or a bundled one's name; its config changes."),
    ],
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
    from collections import Counter

    from hf_dflow.bench import calibrate as bench
    from hf_dflow.bench.conditions import run_conditions
    from hf_dflow.bench.workloads import FITTING, chosen_prompts, read_prompts, tasks_in_turn
    from hf_dflow.checkpoints.names import resolve, similar_drafters, unknown_drafter

    if similar := similar_drafters(str(drafter)):
        raise DFlowError(unknown_drafter(str(drafter), similar))
    drafter = Path(resolve(drafter))
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
    pair = PairOptions(target, str(drafter), threads=threads).load()
    result = bench.fit(pair, workload, max_new_tokens, SafeConsole(stderr=json_path == STDOUT))
    if not dry_run:  # first: whatever becomes of what is printed, the fit is kept
        bench.keep(drafter, result["fitted_decisions"])
    if json_path != STDOUT:
        say(json.dumps(result, indent=1))
    if json_path is not None:
        decoding = ", ".join(mode.name for mode in bench.MODES.values())
        tasks = dict(Counter(prompt.task for prompt in workload))
        conditions = run_conditions(
            prompts=len(workload), tasks=tasks, max_new_tokens=max_new_tokens, decoding=decoding, **pair.describe()
        )
        write_json(json_path, {**result, "conditions": {**conditions, "skipped_prompts": skip}})


def plan(
    target: Annotated[str, typer.Option(help="Folder, config.json or Hub name of the target.")],
    drafter: Annotated[str, typer.Option(help="Folder, config.json or Hub name of the drafter.")],
    gpu_memory: Annotated[float, typer.Option(min=0, help="GiB of each GPU.")],
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt included.")] = 4096,
    prompt_len: Annotated[int | None, typer.Option(min=1, help="Of which prompt; half by default.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share that may be used.")] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the target.")] = 1,
    draft_tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the drafter.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Of weights and caches; the target's own by default.")] = None,
    sampling: Annotated[bool, typer.Option("--sampling", help="Temperature above 0, verified in torch.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Count the memory of a target with and without its drafter, from their configurations; no weights are read."""
    from hf_dflow.bench import memory_plan as bench

    load = bench.Load(
        max_model_len=max_model_len,
        prompt_len=prompt_len,
        dtype=dtype,
        do_sample=sampling,
        tensor_parallel_size=tensor_parallel_size,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
    )
    counted = bench.make_plan(bench.read_target(target), bench.read_drafter(drafter), load)
    available = gpu_memory * gpu_memory_utilization * bench.GIB
    conditions = {**vars(load), "target": Path(target).name, "drafter": Path(drafter).name}
    record = bench.as_record(counted, available, **conditions)
    write_and_show(json_path, record, bench.present(record))


@takes_option_groups
def cost(
    own: SelfHosted,
    hosted: Hosted,
    monthly_tokens: Annotated[float | None, typer.Option(help="Compare the bills of a month with so many.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Compare a hosted bill with your own server, with and without drafting; every number is yours or measured."""
    from hf_dflow.bench.cost import compare, present

    record = compare(hosted, own, monthly_tokens)
    write_and_show(json_path, record, present(record))
