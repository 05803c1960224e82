"""What `generate(..., return_dict_in_generate=True)` returns, and how it is put together from the rows."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from hf_dflow.generation import _compat
from hf_dflow.generation.plan import CallPlan
from hf_dflow.generation.records import combine
from hf_dflow.generation.rows import Row
from hf_dflow.generation.statistics import AcceptanceStatistics


@dataclass
class GenerateDFlowOutput(GenerateDecoderOnlyOutput):
    """[`~generation.GenerateDecoderOnlyOutput`] and, as `statistics`, what the drafts were worth.

    `scores`, `logits`, `hidden_states` and `attentions` hold one entry for each generated token, as in plain decoding.

    In a batch, rows that end early are padded in `sequences` up to the longest, and are 0 in the other entries from
    their end on (plain decoding leaves there what it computed for padding). The cache holds the prompts and no more,
    since rows end at different lengths: a call that continues with the whole text recomputes the answers. It is `None`
    where the rows were decoded one by one.
    """

    statistics: AcceptanceStatistics | None = None


def assemble(
    plan: CallPlan, rows: list[Row], cache: Any, *, num_target_forwards: int, num_draft_forwards: int
) -> GenerateDFlowOutput | torch.Tensor:
    """The result of a call whose rows have all ended.

    Args:
        cache (`Cache`, *optional*): The target's, where all rows share one.
        num_target_forwards, num_draft_forwards (`int`): That were run.
    """
    sequences = rows[0].ids
    if len(rows) > 1:
        longest = max(row.length for row in rows)
        # Without a pad token all rows end at the same length: the plan refuses other calls.
        pad_token = getattr(plan.generation_config, "_pad_token_tensor", None)
        value = 0 if pad_token is None else int(pad_token)
        sequences = torch.cat(
            [torch.nn.functional.pad(row.ids, (0, longest - row.length), value=value) for row in rows]
        )
    if not plan.returns_dict:
        return sequences
    statistics = AcceptanceStatistics.total(
        [row.statistics for row in rows],
        num_target_forwards=num_target_forwards,
        num_draft_forwards=num_draft_forwards,
    )
    fields = combine([row.records for row in rows])
    cache_name = next(name for name in _compat.CACHE_NAMES if name in GenerateDFlowOutput.__dataclass_fields__)
    return GenerateDFlowOutput(sequences=sequences, statistics=statistics, **fields, **{cache_name: cache})  # type: ignore[arg-type]
