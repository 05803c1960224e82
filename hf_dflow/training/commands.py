"""The commands `hf-dflow data` and `hf-dflow train`.

What needs torch is imported inside the commands: --help must not wait for it.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dflow.checkpoints.names import check_drafter_name, check_name
from hf_dflow.console import ThreadsOption, say, use_threads
from hf_dflow.errors import DFlowError

__all__ = ["data", "train"]


def data(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target.")],
    output: Annotated[Path, typer.Argument(help="JSONL file to write; resumed if it exists.")],
    prompts: Annotated[
        list[str] | None, typer.Option(help=".jsonl (prompt, or messages) or .txt file, own, or sharegpt; repeatable.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub name or folder, read with the datasets package.")] = None,
    split: Annotated[str, typer.Option(help="Split of --dataset.")] = "train",
    column: Annotated[str | None, typer.Option(help="Column of --dataset: texts or lists of messages.")] = None,
    use_answers: Annotated[
        bool, typer.Option("--use-answers", help="Take the answers that the chats hold; the target does not run.")
    ] = False,
    part: Annotated[str, typer.Option(help="train, held-out (6% of the prompts, by their hash) or all.")] = "all",
    limit: Annotated[int, typer.Option(min=0, help="Number of prompts to take; 0 for all.")] = 0,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0, the default, is greedy; several are taken in turn.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampled answers.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Answers are cut at this length.")] = 256,
    max_length: Annotated[int, typer.Option(min=1, help="Longest row in tokens, answer included.")] = 1024,
    batch: Annotated[int, typer.Option(help="Prompts answered together.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 on a GPU), float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the order and of sampled answers.")] = 0,
    revision: Annotated[str | None, typer.Option(help="Of the target on the Hub.")] = None,
    template_options: Annotated[
        str | None, typer.Option(help="Options of the chat template as JSON: '{\"enable_thinking\": false}'.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No chat template: continue the prompts' text.")] = False,
    threads: ThreadsOption = None,
) -> None:
    """Write training rows: the target's own answers to prompts, or chats that already hold answers."""
    # Refused before anything is loaded.
    if bool(prompts) == bool(dataset):
        raise DFlowError("give either --prompts or --dataset")
    if output.suffix != ".jsonl":
        raise DFlowError(f"{output}: the output must be a .jsonl file (compress it afterwards; .gz is read as well)")
    options = _template_options(template_options)
    check_name(target)

    from transformers import AutoTokenizer

    from hf_dflow.training import collect
    from hf_dflow.training.answers import Sampling
    from hf_dflow.training.frozen_target import describe_target, load_frozen_target, stop_ids
    from hf_dflow.training.prompts import read_dataset, read_prompts
    from hf_dflow.training.templates import ChatTemplate

    use_threads(threads)
    sampling = Sampling(tuple(temperature or [0.0]), top_p, max_new_tokens, batch, seed)
    if dataset:
        chats, source = read_dataset(dataset, split, column), f"{dataset}, split {split}, column {column or 'found'}"
    else:
        chats, source = [prompt for name in prompts or [] for prompt in read_prompts(name)], ", ".join(prompts or [])
    tokenizer = AutoTokenizer.from_pretrained(target, revision=revision)
    template = ChatTemplate(tokenizer, stop_ids(target, tokenizer, revision), options, is_plain=plain)
    model = None if use_answers else load_frozen_target(target, dtype, revision)
    if model is not None:
        max_length = min(max_length, getattr(model.config.get_text_config(), "max_position_embeddings", max_length))
    job = collect.Job(
        chats[: limit or None],
        template,
        target=describe_target(target, revision, model),
        source=source,
        part=part,
        max_length=max_length,
    )
    if model is None:
        report = collect.collect_chats(job, output)
    else:
        report = collect.collect_answers(job, model, output, sampling, lambda line: say(line, err=True))
    say(report)


def train(
    target: Annotated[str, typer.Argument(help="Folder or Hub name of the target, or of a PEFT adapter for one.")],
    data: Annotated[list[Path], typer.Argument(help="Rows to train on: JSONL files from hf-dflow data.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints, log and drafter; resumed if it has any.")],
    config: Annotated[Path | None, typer.Option(help="JSON file that describes the run; --preset otherwise.")] = None,
    preset: Annotated[str, typer.Option(help="cpu (minutes for a small model) or gpu (the papers' sizes).")] = "cpu",
    updates: Annotated[int | None, typer.Option(min=1, help="In all; each stage in proportion.")] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Train the finished run in OUTPUT further, up to more --updates.")
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest; those of other stages in proportion.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows in an update of each process; narrower stages in proportion.")
    ] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", help="Continue from this drafter (DFlash or DFlow; folder or Hub name).")
    ] = None,
    train_only: Annotated[str | None, typer.Option(help="relay or correction: all other weights stay.")] = None,
    correction: Annotated[
        int | None, typer.Option(min=1, help="Width of a causal correction to train along, e.g. 256; none by default.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Folder for the target's states, or none; OUTPUT/features by default.")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the prompts never trained on.")] = 0.06,
    max_length: Annotated[int, typer.Option(min=2, help="Longer rows are left out, in tokens.")] = 1024,
    seed: Annotated[int | None, typer.Option(min=0, help="Of initialisation, data order and anchors.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of the target on the Hub.")] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="tensorboard (the default, if installed), wandb, trackio, mlflow … or none; repeatable."),
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Train a drafter for TARGET on its own answers, evaluate it by decoding, and save it to OUTPUT/drafter."""
    # Refused before anything is loaded.
    for path in (*data, *([config] if config else [])):
        if not path.is_file():
            raise DFlowError(f"{path}: no such file")
    check_name(target)
    if start_from:
        check_drafter_name(start_from)

    from hf_dflow.training.config import PRESETS, TrainingConfig

    if preset not in PRESETS:
        raise DFlowError(f"--preset {preset} is unknown; use one of {', '.join(PRESETS)}")
    fields = (TrainingConfig.from_json(config) if config else PRESETS[preset]).to_dict()
    if start_from and not config:
        fields["num_hidden_layers"] = fields["block_size"] = None  # the drafter's own
    options = {"train_only": train_only, "seed": seed, "correction_intermediate_size": correction}
    fields |= {key: value for key, value in options.items() if value is not None}
    if train_only == "relay" and not config:
        fields["stages"] = [stage for stage in fields["stages"] if stage["relay_rounds"]]
    training = TrainingConfig.from_dict(fields, str(config or f"preset {preset}"))
    if updates is not None:
        training = training.with_updates(updates)
    if learning_rate is not None:
        training = training.with_learning_rate(learning_rate)
    if batch is not None:
        training = training.with_rows(batch)
    training.check("--learning-rate" if learning_rate is not None else str(config or f"preset {preset}"))

    from hf_dflow.training import log, run

    trackers = None if report_to is None else [name for name in report_to if name != "none"]
    log.check_trackers(trackers or [])

    use_threads(threads)
    report = run.train(
        target,
        data,
        output,
        training,
        start_from=start_from,
        features=None if features in (None, "none") else Path(features or ""),
        compute_live=features == "none",
        revision=revision,
        max_length=max_length,
        held_out_share=held_out,
        extend=extend,
        report_to=trackers,
    )
    if report.is_main_process:
        say(report)


def _template_options(text: str | None) -> dict:
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DFlowError(f"--template-options {text}: not valid JSON ({error})") from error
    if not isinstance(options, dict):
        raise DFlowError(f"--template-options {text}: give a JSON object")
    return options
