"""The training loop: updates over one process or several, exact resume, and nothing non-finite into the weights."""

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training import checkpoint
from hf_dflow.training.config import Stage, TrainingConfig
from hf_dflow.training.data import TrainingRow, supervised_ids
from hf_dflow.training.evaluate import DecodingCounts, decode
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.frozen_target import linear_head, weights_digest
from hf_dflow.training.log import TENSORBOARD, RunLog
from hf_dflow.training.loss import CandidateVocabulary, decayed_cross_entropy, draftable_ids, head_rows, slot_targets
from hf_dflow.training.packing import Anchors, RowOrder, Sequences, lay_out
from hf_dflow.training.rounds import Relayed, RoundResult, draft_round, next_round, previous_embeds
from hf_dflow.training.start import continued_drafter, new_drafter, resolve

PLAIN_DATA_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
ADVICE = "use another output folder, or --from that checkpoint to start a new run with its weights"
EXTEND_ADVICE = "--extend trains a finished run further, whose last stage gets the additional updates; otherwise "


@dataclass
class Update:
    """The result of one update."""

    losses: list[float]  # of each round, mean over processes and accumulated forwards
    gradient_norm: float  # before clipping
    skipped: str | None = None  # why nothing was changed


class Trainer:
    """Trains one drafter. Several processes (`accelerate launch`) take different rows and keep equal weights.

    Args:
        training (`TrainingConfig`): The run; `self.training` is the same with all open fields filled in.
        target (`PreTrainedModel`): Frozen target, on this process's device; wrapped by PEFT or not.
        rows (`list[TrainingRow]`): Training rows.
        store (`LiveFeatures`): Their features, filled, or computed on demand.
        output (`Path`): Folder for checkpoints, `log.jsonl` and TensorBoard files; all processes share it.
        drafter (`DFlowDrafter`, *optional*): Whose weights to start from; a new one otherwise.
        prompts (`list[list[int]]`, *optional*): Held-out prompts to decode while training.
        target_name (`str`, *optional*): Recorded in the drafter's configuration.
        report_to (`list[str | GeneralTracker]`, *optional*): Trackers of accelerate, "tensorboard" among them;
            TensorBoard, if it is installed, by default.

    Raises:
        DFlowError: Before any update: nothing is supervised, or the drafter contradicts the configuration.
    """

    def __init__(
        self,
        training: TrainingConfig,
        target: Any,
        rows: list[TrainingRow],
        store: LiveFeatures,
        output: Path,
        drafter: DFlowDrafter | None = None,
        *,
        prompts: list[list[int]] | None = None,
        target_name: str | None = None,
        report_to: Sequence[str | GeneralTracker] | None = None,
    ):
        data_ids = supervised_ids(rows)
        trackers = [] if report_to is None else [tracker for tracker in report_to if tracker != TENSORBOARD]
        self.accelerator = Accelerator(log_with=trackers or None, project_dir=output)
        _check_launch(self.accelerator, training)
        self.training = resolve(training, target, data_ids, drafter)
        self.target, self.rows, self.store, self.output = target.requires_grad_(False), rows, store, output
        self.prompts = (prompts or [])[: self.training.evaluate_prompts]
        if drafter is None:
            drafter = new_drafter(target, self.training, target_name, rows)
        else:
            drafter = continued_drafter(drafter, self.training)
        self.drafter = drafter.to(target.device).train()
        if self.training.train_only is not None:
            self.drafter.requires_grad_(False)
            part = {"relay": self.drafter.relay, "correction": self.drafter.causal_correction}[self.training.train_only]
            part.requires_grad_(True)
        self.parameters = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=self.training.weight_decay)
        # Draws anchors, noise and candidates; each process has its own.
        self.generator = torch.Generator().manual_seed(self.training.seed + 1_000_003 * self.accelerator.process_index)
        self.order = RowOrder(len(rows), self.training.seed)
        vocab_size = target.get_input_embeddings().weight.shape[0]
        self.candidates = CandidateVocabulary(
            data_ids, vocab_size, self.training.other_candidates, draftable_ids(self.drafter, vocab_size)
        )
        self.head = linear_head(self.drafter, target)
        self.update = self.rows_drawn = self.skipped = self.skipped_in_row = 0
        self.log = RunLog(
            output,
            self.training.updates,
            is_main=self.accelerator.is_main_process,
            accelerator=self.accelerator if trackers else None,
            use_tensorboard=report_to is None or TENSORBOARD in report_to,
        )

    # -- one update

    def draw(self, stage: Stage) -> tuple[Sequences, Anchors]:
        """This process's share of the next rows, and random anchors within their answers."""
        processes = self.accelerator.num_processes
        chosen = self.order.share(self.rows_drawn, stage.rows_per_update, self.accelerator.process_index, processes)
        self.rows_drawn += stage.rows_per_update * processes
        features = [self.store[i] for i in chosen]
        if self.training.feature_noise:
            features = [
                states
                * (1 + self.training.feature_noise * torch.randn(states.shape, generator=self.generator).to(states))
                for states in features
            ]
        teachers = [self.store.teacher(i) for i in chosen] if self.training.distillation else []
        return lay_out(
            [self.rows[i] for i in chosen],
            features,
            [teacher for teacher in teachers if teacher is not None],
            anchors_per_row=stage.anchors_per_row,
            pack=self.training.pack_rows,
            generator=self.generator,
            device=self.target.device,
        )

    def step(self, stage: Stage, learning_rate: float) -> Update:
        """One update; skipped where its loss or gradient is not finite or no process has anything supervised."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(2 + stage.relay_rounds, device=self.target.device)  # loss of each round; anchors
        for _ in range(self.training.gradient_accumulation):
            sequences, anchors = self.draw(stage)
            if len(anchors.row):
                by_round = self._add_gradients(stage, sequences, anchors)
                totals += torch.stack([*by_round, totals.new_tensor(len(anchors.row))])
        self._average_over_processes(totals)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        *sums, num_anchors, gradient_norm = torch.cat([totals, norm.float()[None].to(totals.device)]).tolist()
        update = Update([loss / self.training.gradient_accumulation for loss in sums], gradient_norm)
        if num_anchors == 0:
            update.skipped = "no row of the update holds a supervised token behind another"
        elif not math.isfinite(sum(update.losses)):
            update.skipped = "the loss is not finite"
        elif not math.isfinite(gradient_norm):
            update.skipped = "the gradient is not finite"
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        return update

    def _add_gradients(self, stage: Stage, sequences: Sequences, anchors: Anchors) -> list[torch.Tensor]:
        """Add the gradients of all rounds on some rows; returns the loss of each round."""
        candidate_ids = self.candidates.sample(self.generator)
        relayed, losses = None, []
        decay: Any = stage.loss_decay or self.training.loss_decay  # the latter is resolved
        for round_index in range(1 + stage.relay_rounds):
            head = head_rows(self.drafter, self.head, candidate_ids)  # again each round, for a gradient of its own
            with torch.autocast(self.target.device.type, torch.bfloat16, self.training.precision == "bfloat16"):
                result = draft_round(
                    self.drafter, self.target, sequences, anchors, relayed, block_size=stage.block_size
                )
                targets = slot_targets(
                    result.labels, result.teacher_ids, result.teacher_probs, self.training.distillation
                )
                hidden = self._corrected(sequences.anchor_ids(anchors), result)
                loss = decayed_cross_entropy(
                    hidden, self.candidates.relabel(targets), head, decay, self.drafter.shape_logits
                )
            if loss.requires_grad:  # the mask round has no gradient where only the relay is trained
                (loss / self.training.gradient_accumulation).backward()
            losses.append(loss.detach())
            if round_index < stage.relay_rounds:
                anchors, relayed = self.follow(stage, sequences, anchors, relayed, result)
        return losses

    def follow(
        self, stage: Stage, sequences: Sequences, anchors: Anchors, relayed: Relayed | None, result: RoundResult
    ) -> tuple[Anchors, Relayed | None]:
        """The next round's anchors and the input of its relay, after a round that read `relayed`."""
        return next_round(self.drafter, self.target, sequences, anchors, result, self.training.use_relay)

    def _corrected(self, anchor_ids: torch.Tensor, result: RoundResult) -> torch.Tensor:
        """Draft states `[A, N, H]` conditioned on the trajectory's tokens; a share of the slots stays uncorrected."""
        if self.drafter.causal_correction is None:
            return result.hidden
        previous = previous_embeds(self.drafter, self.target, anchor_ids, result.labels)
        corrected = self.drafter.causal_correction(result.hidden, previous)
        share = self.training.base_share if self.training.train_only != "correction" else 0.0
        is_base = torch.rand(result.labels.shape, generator=self.generator) < share
        return torch.where(is_base.to(corrected.device)[..., None], result.hidden, corrected)

    def _average_over_processes(self, totals: torch.Tensor) -> None:
        """Average gradients and `totals` in place. By hand: a round is several calls, none a wrapped `forward`."""
        if self.accelerator.num_processes == 1:
            return
        totals.copy_(self.accelerator.reduce(totals, "mean"))
        has_gradient = torch.tensor([float(p.grad is not None) for p in self.parameters], device=totals.device)
        holders = self.accelerator.reduce(has_gradient, "sum").tolist()
        for parameter, num_holders in zip(self.parameters, holders, strict=True):
            if num_holders:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(gradient, "mean")

    # -- the run

    def run(self) -> None:
        """Train to the end of the last stage, saving on the way.

        Raises:
            DFlowError: `max_skips_in_row` updates in a row were skipped, or a weight is not finite.
        """
        with self.log:
            self.log.start(self.update, self.training.to_dict())
            if self.update == 0:
                self.evaluate()  # also shows that this target can be decoded with a drafter at all
            first = 0
            for stage in self.training.stages:
                self._run_stage(stage, first)
                first += stage.updates
            self.save()

    def _run_stage(self, stage: Stage, first: int) -> None:
        """The remaining updates of `stage`, which begins after update `first`."""
        training, recent, seconds = self.training, [], 0.0
        while self.update < first + stage.updates:
            started = time.perf_counter()
            rate = stage.learning_rate_at(self.update - first)
            update = self.step(stage, rate)
            self.update += 1
            self._count(update)
            recent.append(update)
            seconds += time.perf_counter() - started
            if self.update % training.log_every == 0 or self.update == first + stage.updates:
                self._record(recent, rate, seconds / len(recent))
                recent, seconds = [], 0.0
            if training.evaluate_every and self.update % training.evaluate_every == 0:
                self.evaluate()
            if self.update % training.save_every == 0:
                self.save()

    def evaluate(self) -> DecodingCounts | None:
        """Decode the held-out prompts, shared among processes, and log the counts; `None` where that is off."""
        if not self.prompts or not self.training.evaluate_every:
            return None
        own_prompts = self.prompts[self.accelerator.process_index :: self.accelerator.num_processes]
        counts = decode(self.drafter, self.target, own_prompts, self.training.evaluate_tokens)
        histogram = torch.tensor(counts.histogram, device=self.target.device)
        counts = DecodingCounts(len(self.prompts), self.accelerator.reduce(histogram, "sum").tolist())
        self.log.record(self.update, **counts.as_record())
        return counts

    def _count(self, update: Update) -> None:
        if update.skipped is None:
            self.skipped_in_row = 0
            self.log.advance(self.update, sum(update.losses))
            return
        self.skipped += 1
        self.skipped_in_row += 1
        self.log.record(self.update, always_print=True, skipped_because=update.skipped, skipped=self.skipped)
        if self.skipped_in_row >= self.training.max_skips_in_row:
            raise DFlowError(
                f"{self.skipped_in_row} updates in a row were skipped, the last because {update.skipped}. The weights "
                f"are those before them, and {self.output} holds the last checkpoint. Check the data and features, "
                "or lower the learning rate."
            )

    def _record(self, updates: list[Update], rate: float, seconds: float) -> None:
        """Log the mean of the updates that were not skipped."""
        updates = [update for update in updates if update.skipped is None]
        if not updates:
            return
        losses = [sum(values) / len(updates) for values in zip(*(update.losses for update in updates), strict=True)]
        self.log.record(
            self.update,
            losses=[round(loss, 5) for loss in losses],
            gradient_norm=round(sum(update.gradient_norm for update in updates) / len(updates), 5),
            learning_rate=rate,
            seconds_per_update=round(seconds, 4),
            skipped=self.skipped,
        )

    # -- checkpoints

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that a resumed run must have in common with its checkpoint."""
        rows = hashlib.sha256()
        for row in self.rows:
            rows.update(json.dumps([row.token_ids, row.spans]).encode())
        return {
            "configuration": self.training.to_dict(),
            "drafter": checkpoint.shape_of(self.drafter),
            "target": weights_digest(self.target),
            "data": rows.hexdigest(),
            "number of processes": self.accelerator.num_processes,
        }

    def state(self) -> checkpoint.RunState:
        """The run's identity and progress."""
        counters = {name: getattr(self, name) for name in ("update", "rows_drawn", "skipped", "skipped_in_row")}
        return checkpoint.RunState(self.identity, counters)

    def save(self) -> None:
        """Write a checkpoint; the one before it stays until this one is complete."""
        saved = checkpoint.checkpoints(self.output)
        if saved and saved[-1].name == f"{checkpoint.PREFIX}{self.update}":
            return
        partial = self.output / checkpoint.PARTIAL
        if self.accelerator.is_main_process:
            checkpoint.begin(self.output)
        self.accelerator.wait_for_everyone()
        checkpoint.write_process_state(partial, self.accelerator.process_index, self._generator_states())
        if self.accelerator.is_main_process:
            checkpoint.write_shared_state(partial, self.drafter, self.optimizer, self.state())
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.finish(partial, self.update, self.training.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def resume(self, *, extend: bool = False) -> bool:
        """Resume from the newest complete checkpoint in the output folder; `False` if there is none.

        Args:
            extend (`bool`, *optional*, defaults to `False`): Train a finished run further, up to as many updates as
                this one has. Its last stage gets the additional ones and its learning rate the longer stage's schedule;
                `self.training` becomes the extended run's configuration.

        Raises:
            DFlowError: It belongs to a run with another configuration, drafter, target, data or number of processes.
        """
        saved = checkpoint.checkpoints(self.output)
        if not saved:
            return False
        state = checkpoint.read_state(saved[-1], ADVICE)
        identity, extended = self.identity, self._extended(saved[-1], state) if extend else None
        if extended is not None:
            identity = {**identity, "configuration": state.identity["configuration"]}
        is_longer = not extend and self.training.updates > _stored_updates(state)
        checkpoint.check_identity(saved[-1], state, identity, EXTEND_ADVICE * is_longer + ADVICE)
        if extended is not None:
            self.training = extended
            del self.identity  # later checkpoints are the extended run's
        for name, value in state.counters.items():
            setattr(self, name, value)
        checkpoint.load_training_state(saved[-1], self.drafter, self.optimizer)
        generators = checkpoint.read_process_state(saved[-1], self.accelerator.process_index)
        self.generator.set_state(generators["draws"])
        torch.set_rng_state(generators["torch"])
        if "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], self.target.device)
        return True

    def _extended(self, folder: Path, state: checkpoint.RunState) -> TrainingConfig | None:
        """The configuration of the run in `folder` with this one's number of updates; `None` where the two differ in
        more than that, which `check_identity` says in words."""
        stored = TrainingConfig.from_dict(state.identity["configuration"], str(folder))
        added = self.training.updates - stored.updates
        # Between evaluations lie by default a tenth of the updates.
        adopted = replace(self.training, stages=stored.stages, evaluate_every=stored.evaluate_every)
        own, others = ([replace(stage, updates=1) for stage in run.stages] for run in (self.training, stored))
        if adopted != stored or own != others:
            return None
        if added < 0 or (added and state.counters["update"] < stored.updates):
            raise DFlowError(
                f"{folder} is at update {state.counters['update']} of {stored.updates} and cannot be extended to "
                f"{self.training.updates}: let it finish with its own settings first, then name a larger number of "
                "updates"
            )
        *earlier, last = stored.stages
        return replace(adopted, stages=[*earlier, replace(last, updates=last.updates + added)])

    def _generator_states(self) -> dict[str, torch.Tensor]:
        states = {"draws": self.generator.get_state(), "torch": torch.get_rng_state()}
        if self.target.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.target.device)
        return states


def _stored_updates(state: checkpoint.RunState) -> int:
    return sum(stage["updates"] for stage in state.identity.get("configuration", {}).get("stages", []))


def _check_launch(accelerator: Accelerator, training: TrainingConfig) -> None:
    """The configuration describes the run; a launcher's flags must not contradict it."""
    kind = accelerator.distributed_type.value
    if kind not in PLAIN_DATA_PARALLEL:
        raise DFlowError(
            f"accelerate was launched for {kind}; each process holds the whole small drafter, so launch it for plain "
            "data-parallel processes (--multi_gpu), without DeepSpeed, FSDP or Megatron"
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched != "no" and launched != {"bfloat16": "bf16"}.get(training.precision):
        raise DFlowError(
            f'accelerate was launched with mixed precision {launched}, the configuration says "precision": '
            f'"{training.precision}" (allowed: float32, bfloat16); make them agree'
        )
