"""DFlow inside vLLM, as a plugin: vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).

A folder written by `hf-dflow export DRAFTER FOLDER --to vllm` then drafts in vLLM as it does here, with its relay and
its causal correction. vLLM drafts in the very step in which it verifies, so no state crosses steps: the rows that were
just rejected feed the block that is drafted next.
"""

from hf_dflow.engines.vllm.plugin import register

__all__ = ["register"]
