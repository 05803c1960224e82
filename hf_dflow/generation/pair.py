"""Whether target and drafter belong together: what cannot work is refused, what is only slow is warned about."""

import os
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from hf_dflow.checkpoints.targets import tokenizer_fingerprint
from hf_dflow.errors import PairMismatchError
from hf_dflow.generation import _compat
from hf_dflow.logs import get_logger
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter

logger = get_logger(__name__)
# Vocabularies are padded to multiples of at most 512, small ones by a quarter at most; sizes that agree after that may
# be those of one tokenizer.
PADDING, LARGEST_PADDING_SHARE = 512, 0.25
SAMPLED_TOKENS = 32  # by which two tokenizers are told apart that only differ in a few added or renamed tokens
LEAST_COMMON_SHARE = 0.5  # of those tokens; two tokenizers with fewer in common are different ones
known_fingerprints: Any = WeakKeyDictionary()  # tokenizer -> its length, its fingerprint
COMMIT = re.compile("[0-9a-f]{40}")


def check_pair(
    model: PreTrainedModel, drafter: DFlowDrafter, tokenizer: Any = None, chat_mode: str | None = None
) -> None:
    """Compare a target with the one that its drafter was made for, before anything is computed.

    `generate` does so at every call. It knows the tokenizer only from `tokenizer=`, and the chat mode only from the
    option `chat_mode` of [`DFlowGenerationConfig`].

    Args:
        model (`PreTrainedModel`): The target.
        drafter (`DFlowDrafter`): Its drafter.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        chat_mode (`str`, *optional*): How prompts ask it: "thinking", "non-thinking", "chat" or "raw".

    Raises:
        PairMismatchError: Naming the first size that differs; or the drafter is spread over devices, or reads rows of
            an embedding that is offloaded; or its tokenizer gives most ids another meaning than the target's. A
            differing name, revision, tokenizer, mode or vocabulary size that proves nothing is warned about once: the
            text stays the target's own, drafts may be rejected more often.
    """
    tokenizer = _tokenizer_in(tokenizer)
    devices = {parameter.device for parameter in drafter.parameters()}
    if len(devices) > 1 or drafter.device.type == "meta":
        raise PairMismatchError(
            f"The drafter is spread over {', '.join(sorted(map(str, devices)))} (meta: offloaded); load it onto one "
            "device, device_map=target.device."
        )
    ours: Any = drafter.config
    mismatch = shape_mismatch(model, ours)
    if mismatch is not None:
        raise PairMismatchError(
            f"The drafter does not fit this target: the target has {mismatch.target_has}, the drafter was made for "
            f"{mismatch.drafter_needs}. Load the drafter that was trained for this very model."
        )
    embedding = model.get_input_embeddings()
    is_offloaded = ours.input_embedding == "raw" and embedding.weight.is_meta
    if is_offloaded and type(embedding) is not nn.Embedding:
        raise PairMismatchError(
            "The target's input embedding is offloaded, and this drafter reads its rows (input_embedding='raw'). Keep "
            "the embedding on a device: name it in device_map."
        )
    drafter.check_draft_vocabulary()
    _check_tokens(model, drafter, tokenizer)
    for difference in _differences(model, model.config.get_text_config(), ours, tokenizer, chat_mode):
        logger.warning_once(
            f"The drafter {_name_of(drafter)} may draft badly for the target {_name_of(model)}: {difference}. The text "
            "stays the target's own; for speed, load the drafter that was made for it."
        )


@dataclass(frozen=True)
class ShapeMismatch:
    """A size in which a target differs from what a drafter reads."""

    target_has: str
    drafter_needs: str


