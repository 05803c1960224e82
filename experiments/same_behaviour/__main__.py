"""`python -m experiments.same_behaviour --old FOLDER --new FOLDER`: do two commits decode alike?

Both checkouts make the same calls, each in a process of its own with one thread; texts, accepted lengths and every
field of the statistics must be identical. The old commit makes the tiny models that both decode with.

    git worktree add /tmp/old COMMIT
    python -m experiments.same_behaviour --old /tmp/old --new .
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
FEWEST_CALLS = 200
REFUSED = "refused"  # the group of calls that must fail; only the kind of their error is compared
SHOWN = 20  # differences

app = typer.Typer(add_completion=False)


@dataclass
class Group:
    """What the calls of one group showed."""

    calls: int = 0
    steps: int = 0
    long_blocks: int = 0  # steps with two or more accepted drafts
    partial_rejections: int = 0
    failed: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def is_vacuous(self) -> bool:
        """Whether its calls decoded with drafts that were never accepted, or never rejected within a block."""
        return self.steps > 0 and not (self.long_blocks and self.partial_rejections)

    @property
    def verdict(self) -> str:
        if self.differences:
            return f"{len(self.differences)} DIFFER"
        return "FAILED" if self.failed else "VACUOUS" if self.is_vacuous else "identical"


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, Group]:
    """Compare the records of two runs, by group."""
    groups: dict[str, Group] = {}
    by_key = {(call["group"], call["name"]): call["record"] for call in new}
    for call in old:
        group, record = groups.setdefault(call["group"], Group()), call["record"]
        group.calls += 1
        statistics = record.get("statistics") or {"per_step_accepted": [], "per_step_drafted": []}
        steps = list(zip(statistics["per_step_accepted"], statistics["per_step_drafted"], strict=True))
        group.steps += len(steps)
        group.long_blocks += sum(accepted >= 2 for accepted, _ in steps)
        group.partial_rejections += sum(0 < accepted < drafted for accepted, drafted in steps)
        if ("error" in record) is not (call["group"] == REFUSED):
            group.failed.append(f"{call['group']}, {call['name']}: {record.get('message', 'was not refused')}")
        other = by_key.pop((call["group"], call["name"]), None)
        if call["group"] == REFUSED:
            record, other = ({"error": (given or {}).get("error")} for given in (record, other))
        difference = next(differences(record, other), None)
        if difference is not None:
            group.differences.append(f"{call['group']}, {call['name']}{difference}")
    for group_name, name in by_key:
        groups.setdefault(group_name, Group()).differences.append(f"{group_name}, {name}: only the new commit has it")
    return groups


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Where two JSON values differ, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key, "absent"), new.get(key, "absent"), f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{place}[{i}]")
    elif old != new:
        yield f"{place}: {str(old)[:200]} -> {str(new)[:200]}"


def show(groups: dict[str, Group], console: Console) -> bool:
    """Print a row for each group; whether all is identical."""
    table = Table("calls", "number", "steps", "2+ accepted", "partly rejected", "verdict")
    for name, group in groups.items():
        counts = (group.calls, group.steps, group.long_blocks, group.partial_rejections)
        table.add_row(name, *map(str, counts), group.verdict)
    console.print(table)
    lines = [line for group in groups.values() for line in (*group.differences, *group.failed)]
    for line in lines[:SHOWN]:
        console.print(line, markup=False, highlight=False)
    total = sum(group.calls for group in groups.values())
    console.print(f"{total} calls; {sum(len(group.differences) for group in groups.values())} differ.")
    return all(group.verdict == "identical" for group in groups.values())


CHILD = "from experiments.same_behaviour.child import main; main(*sys.argv[1:])"


def start(checkout: Path, *arguments: str, code: str = CHILD, piped: bool = False) -> subprocess.Popen:
    """Run `code` with the `hf_dflow` of `checkout`, but with the `experiments` of this one.

    Args:
        arguments (`str`): Of the process, behind the checkout's path.
        piped (`bool`): Whether lines are exchanged over standard input and output.
    """
    prelude = (
        f"import sys; sys.path[:1] = [{str(ROOT)!r}]; import experiments.same_behaviour; "
        f"sys.path[:1] = [{str(checkout)!r}]; "
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    pipe = subprocess.PIPE if piped else None
    command = [sys.executable, "-c", prelude + code, str(checkout), *arguments]
    return subprocess.Popen(command, cwd=checkout, env=environment, text=True, stdin=pipe, stdout=pipe)


def wait(*processes: subprocess.Popen) -> None:
    for process in processes:
        if process.wait():
            raise typer.Exit(2)


@app.command()
def main(
    old: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout of the old commit.")],
    new: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout of the new commit.")],
    fast: Annotated[bool, typer.Option("--fast", help="Leave SmolLM2 out.")] = False,
    group: Annotated[list[str] | None, typer.Option(help="Only calls of this group; repeatable.")] = None,
    sabotage: Annotated[str | None, typer.Option(help="Control: spoil a length or a token of the new run.")] = None,
    models: Annotated[
        Path | None, typer.Option(help="Keep the tiny models here, and use those of an earlier run.")
    ] = None,
) -> None:
    """Exit code 1 at any difference, and where a group of calls shows too little."""
    old, new = old.resolve(), new.resolve()
    if sabotage not in (None, "length", "token"):
        raise typer.BadParameter("use length or token", param_hint="--sabotage")
    smollm2 = None
    if not fast:
        from hf_dflow.bench.smollm2 import smollm2_folder

        smollm2 = str(smollm2_folder())
    with tempfile.TemporaryDirectory() as scratch:
        folder = (models or Path(scratch) / "models").resolve()
        if not (folder / "prompts.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            wait(start(old, "build", str(folder)))
        outputs = [Path(scratch) / "old.jsonl", Path(scratch) / "new.jsonl"]
        options = {"smollm2": smollm2, "groups": group}
        wait(
            start(old, "run", str(folder), str(outputs[0]), json.dumps(options)),
            start(new, "run", str(folder), str(outputs[1]), json.dumps({**options, "sabotage": sabotage})),
        )
        records = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    groups = compare(*records)
    is_same = show(groups, Console(width=120))
    if not group and len(records[0]) < FEWEST_CALLS:
        raise typer.Exit(1)
    raise typer.Exit(0 if is_same else 1)


if __name__ == "__main__":
    app()
