"""From a checkpoint to a drafter: strict about names, shapes and types, with no configuration value guessed."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from hf_dflow.checkpoints.files import HUB_OPTIONS, read_config, stored_tensors
from hf_dflow.checkpoints.layout import OwnLayout, StoredTensor
from hf_dflow.checkpoints.names import resolve
from hf_dflow.checkpoints.reader import Checkpoint, layout_of, read_checkpoint, read_fields
from hf_dflow.checkpoints.targets import listed_drafter
from hf_dflow.errors import DrafterConfigError, DrafterWeightsError
from hf_dflow.model.configuration import REMOVED, DFlowDrafterConfig

IGNORED = ("trust_remote_code", "use_auth_token", "adapter_kwargs", "_commit_hash", "_from_auto")


class LoadableDrafter(PreTrainedModel):
    """How a drafter is loaded: [`LoadableDrafter.from_pretrained`] and [`LoadableDrafter.for_target`]."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        config: DFlowDrafterConfig | str | os.PathLike | None = None,
        use_safetensors: bool | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs,
    ):
        """Load a drafter in any supported layout, which config.json decides.

        Every look-up of a file gets the same `revision` (a branch is followed once, for config.json), `token`,
        `cache_dir`, `local_files_only`, `subfolder`, `proxies` and `force_download`. Only config.json and safetensors
        files are read. Names and sizes are compared with the configuration before anything of that size is allocated.

        Args:
            pretrained_model_name_or_path (`str` or `Path`, *optional*):
                Folder, repository, or name of a bundled drafter; `None` together with `state_dict`.
            config (`DFlowDrafterConfig` or `str`, *optional*):
                Used as it is; a string names where to read it. By default, the one found with the weights.
            use_safetensors (`bool`, *optional*): `False` is refused: a pickle can run any code.
            ignore_mismatched_sizes (`bool`, *optional*, defaults to `False`):
                Accepted for compatibility and not honoured: a weight of the wrong shape is always an error.
            output_loading_info (`bool`, *optional*, defaults to `False`): Also return transformers' loading report.
            kwargs: Any other keyword of `PreTrainedModel.from_pretrained`, or a field of [`DFlowDrafterConfig`].

        Returns:
            The drafter, or `(drafter, loading report)` with `output_loading_info=True`.

        Raises:
            [`DrafterConfigError`]: Unknown layout, missing or impossible configuration key.
            [`DrafterWeightsError`]: No safetensors file, a damaged one, or weights that do not fit the configuration.
        """
        path = None if pretrained_model_name_or_path is None else resolve(pretrained_model_name_or_path)
        if use_safetensors is False:
            raise DrafterWeightsError(
                f"{path}: use_safetensors=False was given, but only safetensors are read; drop it."
            )
        for key in IGNORED:
            kwargs.pop(key, None)
        if config is not None and not isinstance(config, (str, os.PathLike, DFlowDrafterConfig)):
            raise DrafterConfigError(
                f"{path}: config is a {type(config).__name__}; pass a DFlowDrafterConfig, or none to convert the "
                "configuration found there."
            )
        checkpoint = None
        if path is not None:
            checkpoint, config = _read(path, config, kwargs)
            check_weights(cls, config, checkpoint.headers, path, allow_missing_relay=_is_foreign(checkpoint))
            kwargs["state_dict"] = checkpoint.read_weights()
        loaded: Any = super().from_pretrained(
            None,
            *model_args,
            config=config,
            ignore_mismatched_sizes=True,  # so that they are reported together with the other keys
            output_loading_info=True,
            **kwargs,
        )
        drafter, report = loaded
        _check_report(str(path), report, checkpoint is not None and _is_foreign(checkpoint))
        drafter.check_draft_vocabulary()
        if checkpoint is not None:
            drafter.config._name_or_path = drafter.name_or_path = path
            drafter.config._commit_hash = checkpoint.commit
        return (drafter, report) if output_loading_info else drafter

    @classmethod
    def for_target(cls, target: Any, *, tokenizer: Any = None, **kwargs):
        """Load the drafter that is listed for a target.

        A target in a folder is known by its place in the Hub's cache; else by its sizes and its tokenizer, if its
        drafter is bundled, or by its folder's name. A warning then says which target it was taken for.

        Args:
            target (`str`, `Path` or `PreTrainedModel`): The target, its name, or its folder.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; by default the one in its folder.
            kwargs: As in `from_pretrained`.

        Raises:
            [`UnknownDrafterError`]: None is listed; `hf-dflow drafters` shows those that are.
        """
        return cls.from_pretrained(listed_drafter(target, tokenizer).name, **kwargs)


