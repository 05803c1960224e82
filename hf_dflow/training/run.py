"""From data files to a drafter's folder: what `hf-dflow train` does."""

import hashlib
import platform
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import AutoTokenizer

from hf_dflow._version import __version__
from hf_dflow.errors import DFlowError
from hf_dflow.generation.pair import record_target
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.text import visible
from hf_dflow.training import checkpoint
from hf_dflow.training.config import TrainingConfig
from hf_dflow.training.data import DataFile, TrainingRow, read_data, split_rows, supervised_ids
from hf_dflow.training.evaluate import DecodingCounts, decode
from hf_dflow.training.features import FeatureStore, LiveFeatures
from hf_dflow.training.frozen_target import describe_target, load_frozen_target
from hf_dflow.training.start import resolve
from hf_dflow.training.templates import chat_mode
from hf_dflow.training.trainer import Trainer

FILLING_TIMEOUT = timedelta(days=2)  # other processes wait while the first fills the feature cache


@dataclass
class TrainingReport:
    """The result of a run."""

    folder: Path  # the finished drafter, for `from_pretrained`
    updates: int
    skipped: int  # updates without effect
    is_main_process: bool  # of several processes, the one that decoded and saved
    relay_on: DecodingCounts | None = None  # held-out prompts decoded with the finished drafter
    relay_off: DecodingCounts | None = None

    def __str__(self) -> str:
        lines = [f"{self.updates} updates ({self.skipped} skipped); the drafter is in {self.folder}"]
        for name, counts in (("relay on", self.relay_on), ("relay off", self.relay_off)):
            if counts is not None:
                lines.append(
                    f"{counts.prompts} held-out prompts, greedy, {name}: {counts.tokens_per_step:.2f} tokens per step, "
                    f"first draft accepted in {counts.first_draft_rate:.0%} of {counts.steps} steps"
                )
        return "\n".join(lines)

    def as_record(self, max_new_tokens: int) -> dict[str, Any]:
        """For `evaluation.json`."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "max_new_tokens": max_new_tokens,
            "relay_on": self.relay_on and self.relay_on.as_record(),
            "relay_off": self.relay_off and self.relay_off.as_record(),
        }


def train(
    target_name: str,
    data: list[Path],
    output: Path,
    training: TrainingConfig,
    *,
    start_from: str | None = None,
    features: Path | None = None,
    compute_live: bool = False,
    revision: str | None = None,
    max_length: int = 1024,
    held_out_share: float = 0.06,
    extend: bool = False,
    report_to: list[str] | None = None,
) -> TrainingReport:
    """Train a drafter; resumes by itself where `output` holds checkpoints of the same run.

    Args:
        target_name (`str`): Folder or Hub name of a causal language model, or of a PEFT adapter for one.
        data (`list[Path]`): Files of rows, as `hf-dflow data` writes them.
        output (`Path`): For checkpoints, log, and the finished drafter in `drafter/`.
        start_from (`str`, *optional*): Folder or Hub name of a drafter to continue from, DFlash or DFlow.
        features (`Path`, *optional*): Folder for cached target states; `output / "features"` by default.
        compute_live (`bool`, *optional*, defaults to `False`): Cache nothing; compute target states at each update.
        max_length (`int`, *optional*, defaults to 1024): Longer rows are left out.
        held_out_share (`float`, *optional*, defaults to 0.06): Of the prompts, by their hash; never trained on.
        extend (`bool`, *optional*, defaults to `False`): Train the finished run in `output` up to more updates.
        report_to (`list[str]`, *optional*): Trackers of accelerate; TensorBoard, if it is installed, by default.

    Raises:
        DFlowError: What cannot work, before the first update wherever the reason can be known then.
    """
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=FILLING_TIMEOUT)])
    training.check()
    files = [read_data(path, max_length=max_length) for path in data]
    for path, file in zip(data, files, strict=True):
        accelerator.print(visible(f"{path.name}: {file}"))
    rows, held_out = split_rows([row for file in files for row in file.rows], held_out_share)
    if not rows:
        raise DFlowError(f"all {len(held_out)} rows are held out: their prompts are one and the same text; name them")
    drafter = DFlowDrafter.from_pretrained(start_from) if start_from else None
    target = load_frozen_target(target_name, training.target_dtype, revision, accelerator.device)
    _check_token_ids(rows + held_out, target)
    tokenizer = _load_tokenizer(target_name, revision)
    special_ids = [] if tokenizer is None else list(tokenizer.all_special_ids)  # an unused one makes the best mask
    training = resolve(training, target, supervised_ids(rows), drafter, special_ids)
    feature_folder = None if compute_live else features or output / "features"
    store = _open_features(accelerator, rows, target, training, feature_folder)
    shown_name = target_name if not Path(target_name).exists() else Path(target_name).resolve().name
    prompts = held_out_prompts(held_out)
    trainer = Trainer(
        training, target, rows, store, output, drafter, prompts=prompts, target_name=shown_name, report_to=report_to
    )
    for path, file in zip(data, files, strict=True):
        written_by = (file.header or {}).get("target", {}).get("weights")
        if written_by not in (None, trainer.identity["target"]):
            accelerator.print(
                f"{visible(path.name)} was answered by another target than this, or by this one in another dtype; a "
                "drafter learns its own target best"
            )
    num_parameters = sum(parameter.numel() for parameter in trainer.parameters)
    accelerator.print(f"{len(rows)} rows to train on, {len(held_out)} held out; {num_parameters:,} parameters trained")
    if trainer.resume(extend=extend):
        training = trainer.training  # the extended run's
        accelerator.print(f"resumed after update {trainer.update} of {training.updates}")
    elif extend:
        raise DFlowError(f"{output} holds no run to extend; leave --extend out")
    # After `resume`, which compares what a run must have in common: the record of the target is not part of that.
    record_pair(trainer.drafter, target, tokenizer, files)
    with accelerator.main_process_first():  # the others find everything there
        store.fill(lambda done, total: accelerator.print(f"target states of {done} of {total} rows"))
    trainer.run()
    if trainer.skipped == trainer.update:
        raise DFlowError(
            f"all {trainer.update} updates were skipped, so nothing was learned and nothing is saved; "
            f"{output / 'log.jsonl'} says why."
        )
    report = TrainingReport(output / "drafter", trainer.update, trainer.skipped, accelerator.is_main_process)
    if accelerator.is_main_process:
        _evaluate(trainer, report)
        provenance = {
            "target": describe_target(shown_name, revision, target),
            "started_from": start_from and (Path(start_from).name if Path(start_from).exists() else start_from),
            "data": [_describe_file(path, file) for path, file in zip(data, files, strict=True)],
            "rows_trained_on": len(rows),
            "rows_held_out": len(held_out),
            "software": _versions(),
        }
        records = {
            "training": training.to_dict(),
            "provenance": provenance,
            "evaluation": report.as_record(training.evaluate_tokens),
        }
        checkpoint.export(trainer.drafter, report.folder, getattr(torch, training.save_dtype), records)
    accelerator.wait_for_everyone()
    return report


def _check_token_ids(rows: list[TrainingRow], target: Any) -> None:
    vocab_size = target.get_input_embeddings().weight.shape[0]
    for row in rows:
        if max(row.token_ids) >= vocab_size:
            raise DFlowError(
                f"a row holds token {max(row.token_ids)}, this target has the tokens 0 … {vocab_size - 1}: the data "
                "was made with another tokenizer. Let this target answer the prompts (hf-dflow data)."
            )


def _load_tokenizer(name: str, revision: str | None) -> Any:
    """The target's, or `None` for a target that comes without one."""
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError):
        return None


