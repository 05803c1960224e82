"""Drafters by name: those bundled with the package, and a table of those that others have published."""

import difflib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dflow.errors import UnknownDrafterError

FOLDER = Path(__file__).parents[1] / "drafters"


@dataclass(frozen=True)
class Drafter:
    """One row of the table. `None` where the source does not say: the repository's own files decide."""

    name: str  # repository, or the name of a bundled one
    target: str
    format: str  # a key of `hf_dflow.checkpoints.reader.LAYOUTS`
    block_size: int | None = None
    licence: str | None = None  # as published
    chat_mode: str | None = None  # how the target was prompted: "thinking", "non-thinking", "chat", "raw"


# In the package, each laid out as its repository would be; they need no network.
BUNDLED = {
    "smollm2-135m-instruct-b8": FOLDER / "smollm2-135m-instruct-b8",
    "tiny-airports-b8": FOLDER / "tiny-airports-b8" / "drafter",
}
TABLE = (
    # model_cards/*.md of this repository
    Drafter("smollm2-135m-instruct-b8", "HuggingFaceTB/SmolLM2-135M-Instruct", "dflow", 8, "apache-2.0", "chat"),
    Drafter("tiny-airports-b8", "tiny-airports-b8/target", "dflow", 8, "apache-2.0", "raw"),
    # README.md of z-lab/dflash on GitHub, commit 0a2da23, "Supported Models": repository, target (its maker's name is
    # added) and thinking mode; the block is in the name, or that of the serving examples.
    # Licences: what other projects noted of the repository's card at a commit. MIT: ds4_on_spark's manifest of
    # upstreams (experiencenow-ai, 11 May 2026); of Qwen3-Coder-Next, the repository's own commit 6b1027e. Where nobody
    # noted one, or two notes differ (Qwen3.6-35B-A3B), there is none here.
    Drafter("z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", "dflash", 16, None, "non-thinking"),
    Drafter("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", "dflash", 16, None, "non-thinking"),
    Drafter("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "meta-llama/Llama-3.1-8B-Instruct", "dflash"),
    Drafter("z-lab/Qwen3-Coder-Next-DFlash", "Qwen/Qwen3-Coder-Next", "dflash", None, "mit"),
    Drafter("z-lab/Qwen3-Coder-30B-A3B-DFlash", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "dflash", None, "mit"),
    Drafter("z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b", "dflash", None, "mit"),
    Drafter("z-lab/gpt-oss-120b-DFlash", "openai/gpt-oss-120b", "dflash", None, "mit"),
    Drafter("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B", "dflash"),
    Drafter("z-lab/Qwen3.5-9B-DFlash", "Qwen/Qwen3.5-9B", "dflash"),
    Drafter("z-lab/Qwen3.5-27B-DFlash", "Qwen/Qwen3.5-27B", "dflash", 16, "mit"),
    Drafter("z-lab/Qwen3.5-35B-A3B-DFlash", "Qwen/Qwen3.5-35B-A3B", "dflash", 16),
    Drafter("z-lab/Qwen3.5-122B-A10B-DFlash", "Qwen/Qwen3.5-122B-A10B", "dflash"),
    Drafter("z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B", "dflash", None, "mit"),
    Drafter("z-lab/Qwen3.6-35B-A3B-DFlash", "Qwen/Qwen3.6-35B-A3B", "dflash"),
    Drafter("z-lab/Kimi-K2.5-DFlash", "moonshotai/Kimi-K2.5", "dflash"),
    # The Hub's collection "DFlash 2" of z-lab; block: tests/fixtures/dflash2-config.json of z-lab/dflash, 0a7587c, and
    # the card of lued/Qwen3.8-27B-DFlash2-W8, made from it; licence: README of gittensor-ai-lab's sparkinfer
    Drafter("z-lab/Muse-Glimmer-30B-DFlash2", "meta-models/Muse-Glimmer-30B", "dflash2", 16),
    Drafter("z-lab/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B", "dflash2", 8, "apache-2.0"),
    # transformers 5.24, configuration_muse_glimmer_assistant.py: checkpoint and the default block
    Drafter("meta-models/Muse-Glimmer-30B-assistant", "meta-models/Muse-Glimmer-30B", "transformers", 16),
    # README.md of vllm-project/speculators, and each repository's card: mode where it says with or without reasoning,
    # licence where the Hub's page shows one
    Drafter("RedHatAI/Mistral-Small-4-119B-2603.dflash", "mistralai/Mistral-Small-4-119B-2603", "speculators"),
    Drafter("RedHatAI/Qwen3-8B-speculator.dflash", "Qwen/Qwen3-8B", "speculators"),
    Drafter("RedHatAI/Qwen3-8B-speculator.dflash2", "Qwen/Qwen3-8B", "speculators", None, None, "non-thinking"),
    Drafter("RedHatAI/Qwen3-4B-speculator.dflash2", "Qwen/Qwen3-4B", "speculators", None, "apache-2.0"),
    Drafter("RedHatAI/Qwen3-30B-A3B-speculator.dflash", "Qwen/Qwen3-30B-A3B", "speculators"),
    Drafter(
        "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash", "Qwen/Qwen3-30B-A3B-Instruct-2507", "speculators"
    ),
)

KNOWN = tuple(row.name for row in TABLE)
NEAR = 0.8  # difflib's ratio; of a name of 20 characters, four may be wrong


def resolve(name: Any) -> str:
    """The folder or repository to load for `name`: a bundled drafter's folder, else `name` itself."""
    name = os.fspath(name)
    return str(BUNDLED[name]) if name in BUNDLED and not os.path.isdir(name) else name


def check_name(name: Any) -> None:
    """Refuse what can be neither a folder here nor a name on the Hub, without a request.

    Raises:
        `OSError`: There is no such folder, and no repository can have that name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = os.fspath(name)
    if name in BUNDLED or os.path.isdir(name):
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = "is a file, not a folder" if os.path.exists(name) else "there is no such folder"
        raise OSError(
            f"{name}: {problem}, and it is no name on the Hub either (owner/name, of letters, digits, '-', '_', '.'). "
            "Correct the path, or give a repository's name."
        ) from error


def check_drafter_name(name: Any) -> None:
    """The same for a drafter's name, without an owner where a known drafter's is meant: the Hub has none without one.

    Raises:
        `OSError`: Naming the drafters that are nearest.
    """
    name = os.fspath(name)
    try:
        check_name(name)
    except OSError as error:
        words = _as_words(name)
        similar = [words] if words in KNOWN else similar_drafters(words)
        if os.path.exists(name) or not similar:
            raise
        raise OSError(unknown_drafter(name, similar)) from error
    if "/" not in name and (similar := similar_drafters(name)):
        raise OSError(unknown_drafter(name, similar))


def _as_words(name: str) -> str:
    """A name without what a shell or a sentence puts around or into it: blanks, quotes, `./`, a last slash."""
    return "-".join(name.removeprefix("./").strip(" \t\n'\"`/").split())


def similar_drafters(name: str) -> list[str]:
    """Known drafters whose name is nearly `name`, the nearest first; none where `name` is known, or a folder."""
    if os.path.isdir(name) or name in KNOWN:
        return []
    # Case is the first thing to be mistyped. Without an owner, only the names proper are compared.
    spelt = {(known if "/" in name else known.rsplit("/")[-1]).casefold(): known for known in KNOWN}
    return [spelt[key] for key in difflib.get_close_matches(name.casefold(), spelt, n=3, cutoff=NEAR)]


def unknown_drafter(name: str, similar: list[str], reason: str = "") -> str:
    """The message of an error: `name` is no drafter, but `similar` ones are."""
    nearest, *others = similar
    others_too = f" (or {', '.join(others)})" if others else ""
    return (
        f"{name}: there is no such folder here and no known drafter of that name{reason}. Did you mean "
        f"{nearest}{others_too}? `hf-dflow drafters` lists them all; a folder is given by its path."
    )


def refuse_bundled_names(cached_files: Callable) -> Callable:
    """transformers' search for files, which tells its caller the folder where it is asked for a bundled drafter's name.

    Its own loaders know no such name and ask the Hub for it, for most of a minute where there is no network.
    """

    @functools.wraps(cached_files)
    def with_folders_named(path_or_repo_id, *args, **kwargs):
        name = path_or_repo_id
        if isinstance(name, str) and name in BUNDLED and not os.path.isdir(name):
            raise OSError(
                f"{name} is a drafter that comes with hf_dflow, and only DFlowDrafter.from_pretrained({name!r}) takes "
                f"that name: pass its folder, {str(BUNDLED[name])!r}, to transformers' own loaders, and to a pipeline "
                "the loaded drafter."
            )
        return cached_files(path_or_repo_id, *args, **kwargs)

    return with_folders_named


def drafters_for(target: str) -> list[Drafter]:
    """The rows of the table for a target's name, whatever its case; the bundled first."""
    return [row for row in TABLE if row.target.casefold() == target.casefold()]


def drafter_for(target: str | None) -> Drafter:
    """The first row of the table for a target's name.

    Raises:
        [`UnknownDrafterError`]: The table has none.
    """
    rows = drafters_for(target) if target else []
    if rows:
        return rows[0]
    similar = difflib.get_close_matches(str(target), sorted({row.target for row in TABLE}), n=3, cutoff=0.75)
    hint = f" Similar names: {', '.join(similar)}; a drafter serves its own target only." if similar else ""
    raise UnknownDrafterError(
        f"no drafter is listed for the target {target!r}.{hint} `hf-dflow drafters` lists those known; any other is "
        "loaded by its own name with DFlowDrafter.from_pretrained."
    )