def read_drafter_config(source: str | os.PathLike) -> DFlowDrafterConfig:
    """The configuration of a drafter in any layout, from its config.json alone.

    Raises:
        [`DrafterConfigError`]: The layout decides by its weights whose embedding and head the drafter uses.
    """
    path = resolve(source)
    raw, _ = read_config(path, {})
    layout = layout_of(raw, path)
    if layout.needs_weights:
        raise DrafterConfigError(f"{source}: only its weights tell whose embedding and head it uses; export it first.")
    return build_config(path, read_fields(raw, layout, path, {}, {}))


def build_config(path: str, fields: Mapping[str, Any]) -> DFlowDrafterConfig:
    """A checked configuration of `fields`; errors name `path`'s config.json.

    Keys that are not fields of [`DFlowDrafterConfig`] are left out: transformers would let some of them choose code to
    run.
    """
    known = {
        key: value for key, value in fields.items() if key in (*DFlowDrafterConfig.__annotations__, REMOVED, "dtype")
    }
    try:
        config = DFlowDrafterConfig(**{"name_or_path": path, **known})
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DrafterConfigError(f"{path}/config.json: {error}") from error
    config.check()
    return config


def check_weights(
    drafter_class: type,
    config: DFlowDrafterConfig,
    stored: Mapping[str, StoredTensor],
    path: str,
    *,
    allow_missing_relay: bool = False,
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
    shared = {name: (stored[name], needed[name]) for name in needed if name in stored}
    report = {
        "missing_keys": needed.keys() - stored.keys(),
        "unexpected_keys": stored.keys() - needed.keys(),
        "mismatched_keys": [
            (name, found.shape, weight.shape)
            for name, (found, weight) in shared.items()
            if found.shape != tuple(weight.shape)
        ],
        "dtypes": [
            f"{name} is {found.dtype}, needs {'a floating type' if weight.is_floating_point() else 'int64'}"
            for name, (found, weight) in shared.items()
            if found.dtype.is_floating_point != weight.is_floating_point()
        ],
    }
    _check_report(path, report, allow_missing_relay)


def _read(path: str, config: Any, kwargs: dict[str, Any]) -> tuple[Checkpoint, DFlowDrafterConfig]:
    """The checkpoint at `path` and its configuration; takes out of `kwargs` what transformers need not see."""
    hub_options = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
    variant = kwargs.pop("variant", None)
    if isinstance(config, DFlowDrafterConfig):
        _refuse_foreign_kernel(config, kwargs, path)
        return Checkpoint(path, OwnLayout(), stored_tensors(path, hub_options, variant)), config
    overrides = {key: kwargs.pop(key) for key in DFlowDrafterConfig.__annotations__ if key in kwargs}
    source = None if config is None else resolve(config)
    checkpoint = read_checkpoint(path, hub_options, config_source=source, variant=variant, overrides=overrides)
    return checkpoint, build_config(source or path, {**checkpoint.fields, **overrides})


def _is_foreign(checkpoint: Checkpoint) -> bool:
    return not isinstance(checkpoint.layout, OwnLayout)


def _refuse_foreign_kernel(config: DFlowDrafterConfig, kwargs: Mapping[str, Any], path: str) -> None:
    """An attention "org/kernel" is code from the Hub: it must come from the caller, not out of a file."""
    kernel = config._attn_implementation
    if isinstance(kernel, str) and "/" in kernel and kwargs.get("attn_implementation") != kernel:
        raise DrafterConfigError(
            f"{path}/config.json: 'attn_implementation' is '{kernel}', code from a repository; remove the key, or pass "
            "attn_implementation= yourself if you trust it."
        )


def _check_report(path: str, report: Mapping[str, Any], allow_missing_relay: bool) -> None:
    """Raise [`DrafterWeightsError`] listing every weight that transformers would have filled in or dropped."""
    shapes = [f"{name} is {tuple(found)}, needs {tuple(needed)}" for name, found, needed in report["mismatched_keys"]]
    problems = {
        "missing": [name for name in report["missing_keys"] if not (allow_missing_relay and name.startswith("relay."))],
        "unexpected": report["unexpected_keys"],
        "wrong shape": shapes,
        "wrong dtype": report.get("dtypes", []),
    }
    listed = [f"{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names]
    if listed:
        raise DrafterWeightsError(f"{path}: the weights do not fit the configuration. {'; '.join(listed)}.")
