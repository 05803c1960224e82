"""`python -m experiments.recount`: tokens per step of records that were made before a cut step counted what it emitted.

Until then a step counted as its accepted drafts and a bonus, also where the end of the text cut the bonus off. The rows
of these records hold tokens, target forwards and steps of each answer, which give what steps emitted exactly: each
forward that is no step, the prefill's and those without drafts, emits one token. A record is changed only if its rows
give every figure that it holds under the old definition. Nothing is measured anew; what rows do not hold (the share of
drafts accepted, and acceptance by position) stays as it was counted, with the drafts behind the end of a text.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import pstdev
from typing import Annotated, Any

import numpy as np
import typer

from experiments.common import RESULTS, markdown_table, read_json, write_record
from hf_dflow.bench.endpoint_record import with_tokens_per_step
from hf_dflow.bench.figures import difference
from hf_dflow.bench.intervals import figure, resampled_sums
from hf_dflow.bench.strategies import PLAIN
from hf_dflow.console import errors_in_words
from hf_dflow.errors import DFlowError
from hf_dflow.generation.statistics import tokens_per_step

ENDPOINTS, BATCH = "endpoints", "bench-batch"
BEFORE = "tokens_per_step_before"  # of all tasks, by mode and contestant, as the record had it until it was recounted
Rates = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # of accepted, emitted, steps


def emitted_by_steps(run: dict[str, Any]) -> int:
    """What the steps of one answer emitted, from its row in a record.

    Raises:
        DFlowError: No run can have these counts: the end of an answer cuts at most one token off one step.
    """
    emitted = run.get("emitted", run["new_tokens"] - (run["target_forwards"] - run["steps"]))
    if run["accepted"] + run["steps"] - emitted not in (0, 1):
        raise DFlowError(f"a row with {run} cannot be recounted; measure anew")
    return emitted


def _old(accepted: np.ndarray, _: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return 1.0 + accepted / np.maximum(steps, 1)


def _new(_: np.ndarray, emitted: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return tokens_per_step(emitted, steps)


def group_figures(rows: list[dict[str, Any]], group: dict[str, Any], rates_of: Rates) -> dict[str, Any]:
    """Tokens per step of the contestants of `group`, and the differences it holds, from the rows of its answers."""
    names = list(group["contestants"])
    columns: dict[tuple[str, str], int] = {}
    for row in rows:
        columns.setdefault((row["task"], row["prompt_sha256"]), len(columns))
    counts = np.zeros((3, len(names), len(columns)))
    for row in rows:
        for place, name in enumerate(names):
            run = row["runs"][name]
            column = columns[row["task"], row["prompt_sha256"]]
            counts[:, place, column] += (run["accepted"], emitted_by_steps(run), run["steps"])
    sums = resampled_sums(counts.reshape(-1, len(columns))).reshape(3, len(names), -1)
    rates = dict(zip(names, rates_of(*sums), strict=True))
    pairs = {pair: pair.split(" - ") for pair in group["differences"]}
    return {
        "contestants": {name: figure(rate) for name, rate in rates.items()},
        "differences": {pair: difference(rates[name], rates[base]) for pair, (name, base) in pairs.items()},
    }


def _groups(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every group of figures in a record, with the rows it is made from."""
    for mode, measured in record["modes"].items():
        rows = [row for row in record["rows"] if row["mode"] == mode]
        yield measured["all"], rows
        for task, group in measured["by_task"].items():
            yield group, [row for row in rows if row["task"] == task]


def _is_close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_is_close(ours[key], theirs[key]) for key in ours)
    return bool(np.allclose(ours, theirs, rtol=1e-12, atol=1e-12))


def recount(record: dict[str, Any]) -> None:
    """Put the figures of a record right, in place.

    Raises:
        DFlowError: The rows do not give the figures that the record has.
    """
    before = {
        mode: {name: counts["tokens_per_step"]["value"] for name, counts in measured["all"]["contestants"].items()}
        for mode, measured in record["modes"].items()
    }
    for group, rows in _groups(record):
        held = {name: counts["tokens_per_step"] for name, counts in group["contestants"].items()}
        expected = group_figures(rows, group, _old)
        if not _is_close(expected, {"contestants": held, "differences": group["differences"]}):
            raise DFlowError("the rows do not give the record's own figures, so it cannot be recounted; measure anew")
        made = group_figures(rows, group, _new)
        group["differences"] = made["differences"]
        for name, counts in group["contestants"].items():
            counts["tokens_per_step"] = made["contestants"][name]
    for measured in record["modes"].values():
        for name in measured.get("tokens_per_step_std_over_tasks", ()):
            rates = [group["contestants"][name]["tokens_per_step"]["value"] for group in measured["by_task"].values()]
            measured["tokens_per_step_std_over_tasks"][name] = pstdev(rates)
    for row in record["rows"]:
        for name, run in row["runs"].items():
            if name != PLAIN:
                run["emitted"] = emitted_by_steps(run)
    record[BEFORE] = before


