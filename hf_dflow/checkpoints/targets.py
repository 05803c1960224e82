"""Which drafter is listed for a target: by the target's name, or by what its folder holds."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from hf_dflow.checkpoints.names import BUNDLED, TABLE, Drafter, drafter_for, drafters_for
from hf_dflow.errors import UnknownDrafterError
from hf_dflow.logs import get_logger

logger = get_logger(__name__)
SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots(?:[/\\]|$)")  # the Hub's cache names its folders so
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short digest of a tokenizer's tokens and their ids; equal digests give every id the same meaning."""
    tokens = sorted((int(token_id), token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def listed_drafter(target: Any, tokenizer: Any = None) -> Drafter:
    """The row of the table for a target.

    A folder of the Hub's cache has its repository's name. Of another, or of a model without a name, sizes and tokenizer
    are compared with those that each bundled drafter records; else the folder's own name counts. Neither tells a model
    from its fine-tunes, so a warning says what was assumed.

    Args:
        target (`str`, `Path` or `PreTrainedModel`): The target, its name, or its folder.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; by default the one in its folder.

    Raises:
        [`UnknownDrafterError`]: The table has none.
    """
    if isinstance(target, (str, os.PathLike)):
        name, config = os.fspath(target), None
    else:
        config = getattr(target, "config", None)
        name = getattr(config, "_name_or_path", None) or None
    if name is not None and (drafters_for(name) or not _is_folder(name)):
        return drafter_for(name)
    snapshot = SNAPSHOT.search(name) if name else None
    if snapshot is not None:
        return drafter_for("/".join(snapshot.groups()))
    if config is None and name is not None and os.path.isfile(os.path.join(name, "config.json")):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config is None:
        return drafter_for(name)  # which refuses it
    return _by_content(name, config, tokenizer)


@dataclass(frozen=True)
class _Needs:
    """What a bundled drafter records of its target."""

    hidden_size: int
    num_layers: int
    tokenizer_fingerprint: str


def _by_content(name: str | None, config: Any, tokenizer: Any) -> Drafter:
    text = config.get_text_config()
    sizes = (getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None))
    of_this_size = []
    for row in TABLE:
        if row.name in BUNDLED:
            needs = _needs_of(row)
            if (needs.hidden_size, needs.num_layers) == sizes:
                of_this_size.append((row, needs.tokenizer_fingerprint))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None and of_this_size:
        tokenizer = _tokenizer_in(name)
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    for row, wanted in of_this_size:
        if wanted == fingerprint:
            return _assume(row, name, "sizes and tokenizer")
    folder = Path(name).name.casefold() if name else None
    for row in TABLE:
        if row.name not in BUNDLED and row.target.rsplit("/")[-1].casefold() == folder:
            return _assume(row, name, "name of its folder")
    where = name or "without a name"
    hint = ""
    if of_this_size and tokenizer is None:
        fitting = " or ".join(f"{row.name} (for {row.target})" for row, _ in of_this_size)
        hint = f" Its sizes are those that {fitting} needs, but there is no tokenizer to compare: pass tokenizer=."
    raise UnknownDrafterError(
        f"no drafter is listed for the target {where}: no bundled one records its sizes and its tokenizer, and its "
        f"folder is not named like a listed target.{hint} `hf-dflow drafters` lists those known; pass the name of the "
        "target as it is listed, or load any drafter by its own name with DFlowDrafter.from_pretrained."
    )


def _assume(row: Drafter, name: str | None, evidence: str) -> Drafter:
    logger.warning_once(
        f"The target {name or '(no name)'} is taken for {row.target} by the {evidence}, so its drafter is {row.name}. "
        "If its weights are others, the text stays its own and more drafts are rejected."
    )
    return row


def _needs_of(row: Drafter) -> _Needs:
    recorded = json.loads((BUNDLED[row.name] / "config.json").read_text(encoding="utf-8"))
    return _Needs(recorded["target_hidden_size"], recorded["num_target_layers"], recorded["tokenizer_fingerprint"])


def _tokenizer_in(folder: str | None) -> Any:
    if not folder or not any(os.path.isfile(os.path.join(folder, file)) for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # `tokenizers` raises just this; what cannot be read tells nothing
        return None


def _is_folder(name: str) -> bool:
    """Whether a target's name is a path: of a folder here, or one that no repository can have."""
    return os.path.isdir(name) or os.path.isabs(name) or name.startswith(".") or name.count("/") > 1 or "\\" in name
