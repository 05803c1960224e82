"""Block-diffusion speculative decoding in transformers that reuses what the verifier computed."""

from transformers import AutoConfig, AutoModel

from hf_dflow.configuration_dflow import DFlowDrafterConfig
from hf_dflow.modeling_dflow import DFlowDrafter

AutoConfig.register(DFlowDrafterConfig.model_type, DFlowDrafterConfig, exist_ok=True)
AutoModel.register(DFlowDrafterConfig, DFlowDrafter, exist_ok=True)
