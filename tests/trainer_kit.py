"""A tiny training run, built alike in the tests' process and in the processes that the tests kill."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from kit import MASK_TOKEN_ID, shared_target

from hf_dflow.training.config import Stage, TrainingConfig
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.trainer import Trainer

PROMPT_LENGTH = 6
MASK_STAGE, RELAY_STAGE = Stage(8, 0, 2, 4), Stage(12, 2, 2, 4)
STAGES = [MASK_STAGE, RELAY_STAGE]


def training_target():
    """The float32 target of the tiny runs, shared."""
    return shared_target("llama", dtype=torch.float32)


def tiny_rows(count: int = 7, seed: int = 0) -> list[TrainingRow]:
    """Random text of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        token_ids = torch.randint(1, MASK_TOKEN_ID - 2, (18 + i,), generator=generator).tolist()
        rows.append(TrainingRow(token_ids, PROMPT_LENGTH, f"prompt {i}", 0.0))
    return rows


def tiny_training(**changes) -> TrainingConfig:
    """20 updates: 8 of the mask round, 12 with two relay rounds; everything random is in use."""
    training = TrainingConfig(
        num_hidden_layers=1,
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=[0, 2],
        stages=STAGES,
        other_candidates=8,
        feature_noise=0.1,
        save_every=5,
        log_every=5,
        evaluate_every=0,
    )
    return replace(training, **changes)


def tiny_trainer(
    output: Path, *, rows=None, target=None, drafter=None, prompts=None, report_to=None, **changes
) -> Trainer:
    """A trainer of the tiny run in `output`; `changes` are fields of its configuration."""
    target = training_target() if target is None else target
    rows = tiny_rows() if rows is None else rows
    training = tiny_training(**changes)
    layer_ids = training.target_layer_ids or list(drafter.config.target_layer_ids)
    store = LiveFeatures(rows, target, layer_ids)
    return Trainer(training, target, rows, store, output, drafter, prompts=prompts, report_to=report_to)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy."""
    return {name: weight.detach().clone() for name, weight in trainer.drafter.state_dict().items()}


def log_of(folder: Path) -> list[dict]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    return [
        name for name in {**one, **other} if name not in one or name not in other or not one[name].equal(other[name])
    ]


def assert_same_end(resumed: Trainer, straight: Trainer) -> None:
    """A resumed run has the weights, optimiser, counters, random state and log of one that was never interrupted."""
    assert differing(weights_of(resumed), weights_of(straight)) == []
    assert (resumed.rows_drawn, resumed.update) == (straight.rows_drawn, straight.update) == (40, 20)
    parameters = dict(resumed.drafter.named_parameters())
    for name, parameter in straight.drafter.named_parameters():
        state = resumed.optimizer.state[parameters[name]]
        assert all(state[key].equal(value) for key, value in straight.optimizer.state[parameter].items()), name
    assert resumed.generator.get_state().equal(straight.generator.get_state())
    assert sorted(path.name for path in resumed.output.glob("checkpoint-*")) == ["checkpoint-15", "checkpoint-20"]
    logged, expected = (
        [(line["update"], line["losses"], line["learning_rate"]) for line in log_of(trainer.output)]
        for trainer in (resumed, straight)
    )
    assert logged == expected and [update for update, *_ in logged] == [5, 8, 10, 15, 20]
