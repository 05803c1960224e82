"""`python -m experiments.eval_drafter`: tokens per step of drafters on held-out prompts, with intervals."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from experiments.common import BundledOption, RulesOption, with_interval
from hf_dflow import DFlowDrafter
from hf_dflow.bench.answers import Plan, answer_all
from hf_dflow.bench.assistant import load_draft_model
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.figures import as_record, is_identical
from hf_dflow.bench.options import (
    DrafterOption,
    HumanEvalOption,
    PromptFilesOption,
    ShareGptOption,
    TargetOption,
    TemperaturesOption,
)
from hf_dflow.bench.pairs import Pair, load_pair
from hf_dflow.bench.strategies import PLAIN, Contestant, classic_contestant, modes_of
from hf_dflow.bench.workloads import chosen_prompts, tasks_in_turn
from hf_dflow.checkpoints.names import check_name
from hf_dflow.console import (
    JsonOption,
    ResultTable,
    ThreadsOption,
    errors_in_words,
    print_table,
    report_console,
    use_threads,
    write_json,
)
from hf_dflow.errors import DFlowError, PairMismatchError
from hf_dflow.generation.configuration import SAMPLING_RULES
from hf_dflow.generation.pair import check_pair

DTYPES = ("float32", "bfloat16", "float16", "float64")
EXACT_DTYPES = ("float32", "float64")  # in others a near tie may flip between forwards of different shapes
CLASSIC = "autoregressive"


def contestants_of(
    pair: Pair, classic: Path | None, num_draft_tokens: int, others: Sequence[str] = ()
) -> list[Contestant]:
    """The pair with its relay off ("dflash") and on ("dflow"), other drafters, and a classic draft model.

    Args:
        others (`list[str]`, *optional*): `NAME=FOLDER` of each; one with a relay also runs with it switched off.

    Raises:
        DFlowError: One of `others` has another form, a name that is taken, or a drafter for another target.
    """
    check_pair(pair.target, pair.drafter, pair.tokenizer, pair.chat_mode)
    contestants = [Contestant("dflash", pair.drafter, use_relay=False)]
    if pair.drafter.relay is not None:
        contestants.append(Contestant("dflow", pair.drafter, use_relay=True))
    taken = {contestant.name for contestant in contestants} | {PLAIN, CLASSIC}
    for option in others:
        name, _, folder = option.partition("=")
        own = {name, f"{name}, relay off"}
        if not name or not folder or own & taken:
            names = ", ".join(sorted(taken))
            raise DFlowError(f"--other {option}: give NAME=FOLDER with a name that is not one of {names}")
        taken |= own
        drafter = DFlowDrafter.from_pretrained(folder, dtype=pair.target.dtype).to(pair.target.device).eval()
        try:
            check_pair(pair.target, drafter, pair.tokenizer, pair.chat_mode)
        except PairMismatchError as error:
            raise PairMismatchError(f"--other {option}: {error}") from error
        contestants.append(Contestant(name, drafter, use_relay=drafter.relay is not None))
        if drafter.relay is not None:
            contestants.append(Contestant(f"{name}, relay off", drafter, use_relay=False))
    if classic is not None:
        contestants.append(classic_contestant(CLASSIC, load_draft_model(classic, pair.target), num_draft_tokens))
    return contestants


def show(record: dict[str, Any], console: Console) -> None:
    """Print tokens per step of each mode and task, then acceptance by position, and times."""
    for mode, groups in record["modes"].items():
        names = list(groups["all"]["contestants"])
        pairs = list(groups["all"]["differences"])
        rows = []
        for task, group in [*groups["by_task"].items(), ("all", groups["all"])]:
            cells = [with_interval(group["contestants"][name]["tokens_per_step"], ".3f") for name in names]
            cells += [with_interval(group["differences"][pair]["difference"], "+.3f") for pair in pairs]
            rows.append([task, str(group["prompts"]), *cells])
        title = f"{mode}: tokens per step [95% interval over prompts]"
        print_table(console, ResultTable(title, ("task", "prompts"), [*names, *pairs], rows))
        for name, figures in groups["all"]["contestants"].items():
            console.print(f"{name}: {_in_words(figures)}", highlight=False, markup=False)
        for pair in pairs:
            gain = with_interval(groups["all"]["differences"][pair]["gain"], "+.1%")
            console.print(f"{pair}: {gain}", highlight=False, markup=False)
        if "plain_seconds_per_token" in groups["all"]:
            console.print(f"the target alone: {1e3 * groups['all']['plain_seconds_per_token']:.1f} ms per token")
    identity = record["identity"]
    if identity["compared_with_each_other"]:
        own = ", ".join(f"{name} {count}" for name, count in identity["identical_to_plain"].items())
        same, compared = identity["identical_to_each_other"], identity["compared_with_each_other"]
        console.print(
            f"Greedy texts: {same} of {compared} the same by all; of {identity['compared_with_plain']} compared with "
            f"the target's own, the same: {own}",
            highlight=False,
        )
    if not is_identical(record):
        console.print("[red]Some greedy texts are NOT identical.[/]")


def _in_words(figures: dict[str, Any]) -> str:
    positions = " ".join(f"{rate:.3f}" for rate in figures["acceptance_rate_per_position"])
    text = (
        f"{figures['target_forwards_per_token']:.3f} target forwards per token, "
        f"{figures['draft_acceptance_rate']:.1%} of drafts accepted, standard deviation of the accepted "
        f"length {figures['accepted_length_std']:.2f}, "
        f"{1e3 * figures['seconds_per_token']:.1f} ms per token; by position {positions}"
    )
    if "speed_up" in figures:
        text += f"; {with_interval(figures['speed_up'], '.2f')} times as fast as the target alone"
    return text


def main(
    drafter: DrafterOption = None,
    target: TargetOption = None,
    json_path: JsonOption = None,
    bundled: BundledOption = False,
    prompts: PromptFilesOption = None,
    human_eval: HumanEvalOption = 0,
    sharegpt: ShareGptOption = 0,
    temperature: TemperaturesOption = None,
    verification: RulesOption = None,
    seed: Annotated[list[int] | None, typer.Option(help="Of sampled answers; repeatable, 0 by default.")] = None,
    other: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of another drafter to compare side by side; repeatable.")
    ] = None,
    autoregressive: Annotated[
        Path | None, typer.Option(help="Folder of a classic draft model, run by transformers' assisted generation.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Its drafts in each step.")] = 7,
    plain: Annotated[bool, typer.Option("--plain", help="Also time the target alone, side by side.")] = False,
    check_identity: Annotated[
        int, typer.Option(min=0, help="Compare greedy texts with the target's own on so many prompts.")
    ] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu.")] = None,
    threads: ThreadsOption = None,
) -> None:
    """Decode held-out prompts with the relay off and on; exit code 1 if a greedy text in float32 or float64 differs."""
    if dtype not in DTYPES:
        raise DFlowError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    modes = modes_of(temperature or [0.0], verification or SAMPLING_RULES)
    workload = tasks_in_turn(
        chosen_prompts(is_bundled=bundled, files=prompts or [], human_eval=human_eval, sharegpt=sharegpt)
    )
    for name in (target, drafter, autoregressive, *(option.partition("=")[2] for option in other or [])):
        if name:
            check_name(name)
    use_threads(threads)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    pair = load_pair(target, drafter, getattr(torch, dtype), place)
    seeds = seed or [0]
    contestants = contestants_of(pair, autoregressive, draft_tokens, other or [])
    plan = Plan(contestants, modes, max_new_tokens, seeds, plain, check_identity)
    console = report_console()
    followed = track(list(enumerate(workload)), description="prompts", console=console)
    answers = answer_all(pair.target, pair.encode_batch, followed, plan)
    conditions = {
        **pair.describe(),
        "other_drafters": [Path(option.partition("=")[2]).name for option in other or []],
        "classic_draft_model": autoregressive and f"{autoregressive.name}, {draft_tokens} drafts a step",
        "max_new_tokens": max_new_tokens,
        "seeds": seeds,
        "decoding": ", ".join(mode.name for mode in modes),
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if place.startswith("cuda") else "cpu",
        "interval": "95% bootstrap over prompts",
    }
    # With other drafters, every two are compared, the later with the earlier; otherwise each with "dflash" alone.
    pairs = combinations([contestant.name for contestant in contestants[1:]], 2) if other else ()
    also = [(later, earlier) for earlier, later in pairs]
    record = {**as_record(answers, "dflash", also), "conditions": run_conditions(prompts=len(workload), **conditions)}
    show(record, console)
    write_json(json_path, record)
    raise typer.Exit(1 if dtype in EXACT_DTYPES and not is_identical(record) else 0)


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
