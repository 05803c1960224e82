"""A run's log: `log.jsonl`, TensorBoard where it is installed, accelerate's other trackers, and a progress bar."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_dflow.console import SafeConsole
from hf_dflow.errors import DFlowError

TENSORBOARD, PROJECT = "tensorboard", "hf-dflow"
SIMPLE = (bool, int, float, str)  # what every tracker takes as a setting


def check_trackers(names: Sequence[str]) -> None:
    """Raise [`DFlowError`] for a tracker that accelerate does not know, or whose package is missing."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise DFlowError(f"--report-to {name} is unknown; use none or one of {', '.join(LOGGER_TYPE_TO_CLASS)}")
        if name not in available:
            raise DFlowError(f"--report-to {name}: the package {name} is not installed; install it")


class RunLog:
    """Records of one run; a context manager. Only the main process writes.

    Args:
        folder (`Path`): For `log.jsonl` and `tensorboard/`.
        updates (`int`): Of the whole run.
        is_main (`bool`): Whether this is the main process.
        console (`Console`, *optional*): For the bar and printed lines.
        accelerator (`Accelerator`, *optional*): Whose trackers get the numbers too.
        use_tensorboard (`bool`, *optional*, defaults to `True`): Whether TensorBoard does, if it is installed.
    """

    def __init__(
        self,
        folder: Path,
        updates: int,
        is_main: bool,
        console: Console | None = None,
        *,
        accelerator: Accelerator | None = None,
        use_tensorboard: bool = True,
    ):
        self.folder, self.path, self.is_main = folder, folder / "log.jsonl", is_main
        self.accelerator, self.use_tensorboard = accelerator, use_tensorboard
        self.console = console or SafeConsole()
        self.writer: Any = None
        self.bar = Progress(
            TextColumn("updates"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("tokens per step {task.fields[tokens]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (is_main and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=updates, loss="-", tokens="-")

    def __enter__(self) -> "RunLog":
        self.bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()
        if self.writer is not None:
            self.writer.close()
        if self.accelerator is not None:  # its end_training would also end the processes' group
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def start(self, update: int, settings: dict[str, Any] | None = None) -> None:
        """Begin after `update`; later records, which a killed run had written, are removed.

        Args:
            settings (`dict`, *optional*): Of the run, for the trackers.
        """
        self.bar.update(self.task, completed=update)
        if self.accelerator is not None:
            plain = {
                key: value if isinstance(value, SIMPLE) else json.dumps(value)
                for key, value in (settings or {}).items()
            }
            self.accelerator.init_trackers(PROJECT, config=plain)
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_after(update)
        if self.use_tensorboard and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=update + 1)

    def advance(self, update: int, loss: float) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=update, loss=f"{loss:.3f}")

    def record(self, update: int, *, always_print: bool = False, **values: Any) -> None:
        """Write one line, and its numbers to TensorBoard and the trackers; lists go there as `name/0`, `name/1`, …

        Args:
            always_print (`bool`, *optional*, defaults to `False`): Print the line even where there is a bar.
        """
        if not self.is_main:
            return
        with open(self.path, "a", encoding="utf-8") as log:
            log.write(json.dumps({"update": update, **values}) + "\n")
        if "tokens_per_step" in values:
            self.bar.update(self.task, tokens=f"{values['tokens_per_step']:.2f}")
        if always_print or not self.console.is_terminal:
            line = f"update {update}: " + ", ".join(f"{key} {_short(value)}" for key, value in values.items())
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        scalars = _scalars(values)
        if self.writer is not None:
            for name, scalar in scalars.items():
                self.writer.add_scalar(name, scalar, update)
        if self.accelerator is not None and scalars:
            self.accelerator.log(scalars, step=update)

    def _remove_after(self, last: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                update = json.loads(line)["update"]
            except ValueError:  # a kill in the middle of a line
                continue
            if update <= last:
                kept.append(line + "\n")
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self.path)


def _scalars(values: dict[str, Any]) -> dict[str, int | float]:
    """The numbers among `values`; those of a list as `name/0`, `name/1`, …"""
    scalars = {}
    for key, value in values.items():
        parts = {f"{key}/{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {key: value}
        scalars.update({name: part for name, part in parts.items() if isinstance(part, int | float)})
    return scalars


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