def shape_mismatch(model: PreTrainedModel, config: DFlowDrafterConfig) -> ShapeMismatch | None:
    """The first size of a target that a drafter of this configuration cannot work with; `None` if it fits."""
    target = model.config.get_text_config()
    layers, last_tap = target.num_hidden_layers, max(config.target_layer_ids)
    if config.target_hidden_size != target.hidden_size:
        return ShapeMismatch(f"hidden size {target.hidden_size}", f"{config.target_hidden_size}")
    if last_tap >= layers:
        return ShapeMismatch(f"{layers} layers", f"layer {last_tap} (target_layer_ids)")
    if config.num_target_layers is not None and config.num_target_layers != layers:
        return ShapeMismatch(f"{layers} layers", f"{config.num_target_layers} layers")
    if last_tap >= (num_states := _compat.num_layer_states(model)):
        return ShapeMismatch(
            f"{num_states} layers whose states it returns, though its configuration counts {layers}",
            f"the states of layer {last_tap} (target_layer_ids)",
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    if config.input_embedding == "raw" and weight is None:
        return ShapeMismatch(
            "an input embedding without a weight matrix", "input_embedding='raw', which reads its rows"
        )
    if config.input_embedding != "own" and weight is not None and config.mask_token_id >= weight.shape[0]:
        return ShapeMismatch(f"{weight.shape[0]} embedding rows", f"mask_token_id {config.mask_token_id}")
    width = weight.shape[-1] if config.input_embedding == "raw" else getattr(embedding, "embedding_dim", None)
    if config.input_embedding != "own" and width not in (None, config.hidden_size):
        return ShapeMismatch(
            f"input embeddings of width {width} for states of width {target.hidden_size}",
            f"embeddings of width {config.hidden_size} (input_embedding='{config.input_embedding}')",
        )
    if config.output_head == "target":
        if head is None:
            return ShapeMismatch("no LM head", "output_head='target'")
        width = getattr(head, "in_features", None)
        if width not in (None, config.hidden_size):
            return ShapeMismatch(
                f"an LM head that reads {width} features", f"one that reads {config.hidden_size} (output_head='target')"
            )
    return None


def _check_tokens(model: PreTrainedModel, drafter: DFlowDrafter, tokenizer: Any) -> None:
    """Refuse a drafter whose recorded tokens mostly have other ids in `tokenizer`: nearly all drafts are rejected."""
    sample = drafter.config.tokenizer_sample
    if tokenizer is None or not sample or _fingerprint(tokenizer) == drafter.config.tokenizer_fingerprint:
        return
    target_ids = dict(zip(sample, tokenizer.convert_tokens_to_ids(list(sample)), strict=True))
    differing = [token for token in sample if sample[token] != target_ids[token]]
    if len(sample) - len(differing) < LEAST_COMMON_SHARE * len(sample):
        token = differing[0]
        raise PairMismatchError(
            f"The drafter {_name_of(drafter)} was made for another tokenizer than that of the target "
            f"{_name_of(model)}: {len(differing)} of {len(sample)} tokens differ, e.g. {token!r} is "
            f"{sample[token]} for the drafter and {target_ids[token]} for the target. Load the drafter that was "
            "trained for this very model."
        )


def _tokenizer_in(given: Any) -> Any:
    """The tokenizer of a processor, which holds one beside others; `None` for what has no vocabulary to compare."""
    tokenizer = getattr(given, "tokenizer", given)
    return tokenizer if hasattr(tokenizer, "get_vocab") else None


def tokenizer_sample(tokenizer: Any) -> dict[str, int]:
    """Tokens spread evenly over a tokenizer's ids, with their ids."""
    tokens = sorted((int(token_id), token) for token, token_id in tokenizer.get_vocab().items())
    count = min(SAMPLED_TOKENS, len(tokens))
    picked = [tokens[i * len(tokens) // count] for i in range(count)]
    return {token: token_id for token_id, token in picked}


def _fingerprint(tokenizer: Any) -> str:
    """`tokenizer_fingerprint`, computed once: a large vocabulary takes a tenth of a second."""
    size, fingerprint = known_fingerprints.get(tokenizer, (None, ""))
    if size != len(tokenizer):
        fingerprint = tokenizer_fingerprint(tokenizer)
        known_fingerprints[tokenizer] = (len(tokenizer), fingerprint)
    return fingerprint


def record_target(
    drafter: DFlowDrafter, model: PreTrainedModel, tokenizer: Any = None, chat_mode: str | None = None
) -> None:
    """Write into a drafter's configuration what [`check_pair`] compares; save or publish the drafter afterwards.

    Args:
        drafter (`DFlowDrafter`): The drafter.
        model (`PreTrainedModel`): The target it was made for. The name of a folder is not recorded, as it means
            nothing elsewhere.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        chat_mode (`str`, *optional*): How its answers were collected: "thinking", "non-thinking", "chat" or "raw".
    """
    tokenizer = _tokenizer_in(tokenizer)
    config, name = drafter.config, getattr(model.config, "_name_or_path", None)
    config.num_target_layers = model.config.get_text_config().num_hidden_layers
    if _is_repository(name):
        config.target_name = name
        config.target_revision = getattr(model.config, "_commit_hash", None)
    if tokenizer is not None:
        config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        config.tokenizer_sample = tokenizer_sample(tokenizer)
    config.chat_mode = chat_mode or config.chat_mode


def _differences(model: PreTrainedModel, target: Any, ours: Any, tokenizer: Any, chat_mode: str | None) -> list[str]:
    """What differs without making decoding impossible."""
    differences = []
    is_same_tokenizer = None
    if tokenizer is not None and ours.tokenizer_fingerprint is not None:
        fingerprint = _fingerprint(tokenizer)
        is_same_tokenizer = fingerprint == ours.tokenizer_fingerprint
        if not is_same_tokenizer:
            differences.append(f"its tokenizer is {ours.tokenizer_fingerprint}, the target's {fingerprint}")
    if is_same_tokenizer is None and ours.vocab_size is not None and not _may_be_padding(ours, target):
        differences.append(f"it knows {ours.vocab_size} tokens, the target {target.vocab_size}")
    name = getattr(model.config, "_name_or_path", None)
    if ours.target_name and _is_repository(name) and _is_repository(ours.target_name) and name != ours.target_name:
        differences.append(f"it was made for {ours.target_name}, the target is {name}")
    commit, wanted = getattr(model.config, "_commit_hash", None), ours.target_revision
    if commit and wanted and COMMIT.fullmatch(wanted) and name == ours.target_name and commit != wanted:
        differences.append(f"it was made for revision {wanted}, the target's is {commit}")
    if chat_mode and ours.chat_mode and chat_mode != ours.chat_mode:
        differences.append(f"it was made for the mode '{ours.chat_mode}', asked for is '{chat_mode}'")
    return differences


def _may_be_padding(ours: Any, target: Any) -> bool:
    sizes = sorted((ours.vocab_size, target.vocab_size))
    return sizes[1] <= min(-(-sizes[0] // PADDING) * PADDING, (1 + LARGEST_PADDING_SHARE) * sizes[0])


def _name_of(model: Any) -> str:
    """Where a model was loaded from; its class, if it was made here."""
    return getattr(model.config, "_name_or_path", None) or type(model).__name__


def _is_repository(name: Any) -> bool:
    """Whether a name is a Hub repository's, not a folder's: a folder may have any name."""
    return (
        isinstance(name, str) and name.count("/") == 1 and not os.path.exists(name) and not name.startswith((".", "/"))
    )
