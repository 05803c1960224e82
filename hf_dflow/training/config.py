"""Everything that a training run depends on beside data and target, as one JSON file."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.model.configuration import REMOVED
from hf_dflow.text import read_text

LEAST_DECAY = 0.01  # nothing is left of the second slot's weight, and the first one's is still a number


class TrainingConfigError(DFlowError, ValueError):
    """A training configuration with an unknown key or an impossible value."""


@dataclass
class Stage:
    """A stretch of updates with its own schedule: linear warm-up, then a cosine to zero."""

    updates: int
    relay_rounds: int = 0  # reject-conditioned rounds after the mask round
    rows_per_update: int = 8  # in one forward, on each process
    anchors_per_row: int = 16  # different ones, if the row has as many
    learning_rate: float = 1e-3  # at the end of the warm-up
    warmup_share: float = 0.04  # of the stage's updates
    # Shorter than the drafter's, for early stages: while first slots are wrong, later ones teach little, and one block
    # of 8 has as many slots as four blocks of 2.
    block_size: int | None = None
    loss_decay: float | None = None  # instead of the run's

    def learning_rate_at(self, update: int) -> float:
        """The learning rate of the stage's update number `update`, counted from 0."""
        warmup = max(1, round(self.warmup_share * self.updates))
        if update < warmup:
            return self.learning_rate * (update + 1) / warmup
        progress = (update - warmup) / max(1, self.updates - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class TrainingConfig:
    """A run. [`resolve`] fills in most fields that are `None`, from the drafter to continue or from the target."""

    num_hidden_layers: int | None = None  # draft layers; 2
    block_size: int | None = None  # anchor and drafts; 8
    mask_token_id: int | None = None  # fills masked slots and is never proposed; a token that the data lacks
    target_layer_ids: list[int] | None = None  # tapped layers; up to 5 from the 2nd to the third-to-last
    draft_vocab_size: int | None = None  # most frequent tokens, for a smaller head; None: the target's head, all tokens
    stages: list[Stage] = field(default_factory=list)  # one after the other
    loss_decay: float | None = None  # γ of the position-decayed loss, in slots; 4, 5, 7 for blocks of 8, 10, 16
    distillation: float = 0.0  # share of the target's distribution in what is learned, 0 … 1
    teacher_top_k: int = 32  # tokens kept of that distribution
    use_relay: bool = True  # False: rounds without verifier states, no relay weights
    relay_intermediate_size: int | None = None  # width of the relay's MLP; the drafter's own
    correction_intermediate_size: int | None = None  # width of a causal correction; None: none, or the drafter's own
    correction_top_k: int | None = None  # candidates per slot of the correction; 16
    # Slots that learn without the correction, so that their candidates stay good (after Domino's base-anchored
    # training, arXiv 2605.29707).
    base_share: float = 0.25
    train_only: str | None = None  # "relay" or "correction" freezes everything else
    precision: str = "float32"  # or "bfloat16": the drafter's arithmetic; weights and optimiser state stay float32
    target_dtype: str = "float32"  # of the frozen target
    feature_dtype: str = "float32"  # of its cached states
    save_dtype: str = "bfloat16"  # of the finished drafter
    initialise_from_target: bool | None = None  # start draft layers as copies of the target's last; where they fit
    other_candidates: int = 2048  # random tokens in an update's softmax beside the data's
    feature_noise: float = 0.0  # relative, on context features, against memorising a small data set
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    gradient_accumulation: int = 1  # forwards in one update
    pack_rows: bool = False  # put short rows side by side, up to the longest's length
    max_skips_in_row: int = 25  # non-finite or unsupervised updates until the run stops
    seed: int = 0  # of initialisation, data order, anchors and noise
    save_every: int = 100  # updates between checkpoints
    keep_checkpoints: int = 2
    log_every: int = 10  # updates that a line of log.jsonl averages
    evaluate_every: int | None = None  # updates between decodings of held-out prompts, 0: never; a tenth of the run
    evaluate_prompts: int = 8
    evaluate_tokens: int = 48  # new tokens for each prompt

    @property
    def updates(self) -> int:
        """Updates of all stages."""
        return sum(stage.updates for stage in self.stages)

    @classmethod
    def from_json(cls, path: str | Path) -> "TrainingConfig":
        """Read and check the configuration at `path`.

        Raises:
            TrainingConfigError: No JSON object, an unknown key (named), or an impossible value.
        """
        try:
            record = json.loads(read_text(path))
        except ValueError as error:
            raise TrainingConfigError(f"{path}: not a JSON file ({error})") from error
        return cls.from_dict(record, str(path))

    @classmethod
    def from_dict(cls, record: dict[str, Any], where: str = "training configuration") -> "TrainingConfig":
        """The configuration that `to_dict` gave, or a person wrote; see [`from_json`]."""
        if not isinstance(record, dict):
            raise TrainingConfigError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if record.get(REMOVED) is not None:
            raise TrainingConfigError(
                f'{where}: "{REMOVED}" is {record[REMOVED]!r}: relays that read the verifier\'s logits were removed; '
                "leave the key out"
            )
        record = {key: value for key, value in record.items() if key != REMOVED}
        _refuse_unknown(cls, record, where)
        stages = record.get("stages", [])
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
            raise TrainingConfigError(f'{where}: "stages" is {stages!r}; give a list of objects')
        for number, stage in enumerate(stages, 1):
            _refuse_unknown(Stage, stage, f"{where}, stage {number}")
            if "updates" not in stage:
                raise TrainingConfigError(f'{where}, stage {number}: "updates" is missing; say how many')
        training = cls(**{**record, "stages": [Stage(**stage) for stage in stages]})
        training.check(where)
        return training

    def to_dict(self) -> dict[str, Any]:
        """All fields, stages as dicts; JSON can hold it."""
        return asdict(self)

    def with_updates(self, updates: int) -> "TrainingConfig":
        """The same run shortened or lengthened to `updates` in all, each stage in proportion."""
        if updates < len(self.stages):
            raise TrainingConfigError(f"{updates} updates for {len(self.stages)} stages; give each at least one")
        ends, total = [0], 0
        for number, stage in enumerate(self.stages, 1):
            total += stage.updates
            left = len(self.stages) - number
            ends.append(min(max(ends[-1] + 1, round(total * updates / self.updates)), updates - left))
        lengths = [end - start for start, end in pairwise(ends)]
        stages = [replace(stage, updates=length) for stage, length in zip(self.stages, lengths, strict=True)]
        return replace(self, stages=stages)

    def with_learning_rate(self, learning_rate: float) -> "TrainingConfig":
        """The same run with another highest learning rate, those of the other stages in proportion."""
        highest = max(stage.learning_rate for stage in self.stages)
        rates = [learning_rate if stage.learning_rate == highest else stage.learning_rate * learning_rate / highest
                 for stage in self.stages]  # fmt: skip
        stages = [replace(stage, learning_rate=rate) for stage, rate in zip(self.stages, rates, strict=True)]
        return replace(self, stages=stages)

    def with_rows(self, rows: int) -> "TrainingConfig":
        """The same run with `rows` in the widest stage's updates, and those of the other stages in proportion."""
        widest = max(stage.rows_per_update for stage in self.stages)
        stages = [
            replace(stage, rows_per_update=max(1, round(stage.rows_per_update * rows / widest)))
            for stage in self.stages
        ]
        return replace(self, stages=stages)

    def check(self, where: str = "training configuration") -> None:
        """Raise [`TrainingConfigError`] for the first impossible value."""

        def require(holds: bool, key: str, allowed: str, stage: Stage | None = None) -> None:
            if not holds:
                place = where if stage is None else f"{where}, stage {self.stages.index(stage) + 1}"
                value = getattr(self if stage is None else stage, key)
                raise TrainingConfigError(f'{place}: "{key}" is {value!r}; give {allowed}')

        require(bool(self.stages), "stages", 'at least one, e.g. [{"updates": 1000}]')
        for stage in self.stages:
            for key, value in vars(stage).items():
                require(CHECKS[key].holds(value), key, CHECKS[key].allowed, stage)
            limit = self.block_size if isinstance(self.block_size, int) else None
            fits = stage.block_size is None or limit is None or stage.block_size <= limit
            require(fits, "block_size", f"a whole number from 2 to the drafter's {limit}", stage)
            if self.train_only == "relay":
                require(stage.relay_rounds > 0, "relay_rounds", 'at least 1 with "train_only": "relay"', stage)
        for key, value in vars(self).items():
            if key != "stages":
                require(CHECKS[key].holds(value), key, CHECKS[key].allowed)
        has_correction = self.correction_intermediate_size is not None
        require(has_correction or self.correction_top_k is None, "correction_top_k", "null without a correction")
        require(not has_correction or self.draft_vocab_size is None, "draft_vocab_size", "null with a correction")
        require(self.use_relay or self.train_only != "relay", "use_relay", 'true with "train_only": "relay"')


# -- what each field may be


@dataclass(frozen=True)
class Check:
    """A condition on a field's value, and the same in words."""

    holds: Callable[[Any], bool]
    allowed: str


def _integer(least: int, most: int | None = None) -> Check:
    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value and value <= (most or value)

    return Check(holds, f"a whole number from {least}" + (f" to {most}" if most else ""))


def _number(least: float, most: float = sys.float_info.max) -> Check:
    def holds(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return Check(holds, f"a number from {least:g}" + (f" to {most:g}" if most < sys.float_info.max else ""))


def _one_of(*values: Any) -> Check:
    return Check(lambda value: value in values, f"one of {', '.join(map(json.dumps, values))}")


def _or_null(check: Check) -> Check:
    return Check(lambda value: value is None or check.holds(value), f"{check.allowed}, or null")


POSITIVE = Check(lambda value: _number(0).holds(value) and value > 0, "a number above 0")
LAYER_IDS = Check(
    lambda value: isinstance(value, list) and bool(value) and all(map(_integer(0).holds, value)),
    "a list of layer numbers; 0 is the first decoder layer",
)
# Of a run and of its stages; what both have may be the same in both.
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("updates", "rows_per_update", "anchors_per_row"), _integer(1)),
    **dict.fromkeys(("teacher_top_k", "gradient_accumulation", "max_skips_in_row"), _integer(1)),
    **dict.fromkeys(("save_every", "keep_checkpoints", "log_every"), _integer(1)),
    **dict.fromkeys(("evaluate_prompts", "evaluate_tokens"), _integer(1)),
    **dict.fromkeys(("relay_rounds", "other_candidates"), _integer(0)),
    **dict.fromkeys(("num_hidden_layers", "draft_vocab_size", "relay_intermediate_size"), _or_null(_integer(1))),
    **dict.fromkeys(("correction_intermediate_size", "correction_top_k"), _or_null(_integer(1))),
    **dict.fromkeys(("mask_token_id", "evaluate_every"), _or_null(_integer(0))),
    "block_size": _or_null(_integer(2)),
    "target_layer_ids": _or_null(LAYER_IDS),
    "seed": _integer(0, 2**32 - 1),
    **dict.fromkeys(("warmup_share", "distillation", "base_share"), _number(0, 1)),
    **dict.fromkeys(("feature_noise", "weight_decay"), _number(0)),
    **dict.fromkeys(("learning_rate", "max_grad_norm"), POSITIVE),
    "loss_decay": _or_null(_number(LEAST_DECAY)),
    **dict.fromkeys(("use_relay", "pack_rows"), _one_of(True, False)),
    "initialise_from_target": _one_of(True, False, None),
    "train_only": _one_of(None, "relay", "correction"),
    "precision": _one_of("float32", "bfloat16"),
    **dict.fromkeys(("target_dtype", "feature_dtype", "save_dtype"), _one_of("float32", "bfloat16", "float16")),
}


def _refuse_unknown(kind: type, record: dict[str, Any], where: str) -> None:
    known = [known_field.name for known_field in fields(kind)]
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise TrainingConfigError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")


PRESETS = {
    # Minutes for a small model on a few CPU cores.
    "cpu": TrainingConfig(
        num_hidden_layers=2,
        stages=[
            Stage(updates=400, learning_rate=1e-3),
            Stage(updates=200, relay_rounds=2, rows_per_update=4, learning_rate=5e-4),
        ],
    ),
    # The papers' sizes: 5 layers, blocks of 16, learning rate 6e-4, two relay rounds (arXiv 2602.06036, 2609.06498).
    "gpu": TrainingConfig(
        num_hidden_layers=5,
        block_size=16,
        stages=[
            Stage(updates=10_000, rows_per_update=8, anchors_per_row=64, learning_rate=6e-4),
            Stage(updates=20_000, relay_rounds=2, rows_per_update=8, anchors_per_row=64, learning_rate=3e-4),
        ],
        precision="bfloat16",
        target_dtype="bfloat16",
        feature_dtype="bfloat16",
        other_candidates=16_384,
        pack_rows=True,
        save_every=500,
        log_every=50,
    ),
}
