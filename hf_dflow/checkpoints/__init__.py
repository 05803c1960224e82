"""Loading a drafter from a folder or repository: which format it is in, and nothing left to chance in its weights.

Formats are told apart by their config.json, never by a name. Each has a module with four functions: whether a
configuration is of it (`matches`), that configuration as ours (`convert_config`), our name of a stored tensor
(`rename`; `None` for one that only its own training needs), and our weights (`convert_weights`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_dflow.checkpoints import dflash, dflash2, native, own, speculators
from hf_dflow.checkpoints.files import HUB_OPTIONS, StoredTensor, read_config, read_tensors, stored_tensors
from hf_dflow.checkpoints.names import resolve
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError
from hf_dflow.model.configuration import DFlowDrafterConfig

FORMATS: dict[str, Any] = {
    "dflow": own,
    "dflash": dflash,
    "dflash2": dflash2,
    "speculators": speculators,
    "transformers": native,
}
SUPPORTED = "; ".join(module.DESCRIPTION for module in FORMATS.values())
IGNORED = ("trust_remote_code", "use_auth_token", "adapter_kwargs", "_commit_hash", "_from_auto")


def load_drafter(
    drafter_class: type,
    load: Callable[..., Any],
    path: Any,
    *model_args,
    config: PreTrainedConfig | str | None = None,
    use_safetensors: bool | None = None,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    **kwargs,
):
    """What [`DFlowDrafter.from_pretrained`] does: detect the format, convert it, load strictly.

    Every look-up of a file gets the same `revision` (a branch is followed once, for config.json), `token`, `cache_dir`,
    `local_files_only`, `subfolder`, `proxies` and `force_download`. Only config.json and safetensors files are read.
    Names and sizes are compared with the configuration before anything of that size is allocated.

    Args:
        drafter_class (`type`): [`DFlowDrafter`] or a subclass.
        load (`Callable`): transformers' own `from_pretrained`, bound to that class.
        path (`str` or `Path`, *optional*):
            Folder, repository, or name of a bundled drafter; `None` together with `state_dict`.
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
    for key in IGNORED:
        kwargs.pop(key, None)
    if config is not None and not isinstance(config, (str, DFlowDrafterConfig)):
        raise DrafterConfigError(
            f"{path}: config is a {type(config).__name__}; pass a DFlowDrafterConfig, or none to convert the "
            "configuration found there."
        )
    if path is None:
        return _load(load, None, model_args, config, output_loading_info, False, kwargs)
    path = resolve(path)
    hub_options = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
    variant = kwargs.pop("variant", None)
    commit, form = None, own
    raw: dict[str, Any] | None = None
    if not isinstance(config, DFlowDrafterConfig):
        source = path if config is None else config
        raw, commit = read_config(source, hub_options)
        form = format_of(raw, source)
        if commit is not None and config is None:
            hub_options["revision"] = commit  # a branch may move between two look-ups
    exported = _exported_fields(raw or {}, path)
    with_relay = bool(exported.get("use_relay")) and kwargs.get("use_relay") is not False
    corrects = exported.get("correction_intermediate_size") is not None
    stored = stored_tensors(path, hub_options, variant, with_relay or corrects)
    if exported and not with_relay:
        stored = {name: one for name, one in stored.items() if not name.startswith("relay.")}
    if raw is None:
        assert isinstance(config, DFlowDrafterConfig)
        _refuse_foreign_kernel(config, kwargs, path)
        converted = config
    else:
        given = {key: kwargs.pop(key) for key in DFlowDrafterConfig.__annotations__ if key in kwargs}
        fields = {**exported, **given}
        converted = form.convert_config(raw, path if config is None else str(config), stored, **fields)
    names = {name: form.rename(name) for name in stored}
    renamed = {str(names[name]): one for name, one in stored.items() if names[name] is not None}
    is_foreign = form is not own
    check_sizes(drafter_class, converted, renamed, path, relay_may_be_missing=is_foreign)
    kwargs["state_dict"] = form.convert_weights(read_tensors(stored), converted, path)
    return _load(load, path, model_args, converted, output_loading_info, is_foreign, kwargs, commit)


