"""Block-diffusion speculative decoding in transformers that reuses what the verifier computed."""

from transformers import AutoConfig, AutoModel

from hf_dflow._version import __version__
from hf_dflow.errors import (
    DFlowError,
    DrafterConfigError,
    DrafterWeightsError,
    PairMismatchError,
    UnknownDrafterError,
    UnsupportedGenerationError,
)
from hf_dflow.generation.acceptance import AcceptanceContext, AcceptanceProcessor, AcceptanceThreshold
from hf_dflow.generation.configuration import DFlowGenerationConfig
from hf_dflow.generation.decoder import DFlowDecoder
from hf_dflow.generation.mixture import StaleMixture
from hf_dflow.generation.output import GenerateDFlowOutput
from hf_dflow.generation.pair import check_pair, record_target, tokenizer_fingerprint
from hf_dflow.generation.policy.monitor import AcceptanceMonitor, MonitorSettings, StepTimes
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.generation.step import VerifierFeedback
from hf_dflow.generation.strategy import install, uninstall
from hf_dflow.model.configuration import DFlowDrafterConfig
from hf_dflow.model.drafter import DFlowDrafter

AutoConfig.register(DFlowDrafterConfig.model_type, DFlowDrafterConfig, exist_ok=True)
AutoModel.register(DFlowDrafterConfig, DFlowDrafter, exist_ok=True)
install()

__all__ = [
    "AcceptanceContext",
    "AcceptanceMonitor",
    "AcceptanceProcessor",
    "AcceptanceStatistics",
    "AcceptanceThreshold",
    "DFlowDecoder",
    "DFlowDrafter",
    "DFlowDrafterConfig",
    "DFlowError",
    "DFlowGenerationConfig",
    "DrafterConfigError",
    "DrafterWeightsError",
    "GenerateDFlowOutput",
    "MonitorSettings",
    "PairMismatchError",
    "StaleMixture",
    "StepTimes",
    "UnknownDrafterError",
    "UnsupportedGenerationError",
    "VerifierFeedback",
    "__version__",
    "check_pair",
    "install",
    "record_target",
    "tokenizer_fingerprint",
    "uninstall",
]
