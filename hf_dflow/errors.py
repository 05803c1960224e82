"""The exceptions a caller may want to catch. Each is also the built-in type that transformers raises in its place."""


class DFlowError(Exception):
    """Base of every error that hf_dflow raises on purpose."""


class DrafterConfigError(DFlowError, ValueError):
    """A drafter's configuration lacks a key, holds an impossible value, or belongs to an unsupported format."""


class UnknownDrafterError(DFlowError, LookupError):
    """No drafter is listed for a target."""


class DrafterWeightsError(DFlowError, OSError):
    """A drafter's weights are missing, unsafe, or do not fit its configuration."""


class PairMismatchError(DFlowError, ValueError):
    """The drafter was not made for this target (sizes, vocabulary or layer ids differ)."""


class UnsupportedGenerationError(DFlowError, ValueError):
    """An option of `generate` that `speculation_type="dflow"` cannot honour exactly."""


class EngineError(DFlowError, RuntimeError):
    """Another engine, such as vLLM, is not as the plugin for it needs it, or cannot draft with this drafter."""
