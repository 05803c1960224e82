"""Tokens per step of a drafter in training, by decoding: a loss can look fine while drafts are rejected."""

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dflow.generation.configuration import DFlowGenerationConfig
from hf_dflow.generation.statistics import AcceptanceStatistics
from hf_dflow.model.drafter import DFlowDrafter


@dataclass
class DecodingCounts:
    """Steps of greedy decoding over some prompts."""

    prompts: int = 0
    histogram: list[int] = field(default_factory=list)  # steps with 0, 1, … accepted drafts
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)  # of all prompts

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step; 1 without any step."""
        return self.statistics.tokens_per_step

    @property
    def first_draft_rate(self) -> float:
        """Share of steps whose first draft was accepted."""
        return sum(self.histogram[1:]) / max(1, self.steps)

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens_per_step": round(self.tokens_per_step, 4),
            "tokens_per_target_forward": round(self.statistics.tokens_per_target_forward, 4),
            "first_draft_rate": round(self.first_draft_rate, 4),
            "prompts": self.prompts,
            "steps": self.steps,
            "acceptance_histogram": self.histogram,
        }


def decode(
    drafter: DFlowDrafter,
    target: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    use_relay: bool | None = None,
) -> DecodingCounts:
    """Continue each prompt with `generate(..., speculation_type="dflow")`, greedily, as serving does.

    Args:
        target (`PreTrainedModel`): The frozen target, wrapped by PEFT or not.
        prompts (`list[list[int]]`): Token ids of each prompt.
        use_relay (`bool`, *optional*): Off and on compare the same weights; the drafter's default otherwise.
    """
    answers: list[AcceptanceStatistics] = []
    pad_id = target.generation_config.pad_token_id
    config = DFlowGenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_relay=use_relay,
        return_dict_in_generate=True,
        pad_token_id=0 if pad_id is None else pad_id,
    )
    was_training = drafter.training
    drafter.eval()  # without dropout
    try:
        for prompt in prompts:
            input_ids = torch.tensor([prompt], device=target.device)
            output = target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=drafter,
                generation_config=config,
            )
            answers.append(output.statistics)
    finally:
        drafter.train(was_training)
    total = AcceptanceStatistics.pooled(answers)
    histogram = [total.per_step_accepted.count(length) for length in range(drafter.config.block_size)]
    return DecodingCounts(len(prompts), histogram, total)
