"""The LM head as a plain matrix, whatever it is made of: the loss reads rows of it, decoding calls the module."""

from typing import Any

import torch
from torch import nn

from hf_dflow.model.drafter import DFlowDrafter


class PlainHead:
    """Stands in for a target where only its head is asked for."""

    def __init__(self, head: nn.Linear):
        self.head = head

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@torch.no_grad()
def head_owner(drafter: DFlowDrafter, target: Any) -> Any:
    """`target`, or a [`PlainHead`] with what its head computes where an adapter or quantisation is part of that.

    Only an `nn.Linear` shows all of itself in its weight; any other head is asked for its value on unit vectors.
    """
    head = target.get_output_embeddings()
    if drafter.lm_head is not None or (type(head) is nn.Linear and head.weight.is_floating_point()):
        return target
    width, options = drafter.config.hidden_size, {"dtype": target.dtype, "device": target.device}
    zero = head(torch.zeros(1, width, **options))[0]
    columns = [(head(rows) - zero).T for rows in torch.eye(width, **options).split(256)]
    plain = nn.Linear(width, len(zero), device="meta")
    plain.weight = nn.Parameter(torch.cat(columns, dim=1), requires_grad=False)
    plain.bias = nn.Parameter(zero, requires_grad=False)
    return PlainHead(plain)
