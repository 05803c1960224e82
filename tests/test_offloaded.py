"""Targets whose weights accelerate brings for each call, and takes away behind it."""

import accelerate
import pytest
import torch
from kit import dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target

from hf_dflow import DFlowGenerationConfig, PairMismatchError

OFFLOADED = {
    "plain": {},
    "correction": {"correction_intermediate_size": 16, "correction_top_k": 4},
    "target's embedding": {"input_embedding": "target"},
    "own embedding and head": {"input_embedding": "own", "output_head": "own"},
}


@pytest.mark.parametrize("options", [{}, {"adaptive_length": True}, {"tree_budget": 6}], ids=str)
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_target(name, options):
    """C10: a weight of the target read between its calls, when accelerate has taken it away."""
    target, prompt = tiny_target(), prompt_of(7)
    expected = plain_greedy(target, prompt, 12)
    drafter = tiny_drafter(target, 8, **OFFLOADED[name])
    offloaded = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    assert offloaded.get_input_embeddings().weight.is_meta
    config = DFlowGenerationConfig(max_new_tokens=12, do_sample=False, **options)
    output = offloaded.generate(prompt, assistant_model=drafter, generation_config=config)
    assert output.tolist() == expected.tolist()


def test_a_scaled_embedding_that_is_offloaded_is_refused():
    """Bug: rows of a weight that is not there, as an error about meta tensors in the middle of a call."""
    target = tiny_target("gemma")
    drafter = tiny_drafter(target, 8)
    offloaded = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    with pytest.raises(PairMismatchError, match="name it in device_map"):
        dflow_greedy(offloaded, drafter, prompt_of(7), max_new_tokens=4)
