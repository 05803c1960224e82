"""Configuration of a block-diffusion drafter with verifier relay."""

import math
import sys
import warnings
from collections.abc import Sequence
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dflow.errors import DrafterConfigError

SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
    "relay_intermediate_size",
)
JSON_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list",
              dict: "an object"}  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention")
INPUT_EMBEDDINGS = ("raw", "target", "own")
OUTPUT_HEADS = ("target", "own")
FORMAT_VERSION = 1
# Far above what any drafter or tokenizer has; what the file claims beyond is damage, or an attempt to exhaust memory.
LONGEST_BLOCK, LARGEST_VOCABULARY = 1024, 2**24
GIVEN: Any = None  # no default; `check` refuses a drafter without it
# What `hf-dflow calibrate` fits: coefficients of the mixture's learned weight; lines for the first, second and later
# slots, of greedy and of sampled drafts.
NUM_TRAITS, SLOT_GROUPS, DRAFT_RULES = 8, 3, ("greedy", "sampled")
REMOVED = "relay_top_k"  # a field of earlier versions, whose relays could read the verifier's logits too


class DFlowDrafterConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlowDrafter`]. Keys without a sensible default (`block_size`, `mask_token_id`,
    `target_layer_ids`, `rope_parameters`, sizes) have none: [`~DFlowDrafterConfig.check`] names what is missing.

    Args:
        vocab_size (`int`, *optional*):
            Rows of the target's vocabulary that the drafter may propose; `None`: all. Required where the drafter owns a
            matrix of that height.
        hidden_size (`int`): Width of the draft layers; the target's, unless the drafter owns embedding and head.
        target_hidden_size (`int`, *optional*, defaults to `hidden_size`): Width of one tapped target state.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`):
            As in Qwen3. `num_key_value_heads` defaults to `num_attention_heads`, `head_dim` to the even split.
        rope_parameters (`dict`): Rotary parameters, e.g. `{"rope_type": "default", "rope_theta": 1e6}`.
        layer_types (`list[str]`): One of `"full_attention"`, `"sliding_attention"` for each draft layer.
        sliding_window (`int`, *optional*): Window of the sliding layers, in tokens.
        sliding_is_causal, full_is_causal (`bool`, *optional*, default to `False`):
            Whether layers of that type hide later positions of the block from earlier ones.
        window_is_inclusive (`bool`, *optional*, defaults to `True`):
            `|q - k| <= sliding_window` (transformers' native drafters) or `< sliding_window` (z-lab).
        window_from_anchor (`bool`, *optional*, defaults to `False`):
            Every row of a block sees the context that its anchor sees, and the whole block (vLLM's speculators).
        block_size (`int`): Rows of a full block: the anchor and masked slots.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            Each row of the block, the anchor's too, predicts the token after its own position, so that a block drafts
            `block_size` tokens. Otherwise a masked slot predicts its own position: `block_size - 1` tokens.
        mask_token_id (`int`): Token whose input embedding fills the masked slots. Never proposed.
        target_layer_ids (`list[int]`):
            Tapped target layers; id *l* means `hidden_states[l + 1]` of a forward with `output_hidden_states=True`.
        num_target_layers (`int`, *optional*): Layers of the target that the drafter was made for.
        target_name, target_revision (`str`, *optional*): That target; a different one gives a warning, not an error.
        tokenizer_fingerprint (`str`, *optional*): [`~hf_dflow.tokenizer_fingerprint`] of its tokenizer.
        tokenizer_sample (`dict`, *optional*):
            Some of that tokenizer's tokens with their ids, by which it is told from a tokenizer with added tokens.
        chat_mode (`str`, *optional*):
            How the target was prompted when its answers were collected: "thinking", "non-thinking", "chat" or "raw".
        input_embedding (`str`, *optional*, defaults to `"raw"`):
            `"raw"`: rows of the target's embedding matrix, times `input_embedding_scale`. `"target"`: the output of the
            target's embedding module, its own scaling included. `"own"`: the drafter's matrix.
        output_head (`str`, *optional*, defaults to `"target"`): Whose LM head turns draft states into logits.
        draft_vocab_size (`int`, *optional*):
            Number of tokens that an own head can draft, where fewer than `vocab_size`; the weights list them in
            `draft_token_ids`. All others have a draft probability of zero and come from the target alone.
        input_embedding_scale, output_multiplier (`float`, *optional*, defaults to 1.0): Plain factors.
        final_logit_softcapping (`float`, *optional*): `cap * tanh(logits / cap)` after the multiplier.
        conv_kernel_size, conv_group_size (`int`, *optional*):
            DFlash 2: taps, and channels of a group, of the convolutions around each sublayer; `None`: none.
        selector_rank, selector_top_k (`int`, *optional*):
            DFlash 2: rank of the candidate selector, and number of candidates it selects from; `None`: no selector.
        correction_intermediate_size, correction_top_k (`int`, *optional*):
            Width of the MLP that corrects a slot by the token drafted before it, and number of candidates it selects
            from ([`~hf_dflow.model.heads.CausalCorrection`]); `None`: slots are drafted independently.
        use_relay (`bool`, *optional*, defaults to `True`): Whether the model has relay weights.
        relay_intermediate_size (`int`, *optional*, defaults to `hidden_size`): Width of the relay's MLP.
        relay_hidden_act (`str`, *optional*, defaults to `"silu"`): Its activation.
        relay_norm_affine (`bool`, *optional*, defaults to `False`):
            Whether its LayerNorm has weights. The paper states neither width nor activation nor affinity.
        generation_defaults (`dict`, *optional*): Fields of [`DFlowGenerationConfig`] recorded with the drafter.
        fitted_decisions (`dict`, *optional*):
            What `hf-dflow calibrate` fitted: `mixture`, the coefficients of [`StaleMixture`]'s learned weight;
            `calibration`, for "greedy" and "sampled" drafts a line (intercept, slope) through the logit of the
            drafter's confidence for the first, the second and later slots; `row_precision`, for each of the two the
            inverse variance of what a text adds to the intercept.
    """

    model_type = "dflow_drafter"
    default_theta = GIVEN  # a guessed rotary base costs acceptance without any error

    vocab_size: Any = None  # int; None: the target's
    hidden_size: int = GIVEN
    target_hidden_size: int = GIVEN
    intermediate_size: int = GIVEN
    num_hidden_layers: int = GIVEN
    num_attention_heads: int = GIVEN
    num_key_value_heads: int = GIVEN
    head_dim: int = GIVEN
    hidden_act: str = "silu"
    max_position_embeddings: int = GIVEN
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_parameters: dict = GIVEN
    layer_types: list[str] = GIVEN
    sliding_window: int = GIVEN
    sliding_is_causal: bool = False
    full_is_causal: bool = False
    window_is_inclusive: bool = True
    window_from_anchor: bool = False
    block_size: int = GIVEN
    sample_from_anchor: bool = False
    mask_token_id: int = GIVEN
    target_layer_ids: list[int] = GIVEN
    num_target_layers: int | None = None
    target_name: str | None = None
    target_revision: str | None = None
    tokenizer_fingerprint: str | None = None
    tokenizer_sample: dict | None = None
    chat_mode: str | None = None
    input_embedding: str = "raw"
    output_head: str = "target"
    draft_vocab_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    correction_intermediate_size: int | None = None
    correction_top_k: int | None = None
    use_relay: bool = True
    relay_intermediate_size: int = GIVEN
    relay_hidden_act: str = "silu"
    relay_norm_affine: bool = False
    generation_defaults: dict | None = None
    fitted_decisions: dict | None = None
    format_version: int = FORMAT_VERSION
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size is not None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.relay_intermediate_size is None:
            self.relay_intermediate_size = self.hidden_size
        if kwargs.get(REMOVED) is None:  # files of earlier versions hold it as null
            kwargs.pop(REMOVED, None)
        super().__post_init__(**kwargs)

    @property
    def window_reach(self) -> int:
        """The largest distance that a query of a sliding layer sees."""
        return self.sliding_window if self.window_is_inclusive else self.sliding_window - 1

    @property
    def drafts_per_block(self) -> int:
        """How many tokens a full block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check(self) -> None:
        """Raise [`DrafterConfigError`] for the first thing that makes a drafter of this configuration impossible."""
        if self.format_version > FORMAT_VERSION:
            self._refuse(
                f"format_version {self.format_version} is newer than this hf_dflow understands "
                f"(up to {FORMAT_VERSION}); upgrade hf_dflow"
            )
        if hasattr(self, REMOVED):
            self._refuse(
                f"'{REMOVED}' is {getattr(self, REMOVED)!r}: relays that read the verifier's logits were removed; take "
                "the field out and train the drafter again"
            )
        self._check_types()
        self._check_sizes()
        self.check_rope()
        self._check_block()
        self._check_mask_token()
        self._check_layers()
        self._check_choice("input_embedding", INPUT_EMBEDDINGS)
        self._check_choice("output_head", OUTPUT_HEADS)
        problem = None if self.fitted_decisions is None else _problem_of_fit(self.fitted_decisions)
        if problem:
            self._refuse(f"'fitted_decisions': {problem}; run hf-dflow calibrate again, or take the field out")
        self._check_draft_vocabulary()
        self._check_pairs()
        shares_width = self.input_embedding != "own" or self.output_head != "own"
        if shares_width and self.target_hidden_size != self.hidden_size:
            self._refuse(
                f"'hidden_size' {self.hidden_size} differs from 'target_hidden_size' {self.target_hidden_size} while "
                "the target's embedding or head is shared; set input_embedding and output_head to 'own'"
            )

    def _check_types(self) -> None:
        for key in (*SIZES, "rope_parameters", "layer_types", "mask_token_id", "target_layer_ids"):
            if getattr(self, key) is None:
                self._refuse(f"'{key}' is missing and has no safe default; add it")
        for key, hint in DFlowDrafterConfig.__annotations__.items():
            value, may_be_none = getattr(self, key), getattr(DFlowDrafterConfig, key) is None
            allowed = _json_types(hint)
            if allowed and not (value is None and may_be_none) and not _is_one_of(value, allowed):
                self._refuse(f"'{key}' is {value!r}; give {' or '.join(JSON_TYPES[kind] for kind in allowed)}")

    def _check_sizes(self) -> None:
        for key in (*SIZES, *(() if self.vocab_size is None else ("vocab_size",))):
            if not _is_one_of(getattr(self, key), [int]) or getattr(self, key) < 1:
                self._refuse(f"'{key}' is {getattr(self, key)!r}; give a whole number from 1")
        if self.num_attention_heads % self.num_key_value_heads:
            self._refuse(
                f"'num_attention_heads' {self.num_attention_heads} is no multiple of 'num_key_value_heads' "
                f"{self.num_key_value_heads}; correct one of them"
            )
        self._check_choice("hidden_act", sorted(ACT2FN))
        self._check_choice("relay_hidden_act", sorted(ACT2FN))

    def check_rope(self) -> None:
        """Raise [`DrafterConfigError`] unless the rotary parameters are complete and turn whole heads."""
        rope = self.rope_parameters
        theta = rope.get("rope_theta")
        if theta is None:
            self._refuse("'rope_parameters' lacks 'rope_theta' (the rotary base), which has no safe default; add it")
        if not _is_one_of(theta, [float]) or not 0 < theta < math.inf:
            self._refuse(f"'rope_theta' is {theta!r}; give a positive number")
        rope_types = ("default", *ROPE_INIT_FUNCTIONS)
        if rope.get("rope_type", "default") not in rope_types:
            self._refuse(f"'rope_type' is {rope['rope_type']!r}; allowed: {', '.join(rope_types)}")
        for length in (1, 2 * self.max_position_embeddings):  # some types have other factors for long texts
            try:
                width = self._rotary_width(length)
            except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
                self._refuse(
                    f"'rope_parameters' {rope} cannot be computed for heads of {self.head_dim} "
                    f"({type(error).__name__}: {error}); complete them, or use the type 'default'"
                )
            if width != self.head_dim:
                self._refuse(
                    f"'rope_parameters' {rope} turn {width} channels of heads with 'head_dim' {self.head_dim}; a draft "
                    "layer turns whole heads of even width: leave 'partial_rotary_factor' out, or correct 'head_dim'"
                )

    def _rotary_width(self, length: int) -> int:
        """How many channels of a head are rotated, in a text of `length` tokens."""
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type == "default":  # of the draft layers, which read no 'partial_rotary_factor' then
            return 2 * len(range(0, self.head_dim, 2))
        inverse_frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](self, seq_len=length)
        return 2 * len(inverse_frequencies)

    def _check_block(self) -> None:
        if self.block_size < 2:
            self._refuse(
                f"'block_size' is {self.block_size}; a block is an anchor and at least one draft: use 2 or more"
            )
        longest = min(LONGEST_BLOCK, self.max_position_embeddings)
        if self.block_size > longest:
            self._refuse(
                f"'block_size' is {self.block_size}; use at most {longest} ('max_position_embeddings', and never more "
                f"than {LONGEST_BLOCK})"
            )

    def _check_mask_token(self) -> None:
        num_rows = LARGEST_VOCABULARY if self.vocab_size is None else self.vocab_size
        if num_rows > LARGEST_VOCABULARY:
            self._refuse(f"'vocab_size' is {num_rows}; no tokenizer has more than {LARGEST_VOCABULARY} tokens")
        if not 0 <= self.mask_token_id < num_rows:
            self._refuse(
                f"'mask_token_id' {self.mask_token_id} has no row in a vocabulary of {num_rows}; "
                f"use an id in [0, {num_rows - 1}]"
            )
        eos_ids = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        for name, special_ids in (("eos_token_id", eos_ids), ("pad_token_id", [self.pad_token_id])):
            if self.mask_token_id in special_ids:
                warnings.warn(
                    f"{self._where()}: 'mask_token_id' {self.mask_token_id} equals '{name}'. A mask token is never "
                    "proposed, so the drafter will not propose that token either; check the file.",
                    stacklevel=3,
                )

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            self._refuse(f"'layer_types' has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                self._refuse(f"'layer_types' holds '{layer_type}'; allowed: {', '.join(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            self._refuse("'sliding_window' is missing though 'layer_types' has sliding layers; add it")
        ids = self.target_layer_ids
        if not ids or any(not _is_one_of(i, [int]) or i < 0 for i in ids) or len(set(ids)) != len(ids):
            self._refuse(f"'target_layer_ids' is {ids}; give distinct layer numbers, 0 is the first decoder layer")
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            self._refuse(f"'target_layer_ids' names layer {max(ids)} of a target with {self.num_target_layers} layers")

    def _check_pairs(self) -> None:
        """Parts that two numbers describe, and what they exclude."""
        for first, second in (
            ("conv_kernel_size", "conv_group_size"),
            ("selector_rank", "selector_top_k"),
            ("correction_intermediate_size", "correction_top_k"),
        ):
            values = [getattr(self, first), getattr(self, second)]
            if values != [None, None] and any(value is None or value < 1 for value in values):
                self._refuse(
                    f"'{first}' is {values[0]!r} and '{second}' {values[1]!r}; give two whole numbers from 1, or none"
                )
        if self.conv_kernel_size is not None and self.conv_group_size is not None:
            if self.hidden_size % self.conv_group_size:
                self._refuse(
                    f"'conv_group_size' {self.conv_group_size} does not divide 'hidden_size' {self.hidden_size}; "
                    "correct one of them"
                )
            if self.conv_kernel_size > self.block_size:
                self._refuse(
                    f"'conv_kernel_size' {self.conv_kernel_size} is longer than the block; use block_size at most"
                )
        if self.selector_rank is not None and self.draft_vocab_size is not None:
            self._refuse("a candidate selector does not go with 'draft_vocab_size'; leave one of them out")
        if self.correction_intermediate_size is not None:
            others = [key for key in ("draft_vocab_size", "selector_rank") if getattr(self, key) is not None]
            others += ["final_logit_softcapping"] if self.final_logit_softcapping else []
            if others:
                self._refuse(f"a causal correction does not go with {', '.join(map(repr, others))}; leave one out")

    def _check_draft_vocabulary(self) -> None:
        size = self.draft_vocab_size
        owns = [key for key in ("input_embedding", "output_head") if getattr(self, key) == "own"]
        owns += ["selector_rank"] if self.selector_rank is not None else []
        if self.vocab_size is None and owns:
            self._refuse(f"'vocab_size' is missing, which {' and '.join(owns)} need; add it")
        if size is None:
            return
        if self.output_head != "own":
            self._refuse(
                f"'draft_vocab_size' is {size} while 'output_head' is '{self.output_head}'; a reduced vocabulary needs "
                "the drafter's own rows: set output_head to 'own', or leave draft_vocab_size out"
            )
        if not 1 <= size <= self.vocab_size:
            self._refuse(
                f"'draft_vocab_size' is {size!r} for a vocabulary of {self.vocab_size}; give a whole number in "
                f"[1, {self.vocab_size}], or leave it out"
            )

    def _check_choice(self, key: str, allowed: Sequence[str]) -> None:
        if getattr(self, key) not in allowed:
            self._refuse(f"'{key}' is '{getattr(self, key)}'; allowed: {', '.join(allowed)}")

    def _refuse(self, problem: str) -> NoReturn:
        raise DrafterConfigError(f"{self._where()}: {problem}.")

    def _where(self) -> str:
        return f"{self._name_or_path}/config.json" if self._name_or_path else "DFlowDrafterConfig"


def _json_types(hint: Any) -> list[type]:
    """The types of `JSON_TYPES` that an annotation allows."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [kind for kind in JSON_TYPES if kind in [get_origin(part) or part for part in parts]]


def _is_one_of(value: Any, kinds: Sequence[type]) -> bool:
    """Whether `value` is of one of the types. Whole numbers are numbers and tuples are lists; booleans are neither."""
    if isinstance(value, bool):
        return bool in kinds
    wider = {int: float, tuple: list}.get(type(value))
    return isinstance(value, tuple(kinds)) or wider in kinds


def _problem_of_fit(fitted: Any) -> str | None:
    """What is wrong with `fitted_decisions`, whose keys may all be missing; `None` where nothing is."""
    if not isinstance(fitted, dict) or not fitted.keys() <= {"mixture", "calibration", "row_precision"}:
        return "it may hold 'mixture', 'calibration' and 'row_precision', and nothing else"
    if "mixture" in fitted and not _is_table(fitted["mixture"], (NUM_TRAITS,)):
        return f"'mixture' must be {NUM_TRAITS} numbers"
    for key in ("calibration", "row_precision"):
        by_rule = fitted.get(key, {})
        if not isinstance(by_rule, dict) or not by_rule.keys() <= set(DRAFT_RULES):
            return f"'{key}' may hold {' and '.join(map(repr, DRAFT_RULES))}, and nothing else"
    for rule, lines in fitted.get("calibration", {}).items():
        if not _is_table(lines, (SLOT_GROUPS, 2)):
            return f"'calibration' for {rule} drafts must be {SLOT_GROUPS} pairs of numbers"
    for rule, precision in fitted.get("row_precision", {}).items():
        if not _is_table(precision, ()) or precision <= 0:
            return f"'row_precision' for {rule} drafts must be a number above 0"
    return None


def _is_table(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether `value` holds finite numbers in nested lists of `shape`."""
    if not shape:
        return _is_one_of(value, [float]) and abs(value) <= sys.float_info.max  # a whole number may exceed any float
    return isinstance(value, list) and len(value) == shape[0] and all(_is_table(part, shape[1:]) for part in value)


AutoConfig.register(DFlowDrafterConfig.model_type, DFlowDrafterConfig, exist_ok=True)