def is_old(record: Any) -> bool:
    """Whether `record` holds answers whose steps were not counted by what they emitted."""
    if not isinstance(record, dict) or "modes" not in record or "rows" not in record:
        return False
    return any("emitted" not in run for row in record["rows"] for name, run in row["runs"].items() if name != PLAIN)


def cut_answers(record: dict[str, Any], mode: str) -> tuple[int, int]:
    """How many answers of drafting contestants had a step cut by their end, and how many there are."""
    runs = [
        run
        for row in record["rows"]
        if row["mode"] == mode
        for name, run in row["runs"].items()
        if name in record["modes"][mode]["all"]["contestants"]
    ]
    return sum(run["accepted"] + run["steps"] - emitted_by_steps(run) for run in runs), len(runs)


def changes_table(folder: Path = RESULTS) -> str:
    """How tokens per step of the recounted records changed."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = read_json(path)
        for mode, before in found.get(BEFORE, {}).items() if "modes" in found else ():
            contestants = found["modes"][mode]["all"]["contestants"]
            rates = {name: (value, contestants[name]["tokens_per_step"]["value"]) for name, value in before.items()}
            name, (old, new) = max(rates.items(), key=lambda rate: rate[1][0] / rate[1][1])
            cut, answers = cut_answers(found, mode)
            change = [name, f"{old:.3f} → {new:.3f}", f"{new / old - 1:+.1%}"] if cut else ["–", "none", "–"]
            rows.append([path.stem, mode, f"{cut} of {answers}", *change])
    headings = ("record", "mode", "answers whose end cut a step", "largest change: of", "tokens per step", "by")
    return markdown_table(headings, rows)


def recount_endpoints(records: list[dict[str, Any]]) -> None:
    """The records of loads on servers: tokens per step from the tokens that were counted, vLLM's name for the rest."""
    for record in records:
        if record["acceptance"] is not None:
            accepted = record["acceptance"]["mean_accepted_length"]
            record["acceptance"] = with_tokens_per_step(
                {**record["acceptance"], "mean_acceptance_length": 1.0 + accepted}, record["all"]
            )


def recount_batch(record: dict[str, Any]) -> None:
    """The record of [`experiments.batch`], which holds totals only: the one number of steps that they allow.

    Raises:
        DFlowError: They allow none, or several.
    """
    answers, old = record["batch_size"], record["tokens_per_step"]
    after_prefill, found = record["target_forwards"]["alone"] - answers, []
    for undrafted in range(after_prefill):
        steps, emitted = after_prefill - undrafted, record["new_tokens"] - answers - undrafted
        accepted = (old - 1.0) * steps
        is_count = abs(accepted - round(accepted)) < 1e-6
        if is_count and 0 <= round(accepted) + steps - emitted <= answers:  # each answer's end cuts one token at most
            found.append((emitted, steps))
    if len(found) != 1:
        raise DFlowError(f"the totals allow {len(found)} numbers of steps, so they cannot be recounted; measure anew")
    record[BEFORE], record["tokens_per_step"] = old, tokens_per_step(*found[0])


def main(
    folder: Annotated[Path, typer.Option(help="With the records.")] = RESULTS,
) -> None:
    """Recount the records that need it, and say what changed."""
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if path.stem == ENDPOINTS:
            recount_endpoints(record)
            write_record(path, record)
        if path.stem == BATCH and BEFORE not in record and "steps" not in record:
            recount_batch(record)
            write_record(path, record)
            typer.echo(f"{path.stem}: {record[BEFORE]:.3f} → {record['tokens_per_step']:.3f}")
        if not is_old(record):
            continue
        try:
            recount(record)
        except DFlowError as error:
            raise DFlowError(f"{path}: {error}") from error
        write_record(path, record)
        for mode, before in record[BEFORE].items():
            contestants = record["modes"][mode]["all"]["contestants"]
            cut, answers = cut_answers(record, mode)
            changes = ", ".join(
                f"{name} {value:.3f} → {contestants[name]['tokens_per_step']['value']:.3f}"
                for name, value in before.items()
            )
            typer.echo(f"{path.stem}, {mode}: {cut} of {answers} answers cut a step; {changes}")


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