def _open_features(
    accelerator: Accelerator, rows: list[TrainingRow], target: Any, training: TrainingConfig, folder: Path | None
) -> LiveFeatures:
    """Features of the rows, cached in `folder` or, without one, computed on demand. Nothing is computed yet."""
    layer_ids: Any = training.target_layer_ids  # resolved
    teacher_top_k = training.teacher_top_k if training.distillation else 0
    if folder is None:
        return LiveFeatures(rows, target, layer_ids, dtype=training.feature_dtype, teacher_top_k=teacher_top_k)
    with accelerator.main_process_first():
        return FeatureStore(folder, rows, target, layer_ids, dtype=training.feature_dtype, teacher_top_k=teacher_top_k)


def held_out_prompts(held_out: list[TrainingRow]) -> list[list[int]]:
    """Prompts to decode, those that the target answered greedily first: greedy decoding gives their answers."""
    ordered = sorted(held_out, key=lambda row: row.temperature != 0.0)
    return [row.token_ids[: row.prompt_length] for row in ordered if row.prompt_length]


def record_pair(drafter: DFlowDrafter, target: Any, tokenizer: Any, files: list[DataFile]) -> None:
    """Write into the drafter's configuration which target it is trained for; nothing stays of an earlier target.

    The chat mode is that of the data files, if all agree. If no file has one, a drafter that the run continues keeps
    its own.
    """
    config: Any = drafter.config
    config.target_name = config.target_revision = config.tokenizer_fingerprint = config.tokenizer_sample = None
    templates = [(file.header or {}).get("template") for file in files]
    modes = {template and chat_mode(template, tokenizer) for template in templates}
    if modes != {None}:
        config.chat_mode = modes.pop() if len(modes) == 1 else None
    record_target(drafter, target, tokenizer)


def _evaluate(trainer: Trainer, report: TrainingReport) -> None:
    """Decode the held-out prompts with the finished drafter, relay off and on."""
    if not trainer.prompts:
        return
    limits = trainer.prompts, trainer.training.evaluate_tokens
    report.relay_off = decode(trainer.drafter, trainer.target, *limits, use_relay=False)
    if trainer.drafter.relay is not None:
        report.relay_on = decode(trainer.drafter, trainer.target, *limits, use_relay=True)


def _describe_file(path: Path, file: DataFile) -> dict[str, Any]:
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "rows": len(file.rows),
        "supervised_tokens": sum(row.supervised_tokens for row in file.rows),
        "header": file.header,
    }


def _versions() -> dict[str, str]:
    return {
        "hf_dflow": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }
