"""Checkpoints: folders that `DFlowDrafter.from_pretrained` loads, with all that a run needs to resume beside it.

What only training reads lies in `training/` within the folder, as safetensors and JSON; loading a drafter never looks
there. A folder gets its name when it is complete, so a kill at any moment leaves the last complete one.
"""

import json
import os
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.text import give_usual_modes

PREFIX, PARTIAL = "checkpoint-", "checkpoint-partial"
STATE = Path("training") / "state.json"
OPTIMIZER = Path("training") / "optimizer.safetensors"
# What may differ between the configurations of two runs of one training.
NOT_SHAPE = (
    "transformers_version",
    "dtype",
    "_name_or_path",
    "architectures",
    "generation_defaults",
    "fitted_decisions",
)


@dataclass
class RunState:
    """What a run must have in common with its checkpoint, and its progress."""

    identity: dict[str, Any]  # name to JSON value; all of it must be the same to resume
    counters: dict[str, int]


def shape_of(drafter: DFlowDrafter) -> dict[str, Any]:
    """The part of a drafter's configuration that a resumed run must have in common."""
    return {key: value for key, value in drafter.config.to_dict().items() if key not in NOT_SHAPE}


def checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints in `output`, oldest first."""
    folders = [path for path in output.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(PREFIX)))


# -- writing


def begin(output: Path) -> Path:
    """An empty folder for the next checkpoint."""
    partial = output / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    (partial / STATE).parent.mkdir(parents=True)
    return partial


def write_process_state(partial: Path, process: int, generators: dict[str, torch.Tensor]) -> None:
    """Random states of one process; each process writes its own."""
    save_file(generators, _process_file(partial, process))
    give_usual_modes([_process_file(partial, process)])


def write_shared_state(partial: Path, drafter: DFlowDrafter, optimizer: torch.optim.Optimizer, state: RunState) -> None:
    """Drafter, optimiser and counters, which are the same in all processes.

    Raises:
        DFlowError: A weight is not finite; the last good checkpoint stays.
    """
    check_finite(drafter)
    _save_quietly(drafter, partial)
    tensors = {
        f"{name}/{key}": value.contiguous()
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(tensors, partial / OPTIMIZER)
    give_usual_modes([partial / OPTIMIZER])
    (partial / STATE).write_text(
        json.dumps({"identity": state.identity, "counters": state.counters}, indent=1), encoding="utf-8"
    )


def finish(partial: Path, update: int, keep: int) -> Path:
    """Give the checkpoint its name, then delete all but the newest `keep`."""
    for path in sorted(partial.rglob("*")):
        _flush(path)
    folder = partial.with_name(f"{PREFIX}{update}")
    _replace(partial, folder)
    for old in checkpoints(folder.parent)[:-keep]:
        old.rename(partial)  # a folder that is being deleted must not look complete
        shutil.rmtree(partial)
    return folder


def export(drafter: DFlowDrafter, folder: Path, dtype: torch.dtype, records: dict[str, Any]) -> None:
    """Save a finished drafter for serving, and each of `records` beside it as `NAME.json`.

    Args:
        dtype (`torch.dtype`): Of the file; the drafter itself keeps its own.
    """
    check_finite(drafter)
    partial = folder.with_name(f"{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    copied: Any = deepcopy(drafter)
    _save_quietly(copied.to(dtype), partial)
    for name, record in records.items():
        (partial / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _replace(partial, folder)


def check_finite(drafter: DFlowDrafter) -> None:
    """Raise [`DFlowError`] naming the first weight that is not finite."""
    for name, parameter in drafter.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise DFlowError(
                f"{name} is not finite, so nothing was saved; resume the last checkpoint with a lower learning rate"
            )


def _save_quietly(drafter: DFlowDrafter, folder: Path) -> None:
    """Without transformers' own bar for a single file, which would break the run's."""
    was_shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        drafter.save_pretrained(folder)
    finally:
        if was_shown:
            enable_progress_bar()


def _replace(partial: Path, folder: Path) -> None:
    """Rename; an existing folder of that name keeps another name until it is replaced."""
    replaced = folder.with_name(f"{folder.name}-replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """Onto the disk, or a loss of power after the rename could leave a named folder with empty files."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _process_file(folder: Path, process: int) -> Path:
    return folder / "training" / f"process-{process:05d}.safetensors"


# -- reading


def read_state(folder: Path, advice: str) -> RunState:
    """The state in `folder`.

    Raises:
        DFlowError: It is missing or damaged.
    """
    try:
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return RunState(record["identity"], record["counters"])
    except (OSError, ValueError, KeyError) as error:
        raise DFlowError(f"{folder} cannot be resumed: {STATE} is missing or damaged ({error}); {advice}") from error


def check_identity(folder: Path, state: RunState, identity: dict[str, Any], advice: str) -> None:
    """Raise [`DFlowError`] where the run of this identity is not that of the checkpoint, naming what differs."""
    identity = json.loads(json.dumps(identity))
    differences = [text for part in identity for text in _differences(part, state.identity.get(part), identity[part])]
    if differences:
        raise DFlowError(f"{folder} belongs to another run: {', '.join(differences)}; {advice}")


def _differences(name: str, was: Any, now: Any) -> list[str]:
    """Each differing value in words; a setting that an older version did not write counts as left open."""
    if isinstance(was, dict) and isinstance(now, dict):
        return [text for key in {**was, **now} for text in _differences(f"{name} '{key}'", was.get(key), now.get(key))]
    if was == now:
        return []
    are_objects = [isinstance(value, list) and all(isinstance(part, dict) for part in value) for value in (was, now)]
    if all(are_objects) and len(was) == len(now):
        parts = enumerate(zip(was, now, strict=True), 1)
        return [text for number, both in parts for text in _differences(f"{name} {number}", *both)]
    if all(are_objects):
        return [f"{name} had {len(was)} entries and has {len(now)}"]
    return [f"{name} was {json.dumps(was)} and is {json.dumps(now)}"]


def load_training_state(folder: Path, drafter: DFlowDrafter, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimiser state."""
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer.state.clear()
    parameters = dict(drafter.named_parameters())
    for name_and_key, value in load_file(folder / OPTIMIZER).items():
        name, key = name_and_key.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][key] = value if value.ndim == 0 else value.to(parameter.device)


def read_process_state(folder: Path, process: int) -> dict[str, torch.Tensor]:
    """The random states of one process."""
    return load_file(_process_file(folder, process))
