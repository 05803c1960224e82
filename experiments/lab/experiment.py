"""Kinds of drafters for one target, trained on the same rows, anchors and updates, and measured by decoding."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from experiments.lab.corpora import Corpus, make_tokenizer
from experiments.lab.target import (
    Clock,
    TargetRecipe,
    answer,
    encode,
    held_out_loss,
    new_model,
    prompts,
    train_language_model,
)
from experiments.lab.variants import VARIANTS, VariantTrainer
from hf_dflow import DFlowDrafter, DFlowGenerationConfig
from hf_dflow.bench.conditions import run_conditions
from hf_dflow.bench.probe import probe_text, summarise
from hf_dflow.generation.statistics import tokens_per_step
from hf_dflow.training.config import Stage, TrainingConfig
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import FeatureStore
from hf_dflow.training.trainer import Trainer

KINDS = ("dflash", "multi_round", "dflow", "autoregressive")
ALL_KINDS = (*KINDS, *VARIANTS)


@dataclass(frozen=True)
class DrafterRecipe:
    """The settings that all drafters of a comparison share."""

    num_layers: int = 2
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = (1, 3, 5)
    updates: int = 1500
    rows_per_update: int = 8
    anchors_per_row: int = 8
    relay_rounds: int = 2
    learning_rate: float = 2e-3
    distillation: float = 0.0
    seed: int = 0


@dataclass
class Lab:
    """A trained target with training rows, and prompts to measure on."""

    folder: Path
    target: Any
    tokenizer: Any
    rows: list[TrainingRow]
    held_out: list[TrainingRow]  # greedy answers to prompts that no drafter is trained on

    @classmethod
    def load(cls, folder: Path) -> "Lab":
        """Read what [`prepare_lab`] wrote."""
        target = cls.load_target(folder)
        parts = {name: _read(folder / f"{name}.json") for name in ("rows", "held_out")}
        return cls(folder, target, AutoTokenizer.from_pretrained(folder / "target"), **parts)

    @staticmethod
    def load_target(folder: Path) -> Any:
        """Read the target alone."""
        return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()

    def features(self, recipe: DrafterRecipe) -> FeatureStore:
        """The tapped states of the training rows, computed where the folder lacks them."""
        store = FeatureStore(
            self.folder / "features",
            self.rows,
            self.target,
            list(recipe.target_layer_ids),
            dtype="bfloat16",
            teacher_top_k=8,
        )
        store.fill()
        return store


def write_rows(path: Path, rows: list[TrainingRow]) -> None:
    """Write rows as JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(row) for row in rows]))
    partial.replace(path)


def _read(path: Path) -> list[TrainingRow]:
    return [TrainingRow(**record) for record in json.loads(path.read_text())]


def has_relay(kind: str) -> bool:
    """Whether drafters of `kind` are trained with a relay."""
    return kind in ("dflow", *VARIANTS)


def training_config(kind: str, recipe: DrafterRecipe, mask_token_id: int, save_every: int = 10**9) -> TrainingConfig:
    """The training run of one kind; kinds without a relay differ in nothing but the relay and its rounds."""
    rounds = 0 if kind == "dflash" else recipe.relay_rounds
    stage = Stage(recipe.updates, rounds, recipe.rows_per_update, recipe.anchors_per_row, recipe.learning_rate)
    return TrainingConfig(
        num_hidden_layers=recipe.num_layers,
        block_size=recipe.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=list(recipe.target_layer_ids),
        stages=[stage],
        use_relay=has_relay(kind),
        distillation=recipe.distillation,
        teacher_top_k=8,
        feature_dtype="bfloat16",
        seed=recipe.seed,
        save_every=save_every,
    )


