"""Everything that a training run depends on beside data and target, as one JSON file."""

import json
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_dflow.errors import DFlowError
from hf_dflow.model.configuration import REMOVED

PRECISIONS = ("float32", "bfloat16")
DTYPES = ("float32", "bfloat16", "float16")
TRAIN_ONLY = (None, "relay", "correction")
DEFAULT_CANDIDATES = 16
LEAST_DECAY = 0.01  # nothing is left of the second slot's weight, and the first one's is still a number
DECAY_OF_BLOCK = {8: 4.0, 10: 5.0, 16: 7.0}  # arXiv 2602.06036


class TrainingConfigError(DFlowError, ValueError):
    """A training configuration with an unknown key or an impossible value."""


@dataclass
class Stage:
    """A stretch of updates with its own schedule: linear warm-up, then a cosine to zero.

    Args:
        updates (`int`): Optimiser steps.
        relay_rounds (`int`, *optional*, defaults to 0): Reject-conditioned rounds after the mask round.
        rows_per_update (`int`, *optional*, defaults to 8): Rows in one forward, on each process.
        anchors_per_row (`int`, *optional*, defaults to 16): Different anchors of each row, where it has so many.
        learning_rate (`float`, *optional*, defaults to 1e-3): At the end of the warm-up.
        warmup_share (`float`, *optional*, defaults to 0.04): Share of the stage's updates.
        block_size (`int`, *optional*): Shorter than the drafter's, for early stages: while first slots are wrong, later
            ones teach little, and the slots of one block of 8 are those of four blocks of 2.
        loss_decay (`float`, *optional*): As in the run, for this stage alone.
    """

    updates: int
    relay_rounds: int = 0
    rows_per_update: int = 8
    anchors_per_row: int = 16
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    block_size: int | None = None
    loss_decay: float | None = None


