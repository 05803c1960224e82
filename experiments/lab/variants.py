"""Variants of relay training, to find out what training with a relay does to the drafter without it.

A drafter trained with the relay and decoded without it is ahead of one trained without. Each variant removes one
possible cause and is DFlow's training otherwise.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hf_dflow.training.config import Stage
from hf_dflow.training.packing import Anchors, Sequences
from hf_dflow.training.rounds import Relayed, RoundResult, draft_round, next_round
from hf_dflow.training.trainer import Trainer


@dataclass(frozen=True)
class Variant:
    """What differs from DFlow's training.

    Args:
        fed_share (`float`): Share of the blocks of a later round that get relayed rows; the others get plain masks.
        is_shuffled (`bool`): Blocks get the rows and the rejected draft of a block of another document, so that they
            say nothing of the block's own text.
        plain_steps (`bool`): Anchors step, and rows come, from what would be drafted without the relay, so that later
            rounds begin where those of a drafter without one begin.
        is_detached (`bool`): The projection that the relay shares with the context learns nothing from the relay.
    """

    fed_share: float = 1.0
    is_shuffled: bool = False
    plain_steps: bool = False
    is_detached: bool = False


VARIANTS = {
    "dflow_half": Variant(fed_share=0.5),
    "dflow_shuffled": Variant(is_shuffled=True),
    "dflow_plain_steps": Variant(plain_steps=True),
    "dflow_detached": Variant(is_detached=True),
}


class VariantTrainer(Trainer):
    """A [`Trainer`] of one `variant`."""

    def __init__(self, *args: Any, variant: Variant, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.variant = variant
        if variant.is_detached:
            self.drafter.relay.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(), *inputs[1:]))

    def follow(
        self, stage: Stage, sequences: Sequences, anchors: Anchors, relayed: Relayed | None, result: RoundResult
    ) -> tuple[Anchors, Relayed | None]:
        """The next round's anchors, and what the relay reads there."""
        if self.variant.plain_steps and relayed is not None:
            with torch.no_grad():
                result = draft_round(self.drafter, self.target, sequences, anchors, block_size=stage.block_size)
        following, fed = next_round(self.drafter, self.target, sequences, anchors, result)
        assert fed is not None  # these all train a relay
        num_blocks = len(fed.bonus_ids)
        if self.variant.is_shuffled:
            others = _of_other_documents(anchors)
            fed.features, fed.rejected_ids = fed.features[others], fed.rejected_ids[others]
        if self.variant.fed_share < 1.0:
            # Numbers of its own: the trainer's would draw other anchors and candidates than DFlow's training draws.
            generator = torch.Generator().manual_seed(
                self.training.seed * 1_000_003 + 2 * self.update + (relayed is None)
            )
            kept = torch.rand(num_blocks, generator=generator) < self.variant.fed_share
            fed.is_fed = fed.is_fed & kept.to(fed.is_fed.device)[:, None]
        return following, fed


def _of_other_documents(anchors: Anchors) -> torch.Tensor:
    """For each block the index of one in another row, if there are two: half of all blocks further on."""
    num_blocks = len(anchors.row)
    return (torch.arange(num_blocks, device=anchors.row.device) + num_blocks // 2) % num_blocks
