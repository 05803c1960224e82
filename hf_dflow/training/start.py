"""The drafter that a run starts from: a new one in the target's shape, or another drafter's weights."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_dflow.errors import DFlowError, DrafterConfigError
from hf_dflow.generation._compat import num_layer_states
from hf_dflow.generation.pair import check_pair, shape_mismatch
from hf_dflow.logs import get_logger
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.config import TrainingConfig, TrainingConfigError
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.frozen_target import inner_model
from hf_dflow.training.loss import frequent_tokens
from hf_dflow.training.proposals import check_relay_target

logger = get_logger(__name__)
DEFAULT_LAYERS, DEFAULT_BLOCK, DEFAULT_TAPS, DEFAULT_CANDIDATES = 2, 8, 5, 16
DECAY_OF_BLOCK = {8: 4.0, 10: 5.0, 16: 7.0}  # arXiv 2602.06036
EVALUATIONS_PER_RUN, LEAST_UPDATES_BETWEEN_EVALUATIONS = 10, 10
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# How axes of images and videos share a head's frequencies; a text has the same position on every axis.
MODALITY_ROPE = ("mrope_section", "mrope_interleaved")
NEW_PARTS = ("relay.", "causal_correction.")  # what a run may add to a drafter that it continues
OWN_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # stay at one if the target has none
LAYER_WEIGHTS = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def resolve(
    training: TrainingConfig,
    target: Any,
    data_ids: torch.Tensor,
    drafter: DFlowDrafter | None = None,
    special_ids: Sequence[int] = (),
) -> TrainingConfig:
    """Fill in what `training` leaves open, from the drafter to continue or else from the target. Idempotent.

    Args:
        data_ids (`torch.LongTensor` of shape `(K,)`): Distinct tokens of the training data.
        drafter (`DFlowDrafter`, *optional*): What the run continues from.
        special_ids (`list[int]`, *optional*): The tokenizer's special tokens; one that the data lacks is the mask.

    Raises:
        TrainingConfigError: `training` contradicts the drafter to continue or the target.
        DFlowError: No drafter can have the target's shape, or the drafter to continue does not fit this target.
    """
    has_correction = drafter is not None and drafter.causal_correction is not None
    if training.train_only == "correction" and not (has_correction or training.correction_intermediate_size):
        raise TrainingConfigError(
            '"train_only" is "correction", and neither a drafter to continue nor the configuration has one; give '
            '"correction_intermediate_size", e.g. 256'
        )
    if drafter is None:
        resolved = replace(training, **_from_target(training, target, data_ids, special_ids))
    else:
        resolved = replace(training, **_from_drafter(training, drafter))
    if resolved.correction_intermediate_size is not None and resolved.correction_top_k is None:
        resolved.correction_top_k = DEFAULT_CANDIDATES
    if resolved.loss_decay is None:
        block_size: Any = resolved.block_size
        nearest = min(DECAY_OF_BLOCK, key=lambda block: abs(block - block_size))
        resolved.loss_decay = DECAY_OF_BLOCK[nearest]
    if resolved.evaluate_every is None:
        resolved.evaluate_every = max(LEAST_UPDATES_BETWEEN_EVALUATIONS, training.updates // EVALUATIONS_PER_RUN)
    resolved.check()
    _check_fits_target(resolved, target)
    if resolved.use_relay and any(stage.relay_rounds for stage in resolved.stages):
        check_relay_target(target)
    if drafter is not None:
        check_pair(target, drafter)
        return resolved
    config = drafter_config(target, resolved)
    config.check()
    mismatch = shape_mismatch(target, config)
    if mismatch is not None:
        raise DFlowError(
            f"no new drafter fits this target, which has {mismatch.target_has}: a drafter reads "
            f"{mismatch.drafter_needs}; train one for another target"
        )
    return resolved


def _from_target(
    training: TrainingConfig, target: Any, data_ids: torch.Tensor, special_ids: Sequence[int]
) -> dict[str, Any]:
    """The fields of a new drafter."""
    num_layers = training.num_hidden_layers or DEFAULT_LAYERS
    mask_token_id, is_copied = training.mask_token_id, training.initialise_from_target
    if mask_token_id is None:
        mask_token_id = unused_token(target, data_ids, special_ids)
    if is_copied is None:
        is_copied = _why_not_copied(target, num_layers) is None
    return {
        "num_hidden_layers": num_layers,
        "block_size": training.block_size or DEFAULT_BLOCK,
        "target_layer_ids": training.target_layer_ids or spread_layers(num_layer_states(target)),
        "mask_token_id": mask_token_id,
        "initialise_from_target": is_copied,
    }


def _from_drafter(training: TrainingConfig, drafter: DFlowDrafter) -> dict[str, Any]:
    """The fields of the drafter to continue, which `training` must not contradict."""
    config = drafter.config
    _check_trainable(config)
    fixed = ["num_hidden_layers", "mask_token_id", "target_layer_ids", "draft_vocab_size"]
    if drafter.causal_correction is not None:
        fixed += ["correction_intermediate_size", "correction_top_k"]
    for key in fixed + (["relay_intermediate_size"] if drafter.relay is not None else []):
        given, own = getattr(training, key), getattr(config, key)
        if given is not None and given != own:
            raise TrainingConfigError(
                f'"{key}" is {given!r}, the drafter to continue has {own!r}; leave the key out, or start anew'
            )
    if training.block_size is not None and training.block_size > config.block_size:
        warnings.warn(
            f"blocks of {training.block_size} are longer than the {config.block_size} that the drafter was trained "
            "with; its later slots start untrained",
            stacklevel=3,
        )
    return {
        **{key: getattr(config, key) for key in fixed},
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": training.block_size or config.block_size,
        "initialise_from_target": False,
    }


def _check_trainable(config: Any) -> None:
    """Refuse what the training forward lacks, which runs many blocks in a row, each slot for its own position."""
    untrainable = {
        "a candidate selector": config.selector_rank is not None,
        "convolutions": config.conv_kernel_size is not None,
        "sample_from_anchor": config.sample_from_anchor,
        "window_from_anchor": config.window_from_anchor and "sliding_attention" in config.layer_types,
        "no vocab_size": config.vocab_size is None,
    }
    present = [name for name, is_present in untrainable.items() if is_present]
    if present:
        raise TrainingConfigError(
            f"the drafter to continue has {', '.join(present)}, which cannot be trained here; continue a DFlash v1 or "
            "DFlow drafter, or pass vocab_size= when loading one that only lacks its vocabulary"
        )


def _check_fits_target(training: TrainingConfig, target: Any) -> None:
    layer_ids: Any = training.target_layer_ids
    mask_token_id: Any = training.mask_token_id
    config = target.config.get_text_config()
    if max(layer_ids) >= num_layer_states(target):
        raise TrainingConfigError(
            f'"target_layer_ids" is {layer_ids}; this target has the layers 0 … {num_layer_states(target) - 1}'
        )
    if mask_token_id >= target.get_input_embeddings().weight.shape[0]:
        raise TrainingConfigError(
            f'"mask_token_id" is {mask_token_id}; this target has the tokens 0 … {config.vocab_size - 1}'
        )


def spread_layers(num_layers: int, taps: int = DEFAULT_TAPS) -> list[int]:
    """Up to `taps` layer ids from the 2nd to the third-to-last layer (arXiv 2602.06036); fewer in a shallow target."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    taps = min(taps, last - first + 1)
    return [first + round(i * (last - first) / max(1, taps - 1)) for i in range(taps)]


