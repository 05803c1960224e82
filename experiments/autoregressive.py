"""`python -m experiments.autoregressive`: the classic baseline, a small language model that drafts token by token.

It learns from the same rows in the same order as a block-diffusion drafter, with the same updates and schedule, and
decodes in transformers' assisted generation.
"""

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel

from experiments.draft_model import drafter_size, matching_layers, new_draft_model, save_draft_model
from hf_dflow.errors import DFlowError
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.config import TrainingConfig
from hf_dflow.training.data import TrainingRow, read_rows, split_rows, supervised_ids
from hf_dflow.training.features import FeatureStore, LiveFeatures
from hf_dflow.training.frozen_target import load_frozen_target
from hf_dflow.training.log import RunLog
from hf_dflow.training.loss import CandidateVocabulary, HeadRows, decayed_cross_entropy, slot_targets
from hf_dflow.training.packing import RowOrder


@dataclass
class DraftModelReport:
    """The result of a run.

    Args:
        folder (`Path`): The finished model, for `from_pretrained` and `assistant_model=`.
        updates, skipped (`int`): All updates, and those without effect because something was not finite.
        num_hidden_layers, trained_parameters (`int`): Its size without the target's embedding and head.
    """

    folder: Path
    updates: int
    skipped: int
    num_hidden_layers: int
    trained_parameters: int


def train_draft_model(
    training: TrainingConfig,
    target: PreTrainedModel,
    rows: list[TrainingRow],
    output: Path,
    *,
    num_layers: int,
    initialise_from_target: bool = False,
    store: Any = None,
) -> DraftModelReport:
    """Train on the supervised tokens of `rows`; resumes from `output/state` where that belongs to the same run.

    It uses the fields of `training` that do not concern blocks: updates, rows and learning rate of each stage,
    optimiser, precision, seed and distillation. It draws the rows that [`Trainer`] would draw.

    Args:
        store (`FeatureStore`, *optional*): Holds the target's distributions, for distillation.

    Raises:
        DFlowError: `output` holds another run, or too many updates in a row were not finite.
    """
    training.check()
    accelerator = Accelerator()
    model: Any = new_draft_model(target, num_layers, training.seed, initialise_from_target)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.0, weight_decay=training.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    order = RowOrder(len(rows), training.seed)
    is_plain = _has_plain_head(accelerator.unwrap_model(model), rows[0])
    embedding: Any = target.get_input_embeddings()
    candidates = CandidateVocabulary(supervised_ids(rows), len(embedding.weight), training.other_candidates)
    data = hashlib.sha256(json.dumps([[row.token_ids, row.spans] for row in rows]).encode()).hexdigest()
    identity = {"training": training.to_dict(), "layers": num_layers, "copied": initialise_from_target, "data": data}
    progress = {"update": 0, "rows_drawn": 0, "skipped": 0}
    if (output / "state").exists():
        progress = _resume(accelerator, output / "state", identity)
    schedule = [(stage, update) for stage in training.stages for update in range(stage.updates)]
    model.train()
    skipped_in_row = 0
    with RunLog(output, len(schedule), accelerator.is_main_process) as log:
        log.start(progress["update"])
        for stage, update in schedule[progress["update"] :]:
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for _ in range(training.gradient_accumulation):
                processes = accelerator.num_processes
                chosen = order.share(
                    progress["rows_drawn"], stage.rows_per_update, accelerator.process_index, processes
                )
                progress["rows_drawn"] += stage.rows_per_update * processes
                teachers = [store.teacher(i) for i in chosen] if training.distillation else []
                others = torch.Generator().manual_seed(training.seed + progress["rows_drawn"])  # a resumed run's, too
                candidate_ids = candidates.sample(others) if is_plain else None
                with torch.autocast(accelerator.device.type, torch.bfloat16, training.precision == "bfloat16"):
                    loss = _loss(
                        model, [rows[i] for i in chosen], teachers, training.distillation, candidates, candidate_ids
                    )
                accelerator.backward(loss / training.gradient_accumulation)
                total += loss.item() / training.gradient_accumulation
            norm = float(accelerator.clip_grad_norm_(trained, training.max_grad_norm))  # equal in all processes
            if math.isfinite(norm):
                rate = stage.learning_rate_at(update)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                skipped_in_row = 0
            else:
                progress["skipped"] += 1
                skipped_in_row += 1
                if skipped_in_row >= training.max_skips_in_row:
                    raise DFlowError(
                        f"{skipped_in_row} updates in a row had no finite gradient; lower the learning rate"
                    )
            progress["update"] += 1
            log.advance(progress["update"], total)
            if progress["update"] % training.log_every == 0:
                log.record(progress["update"], losses=[round(total, 5)], gradient_norm=round(norm, 5))
            if progress["update"] % training.save_every == 0 or progress["update"] == len(schedule):
                _save_state(accelerator, output / "state", {"identity": identity, "progress": progress})
    folder = output / "draft_model"
    if accelerator.is_main_process:
        finished = accelerator.unwrap_model(model)
        save_draft_model(finished, folder, getattr(torch, training.save_dtype))
    accelerator.wait_for_everyone()
    size = sum(weight.numel() for weight in trained)
    return DraftModelReport(folder, progress["update"], progress["skipped"], num_layers, size)


