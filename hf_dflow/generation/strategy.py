"""The only seam into `generate`: three methods of `GenerationMixin`, wrapped once and given back on request.

It installs itself as soon as transformers' generation is imported, when the rest of transformers may not be there yet.
So what the wrappers call is imported once a call needs it.
"""

import functools
import sys
from typing import Any

from transformers.generation.utils import GenerationMixin

from hf_dflow.errors import UnsupportedGenerationError
from hf_dflow.generation import SPECULATION_TYPE

WRAPPED = ("_prepare_generation_config", "_validate_generation_mode", "_assisted_decoding")


def install() -> None:
    """Teach `generate` the value `speculation_type="dflow"`. Done on import; doing it again changes nothing."""
    for name in WRAPPED:
        original = getattr(GenerationMixin, name)
        if not hasattr(original, "_hf_dflow_original"):
            setattr(GenerationMixin, name, _WRAPPERS[name](original))


def uninstall() -> None:
    """Give `generate` its own methods back."""
    for name in WRAPPED:
        original = getattr(getattr(GenerationMixin, name), "_hf_dflow_original", None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _is_ours(drafter: Any) -> bool:
    if drafter is None:
        return False
    from hf_dflow.model.drafter import DFlowDrafter

    return isinstance(drafter, DFlowDrafter)


def _remember(wrapper: Any, original):
    wrapper._hf_dflow_original = original
    return wrapper


def _wrap_configuration(original):
    @functools.wraps(original)
    def _prepare_generation_config(self, generation_config, **kwargs):
        speculation_type = kwargs.get("speculation_type", getattr(generation_config, "speculation_type", None))
        is_flagged = speculation_type == SPECULATION_TYPE
        if not is_flagged and "hf_dflow.generation.decoder" not in sys.modules:  # nor is this a DFlowDecoder's call
            return original(self, generation_config, **kwargs)
        from hf_dflow.generation.configuration import (
            OPTION_NAMES,
            refuse_misspelt,
            refuse_without_flag,
            take_from_caller,
        )

        if not is_flagged:
            prepared, model_kwargs = original(self, generation_config, **kwargs)
            refuse_without_flag(model_kwargs, self)
            take_from_caller(prepared, self.generation_config, generation_config, {})
            return prepared, model_kwargs
        options = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        prepared, model_kwargs = original(self, generation_config, **kwargs)
        take_from_caller(prepared, self.generation_config, generation_config, options)
        refuse_misspelt([name for name in kwargs if name in model_kwargs], "generate", cutoff=0.8)
        for name, value in options.items():
            setattr(prepared, name, value)
        return prepared, model_kwargs

    return _remember(_prepare_generation_config, original)


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        # A callable custom_generate is handed none of generate's own arguments, and DFlowDecoder checks for itself.
        is_custom = "synced_gpus" not in generation_mode_kwargs
        if generation_config.speculation_type == SPECULATION_TYPE and not is_custom:
            from hf_dflow.generation.checks import check_mode, check_target

            check_mode(generation_config, drafter)
            if generation_config.num_beams in (None, 1) and generation_mode != "assisted_generation":
                raise UnsupportedGenerationError(
                    f'speculation_type="{SPECULATION_TYPE}" drafts for greedy decoding and sampling, but these options '
                    f"ask for {getattr(generation_mode, 'value', generation_mode)}."
                )
            check_target(self)  # here too: generate runs an encoder before it decodes
            return None
        if _is_ours(drafter) and generation_config.speculation_type != "dflash":
            raise UnsupportedGenerationError(
                f'a DFlowDrafter as assistant_model needs speculation_type="{SPECULATION_TYPE}" (or "dflash" for '
                "transformers' own loop without feedback)."
            )
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _remember(_validate_generation_mode, original)


def _wrap_assisted_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, generation_config=None, assistant_model=None, **kwargs):
        if getattr(generation_config, "speculation_type", None) != SPECULATION_TYPE:
            return original(
                self, input_ids, *args, generation_config=generation_config, assistant_model=assistant_model, **kwargs
            )
        for name in ("inputs_tensor", "assistant_tokenizer"):  # generate's own, nothing for the target
            kwargs.pop(name, None)
        from hf_dflow.generation.decoder import DFlowDecoder

        decoder: Any = DFlowDecoder(assistant_model)
        return decoder(self, input_ids, *args, generation_config=generation_config, **kwargs)

    return _remember(_assisted_decoding, original)


_WRAPPERS = {
    "_prepare_generation_config": _wrap_configuration,
    "_validate_generation_mode": _wrap_validation,
    "_assisted_decoding": _wrap_assisted_decoding,
}

install()
