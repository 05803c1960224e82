"""`python -m experiments.lab`: the lab pair, from corpus to figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from experiments.common import append_line, write_record
from experiments.lab import corpora
from experiments.lab.experiment import (
    ALL_KINDS,
    KINDS,
    DrafterRecipe,
    Lab,
    has_relay,
    measure,
    pooled_tokens_per_step,
    prepare_lab,
    probe,
    train,
)
from experiments.lab.report import as_markdown, read_results, summarise, summarise_tasks
from experiments.lab.target import TargetRecipe, answer, prompts
from hf_dflow import DFlowDrafter
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.console import JsonOption
from hf_dflow.errors import DFlowError
from hf_dflow.generation.pair import record_target

app = typer.Typer(help="Train a small target and several kinds of drafters for it, and compare them.")
CORPORA: dict[str, Callable[[], corpora.Corpus]] = {
    "airports": corpora.airports,
    "characters": corpora.characters,
    "source-code": corpora.source_code,
    "documentation": corpora.documentation,
}
ANSWERS = "answers"
OTHER_KINDS = ", ".join(ALL_KINDS[len(KINDS) :])
CHAT_TEMPLATE = "{{ messages[-1]['content'] }}"  # the lab's prompts are plain text
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]


@app.command()
def prepare(
    corpus: Annotated[str, typer.Argument(help=f"{', '.join(CORPORA)}, or {ANSWERS} (with --answers).")],
    folder: Annotated[Path, typer.Argument(help="For target, rows and runs.")],
    answers: Annotated[Path | None, typer.Option(help="JSONL of `hf-dflow data`, for the answers corpus.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer of those answers.")] = None,
    updates: int = TargetRecipe.updates,
    num_prompts: int = 1600,
    num_held_out: int = 80,
    max_new_tokens: int = 96,
    temperature: float = 0.5,
    threads: Threads = 1,
) -> None:
    """Train the target on a corpus where FOLDER has none, and write its answers."""
    torch.set_num_threads(threads)
    text = _corpus(corpus, answers, tokenizer)
    rows = prepare_lab(
        folder,
        text,
        TargetRecipe(updates=updates),
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )
    loss = json.loads((folder / "target.json").read_text())["held_out_loss"]
    typer.echo(f"held-out loss {loss:.3f}")
    typer.echo(f"{len(rows)} training rows, {sum(row.answer_length for row in rows)} tokens")


def _corpus(name: str, answers: Path | None, tokenizer: str | None) -> corpora.Corpus:
    if name in CORPORA:
        return CORPORA[name]()
    if name != ANSWERS or answers is None or tokenizer is None:
        allowed = ", ".join(CORPORA)
        raise DFlowError(f"corpus {name!r}: use one of {allowed}, or {ANSWERS} with --answers FILE --tokenizer NAME")
    return corpora.answers(answers, AutoTokenizer.from_pretrained(tokenizer))


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="What `prepare` wrote.")],
    kinds: Annotated[str, typer.Option(help=f"Separated by commas; also {OTHER_KINDS}.")] = ",".join(KINDS),
    seeds: Annotated[str, typer.Option(help="One run of each kind with each seed; separated by commas.")] = "0",
    updates: int = DrafterRecipe.updates,
    num_layers: int = DrafterRecipe.num_layers,
    relay_rounds: int = DrafterRecipe.relay_rounds,
    distillation: float = DrafterRecipe.distillation,
    with_probe: bool = True,
    threads: Threads = 1,
) -> None:
    """Train a drafter of each kind and seed, decode the held-out prompts, and append to FOLDER/results.jsonl."""
    unknown = sorted(set(kinds.split(",")) - set(ALL_KINDS))
    if unknown:
        raise DFlowError(f"--kinds {','.join(unknown)}: use one or more of {', '.join(ALL_KINDS)}")
    torch.set_num_threads(threads)
    lab = Lab.load(folder)
    for seed in map(int, seeds.split(",")):
        for kind in kinds.split(","):
            recipe = DrafterRecipe(
                updates=updates,
                num_layers=num_layers,
                relay_rounds=relay_rounds,
                distillation=distillation,
                seed=seed,
            )
            drafter, record = train(lab, kind, recipe)
            result: dict[str, Any] = {"kind": kind, "recipe": vars(recipe), **record}
            result["counts"] = measure(lab, drafter, lab.held_out)
            if has_relay(kind):
                result["counts_relay_off"] = measure(lab, drafter, lab.held_out, use_relay=False)
            if kind == "dflash" and with_probe:
                result["probe"] = probe(lab, drafter, lab.held_out)
            if kind != "autoregressive":
                drafter.save_pretrained(folder / "drafters" / f"{kind}-{seed}")
            append_line(folder / "results.jsonl", {**result, "conditions": run_conditions()})
            counts = result["counts"]
            typer.echo(
                f"{kind}, seed {seed}: {pooled_tokens_per_step(counts):.3f} tokens per step, "
                f"{sum(counts['identical'])} of {len(counts['identical'])} texts identical, "
                f"{record['training_seconds']:.0f} s of training"
            )


@app.command()
def tasks(
    corpus: Annotated[str, typer.Argument(help="The corpus of FOLDER.")],
    folder: Annotated[Path, typer.Argument(help="Its drafters were trained by `run`.")],
    seeds: str = "0",
    kinds: str = "dflash,dflow",
    threads: Threads = 1,
) -> None:
    """Probe and measure trained drafters on each of the corpus's tasks; appends to FOLDER/tasks.jsonl."""
    torch.set_num_threads(threads)
    lab, text = Lab.load(folder), _corpus(corpus, None, None)
    for task, documents in text.tasks.items():
        rows = answer(lab.target, prompts(text, documents, lab.tokenizer, len(documents)), 96, 0.0)
        for seed in map(int, seeds.split(",")):
            for kind in kinds.split(","):
                drafter = DFlowDrafter.from_pretrained(folder / "drafters" / f"{kind}-{seed}").float().eval()
                result: dict[str, Any] = {"task": task, "kind": kind, "seed": seed}
                result["counts"] = measure(lab, drafter, rows)
                if has_relay(kind):
                    result["counts_relay_off"] = measure(lab, drafter, rows, use_relay=False)
                if kind == "dflash":
                    result["probe"] = probe(lab, drafter, rows)
                append_line(folder / "tasks.jsonl", result)
                typer.echo(
                    f"{task}, {kind}, seed {seed}: {pooled_tokens_per_step(result['counts']):.3f} tokens per step"
                )


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="Its drafters were trained by `run`.")],
    seeds: str = "0",
    kinds: str = "dflash,dflow",
    threads: Threads = 1,
) -> None:
    """Measure trained drafters at temperature 1, token and block verification; appends to FOLDER/sampled.jsonl."""
    torch.set_num_threads(threads)
    lab = Lab.load(folder)
    for seed in map(int, seeds.split(",")):
        for kind in kinds.split(","):
            drafter = DFlowDrafter.from_pretrained(folder / "drafters" / f"{kind}-{seed}").float().eval()
            for rule in ("token", "block"):
                counts = measure(lab, drafter, lab.held_out, verification=rule)
                result = {"task": f"T=1, {rule} verification", "kind": kind, "seed": seed, "counts": counts}
                append_line(folder / "sampled.jsonl", result)
                typer.echo(f"{rule}, {kind}, seed {seed}: {pooled_tokens_per_step(counts):.3f} tokens per step")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Its drafter was trained by `run`.")],
    output: Annotated[Path, typer.Argument(help="For the folders target/ and drafter/.")],
    kind: str = "dflow",
    seed: int = 0,
) -> None:
    """Write target and drafter in bfloat16, in the form of the bundled tiny pair."""
    lab = Lab.load(folder)
    lab.target.bfloat16().save_pretrained(output / "target")
    lab.tokenizer.chat_template = CHAT_TEMPLATE
    lab.tokenizer.save_pretrained(output / "target")
    drafter = DFlowDrafter.from_pretrained(folder / "drafters" / f"{kind}-{seed}")
    record_target(drafter, lab.target, lab.tokenizer)
    drafter.bfloat16().save_pretrained(output / "drafter")


