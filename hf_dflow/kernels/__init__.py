"""The public ops. The rest of the package imports them from here only, so that a backend is chosen in one place."""

from hf_dflow.kernels.backends import BACKENDS, check_backend, compact_rows, verify_block
from hf_dflow.kernels.torch_ops import RULES, BlockDecision, VerifyInputs, draw_tokens

__all__ = [
    "BACKENDS",
    "RULES",
    "BlockDecision",
    "VerifyInputs",
    "check_backend",
    "compact_rows",
    "draw_tokens",
    "verify_block",
]