def format_of(raw: Mapping[str, Any], where: str) -> Any:
    """The module of the format that the content of a config.json claims.

    Raises:
        [`DrafterConfigError`]: None of those supported.
    """
    if raw.get("quantization_config") is not None:
        raise DrafterConfigError(
            f"{where}/config.json: 'quantization_config' says that the weights are quantised; dequantise them first, "
            "or load the original drafter."
        )
    for module in FORMATS.values():
        if module.matches(raw):
            return module
    kind = raw.get("speculators_model_type") or raw.get("model_type")
    raise DrafterConfigError(
        f"{where}/config.json: 'architectures' {raw.get('architectures')} with 'model_type' '{kind}' is not a drafter "
        f"this hf_dflow can load. Supported: {SUPPORTED}."
    )


def check_sizes(
    drafter_class: type,
    config: DFlowDrafterConfig,
    stored: Mapping[str, StoredTensor],
    path: str,
    *,
    relay_may_be_missing: bool = False,
) -> None:
    """Compare names, shapes and dtypes in the files with what `config` needs, without allocating either.

    Raises:
        [`DrafterConfigError`]: `config` is impossible.
        [`DrafterWeightsError`]: Listing what is missing, unexpected or of the wrong shape.
    """
    config.check()
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if config.num_hidden_layers > len(layers):  # also bounds what is built below
        raise DrafterWeightsError(
            f"{path}: the weights do not fit the configuration. missing: layers.* of {config.num_hidden_layers} "
            f"draft layers ('num_hidden_layers'), the files hold {len(layers)}."
        )
    try:
        with torch.device("meta"):
            needed = drafter_class(config).state_dict()
    except (RuntimeError, OverflowError, TypeError) as error:
        raise DrafterConfigError(f"{path}/config.json: sizes that no model can have ({error}).") from error
    is_float = {name: one.dtype.is_floating_point for name, one in stored.items()}
    report = {
        "missing_keys": [name for name in needed if name not in stored],
        "unexpected_keys": [name for name in stored if name not in needed],
        "mismatched_keys": [
            (name, stored[name].shape, weight.shape)
            for name, weight in needed.items()
            if name in stored and stored[name].shape != tuple(weight.shape)
        ],
        "dtypes": [
            f"{name} is {stored[name].dtype}, needs {'a floating type' if weight.is_floating_point() else 'int64'}"
            for name, weight in needed.items()
            if name in stored and is_float[name] != weight.is_floating_point()
        ],
    }
    _check_report(path, report, relay_may_be_missing)


def _load(
    load: Callable[..., Any],
    path: str | None,
    model_args: tuple,
    config: Any,
    output_loading_info: bool,
    relay_may_be_missing: bool,
    kwargs: dict[str, Any],
    commit: str | None = None,
):
    model, report = load(
        None,
        *model_args,
        config=config,
        ignore_mismatched_sizes=True,  # so that they are reported together with the other keys
        output_loading_info=True,
        **kwargs,
    )
    _check_report(str(path), report, relay_may_be_missing)
    model.check_draft_vocabulary()
    if path is not None:
        model.config._name_or_path = model.name_or_path = path
        model.config._commit_hash = commit
    return (model, report) if output_loading_info else model


def _exported_fields(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What [`~hf_dflow.checkpoints.export.export_drafter`] noted of a drafter in another format, if it wrote it."""
    note = raw.get("hf_dflow")
    fields = note.get("config", {}) if isinstance(note, dict) else {}
    if not isinstance(fields, dict):
        raise DrafterConfigError(f"{path}/config.json: 'hf_dflow.config' is {fields!r}, not an object.")
    return {key: value for key, value in fields.items() if key in DFlowDrafterConfig.__annotations__}


def _refuse_foreign_kernel(config: DFlowDrafterConfig, kwargs: Mapping[str, Any], path: str) -> None:
    """An attention "org/kernel" is code from the Hub: it must come from the caller, not out of a file."""
    kernel = config._attn_implementation
    if isinstance(kernel, str) and "/" in kernel and kwargs.get("attn_implementation") != kernel:
        raise DrafterConfigError(
            f"{path}/config.json: 'attn_implementation' is '{kernel}', code from a repository; remove the key, or pass "
            "attn_implementation= yourself if you trust it."
        )


def _check_report(path: str, report: Mapping[str, Any], relay_may_be_missing: bool) -> None:
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
    if report.get("dtypes"):
        problems.append(f"wrong dtype: {', '.join(sorted(report['dtypes']))}")
    if problems:
        raise DrafterWeightsError(f"{path}: the weights do not fit the configuration. {'; '.join(problems)}.")


__all__ = ["FORMATS", "check_sizes", "format_of", "load_drafter"]
