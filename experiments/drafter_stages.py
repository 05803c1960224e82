"""Answers and training of `four_drafters`: the same rows, anchors, updates and size for every kind of drafter."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from experiments.autoregressive import train_draft_model
from experiments.draft_model import drafter_size, matching_layers, save_draft_model
from experiments.resident import ResidentFeatures
from hf_dflow.bench.assistant import load_draft_model
from hf_dflow.training.answers import Sampling
from hf_dflow.training.collect import Job, collect_answers
from hf_dflow.training.config import Stage, TrainingConfig
from hf_dflow.training.data import TrainingRow, read_rows, supervised_ids
from hf_dflow.training.frozen_target import describe_target, stop_ids
from hf_dflow.training.prompts import read_prompts
from hf_dflow.training.start import new_drafter, resolve
from hf_dflow.training.templates import ChatTemplate
from hf_dflow.training.trainer import Trainer

KINDS = ("dflash", "multi_round", "dflow", "autoregressive")
MAX_FILE_SIZE = "15MB"  # of a weights file: some GPU machines give back no larger files
WARM_UP, TIMED = 2, 4  # updates
USED_TIME = 0.9  # of what is left for training, by the measured speed


class OutOfTimeError(Exception):
    """The deadline passed between two batches of answers; the file holds whole answers."""


@dataclass(frozen=True)
class Recipe:
    """The settings that all drafters of a comparison share."""

    updates: int = 0
    rows_per_update: int = 32
    anchors_per_row: int = 32
    relay_rounds: int = 2
    num_layers: int = 2
    block_size: int = 8
    learning_rate: float = 1e-3
    distillation: float = 0.0
    copy_layers: bool = True
    precision: str = "float32"
    seed: int = 0

    def configuration(self, kind: str, updates: int) -> TrainingConfig:
        """The training run of one kind; kinds without a relay differ in nothing but the relay and its rounds."""
        rounds = self.relay_rounds if kind in ("multi_round", "dflow") else 0
        stage = Stage(updates, rounds, self.rows_per_update, self.anchors_per_row, self.learning_rate)
        return TrainingConfig(
            num_hidden_layers=self.num_layers,
            block_size=self.block_size,
            stages=[stage],
            use_relay=kind == "dflow",
            distillation=self.distillation,
            precision=self.precision,
            target_dtype=self.precision,
            feature_dtype=self.precision,
            initialise_from_target=None if self.copy_layers else False,
            seed=self.seed,
            save_every=max(100, updates // 4),
            keep_checkpoints=1,
            log_every=max(1, updates // 50),
            evaluate_every=0,
        )


def collect(
    name: str,
    target: Any,
    output: Path,
    sources: list[str],
    limit: int,
    answering: dict[str, Any],
    seed: int,
    deadline: float,
) -> dict[str, Any]:
    """Write the target's answers to training prompts until `deadline` (of `time.time()`)."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    job = Job(
        [prompt for source in sources for prompt in read_prompts(source)][: limit or None],
        ChatTemplate(tokenizer, stop_ids(name, tokenizer)),
        target=describe_target(Path(name).name, None, target),
        source=", ".join(Path(source).name for source in sources),
        part="train",
    )

    def stop_in_time(line: str) -> None:
        if time.time() > deadline:
            raise OutOfTimeError(line)

    sampling = Sampling(
        tuple(answering["temperatures"]), 1.0, answering["max_new_tokens"], answering["batch_size"], seed
    )
    is_complete = True
    try:
        collect_answers(job, target, output, sampling, stop_in_time)
    except OutOfTimeError:
        is_complete = False
    rows = read_rows(output)
    return {
        "rows": len(rows),
        "supervised_tokens": sum(row.supervised_tokens for row in rows),
        "all_prompts_answered": is_complete,
        "prompts_left_out": {"duplicates": job.report.duplicates, "over_long": job.report.over_long},
    }