def unused_token(target: Any, data_ids: torch.Tensor, special_ids: Sequence[int]) -> int:
    """A token for the mask, which is never proposed: one that neither the data nor the end of a text needs."""
    used = set(data_ids.tolist())
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        for config in (target.config.get_text_config(), target.generation_config):
            ids = getattr(config, key, None)
            used |= set(ids if isinstance(ids, list) else [ids])
    unused_special = [i for i in special_ids if i not in used]
    if unused_special:
        return max(unused_special)
    unused = [i for i in range(target.config.get_text_config().vocab_size) if i not in used]
    if not unused:
        raise DFlowError('the data uses every token of the vocabulary; name the rarest as "mask_token_id"')
    return unused[-1]


# -- a new drafter


def new_drafter(
    target: Any, training: TrainingConfig, target_name: str | None = None, rows: Sequence[TrainingRow] = ()
) -> DFlowDrafter:
    """A drafter with the run's seed in float32, on the CPU; a reduced vocabulary holds the frequent tokens of `rows`.

    Args:
        training (`TrainingConfig`): Resolved.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        drafter = DFlowDrafter(drafter_config(target, training, target_name))
    drafter = drafter.float()
    if training.draft_vocab_size is not None:
        reduce_vocabulary(drafter, target, rows)
    if training.initialise_from_target:
        initialise_from_target(drafter, target)
    return drafter


def drafter_config(target: Any, training: TrainingConfig, target_name: str | None = None) -> DFlowDrafterConfig:
    """A drafter of the target's width and attention shape."""
    config = target.config.get_text_config()
    own: dict[str, Any] = training.to_dict()
    drafter = DFlowDrafterConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=own["num_hidden_layers"],
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(DEFAULT_ROPE),
        layer_types=["full_attention"] * own["num_hidden_layers"],
        block_size=own["block_size"],
        mask_token_id=own["mask_token_id"],
        target_layer_ids=own["target_layer_ids"],
        num_target_layers=config.num_hidden_layers,
        target_name=target_name,
        output_head="target" if training.draft_vocab_size is None else "own",
        draft_vocab_size=training.draft_vocab_size,
        use_relay=training.use_relay,
        relay_intermediate_size=own["relay_intermediate_size"],
        correction_intermediate_size=training.correction_intermediate_size,
        correction_top_k=training.correction_top_k,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    _copy_rope(drafter, config)
    return drafter


