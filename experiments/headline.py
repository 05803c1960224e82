"""The lab's headline with its real uncertainty: several targets, several drafters of each kind for every target.

`run` takes about ten hours of one core and may be killed at any time: finished runs are skipped, the unfinished one
resumes from its checkpoint, and a target whose folder is gone is trained again from its seed. `report` reads the
record.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from experiments.common import RESULTS, append_line, markdown_table, with_interval
from experiments.lab import corpora
from experiments.lab.experiment import (
    DrafterRecipe,
    Lab,
    has_relay,
    measure,
    pooled_tokens_per_step,
    prepare_lab,
    train,
)
from experiments.lab.target import TargetRecipe
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.generation.statistics import tokens_per_step

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
RECORD = RESULTS / "headline.jsonl"
KINDS = ("dflash", "multi_round", "dflow")
RELAY_OFF = "dflow, relay off"
COMPARISONS = (("dflow", "dflash"), ("dflow", "multi_round"), (RELAY_OFF, "multi_round"))
TARGET_UPDATES, DRAFTER_UPDATES = 900, 1200  # as in docs/experiment.md
NUM_PROMPTS, NUM_HELD_OUT, MAX_NEW_TOKENS, TEMPERATURE = 2400, 80, 96, 0.5
SAVE_EVERY = 100  # updates of a drafter that a kill loses at most
RESAMPLES, BOOTSTRAP_SEED = 10_000, 0
RecordOption = Annotated[Path, typer.Option(help="JSON lines, one for each target, drafter seed and kind.")]


@dataclass(frozen=True, order=True)
class RunKey:
    """One training run of the design; runs sort in the order in which they are made."""

    drafter_seed: int
    target_seed: int
    kind: str


def design(num_targets: int, num_seeds: int) -> Iterator[RunKey]:
    """All runs, so that every prefix holds a design that is complete but for its last drafter seed."""
    for drafter_seed in range(num_seeds):
        for target_seed in range(num_targets):
            for kind in KINDS:
                yield RunKey(drafter_seed, target_seed, kind)


def read_record(path: Path) -> dict[RunKey, dict[str, Any]]:
    """The finished runs; a line that a kill cut short is left out."""
    runs = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        runs[RunKey(entry["drafter_seed"], entry["target_seed"], entry["kind"])] = entry
    return runs


def prepared_lab(folder: Path, target_seed: int) -> Lab:
    """The target of a seed with its rows and held-out prompts, made where `folder` lacks them."""
    if not (folder / "held_out.json").exists():
        prepare_lab(
            folder,
            corpora.airports(),
            TargetRecipe(updates=TARGET_UPDATES, seed=target_seed),
            num_prompts=NUM_PROMPTS,
            num_held_out=NUM_HELD_OUT,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
        )
    return Lab.load(folder)


def weights_digest(model: torch.nn.Module) -> str:
    """Tells whether two runs had the same target to the bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def train_and_decode(lab: Lab, key: RunKey) -> dict[str, Any]:
    """Train the drafter of one run and decode the held-out prompts; the line that goes into the record."""
    recipe = DrafterRecipe(updates=DRAFTER_UPDATES, seed=key.drafter_seed)
    drafter, training = train(lab, key.kind, recipe, save_every=SAVE_EVERY)
    counts = {key.kind: measure(lab, drafter, lab.held_out)}
    if has_relay(key.kind):
        counts[RELAY_OFF] = measure(lab, drafter, lab.held_out, use_relay=False)
    prompts = [row.token_ids[: row.prompt_length] for row in lab.held_out]
    return {
        **vars(key),
        "counts": counts,
        "prompts": [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8] for ids in prompts],
        "target": {**json.loads((lab.folder / "target.json").read_text()), "weights": weights_digest(lab.target)},
        "training_rows": len(lab.rows),
        "recipe": vars(recipe),
        "last_losses": training["last_losses"],
        "conditions": run_conditions(airportsdata=version("airportsdata")),
    }


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="For targets, features and checkpoints; can be deleted when done.")],
    record: RecordOption = RECORD,
    targets: Annotated[int, typer.Option(min=1, help="Target seeds.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Drafter seeds for each target.")] = 5,
) -> None:
    """Make the runs that the record lacks, and append each to it when it is done."""
    torch.set_num_threads(1)
    for key in design(targets, seeds):
        if key in read_record(record):
            continue
        lab = prepared_lab(folder / f"target-{key.target_seed}", key.target_seed)
        entry = train_and_decode(lab, key)
        append_line(record, entry)
        counts = entry["counts"][key.kind]
        typer.echo(f"{key}: {pooled_tokens_per_step(counts):.3f} tokens per step")


def counts_array(runs: dict[RunKey, dict[str, Any]]) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """`{(target seed, drafter seed): {kind: [2, prompts] tokens and steps}}` of the prompts that all runs answered."""
    common = set.intersection(*(set(entry["prompts"]) for entry in runs.values())) if runs else set()
    cells: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for key, entry in runs.items():
        place = {prompt: index for index, prompt in enumerate(entry["prompts"]) if prompt in common}
        chosen = [place[prompt] for prompt in sorted(common)]
        for kind, counts in entry["counts"].items():
            pair = np.array([counts["tokens"], counts["steps"]], dtype=float)[:, chosen]
            cells.setdefault((key.target_seed, key.drafter_seed), {})[kind] = pair
    return cells


