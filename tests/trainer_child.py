"""Processes of their own for the trainer's tests: some that kill themselves, and one of several that train together.

`python trainer_child.py kill FOLDER` runs the tiny run once for each of `DEATHS`, each in a forked process that sends
itself SIGKILL there. `accelerate launch … trainer_child.py together FOLDER` trains and writes down what it drew.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch

torch.set_num_threads(1)

from trainer_kit import tiny_trainer

from hf_dflow.training import checkpoint

DEATHS = ("between saves", "half the weights", "half the optimiser", "before the rename", "while the oldest goes")
SAVE_AT_DEATH = 15  # two checkpoints are there, the third is being written


def cut_in_half(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def arm(trainer, death: str, die: Callable[[], None], set_attribute: Callable = setattr) -> None:
    """Make `trainer` call `die` at that point, the first time from update `SAVE_AT_DEATH` on."""

    def is_due() -> bool:
        return trainer.update >= SAVE_AT_DEATH

    def replace(holder, name, make):
        set_attribute(holder, name, make(getattr(holder, name)))

    def dying_step(step):
        def run(stage, rate):
            if trainer.update == 13:
                die()
            return step(stage, rate)

        return run

    def dying_write(write, path_written):
        def run(*arguments, **options):
            write(*arguments, **options)
            if is_due():
                cut_in_half(path_written(*arguments))
                die()

        return run

    def dying_call(call):
        def run(*arguments, **options):
            if is_due():
                die()
            return call(*arguments, **options)

        return run

    def dying_removal(remove):
        def run(folder, *arguments, **options):
            if is_due() and (Path(folder) / "model.safetensors").exists():
                (Path(folder) / "model.safetensors").unlink()
                die()
            return remove(folder, *arguments, **options)

        return run

    if death == "between saves":
        replace(trainer, "step", dying_step)
    elif death == "half the weights":
        weights = lambda drafter, folder: folder / "model.safetensors"  # noqa: E731
        replace(checkpoint, "_save_quietly", lambda write: dying_write(write, weights))
    elif death == "half the optimiser":
        replace(checkpoint, "save_file", lambda write: dying_write(write, lambda tensors, path: path))
    elif death == "before the rename":
        replace(checkpoint, "_replace", dying_call)
    elif death == "while the oldest goes":
        replace(shutil, "rmtree", dying_removal)
    else:
        raise ValueError(death)


def kill(folder: Path) -> None:
    for death in DEATHS:
        child = os.fork()
        if child == 0:
            trainer = tiny_trainer(folder / death)
            arm(trainer, death, lambda: os.kill(os.getpid(), signal.SIGKILL))
            trainer.run()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps([death, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]), flush=True)


def together(folder: Path) -> None:
    trainer = tiny_trainer(folder / "run")
    drawn, share = [], trainer.order.share

    def watched_share(*arguments):
        drawn.append(share(*arguments))
        return drawn[-1]

    trainer.order.share = watched_share
    trainer.run()
    process = trainer.accelerator.process_index
    torch.save(trainer.drafter.state_dict(), folder / f"weights-{process}.pt")
    (folder / f"drawn-{process}.json").write_text(json.dumps(drawn))


if __name__ == "__main__":
    {"kill": kill, "together": together}[sys.argv[1]](Path(sys.argv[2]))
