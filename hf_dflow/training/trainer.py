"""A plain trainer: one process, one device, exact resume. Mask-only updates first, then multi-round updates."""

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from hf_dflow.configuration_dflow import DFlowDrafterConfig
from hf_dflow.errors import DFlowError
from hf_dflow.modeling_dflow import DFlowDrafter
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import FeatureStore
from hf_dflow.training.loss import CandidateVocabulary, decayed_cross_entropy, slot_targets
from hf_dflow.training.rounds import Anchors, Sequences, draft_round, next_round


@dataclass
class Stage:
    """A stretch of updates with its own schedule."""

    updates: int
    relay_rounds: int = 0  # reject-conditioned rounds after the mask round
    rows_per_update: int = 8
    anchors_per_row: int = 16
    learning_rate: float = 1e-3
    warmup_share: float = 0.04


@dataclass
class TrainingConfig:
    """All that a run depends on beside data and target."""

    num_hidden_layers: int = 2
    block_size: int = 8
    mask_token_id: int = 0
    target_layer_ids: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    loss_decay: float = 4.0
    distillation: float = 0.0  # share of the target's distribution in what a slot is trained towards
    teacher_top_k: int = 32  # tokens kept of it
    use_relay: bool = True  # False: an ablation, rounds without verifier states
    precision: str = "float32"  # or "bfloat16": the drafter's arithmetic; its weights stay float32
    feature_dtype: str = "float32"
    initialise_from_target: bool = True
    other_candidates: int = 2048
    feature_noise: float = 0.0  # relative; a drafter that sees the same few rows often learns them by heart
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    save_every: int = 100

    @classmethod
    def from_json(cls, path: str | Path) -> "TrainingConfig":
        record = json.loads(Path(path).read_text())
        record["stages"] = [Stage(**stage) for stage in record.get("stages", [])]
        return cls(**record)


def drafter_config(target, training: TrainingConfig, target_name: str | None = None) -> DFlowDrafterConfig:
    """A drafter of the target's width and attention shape."""
    config = target.config.get_text_config()
    return DFlowDrafterConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=training.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        layer_types=["full_attention"] * training.num_hidden_layers,
        block_size=training.block_size,
        mask_token_id=training.mask_token_id,
        target_layer_ids=training.target_layer_ids,
        num_target_layers=config.num_hidden_layers,
        target_name=target_name,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


@torch.no_grad()
def initialise_from_target(drafter: DFlowDrafter, target) -> None:
    """Start the draft layers as the target's last ones and the context projection as its last tap."""
    for ours, theirs in zip(drafter.layers, target.model.layers[-len(drafter.layers) :], strict=True):
        ours.load_state_dict(theirs.state_dict(), strict=False)  # a target without q/k-norm leaves ours at one
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    drafter.fc.weight.mul_(0.1)
    width = drafter.config.hidden_size
    drafter.fc.weight[:, -width:] += torch.eye(width)


