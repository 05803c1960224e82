"""Batches, too, leave nothing behind: not in the drafter, not in what the caller handed over, not in another thread."""

import threading

import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, padded, prompt, said, target_of, text
from kit import (
    NudgedDrafter,
    PatternDrafter,
    assert_not_vacuous,
    dflow_greedy,
    plain_greedy,
    tiny_drafter,
    tiny_target,
)
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_dflow import DFlowGenerationConfig

NEW_TOKENS = 20
CALLS = ([7], [0, 1, 3], [2], [1, 0], [0, 1, 3], [5, 6, 7, 2])


def result(drafter, rows):
    drafter.follow_rows([(text(row, NEW_TOKENS + 8), LENGTHS[row]) for row in rows])
    output = generate(rows, drafter, NEW_TOKENS)
    assert [new_tokens_of(output, i, rows) for i in range(len(rows))] == [said(row, NEW_TOKENS) for row in rows]
    return [row.per_step_accepted for row in output.statistics.per_row]


def fresh(drafter_class=NudgedDrafter):
    return tiny_drafter(target_of(), 8, drafter_class=drafter_class)


def test_one_drafter_for_batches_of_all_sizes():
    """C4: context, positions or feedback of an earlier call's rows in a later one's."""
    drafter = fresh()
    other = tiny_target("llama", seed=5, attention="sdpa")
    for rows in CALLS:
        assert result(drafter, rows) == result(fresh(), rows)
        dflow_greedy(other, tiny_drafter(other, 8), prompt(1), max_new_tokens=3)
        ids, mask = padded([prompt(2), prompt(3)])
        drafter.follow_rows([(plain_greedy(other, prompt(row), 12), LENGTHS[row]) for row in (2, 3)])
        dflow_greedy(other, drafter, ids, attention_mask=mask, max_new_tokens=4)


def test_after_an_exception_in_the_middle_of_a_batch():
    """C4: rows of an interrupted call that the next one goes on with."""

    def fails(input_ids, scores, **kwargs):
        if input_ids.shape[1] > 12 + NEW_TOKENS // 2:
            raise KeyError("on purpose")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    drafter = fresh()
    drafter.follow_rows([(text(row, NEW_TOKENS + 8), LENGTHS[row]) for row in (0, 1, 3)])
    with pytest.raises(KeyError):
        generate([0, 1, 3], drafter, NEW_TOKENS, stopping_criteria=StoppingCriteriaList([fails]), pad_token_id=0)
    for rows in ([1], [0, 1, 3]):
        assert result(drafter, rows) == result(fresh(), rows)


class Remembers(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


def test_nothing_of_the_callers_is_changed_by_a_batch():
    """Ids, masks, configurations, processors or the generator changed in place by a batch."""
    target = target_of()
    ids, mask = padded([prompt(row) for row in (0, 1, 3)])
    before = ids.clone(), mask.clone(), torch.get_rng_state()
    processor = Remembers()
    config = DFlowGenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, repetition_penalty=1.1, eos_token_id=[5, 6]
    )
    drafter = following(PatternDrafter, [0, 1, 3], NEW_TOKENS, pattern=[2, 0, 5])
    states = config.to_dict(), target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    target.generate(
        ids, attention_mask=mask, assistant_model=drafter, generation_config=config,
        logits_processor=LogitsProcessorList([processor]),
    )  # fmt: skip
    assert torch.equal(ids, before[0]) and torch.equal(mask, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    after = config.to_dict(), target.generation_config.to_dict(), target.config.to_dict(), drafter.config.to_dict()
    assert after == states
    assert all(torch.equal(weights[name], tensor) for name, tensor in target.state_dict().items())
    assert processor.calls == 0  # each row had its own copy


def test_two_threads_decode_batches():
    """C4: rows of one thread's batch in another's."""
    drafter, results = tiny_drafter(target_of(), 8), {}
    batches = ([0, 1, 3], [7, 2])
    barrier = threading.Barrier(2)

    def work(i):
        barrier.wait(timeout=60)
        for _ in range(2):
            results[i] = generate(batches[i], drafter, NEW_TOKENS)

    alone = [generate(rows, drafter, NEW_TOKENS) for rows in batches]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    for i, rows in enumerate(batches):
        assert torch.equal(results[i].sequences, alone[i].sequences)
        found = [row.per_step_accepted for row in results[i].statistics.per_row]
        assert found == [row.per_step_accepted for row in alone[i].statistics.per_row]
        assert [new_tokens_of(results[i], j, rows) for j in range(len(rows))] == [said(r, NEW_TOKENS) for r in rows]


@pytest.mark.parametrize("offset", range(13))
def test_eos_at_every_offset_of_a_row(offset):
    """D1 in a batch: tokens behind an EOS inside a block, or a row cut where its neighbour ends."""
    rows = [0, 3, 1]
    eos = said(3, NEW_TOKENS)[offset]
    ids, mask = padded([prompt(row) for row in rows])
    plain = plain_greedy(target_of(), ids, NEW_TOKENS, attention_mask=mask, eos_token_id=eos, pad_token_id=0)
    drafter = following(PatternDrafter, rows, NEW_TOKENS, pattern=[2, 7, 7])
    output = generate(rows, drafter, NEW_TOKENS, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(output.sequences, plain)
    lengths = [len(said(row, NEW_TOKENS, [eos])) for row in rows]
    assert [row.num_output_tokens for row in output.statistics.per_row] == lengths
    if min(lengths) > 5:
        assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 17])
def test_length_budget_of_a_batch(limit):
    """D3 in a batch: a block, a draft or a target row beyond the room that is left."""
    rows, widths = [0, 3, 1], []
    drafter = following(PatternDrafter, rows, limit, pattern=[7, 0, 2], offset=1)
    handle = target_of().register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        output = generate(rows, drafter, limit)
    finally:
        handle.remove()
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [said(row, limit) for row in rows]
    assert max(widths[1:], default=0) <= max(limit - 1, 1)
    assert limit > 2 or drafter.anchors == [[], [], []]
