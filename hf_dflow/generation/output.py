"""What `generate(..., return_dict_in_generate=True)` returns."""

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from hf_dflow.generation.statistics import AcceptanceStatistics


@dataclass
class GenerateDFlowOutput(GenerateDecoderOnlyOutput):
    """[`~generation.GenerateDecoderOnlyOutput`] and, as `statistics`, what the drafts were worth.

    `scores`, `logits`, `hidden_states` and `attentions` hold one entry for each generated token, as in plain decoding.

    In a batch, rows that end early are padded in `sequences` up to the longest, and are 0 in the other entries from
    their end on (plain decoding leaves there what it computed for padding). The cache holds the prompts and no more,
    since rows end at different lengths: going on with the whole text as input recomputes the answers. It is `None`
    where the rows were decoded one by one.
    """

    statistics: AcceptanceStatistics | None = None
