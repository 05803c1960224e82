"""What stands for a DFlow drafter in a version of vLLM that the plugin was not tested with."""

from torch import nn

from hf_dflow.engines.vllm.plugin import TESTED, vllm_version
from hf_dflow.errors import EngineError


class UntestedVersion(nn.Module):
    """Looks enough like a model for vLLM to build it, and says why it cannot be built."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        raise EngineError(
            f"This is vLLM {vllm_version()}; DFlow drafters are tested with vLLM {', '.join(TESTED)}. Install that, "
            "or export the drafter for stock vLLM, without its relay: hf-dflow export DRAFTER FOLDER --to dflash."
        )

    def embed_input_ids(self, input_ids):
        raise NotImplementedError

    def forward(self, input_ids, positions, inputs_embeds=None):
        raise NotImplementedError

    def compute_logits(self, hidden_states):
        raise NotImplementedError