@app.command()
def requests(
    folder: Annotated[Path, typer.Argument(help="What `prepare` wrote.")],
    fitting: Annotated[Path, typer.Argument(help="Gets every second held-out prompt, for `calibrate`.")],
    measuring: Annotated[Path, typer.Argument(help="Gets the others, to measure on.")],
) -> None:
    """Write the held-out prompts as text, in two halves, for commands that take `--prompts`."""
    lab = Lab.load(folder)
    texts = [lab.tokenizer.decode(row.token_ids[: row.prompt_length]) for row in lab.held_out]
    for path, half in ((fitting, texts[1::2]), (measuring, texts[::2])):
        path.write_text(json.dumps({"held out": half}, indent=0) + "\n", encoding="utf-8")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders with results.")],
    json_path: JsonOption = None,
) -> None:
    """Pool the seeds of each folder; print tokens per step and gains."""
    record = {
        folder.name: {
            **summarise(read_results(folder)),
            "tasks": summarise_tasks(folder / "tasks.jsonl"),
            "sampled": summarise_tasks(folder / "sampled.jsonl"),
        }
        for folder in folders
    }
    for name, corpus_record in record.items():
        typer.echo(f"{name}\n\n{as_markdown(corpus_record)}\n")
    if json_path is not None:
        write_record(json_path, {"corpora": record, "conditions": run_conditions()})


if __name__ == "__main__":
    app()