class Training:
    """Trains one kind after the other on one set of rows and features.

    Args:
        name (`str`): Folder or Hub name of the target.
        target (`PreTrainedModel`): The frozen target.
        data (`Path`): Its answers.
        work (`Path`): For checkpoints.
        weights (`Path`): For finished drafters, a folder each, in bfloat16.
    """

    def __init__(self, name: str, target: Any, data: Path, recipe: Recipe, work: Path, weights: Path):
        self.name, self.target, self.recipe, self.work, self.weights = name, target, recipe, work, weights
        self.rows: list[TrainingRow] = read_rows(data)
        self.special_ids = list(AutoTokenizer.from_pretrained(name).all_special_ids)
        self._store: ResidentFeatures | None = None

    def configuration(self, kind: str, updates: int) -> TrainingConfig:
        """The resolved run of `kind`; mask token and tapped layers are the same for all kinds."""
        data_ids = supervised_ids(self.rows)
        return resolve(self.recipe.configuration(kind, updates), self.target, data_ids, None, self.special_ids)

    def features(self, training: TrainingConfig) -> ResidentFeatures:
        """Features of all rows, computed once for all kinds."""
        if self._store is None:
            layer_ids: Any = training.target_layer_ids
            self._store = ResidentFeatures(
                self.rows,
                self.target,
                layer_ids,
                dtype=training.feature_dtype,
                teacher_top_k=training.teacher_top_k if training.distillation else 0,
            )
            self._store.fill()
        return self._store

    def trainer(self, kind: str, updates: int) -> Trainer:
        """A trainer of `kind` before its first update."""
        training = self.configuration(kind, updates)
        store = self.features(training)
        return Trainer(training, self.target, self.rows, store, self.work / kind, target_name=Path(self.name).name)

    def count_updates(self, kinds: tuple[str, ...], deadline: float) -> dict[str, Any]:
        """The updates of every drafter: the recipe's, or as many as fit before `deadline` at the measured speed.

        DFlow's updates are timed; a round is taken to cost the same in every kind.
        """
        if self.recipe.updates:
            return {"updates": self.recipe.updates}
        trainer = self.trainer("dflow", WARM_UP + TIMED)
        stage = trainer.training.stages[0]
        for _ in range(WARM_UP):
            trainer.step(stage, 0.0)
        started = time.time()
        for _ in range(TIMED):
            trainer.step(stage, 0.0)
        seconds = (time.time() - started) / TIMED
        rounds = [1 + self.recipe.configuration(kind, 1).stages[0].relay_rounds for kind in kinds]
        seconds_of_all_kinds = seconds * sum(rounds) / (1 + self.recipe.relay_rounds)
        usable_seconds = max(0.0, deadline - time.time()) * USED_TIME
        updates = max(1, int(usable_seconds / seconds_of_all_kinds))
        return {"updates": updates, "seconds_per_dflow_update": round(seconds, 4)}

    def train(self, kind: str, updates: int) -> dict[str, Any]:
        """Train a drafter of `kind`, resuming from its last checkpoint, and write its weights."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        size = drafter_size(new_drafter(self.target, self.configuration("dflow", 1)))
        if kind == "autoregressive":
            training = self.configuration(kind, updates)
            report = train_draft_model(
                training,
                self.target,
                self.rows,
                self.work / kind,
                num_layers=matching_layers(self.target, size),
                initialise_from_target=self.recipe.copy_layers,
                store=self.features(training),
            )
            model = load_draft_model(report.folder, self.target)
            save_draft_model(
                model, self.weights / kind, torch.bfloat16, with_embedding=False, max_shard_size=MAX_FILE_SIZE
            )
            size_record = {"parameters": report.trained_parameters, "layers": report.num_hidden_layers}
            skipped = report.skipped
        else:
            trainer = self.trainer(kind, updates)
            trainer.resume()
            trainer.run()
            training, skipped = trainer.training, trainer.skipped
            size_record = {"parameters": drafter_size(trainer.drafter), "layers": self.recipe.num_layers}
            trainer.drafter.to(torch.bfloat16).save_pretrained(self.weights / kind, max_shard_size=MAX_FILE_SIZE)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        return {
            **size_record,
            "updates": updates,
            "skipped": skipped,
            "peak_gib": peak,
            "configuration": training.to_dict(),
        }