@torch.no_grad()
def _has_plain_head(model: Any, row: TrainingRow) -> bool:
    """Whether logits are the head's matrix times the last states, and nothing else (no scale, no soft-cap)."""
    output = model(torch.tensor([row.token_ids[:4]], device=model.device), output_hidden_states=True, use_cache=False)
    return output.logits.allclose(model.get_output_embeddings()(output.hidden_states[-1]), rtol=1e-3, atol=1e-3)


def _loss(
    model: Any,
    rows: list[TrainingRow],
    teachers: list[Any],
    distillation: float,
    candidates: CandidateVocabulary | None = None,
    candidate_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy over the supervised tokens of `rows`, mixed with the teachers' distributions if given.

    With `candidate_ids`, drawn from `candidates`, the softmax runs over these alone, as in training a drafter.
    """
    device = next(model.parameters()).device

    def padded(parts: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(parts, batch_first=True).to(device)

    token_ids = padded([torch.tensor(row.token_ids) for row in rows])
    is_text = padded([torch.ones(len(row.token_ids), dtype=torch.long) for row in rows])
    is_label = padded([torch.tensor(row.supervised()) for row in rows])[:, 1:]  # row t predicts token t + 1
    ids = probs = None
    if teachers:
        ids, probs = (
            padded([getattr(teacher, part) for teacher in teachers])[:, :-1][is_label] for part in ("ids", "probs")
        )
        ids, probs = ids[:, None], probs[:, None]
    targets = slot_targets(token_ids[:, 1:][is_label][:, None], ids, probs, distillation)
    inputs = {"input_ids": token_ids, "attention_mask": is_text, "use_cache": False}
    if candidates is None or candidate_ids is None:
        logits = model(**inputs).logits[:, :-1][is_label].float()
        return -(targets.weights[:, 0] * logits.log_softmax(dim=-1).gather(-1, targets.ids[:, 0])).sum(-1).mean()
    # Data-parallel processes synchronise in the whole model's forward, so it is called although its logits go unused.
    states = model(**inputs, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][:, :-1][is_label]
    head = getattr(model, "module", model).get_output_embeddings()
    bias = None if getattr(head, "bias", None) is None else head.bias[candidate_ids]
    kept = candidates.relabel(targets)
    return decayed_cross_entropy(states[:, None], kept, HeadRows(head.weight[candidate_ids], bias), 1.0)


def _save_state(accelerator: Accelerator, folder: Path, record: dict[str, Any]) -> None:
    """Replace the state once the new one is written completely."""
    partial = folder.with_name("state-partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial / "run.json").write_text(json.dumps(record))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    accelerator.wait_for_everyone()


def _resume(accelerator: Accelerator, folder: Path, identity: dict[str, Any]) -> dict[str, int]:
    record = json.loads((folder / "run.json").read_text())
    now = json.loads(json.dumps(identity))
    differing = [key for key in now if record["identity"].get(key) != now[key]]
    if differing:
        raise DFlowError(f"{folder} belongs to a run with other {', '.join(differing)}; use another output folder")
    accelerator.load_state(str(folder))
    return record["progress"]


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hub name.")],
    data: Annotated[list[Path], typer.Argument(help="JSONL files of hf-dflow data.")],
    output: Annotated[Path, typer.Option(help="For state, log and the finished model in draft_model/.")],
    config: Annotated[Path, typer.Option(help="The training configuration of the drafter to compare with.")],
    like: Annotated[str, typer.Option(help="The drafter whose size it matches.")],
    copy_layers: Annotated[bool, typer.Option("--copy-layers", help="Start from the target's layers.")] = False,
    features: Annotated[
        Path | None, typer.Option(help="Feature store of that drafter, for distillation; computed if left out.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Rows of more tokens are left out.")] = 1024,
) -> None:
    """Train a classic draft model on the same rows and updates, and of the same size, as a drafter."""
    training = TrainingConfig.from_json(config)
    rows, _ = split_rows([row for path in data for row in read_rows(path, max_length=max_length)])
    model = load_frozen_target(target, training.target_dtype, None, Accelerator().device)
    drafter = DFlowDrafter.from_pretrained(like)
    store = None
    if training.distillation:
        arguments: Any = (rows, model, list(drafter.config.target_layer_ids))
        options: Any = {"dtype": training.feature_dtype, "teacher_top_k": training.teacher_top_k}
        store = FeatureStore(features, *arguments, **options) if features else LiveFeatures(*arguments, **options)
        store.fill()
    layers = matching_layers(model, drafter_size(drafter))
    report = train_draft_model(
        training, model, rows, output, num_layers=layers, initialise_from_target=copy_layers, store=store
    )
    AutoTokenizer.from_pretrained(target).save_pretrained(report.folder)
    typer.echo(json.dumps({**asdict(report), "folder": str(report.folder)}, indent=1))


if __name__ == "__main__":
    typer.run(main)
