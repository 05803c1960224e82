"""`hf-dflow bench run`, `endpoint`, `sweep` and `report`: the options, and what is done with them."""

from pathlib import Path
from typing import Annotated, Any

import typer

# What needs torch is imported inside the commands: --help must not wait for it.
from hf_dflow.bench import report_commands
from hf_dflow.bench.options import (
    DatasetOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    HumanEvalOption,
    JsonLinesOption,
    PerTaskOption,
    PromptFilesOption,
    TargetOption,
    TaskOption,
    TemperaturesOption,
    TinyOption,
)
from hf_dflow.console import (
    JsonOption,
    ThreadsOption,
    errors_in_words,
    report_console,
    writable,
    writable_folder,
    write_json,
)
from hf_dflow.errors import DFlowError

app = typer.Typer(help="Measure before you switch it on.", no_args_is_help=True)


@app.command()
@errors_in_words()
def run(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    tiny: TinyOption = False,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="assisted, prompt_lookup, transformers_dflash, dflash, dflow; repeatable; plain always."),
    ] = None,
    assistant: Annotated[Path | None, typer.Option(help="Folder of the classic draft model of 'assisted'.")] = None,
    task: TaskOption = None,
    prompts: PromptFilesOption = None,
    jsonl: JsonLinesOption = None,
    dataset: DatasetOption = None,
    human_eval: HumanEvalOption = 0,
    per_task: PerTaskOption = None,
    temperature: TemperaturesOption = None,
    verification: Annotated[list[str] | None, typer.Option(help="token (default) or block; repeatable.")] = None,
    output_tokens: Annotated[int, typer.Option(min=2)] = 48,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts decoded together, as one batch.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Turns over all prompts, for times.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Begin no prompt after so long.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="For the chat template.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(callback=writable, help="PNG of tokens per step by task.")] = None,
) -> None:
    """Measure every strategy on the same prompts, by turns; exit code 1 if a greedy float32 text differs."""
    from hf_dflow.bench import run_view, suite
    from hf_dflow.bench.assistant import load_draft_model
    from hf_dflow.bench.evaluation import is_identical, modes_of
    from hf_dflow.bench.runners import load_pair
    from hf_dflow.bench.tiny import given_or_tiny
    from hf_dflow.bench.workloads import workload
    from hf_dflow.console import use_threads

    kind = _dtype(dtype)
    target, drafter, own_prompts = given_or_tiny(tiny, target, drafter)
    measured_on = workload(
        files=prompts or [], jsonl=jsonl or [], dataset=dataset, human_eval=human_eval, otherwise=own_prompts,
        tasks=task or [], per_task=per_task,
    )  # fmt: skip
    use_threads(threads)
    pair = load_pair(target, drafter, kind, device, thinking)
    small = load_draft_model(assistant, pair.target) if assistant else None
    names = strategy or [
        name
        for name in suite.STRATEGIES
        if not (name == "assisted" and small is None) and not (name == "dflow" and pair.drafter.relay is None)
    ]
    console = report_console()
    if warning := suite.mode_warning(pair):
        console.print(f"[yellow]{warning}[/]")
    record = suite.run(
        pair,
        suite.contestants_of(pair, names, small),
        modes_of(temperature or [0.0], verification or ["token"]),
        measured_on.prompts,
        workload=measured_on.source,
        output_tokens=output_tokens,
        concurrency=concurrency,
        repeats=repeats,
        minutes=minutes,
        console=console,
    )
    run_view.show(record, console)
    write_json(json_path, record)
    if plot is not None:
        run_view.plot(record, plot)
    raise typer.Exit(1 if dtype in ("float32", "float64") and not is_identical(record) else 0)


