"""The drafter that a run starts from: a new one in the target's shape, or another drafter's weights."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_dflow.errors import DFlowError
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter
from hf_dflow.training.config import DECAY_OF_BLOCK, DEFAULT_CANDIDATES, TrainingConfig, TrainingConfigError
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.frozen_target import inner_model
from hf_dflow.training.loss import frequent_tokens

DEFAULT_LAYERS, DEFAULT_BLOCK, DEFAULT_TAPS = 2, 8, 5
EVALUATIONS_PER_RUN, FEWEST_BETWEEN_EVALUATIONS = 10, 10
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary settings of a target's attention shape or modalities that a plain drafter does not have.
FOREIGN_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
NEW_PARTS = ("relay.", "causal_correction.")  # what a run may add to a drafter that it continues
OWN_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # a target without them leaves ours at one


def resolve(
    training: TrainingConfig,
    target: Any,
    data_ids: torch.Tensor,
    drafter: DFlowDrafter | None = None,
    special_ids: list[int] | None = None,
) -> TrainingConfig:
    """Fill in what `training` leaves open, from the drafter to continue or else from the target. Idempotent.

    Args:
        data_ids (`torch.LongTensor` of shape `(K,)`): Distinct tokens of the training data.
        drafter (`DFlowDrafter`, *optional*): What the run continues from.
        special_ids (`list[int]`, *optional*): The tokenizer's special tokens; one that the data lacks is the mask.

    Raises:
        TrainingConfigError: `training` contradicts the drafter to continue.
    """
    has_correction = drafter is not None and drafter.causal_correction is not None
    if training.train_only == "correction" and not (has_correction or training.correction_intermediate_size):
        raise TrainingConfigError(
            '"train_only" is "correction", and neither a drafter to continue nor the configuration has one; give '
            '"correction_intermediate_size", e.g. 256'
        )
    if drafter is not None:
        ours = drafter.config
        _check_trainable(ours)
        fixed = ["num_hidden_layers", "mask_token_id", "target_layer_ids", "draft_vocab_size"]
        if has_correction:
            fixed += ["correction_intermediate_size", "correction_top_k"]
        relays = ["relay_intermediate_size"] if drafter.relay is not None else []
        for key in fixed + relays:
            wanted, has = getattr(training, key), getattr(ours, key)
            if wanted is not None and wanted != has:
                raise TrainingConfigError(
                    f'"{key}" is {wanted!r}, the drafter to continue has {has!r}; leave the key out, or start anew'
                )
        filled: dict[str, Any] = {key: getattr(ours, key) for key in fixed if key != "target_layer_ids"}
        filled |= {"target_layer_ids": list(ours.target_layer_ids), "initialise_from_target": False}
        if training.block_size is not None and training.block_size > ours.block_size:
            warnings.warn(
                f"blocks of {training.block_size} are longer than the {ours.block_size} that the drafter was trained "
                "with; its later slots start untrained",
                stacklevel=2,
            )
        filled["block_size"] = training.block_size or ours.block_size
    else:
        layers = target.config.get_text_config().num_hidden_layers
        filled = {
            "num_hidden_layers": training.num_hidden_layers or DEFAULT_LAYERS,
            "block_size": training.block_size or DEFAULT_BLOCK,
            "target_layer_ids": training.target_layer_ids or spread_layers(layers),
            "mask_token_id": training.mask_token_id,
            "initialise_from_target": training.initialise_from_target,
        }
        if filled["mask_token_id"] is None:
            filled["mask_token_id"] = unused_token(target, data_ids, special_ids or [])
        if filled["initialise_from_target"] is None:
            filled["initialise_from_target"] = _why_not_copied(target, filled["num_hidden_layers"]) is None
    if filled.get("correction_intermediate_size", training.correction_intermediate_size) is not None:
        filled["correction_top_k"] = filled.get("correction_top_k") or training.correction_top_k or DEFAULT_CANDIDATES
    config, layer_ids = target.config.get_text_config(), filled["target_layer_ids"]
    if max(layer_ids) >= config.num_hidden_layers:
        raise TrainingConfigError(
            f'"target_layer_ids" is {layer_ids}; this target has the layers 0 … {config.num_hidden_layers - 1}'
        )
    if filled["mask_token_id"] >= target.get_input_embeddings().weight.shape[0]:
        raise TrainingConfigError(
            f'"mask_token_id" is {filled["mask_token_id"]}; this target has the tokens 0 … {config.vocab_size - 1}'
        )
    if training.loss_decay is None:
        nearest = min(DECAY_OF_BLOCK, key=lambda block: abs(block - filled["block_size"]))
        filled["loss_decay"] = DECAY_OF_BLOCK[nearest]
    if training.evaluate_every is None:
        filled["evaluate_every"] = max(FEWEST_BETWEEN_EVALUATIONS, training.updates // EVALUATIONS_PER_RUN)
    resolved = replace(training, **filled)
    resolved.check()
    return resolved


def _check_trainable(config: Any) -> None:
    """Refuse what the training forward, many blocks in one row whose slots predict their own positions, has not."""
    foreign = {
        "a candidate selector": config.selector_rank is not None,
        "convolutions": config.conv_kernel_size is not None,
        "sample_from_anchor": config.sample_from_anchor,
        "window_from_anchor": config.window_from_anchor and "sliding_attention" in config.layer_types,
        "no vocab_size": config.vocab_size is None,
    }
    found = [name for name, is_there in foreign.items() if is_there]
    if found:
        raise TrainingConfigError(
            f"the drafter to continue has {', '.join(found)}, which cannot be trained here; continue a DFlash v1 or "
            "DFlow drafter, or pass vocab_size= when loading one that only lacks its vocabulary"
        )


def spread_layers(num_layers: int, taps: int = DEFAULT_TAPS) -> list[int]:
    """Up to `taps` layer ids from the 2nd to the third-to-last layer (arXiv 2602.06036); fewer in a shallow target."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    taps = min(taps, last - first + 1)
    return [first + round(i * (last - first) / max(1, taps - 1)) for i in range(taps)]


