"""What `num_return_sequences` does to things of the caller's that belong to a prompt or to a row."""

import pytest
import torch
from kit import PatternDrafter, assert_not_vacuous, prompt_of, tiny_drafter, tiny_target
from transformers import LogitsProcessorList

from hf_dflow import UnsupportedGenerationError

NEW_TOKENS, EACH = 14, 3


def test_a_grammar_of_each_prompt_holds_for_all_of_its_rows():
    """Bug: the function is asked about a row where plain decoding names the prompt, so rows get another's grammar."""
    target = tiny_target("llama")
    prompts = torch.cat([prompt_of(12, 1), prompt_of(12, 4)])
    asked = set()

    def grammar(prompt, _):
        asked.add(prompt)
        return list(range(1 + prompt % 3, 60, 3))

    options = {"prefix_allowed_tokens_fn": grammar, "do_sample": True, "top_k": 1, "num_return_sequences": EACH}
    options |= {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    plain = target.generate(prompts, **options).sequences
    named = set(asked)
    asked.clear()
    drafter = tiny_drafter(target, block_size=8, drafter_class=PatternDrafter)
    drafter.pattern = [5, 1, 0, 3]
    drafter.follow_rows([(row, prompts.shape[1]) for row in plain])
    output = target.generate(prompts, assistant_model=drafter, speculation_type="dflow", **options)
    assert output.sequences.equal(plain)
    assert asked == named
    for row in output.statistics.per_row:
        assert_not_vacuous(row)


def test_a_processor_with_a_value_for_each_row_is_named():
    """Bug: scores of another shape fail deep inside, in words about tensors that the caller never made."""
    target = tiny_target("llama")
    prompts = torch.cat([prompt_of(12, seed) for seed in (1, 4)])
    drafter = tiny_drafter(target, block_size=8)

    class OfEachRow:
        def __call__(self, input_ids, scores):
            return scores + torch.zeros(2, scores.shape[-1], dtype=scores.dtype)

    processors = LogitsProcessorList([OfEachRow()])
    options = {"logits_processor": processors, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert target.generate(prompts, **options).shape[0] == 2
    with pytest.raises(UnsupportedGenerationError, match=r"OfEachRow.*one row of a batch at a time"):
        target.generate(prompts, assistant_model=drafter, speculation_type="dflow", **options)
