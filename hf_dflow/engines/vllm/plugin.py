"""What vLLM calls when it starts. Nothing here imports torch or vLLM before that, or may raise."""

import logging

from hf_dflow.checkpoints.vllm import ARCHITECTURE

logger = logging.getLogger(__name__)

# The method names and tensors that the hooks rely on belong to no public interface of vLLM.
TESTED = ("0.32.0",)
MODEL = "hf_dflow.engines.vllm.model:DFlowDraftModel"
REFUSAL = "hf_dflow.engines.vllm.refusal:UntestedVersion"


def register() -> None:
    """Make the architecture of exported DFlow drafters known to vLLM; every other model stays as it is.

    vLLM calls its plugins unguarded, so that an error here would end servers that never load such a drafter: an
    untested version is refused when one is loaded.
    """
    try:
        from vllm import ModelRegistry

        ModelRegistry.register_model(ARCHITECTURE, MODEL if is_tested() else REFUSAL)
    except Exception:
        logger.exception("hf_dflow could not register %s with vLLM; DFlow drafters will not load.", ARCHITECTURE)


def vllm_version() -> str:
    """vLLM's own number, without what a build appends to it (`+cpu`)."""
    from vllm.version import __version__

    return str(__version__).partition("+")[0]


def is_tested() -> bool:
    """Whether this version of vLLM is one that the plugin's tests ran with."""
    return vllm_version() in TESTED