def hierarchical_bootstrap(
    counts: dict[int, list[np.ndarray]], *, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> dict[str, Any]:
    """How much longer the steps of one kind are than another's, with a 95% interval.

    Every resample draws targets, then drafter seeds of each drawn target, then prompts. All runs answer the same
    prompts, so that one draw of prompts counts for all of them: their difficulty does not average out over runs.

    Args:
        counts (`dict[int, list[np.ndarray]]`): For each target, for each drafter seed: tokens and steps of one kind,
            then of the other, `[4, prompts]`.
    """
    generator = np.random.default_rng(seed)
    targets = [np.stack(by_seed) for by_seed in counts.values()]  # each [seeds, 4, prompts]
    num_prompts = targets[0].shape[-1]

    def gain(sums: np.ndarray) -> float:
        tokens, steps, base_tokens, base_steps = sums
        return float((tokens / steps) / (base_tokens / base_steps) - 1)

    gains = np.empty(resamples)
    for i in range(resamples):
        weights = np.bincount(generator.integers(0, num_prompts, num_prompts), minlength=num_prompts)
        sums = np.zeros(4)
        for target in generator.integers(0, len(targets), len(targets)):
            by_seed = targets[target]
            drawn = generator.integers(0, len(by_seed), len(by_seed))
            # A mean, so that a target with more finished seeds does not weigh more.
            sums += (by_seed[drawn] @ weights).mean(axis=0)
        gains[i] = gain(sums)
    value = gain(np.sum([by_seed.sum(axis=2).mean(axis=0) for by_seed in targets], axis=0))
    return {"value": value, "interval_95": np.percentile(gains, [2.5, 97.5]).tolist()}


def summarise(runs: dict[RunKey, dict[str, Any]]) -> dict[str, Any]:
    """The three comparisons, each over the targets and seeds in which both kinds are finished."""
    cells = counts_array(runs)
    comparisons = {}
    for kind, base in COMPARISONS:
        by_target: dict[int, list[np.ndarray]] = {}
        by_cell = {}
        for (target, seed), by_kind in sorted(cells.items()):
            if kind in by_kind and base in by_kind:
                both = np.concatenate([by_kind[kind], by_kind[base]])
                tokens, steps, base_tokens, base_steps = both.sum(axis=1)
                by_target.setdefault(target, []).append(both)
                by_cell[f"target {target}, seed {seed}"] = (tokens / steps) / (base_tokens / base_steps) - 1
        if by_target:
            comparisons[f"{kind} over {base}"] = {
                "targets": len(by_target),
                "seeds_by_target": [len(by_seed) for by_seed in by_target.values()],
                "prompts": both.shape[1],
                "gain": hierarchical_bootstrap(by_target),
                "gain_by_run": by_cell,
            }
    kinds: dict[str, list[float]] = {}
    for _, by_kind in sorted(cells.items()):
        for kind, pair in by_kind.items():
            kinds.setdefault(kind, []).append(tokens_per_step(*pair.sum(axis=1)))
    identical = [same for entry in runs.values() for counts in entry["counts"].values() for same in counts["identical"]]
    return {
        "comparisons": comparisons,
        "tokens_per_step_by_run": kinds,
        "texts_identical": f"{sum(identical)} of {len(identical)}",
        "resamples": RESAMPLES,
        "bootstrap_seed": BOOTSTRAP_SEED,
    }


def as_markdown(summary: dict[str, Any]) -> str:
    """The comparisons as a table."""
    rows = []
    for name, entry in summary["comparisons"].items():
        seeds, gains = entry["seeds_by_target"], entry["gain_by_run"].values()
        is_complete = len(set(seeds)) == 1
        design_text = f"{entry['targets']} × {seeds[0]}" if is_complete else " + ".join(map(str, seeds))
        rows.append([name, design_text, with_interval(entry["gain"], "+.1%"), f"{min(gains):+.1%} … {max(gains):+.1%}"])
    return markdown_table(("comparison", "targets × seeds", "tokens per step longer by", "of single runs"), rows)


@app.command()
def report(record: RecordOption = RECORD) -> None:
    """Print the comparisons with intervals over targets, drafter seeds and prompts."""
    runs = read_record(record)
    if not runs:
        raise typer.BadParameter(f"{record} holds no finished run; make some with `run`")
    summary = summarise(runs)
    typer.echo(as_markdown(summary))
    typer.echo(
        f"\n{len(runs)} runs; 95% intervals of a hierarchical bootstrap over targets, drafter seeds and prompts "
        f"({RESAMPLES:,} resamples, seed {BOOTSTRAP_SEED}); texts identical to the target's: "
        f"{summary['texts_identical']}"
    )


if __name__ == "__main__":
    app()
