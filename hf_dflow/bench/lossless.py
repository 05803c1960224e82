"""Is `speculation_type="dflow"` lossless on this machine? A comparer that tells rounding from a fault."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dflow.generation import SPECULATION_TYPE
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.model.drafter import DFlowDrafter

IDENTICAL, NEAR_TIE, FAULT = "identical", "rounding near tie", "FAULT"


@dataclass(frozen=True)
class LosslessReport:
    """What [`compare_with_plain`] found. Token fields are `None` where the texts are identical or one ended early.

    Args:
        identical (`bool`): Whether both texts are the same, token by token.
        verdict (`str`): "identical", "rounding near tie" or "FAULT".
        position (`int`, *optional*): The first new token that differs, counted from 0.
        plain_token, dflow_token (`int`, *optional*): The token of each text there.
        margin (`float`, *optional*): Top-1 minus top-2 logit there, in a full forward without any cache.
        gap (`float`, *optional*): Top-1 logit minus the lower of the two tokens' logits, in the same forward. It is
            what the verdict goes by: a fault can also strike where the target happens to hesitate.
        statistics (`AcceptanceStatistics`, *optional*): Of the dflow call. Without accepted drafts nothing was tested.
    """

    identical: bool
    verdict: str
    position: int | None = None
    plain_token: int | None = None
    dflow_token: int | None = None
    margin: float | None = None
    gap: float | None = None
    statistics: AcceptanceStatistics | None = None

    def as_record(self) -> dict[str, Any]:
        """What was found, for JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "statistics"}
        if self.statistics is not None:
            fields["num_spec_steps"] = self.statistics.num_spec_steps
            fields["num_accepted_draft_tokens"] = self.statistics.num_accepted_draft_tokens
        return fields

    def __str__(self) -> str:
        if self.identical:
            return self.verdict
        if self.margin is None:
            return f"{self.verdict}: one text ends at new token {self.position}, the other goes on"
        return (
            f"{self.verdict}: new token {self.position} is {self.plain_token} alone and {self.dflow_token} with the "
            f"drafter; the logits there are {self.gap:.3g} apart (top-1 to top-2: {self.margin:.3g})"
        )


@torch.no_grad()
def compare_with_plain(
    model: PreTrainedModel,
    drafter: DFlowDrafter,
    inputs: torch.Tensor | dict[str, torch.Tensor],
    max_new_tokens: int,
    margin: float = 0.1,
    **kwargs: Any,
) -> LosslessReport:
    """Decode greedily without and with the drafter, and judge the first difference.

    A forward over a block and one over a single token use different kernels, so low precision may flip a near tie;
    whatever flips a clear decision is a fault.

    Args:
        model (`PreTrainedModel`): The target.
        drafter (`DFlowDrafter`): Its drafter.
        inputs (`torch.LongTensor` of shape `(1, T)`, or `dict`): Prompt, or what a tokenizer returned for it.
        max_new_tokens (`int`): How far to compare.
        margin (`float`, *optional*, defaults to 0.1): Largest distance of logits that counts as a near tie.
        kwargs: Anything else that both calls of `generate` shall get.

    Raises:
        ValueError: Sampling, a relaxed rule or several sequences were asked for; there is no single right text then.
    """
    inputs = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    if inputs["input_ids"].shape[0] != 1:
        raise ValueError(f"compare_with_plain compares one sequence, got {inputs['input_ids'].shape[0]}.")
    if kwargs.get("do_sample"):
        raise ValueError("compare_with_plain compares greedy texts; leave do_sample out.")
    kwargs |= {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    generate: Any = model.generate
    plain = generate(**inputs, **kwargs)
    dflow = generate(**inputs, **kwargs, assistant_model=drafter, speculation_type=SPECULATION_TYPE)
    if not dflow.statistics.lossless:
        raise ValueError("compare_with_plain judges lossless decoding, but a relaxed acceptance rule is on.")
    prompt_length = inputs["input_ids"].shape[1]
    alone, drafted = plain.sequences[0].tolist(), dflow.sequences[0].tolist()
    if alone == drafted:
        return LosslessReport(True, IDENTICAL, statistics=dflow.statistics)
    pairs = enumerate(zip(alone, drafted, strict=False))
    cut = next((i for i, (left, right) in pairs if left != right), None)
    if cut is None:
        return LosslessReport(False, FAULT, min(len(alone), len(drafted)) - prompt_length, statistics=dflow.statistics)
    recorded = generate(**inputs, **{**kwargs, "output_scores": True, "output_logits": True})
    step = cut - prompt_length
    logits = _uncached_logits(model, plain.sequences[:, :cut], inputs)
    logits += (recorded.scores[step] - recorded.logits[step])[0].to(logits)  # what the logits processors did there
    top = logits.topk(2).values
    gap = float(top[0] - logits[[alone[cut], drafted[cut]]].min())
    verdict = NEAR_TIE if gap <= margin else FAULT
    return LosslessReport(
        False, verdict, step, alone[cut], drafted[cut], float(top[0] - top[1]), gap, statistics=dflow.statistics
    )


def _uncached_logits(model: PreTrainedModel, token_ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[V]` after `token_ids` `[1, T]`, in float64."""
    arguments: dict[str, Any] = {"use_cache": False}
    mask = inputs.get("attention_mask")
    if mask is not None:
        new = token_ids.shape[1] - mask.shape[1]
        arguments["attention_mask"] = torch.cat([mask, mask.new_ones(1, new)], dim=1)
        arguments["position_ids"] = (arguments["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    return model(token_ids, **arguments).logits[0, -1].double()
