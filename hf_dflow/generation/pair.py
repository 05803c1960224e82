"""Whether target and drafter belong together: what cannot work is refused, what is only slow is warned about."""

import hashlib
import json
import os
import re
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dflow.errors import PairMismatchError
from hf_dflow.model.drafter import DFlowDrafter

logger: Any = logging.get_logger(__name__)
PADDING = 512  # vocabularies are padded to multiples of at most this; sizes that agree after that may be the same
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
            an embedding that is offloaded. A differing name, revision, tokenizer, mode or vocabulary size is warned
            about once: the text stays the target's own, drafts may be rejected more often.
    """
    devices = {parameter.device for parameter in drafter.parameters()}
    if len(devices) > 1 or drafter.device.type == "meta":
        raise PairMismatchError(
            f"The drafter is spread over {', '.join(sorted(map(str, devices)))} (meta: offloaded); load it onto one "
            "device, device_map=target.device."
        )
    target, ours = model.config.get_text_config(), drafter.config
    layers = target.num_hidden_layers
    if ours.target_hidden_size != target.hidden_size:
        _mismatch(f"hidden size {target.hidden_size}", f"{ours.target_hidden_size}")
    if max(ours.target_layer_ids) >= layers:
        _mismatch(f"{layers} layers", f"layer {max(ours.target_layer_ids)} (target_layer_ids)")
    if ours.num_target_layers is not None and ours.num_target_layers != layers:
        _mismatch(f"{layers} layers", f"{ours.num_target_layers} layers")
    embedding: Any = getattr(model.get_input_embeddings(), "weight", None)
    if ours.input_embedding == "raw" and embedding is None:
        _mismatch("an input embedding without a weight matrix", "input_embedding='raw', which reads its rows")
    if ours.input_embedding == "raw" and embedding.is_meta and type(model.get_input_embeddings()) is not nn.Embedding:
        raise PairMismatchError(
            "The target's input embedding is offloaded, and this drafter reads its rows (input_embedding='raw'). Keep "
            "the embedding on a device: name it in device_map."
        )
    if ours.input_embedding != "own" and embedding is not None and ours.mask_token_id >= embedding.shape[0]:
        _mismatch(f"{embedding.shape[0]} embedding rows", f"mask_token_id {ours.mask_token_id}")
    drafter.check_draft_vocabulary()
    if ours.output_head == "target" and model.get_output_embeddings() is None:
        _mismatch("no LM head", "output_head='target'")
    for difference in _differences(model, target, ours, tokenizer, chat_mode):
        logger.warning_once(
            f"The drafter may draft badly for this target: {difference}. The text stays the target's own; for speed, "
            "load the drafter that was made for it."
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short digest of a tokenizer's tokens and their ids; equal digests give every id the same meaning."""
    tokens = sorted((int(token_id), token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


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
    config, name = drafter.config, getattr(model.config, "_name_or_path", None)
    config.num_target_layers = model.config.get_text_config().num_hidden_layers
    if _is_repository(name):
        config.target_name = name
        config.target_revision = getattr(model.config, "_commit_hash", None)
    if tokenizer is not None:
        config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
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
    return sizes[1] <= -(-sizes[0] // PADDING) * PADDING


def _is_repository(name: Any) -> bool:
    """Whether a name is a Hub repository's, not a folder's: a folder may have any name."""
    return (
        isinstance(name, str) and name.count("/") == 1 and not os.path.exists(name) and not name.startswith((".", "/"))
    )


def _mismatch(has: str, wants: str) -> None:
    raise PairMismatchError(
        f"The drafter does not fit this target: the target has {has}, the drafter was made for {wants}. Load the "
        "drafter that was trained for this very model."
    )
