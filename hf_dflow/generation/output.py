"""What `generate(..., return_dict_in_generate=True)` returns."""

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from hf_dflow.generation.statistics import AcceptanceStatistics


@dataclass
class GenerateDFlowOutput(GenerateDecoderOnlyOutput):
    """[`~generation.GenerateDecoderOnlyOutput`] and, as `statistics`, what the drafts were worth.

    `scores`, `logits`, `hidden_states` and `attentions` hold one entry for each generated token, as in plain decoding.
    """

    statistics: AcceptanceStatistics | None = None