def unused_token(target: Any, data_ids: torch.Tensor, special_ids: list[int]) -> int:
    """A token to be the mask: never proposed, so one that neither the data nor the end of a text needs."""
    used = set(data_ids.tolist())
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        for config in (target.config.get_text_config(), target.generation_config):
            ids = getattr(config, key, None)
            used |= set(ids if isinstance(ids, list) else [ids])
    free_special = [i for i in special_ids if i not in used]
    if free_special:
        return max(free_special)
    free = [i for i in range(target.config.get_text_config().vocab_size) if i not in used]
    if not free:
        raise DFlowError('the data uses every token of the vocabulary; name the rarest as "mask_token_id"')
    return free[-1]


def drafter_config(target: Any, training: TrainingConfig, target_name: str | None = None) -> DFlowDrafterConfig:
    """A drafter of the target's width and attention shape."""
    config = target.config.get_text_config()
    wanted: dict[str, Any] = training.to_dict()
    layers = wanted["num_hidden_layers"]
    rope = dict(getattr(config, "rope_parameters", None) or DEFAULT_ROPE)
    rope = dict(rope.get("full_attention") or rope)  # some families keep one set for each kind of layer
    return DFlowDrafterConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={key: value for key, value in rope.items() if key not in FOREIGN_ROPE},
        layer_types=["full_attention"] * layers,
        block_size=wanted["block_size"],
        mask_token_id=wanted["mask_token_id"],
        target_layer_ids=wanted["target_layer_ids"],
        num_target_layers=config.num_hidden_layers,
        target_name=target_name,
        output_head="target" if training.draft_vocab_size is None else "own",
        draft_vocab_size=training.draft_vocab_size,
        use_relay=training.use_relay,
        relay_intermediate_size=wanted["relay_intermediate_size"],
        correction_intermediate_size=training.correction_intermediate_size,
        correction_top_k=training.correction_top_k,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def new_drafter(
    target: Any, training: TrainingConfig, target_name: str | None = None, rows: Sequence[TrainingRow] = ()
) -> DFlowDrafter:
    """A drafter with the run's seed in float32, on the CPU; `rows` decide what a reduced vocabulary holds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        drafter = DFlowDrafter(drafter_config(target, training, target_name))
    drafter = drafter.float()
    if training.draft_vocab_size is not None:
        reduce_vocabulary(drafter, target, rows)
    if training.initialise_from_target:
        initialise_from_target(drafter, target)
    return drafter


def reduce_vocabulary(drafter: DFlowDrafter, target: Any, rows: Sequence[TrainingRow]) -> None:
    """Give the drafter's own head the target's rows of what the target wrote most often, and of its stop tokens."""
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


def continued_drafter(drafter: DFlowDrafter, training: TrainingConfig) -> DFlowDrafter:
    """`drafter` in float32 with the run's block; relay and correction start at zero where only the run wants them.

    A new drafter is built and filled, so the one given stays as it is.
    """
    config = DFlowDrafterConfig.from_dict(drafter.config.to_dict())
    config.block_size = training.block_size or config.block_size
    config.use_relay = training.use_relay or drafter.relay is not None
    config.relay_intermediate_size = training.relay_intermediate_size or config.relay_intermediate_size
    config.correction_intermediate_size = training.correction_intermediate_size  # resolved, as is the next
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
    """Why the target's last layers are no draft layers, or `None` if they are."""
    inner = inner_model(target)
    layers = getattr(inner, "layers", None)
    if layers is None or not hasattr(inner, "norm"):
        return f"{type(inner).__name__} has no 'layers' and 'norm'"
    if len(layers) < num_layers:
        return f"it has {len(layers)}, the drafter {num_layers}"
    if type(inner.norm).__name__.startswith("Gemma"):  # these scale by 1 + weight
        return f"its {type(inner.norm).__name__} is another function of its weight"
    wanted = {
        "self_attn": {f"{name}_proj.weight" for name in "qkvo"},
        "mlp": {f"{name}_proj.weight" for name in ("gate", "up", "down")},
    }
    needed = {f"{part}.{name}" for part, names in wanted.items() for name in names}
    needed |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    found = set(_base_weights(layers[-1]))
    if found - set(OWN_NORMS) != needed:
        return f"their weights differ by {', '.join(sorted((found - set(OWN_NORMS)) ^ needed))}"
    return None


def _base_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of `module` in float32 without what PEFT put beside them."""
    return {
        key.replace(".base_layer.", "."): value.float().cpu()
        for key, value in module.state_dict().items()
        if "lora_" not in key
    }