def train(lab: Lab, kind: str, recipe: DrafterRecipe, save_every: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Train a drafter of `kind`; returns it with the seconds it took, its size and the last losses of each round.

    With `save_every`, the run is saved every so many updates, and resumes from the last checkpoint.
    """
    started, record = time.perf_counter(), {}
    folder = lab.folder / "runs" / f"{kind}-{recipe.seed}-{recipe.updates}-{recipe.num_layers}"
    if kind == "autoregressive":
        drafter = _train_autoregressive(lab, recipe)
    else:
        config = training_config(kind, recipe, lab.tokenizer.mask_token_id, save_every or 10**9)
        arguments = (config, lab.target, lab.rows, lab.features(recipe), folder)
        trainer = VariantTrainer(*arguments, variant=VARIANTS[kind]) if kind in VARIANTS else Trainer(*arguments)
        if save_every is not None:
            trainer.resume()
        trainer.run()
        drafter = trainer.drafter.eval()
        record["last_losses"] = last_losses(folder / "log.jsonl")
    count = sum(weight.numel() for name, weight in drafter.named_parameters() if "embed" not in name)
    seconds = time.perf_counter() - started
    return drafter, {"training_seconds": seconds, "non_embedding_parameters": count, **record}


def last_losses(log: Path, updates: int = 100) -> list[float]:
    """Mean loss of each round over the last `updates` of a run's log; the mask round's first."""
    lines = [line for line in map(json.loads, log.read_text(encoding="utf-8").splitlines()) if "losses" in line]
    if not lines:
        return []  # every update was skipped
    counted = [line["losses"] for line in lines if line["update"] > lines[-1]["update"] - updates]
    return [sum(losses) / len(counted) for losses in zip(*counted, strict=True)]


def _train_autoregressive(lab: Lab, recipe: DrafterRecipe) -> Any:
    """The classic small draft model: of the target's architecture, with the target's embedding."""
    torch.manual_seed(recipe.seed)
    model = new_model(lab.tokenizer, recipe.num_layers, lab.target.config.hidden_size)
    model.model.embed_tokens.load_state_dict(lab.target.model.embed_tokens.state_dict())
    schedule = TargetRecipe(
        updates=recipe.updates,
        documents_per_update=recipe.rows_per_update,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
    )
    return train_language_model(model, [row.token_ids for row in lab.rows], schedule)


@torch.no_grad()
def measure(
    lab: Lab,
    drafter: Any,
    rows: list[TrainingRow],
    use_relay: bool | None = None,
    verification: str | None = None,
) -> dict[str, list[int]]:
    """Decode the prompt of each row and count emitted tokens and steps, the prefill's left out.

    Here any forward after the prefill is a step, for all kinds of drafters. One without drafts occurs only where a
    single token is left to write, so at most once in a text.

    Greedy, or with `verification` ("token" or "block") sampled at temperature 1. An autoregressive drafter runs in
    transformers' assisted generation with 7 drafts a step. `identical` is 1 where the text is the target's greedy one.
    """
    counts: dict[str, list[int]] = {"tokens": [], "steps": [], "identical": []}
    sampling: dict[str, Any] = {"do_sample": verification is not None}
    if verification is not None:
        sampling |= {"temperature": 1.0, "top_k": 0}
    for index, row in enumerate(rows):
        set_seed(index)
        options = {"max_new_tokens": row.answer_length, "return_dict_in_generate": True, **sampling}
        prompt = torch.tensor([row.token_ids[: row.prompt_length]])
        arguments: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        forwards: list[int] = []
        handle = lab.target.register_forward_hook(lambda *_, counter=forwards: counter.append(1))
        if isinstance(drafter, DFlowDrafter):
            config = DFlowGenerationConfig(**options, use_relay=use_relay, verification=verification)
            output = lab.target.generate(**arguments, generation_config=config, assistant_model=drafter)
            steps = len(forwards) - 1  # the prefill gives the first token
        else:
            drafter.generation_config.num_assistant_tokens = 7
            drafter.generation_config.num_assistant_tokens_schedule = "constant"
            drafter.generation_config.assistant_confidence_threshold = 0.0
            output = lab.target.generate(**arguments, **options, assistant_model=drafter)
            steps = len(forwards)  # the first verification also reads the prompt
        handle.remove()
        new = output.sequences[0, row.prompt_length :].tolist()
        counts["tokens"].append(len(new) - (1 if isinstance(drafter, DFlowDrafter) else 0))
        counts["steps"].append(max(steps, 1))
        counts["identical"].append(int(new == row.token_ids[row.prompt_length :]))
    return counts


def pooled_tokens_per_step(counts: dict[str, list[int]]) -> float:
    """[`tokens_per_step`], pooled over prompts."""
    return tokens_per_step(sum(counts["tokens"]), sum(counts["steps"]))


def probe(lab: Lab, drafter: DFlowDrafter, rows: list[TrainingRow]) -> dict[str, Any]:
    """The figures of `hf-dflow probe` on the texts of some rows."""
    return summarise(probe_text(drafter, lab.target, row.token_ids, row.prompt_length) for row in rows)


def prepare_lab(
    folder: Path,
    corpus: Corpus,
    recipe: TargetRecipe,
    *,
    num_prompts: int,
    num_held_out: int,
    max_new_tokens: int,
    temperature: float,
) -> list[TrainingRow]:
    """Train the target on a corpus where `folder` has none, and write its answers; returns the training rows."""
    tokenizer: Any = make_tokenizer(corpus, 8192 if corpus.is_word_level else 4096)
    if not (folder / "target.json").exists():  # written last
        torch.manual_seed(recipe.seed)
        model = new_model(tokenizer, recipe.num_layers, recipe.hidden_size)
        documents = corpus.training + (corpus.held_out if corpus.target_knows_held_out else [])
        train_language_model(model, encode(documents, tokenizer), recipe, Clock(f"{corpus.name} target"))
        loss = held_out_loss(model, encode(corpus.held_out[:60], tokenizer))
        record = {
            "corpus": corpus.name,
            "held_out_loss": loss,
            "updates": recipe.updates,
            "seed": recipe.seed,
            **run_conditions(),
        }
        tokenizer.save_pretrained(folder / "target")
        model.save_pretrained(folder / "target")
        (folder / "target.json").write_text(json.dumps(record, indent=1))
    target, tokenizer = Lab.load_target(folder), AutoTokenizer.from_pretrained(folder / "target")
    return write_answers(
        folder,
        target,
        prompts(corpus, corpus.training, tokenizer, num_prompts),
        prompts(corpus, corpus.held_out, tokenizer, num_held_out),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )


def write_answers(
    folder: Path, target, training_prompts, held_out_prompts, *, max_new_tokens: int, temperature: float
) -> list[TrainingRow]:
    """Write the target's answers for training (half greedy, half sampled; returned) and for measuring (greedy)."""
    half = len(training_prompts) // 2
    rows = answer(target, training_prompts[:half], max_new_tokens, 0.0)
    rows += answer(target, training_prompts[half:], max_new_tokens, temperature)
    rows = [row for row in rows if row.answer_length > 9]
    write_rows(folder / "rows.json", rows)
    held_out = answer(target, held_out_prompts, max_new_tokens, 0.0)
    write_rows(folder / "held_out.json", [row for row in held_out if row.answer_length > 9])
    return rows