def _copy_rope(drafter: DFlowDrafterConfig, config: Any) -> None:
    """Give a drafter its target's rotary settings: whole, or nothing but the base where they do not fit whole heads.

    Factors of a part of each head say nothing about all of it.
    """
    given = getattr(config, "rope_parameters", None) or DEFAULT_ROPE
    by_layer_type = [given.get("full_attention"), *given.values()]  # some families have one set for each kind of layer
    rope = next((settings for settings in by_layer_type if isinstance(settings, dict)), given)
    rope = {key: value for key, value in rope.items() if key not in MODALITY_ROPE}
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or DEFAULT_ROPE["rope_theta"]}
    rope_type, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor")
    drafter.rope_parameters = plain if rope_type == "default" else rope
    try:
        drafter.check_rope()
    except DrafterConfigError:
        drafter.rope_parameters = plain
        logger.warning_once(
            f"The target's rotary settings ({rope_type}{'' if part is None else f' of {part:g} of each head'}) do not "
            f"fit a draft layer, which rotates whole heads; the drafter gets plain ones of base "
            f"{plain['rope_theta']:g}."
        )


def reduce_vocabulary(drafter: DFlowDrafter, target: Any, rows: Sequence[TrainingRow]) -> None:
    """Give the drafter's own head the target's rows of its most frequent tokens in `rows`, and of its stop tokens."""
    head = target.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None or not head.weight.is_floating_point():
        raise DFlowError(
            f"a reduced draft vocabulary copies rows of the LM head, which {type(head).__name__} does not show as one "
            'matrix without a bias; leave "draft_vocab_size" out.'
        )
    config = drafter.config
    stops = target.generation_config.eos_token_id
    written = [i for row in rows for start, end in row.spans for i in row.token_ids[start:end]]
    token_ids = frequent_tokens(
        [i for i in written if i < config.vocab_size],
        config.draft_vocab_size,
        config.vocab_size,
        never=[config.mask_token_id],
        always=stops if isinstance(stops, list) else [] if stops is None else [stops],
    )
    drafter.set_draft_vocabulary(token_ids, head.weight)


