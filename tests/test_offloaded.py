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


@pytest.mark.parametrize(("of_target", "of_drafter"), [("float32", "bfloat16"), ("float64", "float32")])
def test_an_offloaded_head_gets_states_of_its_own_type(of_target, of_drafter):
    """Bug: a weight that is away is not asked for its type either."""
    target, prompt = tiny_target(dtype=getattr(torch, of_target)), prompt_of(7)
    expected = plain_greedy(target, prompt, 12)
    drafter = tiny_drafter(target, 8, dtype=getattr(torch, of_drafter))
    offloaded = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    assert dflow_greedy(offloaded, drafter, prompt, max_new_tokens=12).sequences.tolist() == expected.tolist()


def test_raw_rows_are_the_matrix_own():
    """Bug: an embedding whose call is not its rows, as a hook's, is called where its rows are asked for."""
    target = tiny_target()
    embedding, ids = target.get_input_embeddings(), torch.tensor([[3, 5]])
    rows = embedding.weight[ids].clone()
    embedding.register_forward_hook(lambda module, given, output: output * 3)
    assert tiny_drafter(target, 8).embed(ids, embedding).equal(rows)
    assert tiny_drafter(target, 8, input_embedding="target").embed(ids, embedding).equal(3 * rows)


def test_an_offloaded_drafter_is_refused():
    """Bug: a bare error about meta tensors from the middle of a call."""
    target = tiny_target()
    drafter = accelerate.cpu_offload(tiny_drafter(target, 8), execution_device=torch.device("cpu"))
    with pytest.raises(PairMismatchError, match="load it onto one device"):
        dflow_greedy(target, drafter, prompt_of(7), max_new_tokens=4)


def test_a_scaled_embedding_that_is_offloaded_is_refused():
    """Bug: rows of a weight that is not there, as an error about meta tensors in the middle of a call."""
    target = tiny_target("gemma")
    drafter = tiny_drafter(target, 8)
    offloaded = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    with pytest.raises(PairMismatchError, match="name it in device_map"):
        dflow_greedy(offloaded, drafter, prompt_of(7), max_new_tokens=4)