@app.command()
@errors_in_words()
def endpoint(
    endpoint: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server, up to and with /v1.")],
    model: Annotated[str, typer.Option(help="As the server calls it.")],
    server: Annotated[str | None, typer.Option(help="What serves, and with which drafter: for the record.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at any time.")] = 1,
    task: TaskOption = None,
    prompts: PromptFilesOption = None,
    jsonl: JsonLinesOption = None,
    dataset: DatasetOption = None,
    human_eval: HumanEvalOption = 0,
    per_task: PerTaskOption = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    retries: Annotated[int, typer.Option(min=0, help="Of a request that was refused for now.")] = 2,
    stall_seconds: Annotated[float, typer.Option(help="Longest silence within an answer.")] = 30.0,
    request_seconds: Annotated[float, typer.Option(help="Longest answer.")] = 300.0,
    json_path: JsonOption = None,
) -> None:
    """Put a load on an endpoint, key from OPENAI_API_KEY; exit code 1 if a request got no whole answer."""
    from hf_dflow.bench import endpoint as bench
    from hf_dflow.bench import endpoint_report as report
    from hf_dflow.bench.workloads import workload

    measured_on = workload(
        files=prompts or [], jsonl=jsonl or [], dataset=dataset, human_eval=human_eval, tasks=task or [],
        per_task=per_task,
    )  # fmt: skip
    settings = bench.EndpointSettings(
        url=endpoint,
        model=model,
        server=server,
        concurrency=concurrency,
        output_tokens=output_tokens,
        temperature=temperature,
        retries=retries,
        stall_seconds=stall_seconds,
        request_seconds=request_seconds,
    )
    record = report.measure(settings, measured_on.prompts)
    record["conditions"]["workload"] = measured_on.source
    report.show(record, report_console())
    write_json(json_path, record)
    raise typer.Exit(0 if set(record["all"]["outcomes"]) == {bench.OK} else 1)


@app.command()
@errors_in_words()
def sweep(
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the record, and for generation defaults by task.",
            file_okay=False,
            callback=writable_folder,
        ),
    ] = Path("sweep"),
    target: TargetOption = None,
    drafter: DrafterOption = None,
    tiny: TinyOption = False,
    block_size: Annotated[str, typer.Option(help="Comma-separated.")] = "2,4,8",
    verification: Annotated[str, typer.Option(help="Comma-separated, for temperatures above 0.")] = "token,block",
    temperature: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    output_tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "64",
    concurrency: Annotated[str, typer.Option(help="Prompts decoded together; comma-separated.")] = "1",
    task: TaskOption = None,
    prompts: PromptFilesOption = None,
    jsonl: JsonLinesOption = None,
    dataset: DatasetOption = None,
    human_eval: HumanEvalOption = 0,
    per_task: PerTaskOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns over all prompts.")] = 1,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="For the chat template.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Find the fastest block size and verification rule for each task and condition, and write them as defaults."""
    from hf_dflow.bench import sweep as bench
    from hf_dflow.bench.runners import load_pair
    from hf_dflow.bench.tiny import given_or_tiny
    from hf_dflow.bench.workloads import workload
    from hf_dflow.console import use_threads

    sizes, lengths, together = (_numbers(given, int) for given in (block_size, output_tokens, concurrency))
    temperatures = _numbers(temperature, float)
    kind = _dtype(dtype)
    target, drafter, own_prompts = given_or_tiny(tiny, target, drafter)
    measured_on = workload(
        files=prompts or [], jsonl=jsonl or [], dataset=dataset, human_eval=human_eval, otherwise=own_prompts,
        tasks=task or [], per_task=per_task,
    )  # fmt: skip
    use_threads(threads)
    console = report_console()
    record = bench.sweep(
        load_pair(target, drafter, kind, device, thinking),
        measured_on.prompts,
        workload=measured_on.source,
        block_sizes=sizes,
        verifications=[rule.strip() for rule in verification.split(",")],
        temperatures=temperatures,
        output_tokens=lengths,
        concurrencies=together,
        repeats=repeats,
        console=console,
    )
    bench.show(record, console)
    written = bench.write(record, output)
    typer.echo(f"{output / bench.RECORD}: all of it; generation defaults for DFlowGenerationConfig.from_pretrained:")
    for path in written:
        typer.echo(f"  {path}")
    if not written:
        typer.echo("  none: plain decoding is faster everywhere")


app.command()(errors_in_words()(report_commands.report))


def _dtype(name: str) -> Any:
    from hf_dflow.bench.memory import DTYPES

    if name not in DTYPES:
        raise DFlowError(f"--dtype {name} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _numbers(given: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError as error:
        raise DFlowError(f"{given}: give numbers with commas between them") from error
