"""`python -m hf_dflow.training`: train a drafter from answers of its target."""

from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM

from hf_dflow.modeling_dflow import DFlowDrafter
from hf_dflow.training.data import read_rows, split_rows
from hf_dflow.training.evaluate import tokens_per_step
from hf_dflow.training.features import FeatureStore
from hf_dflow.training.trainer import Trainer, TrainingConfig


def main(
    target: str,
    config: Path,
    output: Path,
    features: Path,
    data: list[Path],
    start_from: str | None = None,
    threads: int = 2,
) -> None:
    """Train as CONFIG says on the answers in DATA files (JSONL with prompt_ids and answer_ids); resumes by itself."""
    torch.set_num_threads(threads)
    training = TrainingConfig.from_json(config)
    rows, held_out = split_rows([row for path in data for row in read_rows(path)])
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    stores = {}
    for name, part in (("train", rows), ("held", held_out)):
        stores[name] = FeatureStore(
            features / name,
            part,
            target_model,
            training.target_layer_ids,
            dtype=training.feature_dtype,
            teacher_top_k=training.teacher_top_k if training.distillation else 0,
        )
        stores[name].fill(lambda done, total: print(f"features {done}/{total}", flush=True))
    drafter = DFlowDrafter.from_pretrained(start_from) if start_from else None
    trainer = Trainer(training, target_model, rows, stores["train"], output, drafter)
    print("resumed" if trainer.resume() else "started", "at update", trainer.update, flush=True)
    trainer.run()
    counts = [
        tokens_per_step(trainer.drafter, target_model, row, stores["held"][index])
        for index, row in enumerate(held_out)
        if row.temperature == 0.0
    ]
    tokens, steps, first_right = (sum(values) for values in zip(*counts, strict=True))
    print(f"held-out greedy answers, relay off: {tokens / steps:.3f} tokens per step, first {first_right / steps:.3f}")
    trainer.drafter.bfloat16().save_pretrained(output / "drafter")


typer.run(main)
