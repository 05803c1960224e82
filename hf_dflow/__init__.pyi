from ._version import __version__
from .checkpoints.targets import tokenizer_fingerprint
from .errors import (
    DFlowError,
    DrafterConfigError,
    DrafterWeightsError,
    PairMismatchError,
    UnknownDrafterError,
    UnsupportedGenerationError,
)
from .generation.acceptance import AcceptanceContext, AcceptanceProcessor, AcceptanceThreshold
from .generation.configuration import DFlowGenerationConfig
from .generation.decoder import DFlowDecoder
from .generation.mixture import StaleMixture
from .generation.output import GenerateDFlowOutput
from .generation.pair import check_pair, record_target
from .generation.policy.monitor import AcceptanceMonitor, MonitorSettings, StepTimes
from .generation.statistics import AcceptanceStatistics
from .generation.step import VerifierFeedback
from .generation.strategy import install, uninstall
from .model.configuration import DFlowDrafterConfig
from .model.drafter import DFlowDrafter

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
