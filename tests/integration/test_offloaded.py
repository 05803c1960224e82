"""Targets whose weights accelerate brings for each call, and takes away behind it."""

import accelerate
import kit
import pytest
import torch

from hf_dflow import DFlowGenerationConfig, PairMismatchError

OFFLOADED = {
    "plain": {},
    "target's embedding": {"input_embedding": "target"},
    "own embedding and head": {"input_embedding": "own", "output_head": "own"},
}
CORRECTED = {"correction_intermediate_size": 16, "correction_top_k": 40}
NEW_TOKENS = 24


def offload(target):
    """The same target, whose weights are gone between calls."""
    offloaded = accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    assert offloaded.get_input_embeddings().weight.is_meta
    return offloaded


@pytest.mark.parametrize("options", [{}, {"adaptive_length": True}, {"tree_budget": 6}], ids=str)
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_target(name, options):
    """C10: a weight of the target read between its calls, when accelerate has taken it away."""
    target, prompt = kit.tiny_target(), kit.prompt_of(7)
    expected = kit.plain_greedy(target, prompt, NEW_TOKENS)

    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=[3, 1, 0, 2], **OFFLOADED[name])
    config = DFlowGenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, **options)
    output = offload(target).generate(prompt, assistant_model=drafter, generation_config=config)
    assert output.sequences.tolist() == expected.tolist()
    if "adaptive_length" not in options:  # whose measured costs may well verify single drafts
        kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize(("of_target", "of_drafter"), [("float32", "bfloat16"), ("float64", "float32")])
def test_an_offloaded_head_gets_states_of_its_own_type(of_target, of_drafter):
    """Bug: a weight that is away is not asked for its type either."""
    target, prompt = kit.tiny_target(dtype=getattr(torch, of_target)), kit.prompt_of(7)
    expected = kit.plain_greedy(target, prompt, NEW_TOKENS)
    drafter = kit.scripted(
        kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=[3, 1, 0, 2], dtype=getattr(torch, of_drafter)
    )
    output = kit.dflow_greedy(offload(target), drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert output.sequences.tolist() == expected.tolist()
    kit.assert_not_vacuous(output.statistics)


def test_a_correction_scores_through_the_head_alone():
    """C10: rows of a head's weight, when accelerate has taken it away."""
    target, prompt, outputs = kit.tiny_target(), kit.prompt_of(7), []
    drafter = kit.tiny_drafter(target, 8, **CORRECTED)
    options = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "temperature": 4.0, "seeds": [0]}
    config = DFlowGenerationConfig(return_dict_in_generate=True, **options)
    for place in (lambda model: model, offload):
        outputs.append(place(target).generate(prompt, assistant_model=drafter, generation_config=config))
    expected, actual = outputs
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert actual.statistics.per_step_accepted == expected.statistics.per_step_accepted
    kit.assert_not_vacuous(actual.statistics)


def test_raw_rows_are_the_matrix_own():
    """Bug: an embedding whose call is not its rows, as a hook's, is called where its rows are asked for."""
    target = kit.tiny_target()
    embedding, ids = target.get_input_embeddings(), torch.tensor([[3, 5]])
    rows = embedding.weight[ids].clone()
    embedding.register_forward_hook(lambda module, given, output: output * 3)
    assert kit.tiny_drafter(target, 8).embed(ids, embedding).equal(rows)
    assert kit.tiny_drafter(target, 8, input_embedding="target").embed(ids, embedding).equal(3 * rows)


def test_an_offloaded_drafter_is_refused():
    """Bug: a bare error about meta tensors from the middle of a call."""
    target = kit.tiny_target()
    drafter = accelerate.cpu_offload(kit.tiny_drafter(target, 8), execution_device=torch.device("cpu"))
    with pytest.raises(PairMismatchError, match="load it onto one device"):
        kit.dflow_greedy(target, drafter, kit.prompt_of(7), max_new_tokens=4)


def test_a_scaled_embedding_that_is_offloaded_is_refused():
    """Bug: rows of a weight that is not there, as an error about meta tensors in the middle of a call."""
    target = kit.tiny_target("gemma")
    drafter = kit.tiny_drafter(target, 8)
    with pytest.raises(PairMismatchError, match="name it in device_map"):
        kit.dflow_greedy(offload(target), drafter, kit.prompt_of(7), max_new_tokens=4)
