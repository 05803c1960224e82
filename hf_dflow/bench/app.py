"""`hf-dflow bench run`, `endpoint`, `sweep` and `report`: their options, and what is done with them."""

from pathlib import Path
from typing import Annotated, Any

import typer

# What needs torch is imported inside the commands: --help must not wait for it.
from hf_dflow.bench.endpoint import OK, EndpointSettings
from hf_dflow.bench.options import PairOptions, PromptOptions, TemperaturesOption
from hf_dflow.console import (
    INTERRUPTED,
    JsonOption,
    drawable,
    errors_in_words,
    report_console,
    say,
    show,
    takes_option_groups,
    writable,
    writable_folder,
    write_and_show,
    write_json,
    written,
)
from hf_dflow.errors import DFlowError
from hf_dflow.text import read_text

app = typer.Typer(help="Measure before you switch it on.", no_args_is_help=True)


@app.command()
@errors_in_words()
@takes_option_groups
def run(
    pair_options: PairOptions,
    prompt_options: PromptOptions,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="assisted, prompt_lookup, transformers_dflash, dflash, dflow; repeatable; plain always."),
    ] = None,
    assistant: Annotated[Path | None, typer.Option(help="Folder of the classic draft model of 'assisted'.")] = None,
    temperature: TemperaturesOption = None,
    verification: Annotated[list[str] | None, typer.Option(help="token (default) or block; repeatable.")] = None,
    output_tokens: Annotated[int, typer.Option(min=2)] = 48,
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts decoded together, as one batch.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Turns over all prompts, for times.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Begin no prompt after so long.")] = None,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(callback=drawable, help="PNG of tokens per step by task.")] = None,
) -> None:
    """Measure every strategy on the same prompts, by turns; exit code 1 if a greedy float32 text differs."""
    from hf_dflow.bench import comparison
    from hf_dflow.bench.assistant import load_draft_model
    from hf_dflow.bench.figures import is_identical
    from hf_dflow.bench.strategies import modes_of

    workload = prompt_options.workload(pair_options.own_prompts)
    pair = pair_options.load()
    draft_model = load_draft_model(assistant, pair.target) if assistant else None
    unavailable = {"assisted": draft_model is None, "dflow": pair.drafter.relay is None}
    strategies = strategy or [name for name in comparison.STRATEGIES if not unavailable.get(name)]
    console = report_console(json_path)
    if warning := comparison.mode_warning(pair):
        console.print(f"[yellow]{warning}[/]")
    record = comparison.run(
        pair,
        comparison.contestants_of(pair, strategies, draft_model),
        modes_of(temperature or [0.0], verification or ["token"]),
        workload.prompts,
        workload=workload.source,
        output_tokens=output_tokens,
        concurrency=concurrency,
        repeats=repeats,
        minutes=minutes,
        console=console,
        keep=lambda record: write_json(json_path, record, is_final=False),
    )
    write_and_show(json_path, record, comparison.present(record))
    if plot is not None:
        comparison.plot(record, plot)
        written(plot)
    if record["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    is_exact = pair_options.dtype in ("float32", "float64")  # in others a near tie may flip
    raise typer.Exit(1 if is_exact and not is_identical(record) else 0)


@app.command()
@errors_in_words()
@takes_option_groups
def endpoint(settings: EndpointSettings, prompt_options: PromptOptions, json_path: JsonOption = None) -> None:
    """Put a load on an endpoint, key from OPENAI_API_KEY; exit code 1 if a request got no whole answer."""
    from hf_dflow.bench import endpoint_record

    workload = prompt_options.workload()
    record = endpoint_record.measure(settings, workload.prompts)
    record["conditions"]["workload"] = workload.source
    write_and_show(json_path, record, endpoint_record.present(record))
    if record["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if set(record["all"]["outcomes"]) == {OK} else 1)


@app.command()
@errors_in_words()
@takes_option_groups
def sweep(
    pair_options: PairOptions,
    prompt_options: PromptOptions,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the record, and for generation defaults by task.",
            file_okay=False,
            callback=writable_folder,
        ),
    ] = Path("sweep"),
    block_size: Annotated[str, typer.Option(help="Comma-separated.")] = "2,4,8",
    verification: Annotated[str, typer.Option(help="Comma-separated, for temperatures above 0.")] = "token,block",
    temperature: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
    output_tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "64",
    concurrency: Annotated[str, typer.Option(help="Prompts decoded together; comma-separated.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Turns over all prompts.")] = 1,
    json_path: JsonOption = None,
) -> None:
    """Find the fastest block size and verification rule for each task and condition, and write them as defaults."""
    from hf_dflow.bench import sweep as bench

    axes: dict[str, list[Any]] = {
        "block_sizes": _numbers(block_size, int),
        "verifications": [rule.strip() for rule in verification.split(",")],
        "temperatures": _numbers(temperature, float),
        "output_tokens": _numbers(output_tokens, int),
        "concurrencies": _numbers(concurrency, int),
    }
    workload = prompt_options.workload(pair_options.own_prompts)
    console, pair = report_console(json_path), pair_options.load()

    def keep(record: dict[str, Any]) -> None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / bench.RECORD, record, is_final=False)

    record = bench.sweep(
        pair, workload.prompts, **axes, workload=workload.source, repeats=repeats, console=console, keep=keep
    )
    files = bench.write(record, output)
    write_and_show(json_path, record, bench.present(record))
    for path in files:
        written(path)
    advice = "DFlowGenerationConfig.from_pretrained reads them" if files else "the drafter is shown to pay nowhere"
    console.print(f"{len(files)} files of generation defaults: {advice}.")
    if record["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise DFlowError(f"{text}: give numbers with commas between them") from error


@app.command()
@errors_in_words()
def report(
    records: Annotated[list[Path], typer.Argument(help="JSON of bench run, endpoint and sweep, plan, cost and probe.")],
    html: Annotated[Path | None, typer.Option(callback=writable, help="Write all of it as one HTML file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=drawable, help="PNG of runs and endpoints side by side.")
    ] = None,
    monitor: Annotated[Path | None, typer.Option(help="Prometheus text of an AcceptanceMonitor that served.")] = None,
    target_licence: Annotated[str | None, typer.Option(help="E.g. apache-2.0.")] = None,
    drafter_licence: Annotated[str | None, typer.Option(help="E.g. apache-2.0.")] = None,
    canary: Annotated[str | None, typer.Option(help="What the canary period and its bill showed.")] = None,
    except_for: Annotated[list[str] | None, typer.Option(help="A condition that runs may differ in.")] = None,
    allow_open: Annotated[bool, typer.Option("--allow-open", help="Exit with 0 though items are open.")] = False,
) -> None:
    """Put records side by side, of this process and of endpoints alike, and end with the rollout checklist.

    Records of different conditions are refused. Exit code 1 while items of the checklist are open.
    """
    from hf_dflow.bench import side_by_side
    from hf_dflow.bench.checklist import checklist
    from hf_dflow.bench.conditions import refuse_other_loads
    from hf_dflow.bench.report import read_evidence, render

    evidence = read_evidence(
        records,
        monitor=read_text(monitor) if monitor else None,
        target_licence=target_licence,
        drafter_licence=drafter_licence,
        canary=canary,
    )
    loads, names = list(evidence.loads.values()), list(evidence.loads)
    refuse_other_loads(loads, names, except_for=except_for or [])
    text = render(evidence, with_plots=html is not None)  # also finds records that are incomplete
    if html is not None:
        html.write_text(text, encoding="utf-8")
        written(html)
    if plot is not None:
        if not loads:
            raise DFlowError("--plot draws runs and endpoints; give the record of one")
        side_by_side.plot(loads, names, plot)
        written(plot)
    if loads:
        show(side_by_side.present(loads, names), report_console())
    items = checklist(evidence)
    for item in items:
        say(f"[{'x' if item.is_done else ' '}] {item.text}: {item.evidence}")
    raise typer.Exit(0 if allow_open or all(item.is_done for item in items) else 1)
