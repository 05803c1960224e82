"""The public ops. The rest of the package imports them from here only, so that a backend is chosen in one place."""

from hf_dflow.kernels.reference import RULES, BlockDecision, DraftLaw, SparseLogits, draw_tokens, verify_block

__all__ = ["RULES", "BlockDecision", "DraftLaw", "SparseLogits", "draw_tokens", "verify_block"]