@dataclass
class TrainingConfig:
    """A run. Fields that default to `None` are filled in by [`resolve`] from the drafter to continue, or the target.

    Args:
        num_hidden_layers (`int`, *optional*): Draft layers; 2.
        block_size (`int`, *optional*): Anchor and drafts; 8.
        mask_token_id (`int`, *optional*): Fills masked slots and is never proposed; a token that the data lacks.
        target_layer_ids (`list[int]`, *optional*): Tapped layers; up to 5 from the 2nd to the third-to-last.
        draft_vocab_size (`int`, *optional*): Tokens of an own, smaller head, the data's most frequent; `None`: the
            target's head and all of its tokens.
        stages (`list[Stage]`): One after the other.
        loss_decay (`float`, *optional*): γ of the position-decayed loss, in slots; 4, 5, 7 for blocks of 8, 10, 16.
        distillation (`float`, *optional*, defaults to 0): Share of the target's distribution in what is learned, 0 … 1.
        teacher_top_k (`int`, *optional*, defaults to 32): Tokens kept of that distribution.
        use_relay (`bool`, *optional*, defaults to `True`): `False`: rounds without verifier states, no relay weights.
        relay_intermediate_size (`int`, *optional*): Width of the relay's MLP; by default the drafter's own.
        correction_intermediate_size (`int`, *optional*): Width of a causal correction, by which each slot hears of the
            draft before it; `None`: none, or the drafter's own.
        correction_top_k (`int`, *optional*): Candidates of a slot that it chooses from; 16.
        base_share (`float`, *optional*, defaults to 0.25): Share of the slots that learn without the correction, so
            that their candidates stay good (after Domino's base-anchored training, arXiv 2605.29707).
        train_only (`str`, *optional*): "relay" or "correction" freezes everything else.
        precision (`str`, *optional*, defaults to "float32"): Or "bfloat16", the drafter's arithmetic under autocast.
            Its weights and the optimiser's state stay float32.
        target_dtype (`str`, *optional*, defaults to "float32"): What the frozen target is loaded in.
        feature_dtype (`str`, *optional*, defaults to "float32"): What its cached states are stored in.
        save_dtype (`str`, *optional*, defaults to "bfloat16"): What the finished drafter is saved in.
        initialise_from_target (`bool`, *optional*): Start draft layers as copies of the target's last; where they fit.
        other_candidates (`int`, *optional*, defaults to 2048): Random tokens in an update's softmax beside the data's.
        feature_noise (`float`, *optional*, defaults to 0): Relative noise on context features, against learning a small
            data set by heart.
        weight_decay, max_grad_norm (`float`, *optional*, default to 0.01 and 1.0): As usual.
        gradient_accumulation (`int`, *optional*, defaults to 1): Forwards in one update.
        pack_rows (`bool`, *optional*, defaults to `False`): Put short rows side by side, up to the longest's length.
        max_skips_in_row (`int`, *optional*, defaults to 25): Non-finite or unsupervised updates until the run stops.
        seed (`int`, *optional*, defaults to 0): Of initialisation, data order, anchors and noise.
        save_every (`int`, *optional*, defaults to 100): Updates between checkpoints.
        keep_checkpoints (`int`, *optional*, defaults to 2): How many stay.
        log_every (`int`, *optional*, defaults to 10): Updates that one line of `log.jsonl` is the mean of.
        evaluate_every (`int`, *optional*): Updates between decodings of held-out prompts; a tenth of the run, 10 at
            least. 0: never.
        evaluate_prompts, evaluate_tokens (`int`, *optional*, default to 8 and 48): How many, and new tokens for each.
    """

    num_hidden_layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    stages: list[Stage] = field(default_factory=list)
    loss_decay: float | None = None
    distillation: float = 0.0
    teacher_top_k: int = 32
    use_relay: bool = True
    relay_intermediate_size: int | None = None
    correction_intermediate_size: int | None = None
    correction_top_k: int | None = None
    base_share: float = 0.25
    train_only: str | None = None
    precision: str = "float32"
    target_dtype: str = "float32"
    feature_dtype: str = "float32"
    save_dtype: str = "bfloat16"
    initialise_from_target: bool | None = None
    other_candidates: int = 2048
    feature_noise: float = 0.0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    gradient_accumulation: int = 1
    pack_rows: bool = False
    max_skips_in_row: int = 25
    seed: int = 0
    save_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    evaluate_every: int | None = None
    evaluate_prompts: int = 8
    evaluate_tokens: int = 48

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
            record = json.loads(Path(path).read_text(encoding="utf-8"))
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

    def check(self, where: str = "training configuration") -> None:
        """Raise [`TrainingConfigError`] for the first impossible value."""

        def require(holds: bool, key: str, allowed: str, holder: Any = self) -> None:
            if not holds:
                place = where if holder is self else f"{where}, stage {self.stages.index(holder) + 1}"
                raise TrainingConfigError(f'{place}: "{key}" is {getattr(holder, key)!r}; give {allowed}')

        require(bool(self.stages), "stages", 'at least one, e.g. [{"updates": 1000}]')
        for stage in self.stages:
            for key, least in (("updates", 1), ("relay_rounds", 0), ("rows_per_update", 1), ("anchors_per_row", 1)):
                require(_is_int(getattr(stage, key), least), key, f"a whole number from {least}", stage)
            require(_is_number(stage.learning_rate, above=0.0), "learning_rate", "a number above 0", stage)
            require(_is_number(stage.warmup_share, 0.0, 1.0), "warmup_share", "a number in 0 … 1", stage)
            own, block = stage.block_size, self.block_size
            fits = own is None or (_is_int(own, 2) and (not isinstance(block, int) or own <= block))
            require(fits, "block_size", f"a whole number from 2 to the drafter's {block or ''}".rstrip(), stage)
            holds = stage.loss_decay is None or _is_number(stage.loss_decay, LEAST_DECAY)
            require(holds, "loss_decay", f"a number from {LEAST_DECAY}", stage)
            if self.train_only == "relay":
                require(stage.relay_rounds > 0, "relay_rounds", 'at least 1 with "train_only": "relay"', stage)
        optional = {"num_hidden_layers": 1, "block_size": 2, "mask_token_id": 0, "draft_vocab_size": 1}
        for key, least in {**optional, "evaluate_every": 0}.items():
            require(
                getattr(self, key) is None or _is_int(getattr(self, key), least), key, f"a whole number from {least}"
            )
        for key in ("teacher_top_k", "gradient_accumulation", "max_skips_in_row", "save_every", "keep_checkpoints"):
            require(_is_int(getattr(self, key), 1), key, "a whole number from 1")
        for key in ("log_every", "evaluate_prompts", "evaluate_tokens"):
            require(_is_int(getattr(self, key), 1), key, "a whole number from 1")
        require(_is_int(self.other_candidates, 0), "other_candidates", "a whole number from 0")
        require(_is_int(self.seed, 0) and self.seed < 2**32, "seed", "a whole number in 0 … 2^32 - 1")
        ids = self.target_layer_ids
        is_list = ids is None or (isinstance(ids, list) and bool(ids) and all(_is_int(i, 0) for i in ids))
        require(is_list, "target_layer_ids", "a list of layer numbers; 0 is the first decoder layer")
        holds = self.loss_decay is None or _is_number(self.loss_decay, LEAST_DECAY)
        require(holds, "loss_decay", f"a number from {LEAST_DECAY}")
        require(_is_number(self.distillation, 0.0, 1.0), "distillation", "a number in 0 … 1")
        require(_is_number(self.max_grad_norm, above=0.0), "max_grad_norm", "a number above 0")
        for key in ("relay_intermediate_size", "correction_intermediate_size", "correction_top_k"):
            require(getattr(self, key) is None or _is_int(getattr(self, key), 1), key, "a whole number from 1, or null")
        require(_is_number(self.base_share, 0.0, 1.0), "base_share", "a number in 0 … 1")
        corrects = self.correction_intermediate_size is not None
        require(corrects or self.correction_top_k is None, "correction_top_k", "null without a correction")
        require(not corrects or self.draft_vocab_size is None, "draft_vocab_size", "null with a causal correction")
        for key in ("feature_noise", "weight_decay"):
            require(_is_number(getattr(self, key), 0.0), key, "a number from 0")
        for key, allowed in (
            ("precision", PRECISIONS),
            ("train_only", TRAIN_ONLY),
            ("use_relay", (True, False)),
            ("pack_rows", (True, False)),
        ):
            require(getattr(self, key) in allowed, key, f"one of {', '.join(map(json.dumps, allowed))}")
        for key in ("target_dtype", "feature_dtype", "save_dtype"):
            require(getattr(self, key) in DTYPES, key, f"one of {', '.join(map(json.dumps, DTYPES))}")
        require(self.initialise_from_target in (None, True, False), "initialise_from_target", "true, false or null")
        require(self.train_only != "relay" or self.use_relay, "use_relay", 'true with "train_only": "relay"')


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


def _refuse_unknown(kind: type, record: dict[str, Any], where: str) -> None:
    known = [one.name for one in fields(kind)]
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise TrainingConfigError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any, least: float = 0.0, most: float = float("inf"), above: float | None = None) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= min(most, sys.float_info.max) and (above is None or value > above)