@torch.no_grad()
def initialise_from_target(drafter: DFlowDrafter, target: Any) -> None:
    """Start the draft layers as the target's last ones and the context projection as its last tap.

    An adapter on the target is left out: base weights are copied.

    Raises:
        DFlowError: The target's layers have other weights than a draft layer.
    """
    reason = _why_not_copied(target, len(drafter.layers))
    if reason:
        raise DFlowError(f'the target\'s layers cannot be copied: {reason}; set "initialise_from_target" to false')
    inner = inner_model(target)
    for ours, theirs in zip(drafter.layers, inner.layers[-len(drafter.layers) :], strict=True):
        own = {key: value for key, value in ours.state_dict().items() if key in OWN_NORMS}
        ours.load_state_dict({**own, **_base_weights(theirs)})
    drafter.norm.load_state_dict(_base_weights(inner.norm))
    drafter.fc.weight.mul_(0.1)
    width = drafter.config.hidden_size
    drafter.fc.weight[:, -width:] += torch.eye(width)


def _why_not_copied(target: Any, num_layers: int) -> str | None:
    """Why the target's last layers cannot be draft layers; `None` if they can."""
    inner = inner_model(target)
    layers = getattr(inner, "layers", None)
    if layers is None or not hasattr(inner, "norm"):
        return f"{type(inner).__name__} has no 'layers' and 'norm'"
    if len(layers) < num_layers:
        return f"it has {len(layers)}, the drafter {num_layers}"
    if not _is_rms_norm(inner.norm):  # some scale by 1 + weight
        return f"its {type(inner.norm).__name__} is another function of its weight"
    config = target.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in layers[len(layers) - num_layers :]:  # a hybrid's differ in kind
        weights = _base_weights(layer)
        names = set(weights) - set(OWN_NORMS)
        if names != LAYER_WEIGHTS:
            return f"their weights differ by {', '.join(sorted(names ^ LAYER_WEIGHTS))}"
        if len(weights["self_attn.q_proj.weight"]) != config.num_attention_heads * width:
            return "their queries hold more than one vector for each head"
    return None


@torch.no_grad()
def _is_rms_norm(norm: Any) -> bool:
    """Whether `norm` scales what has a mean square of one by nothing but its weight."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1:
        return False
    signs = torch.ones_like(weight)
    signs[::4] = -1  # their mean is no zero either, which others subtract
    scaled = norm(signs[None, None])[0, 0].float()
    return bool(torch.allclose(scaled, (signs * weight).float(), rtol=1e-2, atol=1e-2))


def _base_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of `module` in float32 without what PEFT added."""
    return {
        key.replace(".base_layer.", "."): value.float().cpu()
        for key, value in module.state_dict().items()
        if "lora_" not in key
    }


# -- a drafter to continue


def continued_drafter(drafter: DFlowDrafter, training: TrainingConfig) -> DFlowDrafter:
    """A copy of `drafter` in float32 with the run's block; a relay or correction that it lacks starts at zero.

    Args:
        training (`TrainingConfig`): Resolved.
    """
    config = DFlowDrafterConfig.from_dict(drafter.config.to_dict())
    config.block_size = training.block_size or config.block_size
    config.use_relay = training.use_relay or drafter.relay is not None
    config.relay_intermediate_size = training.relay_intermediate_size or config.relay_intermediate_size
    config.correction_intermediate_size = training.correction_intermediate_size
    config.correction_top_k = training.correction_top_k
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        continued = DFlowDrafter(config).float()
    missing, unexpected = continued.load_state_dict(
        {key: value.float() for key, value in drafter.state_dict().items()}, strict=False
    )
    if unexpected or any(not key.startswith(NEW_PARTS) for key in missing):
        raise DFlowError(f"the drafter to continue does not fit its own configuration: {missing + unexpected}")
    return continued