class Trainer:
    """Trains one drafter.

    Args:
        training (`TrainingConfig`): The run.
        target (`PreTrainedModel`): Frozen target.
        rows (`list[TrainingRow]`): Training rows.
        store (`FeatureStore`): Their features, filled.
        output (`Path`): Folder for checkpoints, `log.jsonl` and the trained drafter.
        drafter (`DFlowDrafter`, *optional*): Whose weights to start from; a new one otherwise.
    """

    def __init__(
        self,
        training: TrainingConfig,
        target,
        rows: list[TrainingRow],
        store: FeatureStore,
        output: Path,
        drafter: DFlowDrafter | None = None,
    ):
        self.training, self.target, self.rows, self.store, self.output = training, target, rows, store, output
        target.requires_grad_(False)
        torch.manual_seed(training.seed)
        if drafter is None:
            drafter = DFlowDrafter(drafter_config(target, training))
            if training.initialise_from_target:
                initialise_from_target(drafter, target)
        self.drafter = drafter.float().train()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=0.0, weight_decay=training.weight_decay)
        self.generator = torch.Generator().manual_seed(training.seed)
        data_ids = torch.tensor(sorted({i for row in rows for i in row.token_ids[row.prompt_length :]}))
        self.candidates = CandidateVocabulary(data_ids, target.config.vocab_size, training.other_candidates)
        self.update = 0
        self.skipped = 0
        output.mkdir(parents=True, exist_ok=True)

    # -- one update

    def draw(self, stage: Stage) -> tuple[Sequences, Anchors]:
        """Random rows, and random anchors within their answers."""
        chosen = torch.randint(len(self.rows), (stage.rows_per_update,), generator=self.generator).tolist()
        rows = [self.rows[i] for i in chosen]
        longest = max(len(row.token_ids) for row in rows)
        token_ids = torch.zeros(len(rows), longest, dtype=torch.long)
        features = torch.zeros(len(rows), longest, self.store.width)
        anchor_rows, positions, teachers = [], [], []
        for i, (index, row) in enumerate(zip(chosen, rows, strict=True)):
            token_ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
            features[i, : len(row.token_ids)] = self.store[index]
            if self.training.distillation:
                teachers.append(self.store.teacher(index))
            drawn = torch.randint(row.answer_length - 1, (stage.anchors_per_row,), generator=self.generator)
            positions.append(row.prompt_length + drawn)
            anchor_rows.append(torch.full_like(drawn, i))
        if self.training.feature_noise:
            noise = torch.randn(features.shape, generator=self.generator)
            features = features * (1 + self.training.feature_noise * noise)
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        sequences = Sequences(token_ids, lengths, features)
        if teachers:
            sequences.teacher_ids = pad_sequence([one.ids for one in teachers], batch_first=True)
            sequences.teacher_probs = pad_sequence([one.probs for one in teachers], batch_first=True)
        return sequences, Anchors(torch.cat(anchor_rows), torch.cat(positions))

    def step(self, stage: Stage, learning_rate: float) -> list[float]:
        """One update; returns the loss of each round. A non-finite loss or gradient skips the update and is counted."""
        sequences, anchors = self.draw(stage)
        candidate_ids = self.candidates.sample(self.generator)
        head_weight = self.target.get_output_embeddings().weight[candidate_ids]
        relayed, losses = None, []
        self.optimizer.zero_grad(set_to_none=True)
        for round_index in range(1 + stage.relay_rounds):
            with torch.autocast(self.drafter.device.type, torch.bfloat16, self.training.precision == "bfloat16"):
                result = draft_round(self.drafter, self.target, sequences, anchors, relayed)
                targets = slot_targets(
                    result.labels, result.teacher_ids, result.teacher_probs, self.training.distillation
                )
                targets = self.candidates.relabel(targets)
                loss = decayed_cross_entropy(
                    result.hidden, targets, head_weight, self.training.loss_decay, self.drafter.shape_logits
                )
            loss.backward()
            losses.append(loss.item())
            if round_index < stage.relay_rounds:
                with torch.autocast(self.drafter.device.type, torch.bfloat16, self.training.precision == "bfloat16"):
                    anchors, relayed = next_round(
                        self.drafter, self.target, sequences, anchors, result, self.training.use_relay
                    )
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.training.max_grad_norm)
        if not math.isfinite(sum(losses)) or not torch.isfinite(norm):
            self.skipped += 1
            return losses
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return losses

    # -- the run

    def run(self) -> None:
        """Train to the end of the last stage, saving as it goes."""
        started = time.perf_counter()
        done_before = self.update
        for stage, first in self._stages_with_starts():
            while self.update < first + stage.updates:
                losses = self.step(stage, learning_rate(stage, self.update - first))
                self.update += 1
                if self.update % 10 == 0:
                    seconds = (time.perf_counter() - started) / (self.update - done_before)
                    self._log({"update": self.update, "losses": losses, "seconds_per_update": round(seconds, 3)})
                if self.update % self.training.save_every == 0:
                    self.save()
        self.save()

    def _stages_with_starts(self):
        first = 0
        for stage in self.training.stages:
            yield stage, first
            first += stage.updates

    def _log(self, record: dict) -> None:
        with open(self.output / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({**record, "skipped": self.skipped}) + "\n")

    def save(self) -> None:
        """Write a checkpoint under a temporary name, then rename: a kill in between leaves the last one whole."""
        folder = self.output / f"checkpoint-{self.update}"
        if folder.exists():  # the last update may have been saved in its turn
            return
        partial = self.output / "checkpoint-partial"
        self.drafter.save_pretrained(partial)
        tensors = {f"{name}.{key}": value for name, key, value in self._optimizer_tensors()}
        tensors["generator"] = self.generator.get_state()
        save_file(tensors, partial / "trainer.safetensors")
        state = {"update": self.update, "skipped": self.skipped, "training": asdict(self.training)}
        (partial / "trainer.json").write_text(json.dumps(state, indent=1))
        partial.rename(folder)
        for old in sorted(self.output.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)[:-2]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()

    def _optimizer_tensors(self):
        for name, parameter in self.drafter.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield name, key, value

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint; `False` if there is none.

        Raises:
            DFlowError: It belongs to a run with another configuration.
        """
        found = [path for path in self.output.glob("checkpoint-*") if path.name != "checkpoint-partial"]
        if not found:
            return False
        folder = max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))
        state = json.loads((folder / "trainer.json").read_text())
        if state["training"] != asdict(self.training):
            raise DFlowError(f"{folder} was trained with another configuration; use another output folder")
        self.update, self.skipped = state["update"], state["skipped"]
        self.drafter.load_state_dict(load_file(folder / "model.safetensors"))
        tensors = load_file(folder / "trainer.safetensors")
        self.generator.set_state(tensors["generator"])
        for name, parameter in self.drafter.named_parameters():
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors]
            if keys:
                self.optimizer.state[parameter] = {key: tensors[f"{name}.{key}"] for key in keys}
        return True


def learning_rate(stage: Stage, update: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(stage.warmup_share * stage.updates))
    if update < warmup:
        return stage.learning_rate * (update + 1) / warmup
    progress = (update - warmup) / max(1, stage.updates - warmup)
    return stage.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
