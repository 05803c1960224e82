"""Finding a drafter's files in a folder, the cache or the Hub, and reading no more of them than is safe."""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from hf_dflow.checkpoints.layout import StoredTensor
from hf_dflow.checkpoints.names import check_drafter_name, similar_drafters, unknown_drafter
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError

HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder")
LONGEST_ANSWER = 10.0  # seconds, of the Hub
LONGEST_JSON = 16 * 2**20  # bytes; the index of a thousand shards is far smaller
OWN_PARTS_FILE = "hf_dflow/parts.safetensors"  # of an exported drafter: its relay and causal correction
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "BOOL": torch.bool},  # of vocabulary maps
}


def read_config(source: str, hub_options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The raw content of `source`'s config.json, and the commit it came from (`None` for a folder).

    Raises:
        [`DrafterConfigError`]: No config.json, or one that is no JSON object.
        `OSError`: No such folder or repository, no access, or no network.
    """
    check_drafter_name(source)
    _refuse_misspelt(source, hub_options)
    try:
        file = cached_file(source, "config.json", **hub_options)
    except OSError as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise OSError(
                f"{source} is a gated repository: ask for access on its page, then pass token=… or log in with "
                "`hf auth login`."
            ) from error
        if os.path.isdir(source):
            raise
        raise OSError(f"{source}: there is no such folder here. As a name on the Hub: {error}") from error
    if file is None:
        raise DrafterConfigError(f"{source}: no config.json.")
    try:
        raw = read_json(file)
    except ValueError as error:
        raise DrafterConfigError(f"{source}/config.json: not a JSON file ({error}).") from error
    if not isinstance(raw, dict):
        raise DrafterConfigError(f"{source}/config.json: not a JSON object.")
    return raw, extract_commit_hash(file, None)


def _refuse_misspelt(source: str, hub_options: Mapping[str, Any]) -> None:
    """Ask once whether `source` is there where a known drafter's name is nearly the same; others may have named theirs
    like it.

    transformers repeats its question for most of a minute before it says that a name is wrong.

    Raises:
        `OSError`: Naming the drafters that are nearest.
    """
    similar = similar_drafters(source)
    if not similar or _is_cached(source, hub_options):
        return
    if hub_options.get("local_files_only"):
        raise OSError(unknown_drafter(source, similar, ", nor is such a repository in the cache"))
    try:
        HfApi().model_info(source, revision=None, timeout=LONGEST_ANSWER, token=hub_options.get("token"))
    except RepositoryNotFoundError as error:
        raise OSError(unknown_drafter(source, similar, ", nor such a repository, unless it is private")) from error
    except HfHubHTTPError:  # the Hub has something else to say, and transformers passes it on
        return
    except Exception as error:  # whichever of its clients' errors says that there is no connection
        reason = f", and the Hub cannot be asked ({error})"
        raise OSError(unknown_drafter(source, similar, reason)) from error


def _is_cached(source: str, hub_options: Mapping[str, Any]) -> bool:
    try:
        return (
            cached_file(source, "config.json", **{**hub_options, "local_files_only": True, "force_download": False})
            is not None
        )
    except OSError:
        return False


def read_json(file: str | os.PathLike) -> Any:
    """The content of a JSON file, which must not be longer than `LONGEST_JSON`.

    Raises:
        `ValueError`: It is longer, no JSON, or nested without end.
    """
    length = os.path.getsize(file)
    if length > LONGEST_JSON:
        raise ValueError(f"{length} bytes, more than {LONGEST_JSON}")

    def refuse(name: str):
        raise ValueError(f"{name} is no JSON number")

    with open(file, encoding="utf-8") as stream:
        try:
            return json.load(stream, parse_constant=refuse)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def stored_tensors(
    path: str, hub_options: Mapping[str, Any], variant: str | None = None, with_own_parts: bool = False
) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of `path`, from their headers alone.

    Args:
        path (`str`): Folder or repository.
        hub_options (`Mapping`): Of `HUB_OPTIONS`.
        variant (`str`, *optional*): As in transformers, `model.<variant>.safetensors`.
        with_own_parts (`bool`): Include the parts of an exported drafter that its layout cannot express.

    Raises:
        [`DrafterWeightsError`]: No safetensors file, a damaged one, a shard outside the repository, a dtype that is no
            weight's.
    """
    try:
        files = _weight_files(path, hub_options, variant)
        files += [_beside(path, OWN_PARTS_FILE, hub_options)] if with_own_parts else []
        stored: dict[str, StoredTensor] = {}
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as content:  # checks sizes and offsets
                for name in content.keys():  # noqa: SIM118 - no mapping
                    part = content.get_slice(name)
                    dtype = part.get_dtype()
                    if dtype not in DTYPES:
                        raise DrafterWeightsError(
                            f"{path}: '{name}' is stored as {dtype}, which is no floating point weight; a quantised "
                            "drafter must be dequantised first."
                        )
                    if name in stored:
                        raise DrafterWeightsError(f"{path}: '{name}' is in two files; keep one of them.")
                    stored[name] = StoredTensor(file, tuple(part.get_shape()), DTYPES[dtype])
    except DrafterWeightsError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise DrafterWeightsError(
            f"{path}: cannot read the weights ({error}). Only intact safetensors files are loaded, never pickles; "
            "download again, or convert pytorch_model.bin in a place where running its code is acceptable."
        ) from error
    return stored


def read_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """The tensors themselves, mapped into memory."""
    tensors: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        with safe_open(file, framework="pt", device="cpu") as content:
            tensors |= {name: content.get_tensor(name) for name, tensor in stored.items() if tensor.file == file}
    return tensors


def _weight_files(path: str, hub_options: Mapping[str, Any], variant: str | None) -> list[str]:
    suffix = "" if variant is None else f".{variant}"
    single, index = f"model{suffix}.safetensors", f"model.safetensors.index{suffix}.json"
    file = cached_file(path, single, _raise_exceptions_for_missing_entries=False, **hub_options)
    if file is not None:
        return [file]
    index_file = cached_file(path, index, _raise_exceptions_for_missing_entries=False, **hub_options)
    if index_file is None:
        raise ValueError(f"neither {single} nor {index} is there")
    content = read_json(index_file)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} has no 'weight_map'")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if not SHARD_NAME.fullmatch(name):
            raise ValueError(f"{index} names the shard {name!r}; a shard is a .safetensors file beside its index")
    return [_beside(path, name, hub_options) for name in names]


def _beside(path: str, name: str, hub_options: Mapping[str, Any]) -> str:
    file = cached_file(path, name, **hub_options)
    if file is None:
        raise ValueError(f"{name} is missing")
    return file
