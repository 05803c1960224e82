"""Loading a drafter from a folder or repository: which format it is in, and nothing left to chance in its weights."""

import json
from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import GatedRepoError
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from hf_dflow.checkpoints import dflash
from hf_dflow.configuration_dflow import DFlowDrafterConfig
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError

HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder")
SUPPORTED = f"'model_type': '{DFlowDrafterConfig.model_type}' (this package) and {dflash.DESCRIPTION}"


def load_drafter(
    load: Callable[..., Any],
    path: str | None,
    *model_args,
    config: PreTrainedConfig | str | None = None,
    use_safetensors: bool | None = None,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    **kwargs,
):
    """What [`DFlowDrafter.from_pretrained`] does: detect the format, convert its configuration, load strictly.

    Args:
        load (`Callable`): transformers' own `from_pretrained`, bound to the drafter class.
        path (`str`, *optional*): Folder or repository; `None` together with `state_dict`.
        config (`DFlowDrafterConfig` or `str`, *optional*):
            Used as it is; a string names where to read it. Without one, the configuration found at `path` decides.
        use_safetensors (`bool`, *optional*): `False` is refused: a pickle can run any code.
        ignore_mismatched_sizes (`bool`, *optional*, defaults to `False`):
            Accepted for compatibility and not honoured: a weight of the wrong shape always is an error.
        output_loading_info (`bool`, *optional*, defaults to `False`): Also return transformers' loading report.
        kwargs: Any other keyword of `PreTrainedModel.from_pretrained`, or a field of [`DFlowDrafterConfig`].

    Returns:
        The drafter, or `(drafter, loading report)` with `output_loading_info=True`.

    Raises:
        [`DrafterConfigError`]: Unknown format, missing or impossible configuration key.
        [`DrafterWeightsError`]: No safetensors file, a damaged one, or weights that do not fit the configuration.
    """
    if use_safetensors is False:
        raise DrafterWeightsError(f"{path}: use_safetensors=False was given, but only safetensors are read; drop it.")
    converted = False
    if isinstance(config, PreTrainedConfig):
        if not isinstance(config, DFlowDrafterConfig):
            raise DrafterConfigError(
                f"{path}: config is a {type(config).__name__}; pass a DFlowDrafterConfig, or none to convert the "
                "configuration found there."
            )
    elif path is not None:
        source = path if config is None else config
        raw, commit = _read_config(source, {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs})
        if commit is not None and config is None:
            kwargs["revision"] = commit  # a branch may move between two look-ups
        if dflash.matches(raw):
            overrides = {key: kwargs.pop(key) for key in DFlowDrafterConfig.__annotations__ if key in kwargs}
            config, converted = dflash.convert_config(raw, str(source), **overrides), True
        elif raw.get("model_type") != DFlowDrafterConfig.model_type:
            raise DrafterConfigError(
                f"{source}/config.json: 'architectures' {raw.get('architectures')} with 'model_type' "
                f"'{raw.get('model_type')}' is not a drafter this hf_dflow can load. Supported: {SUPPORTED}."
            )
    if kwargs.get("revision") is not None:  # the oldest supported transformers would look for adapters in another one
        kwargs["adapter_kwargs"] = {"revision": kwargs["revision"], **(kwargs.get("adapter_kwargs") or {})}
    try:
        model, report = load(
            path,
            *model_args,
            config=config,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they are reported together with the other keys
            output_loading_info=True,
            **kwargs,
        )
    except (OSError, SafetensorError) as error:
        raise DrafterWeightsError(
            f"{path}: cannot read the weights ({error}). Only intact safetensors files are loaded, never pickles; "
            "download again, or convert pytorch_model.bin in a place where running its code is acceptable."
        ) from error
    _check_weights(str(path), report, relay_may_be_missing=converted)
    model.check_draft_vocabulary()
    return (model, report) if output_loading_info else model


def _read_config(source: str, hub_options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The raw content of `source`'s config.json, and the commit it came from (`None` for a folder)."""
    try:
        file = cached_file(source, "config.json", **hub_options)
    except OSError as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise OSError(
                f"{source} is a gated repository: ask for access on its page, then pass token=… or log in with "
                "`hf auth login`."
            ) from error
        raise
    if file is None:
        raise DrafterConfigError(f"{source}: no config.json.")
    try:
        with open(file, encoding="utf-8") as stream:
            raw = json.load(stream)
    except ValueError as error:
        raise DrafterConfigError(f"{source}/config.json: not a JSON file ({error}).") from error
    if not isinstance(raw, dict):
        raise DrafterConfigError(f"{source}/config.json: not a JSON object.")
    return raw, extract_commit_hash(file, None)


def _check_weights(path: str, report: dict[str, Any], *, relay_may_be_missing: bool) -> None:
    """Raise [`DrafterWeightsError`] listing every weight that transformers would have filled in or dropped."""
    missing = [key for key in report["missing_keys"] if not (relay_may_be_missing and key.startswith("relay."))]
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(sorted(missing))}")
    if report["unexpected_keys"]:
        problems.append(f"unexpected: {', '.join(sorted(report['unexpected_keys']))}")
    shapes = [f"{key} is {tuple(found)}, needs {tuple(needed)}" for key, found, needed in report["mismatched_keys"]]
    if shapes:
        problems.append(f"wrong shape: {', '.join(sorted(shapes))}")
    if problems:
        raise DrafterWeightsError(f"{path}: the weights do not fit the configuration. {'; '.join(problems)}.")


__all__ = ["load_drafter"]
