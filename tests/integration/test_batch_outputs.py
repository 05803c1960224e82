"""What a batch returns beside its text: one entry a step for all rows, as in plain decoding, 0 behind a row's end."""

from functools import cache

import pytest
import torch
from batches import LENGTHS, padded, prompt
from kit import PatternDrafter, assert_not_vacuous, dflow_greedy, plain_greedy, tiny_drafter, tiny_target

NEW_TOKENS = 20
ROWS = [0, 1, 3]
WIDTH = max(LENGTHS[row] for row in ROWS)
CLOSE = 2e-4  # float32: blocks and single tokens, holes and none, round differently
EVERYTHING = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "repetition_penalty": 1.2,
}


@cache
def setting(eos_offset: int | None):
    """Plain and dflow outputs of one padded batch, and where its rows end. Eager, which returns attentions."""
    target = tiny_target("llama", dtype=torch.float32)
    ids, mask = padded([prompt(row) for row in ROWS])
    arguments = {"attention_mask": mask, **EVERYTHING}
    text = plain_greedy(target, ids, NEW_TOKENS + 8, **arguments)
    eos = None if eos_offset is None else int(text[0, WIDTH + eos_offset])
    arguments |= {"return_dict_in_generate": True, "eos_token_id": eos, "pad_token_id": 0}
    plain = plain_greedy(target, ids, NEW_TOKENS, **arguments)
    drafter = tiny_drafter(target, 8, drafter_class=PatternDrafter)
    drafter.pattern, drafter.offset = [3, 0, 7, 1, 5], 2
    drafter.follow_rows([(text[i, WIDTH - LENGTHS[row] :], LENGTHS[row]) for i, row in enumerate(ROWS)])
    output = dflow_greedy(target, drafter, ids, max_new_tokens=NEW_TOKENS, **arguments)
    words = text[:, WIDTH : WIDTH + NEW_TOKENS].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token == eos), NEW_TOKENS) for row in words]
    return target, plain, output, ends


def entries(output, name: str, step: int) -> list[torch.Tensor]:
    entry = getattr(output, name)[step]
    return [entry] if isinstance(entry, torch.Tensor) else list(entry)


@pytest.mark.parametrize("name", ["scores", "logits", "hidden_states", "attentions"])
@pytest.mark.parametrize("eos_offset", [None, 5])
def test_one_entry_a_step(name, eos_offset):
    """D4: entries of another row or step, keys counted in cache columns instead of tokens, holes among them, or
    something else than 0 behind a row's end."""
    _, plain, output, ends = setting(eos_offset)
    assert_not_vacuous(output.statistics)
    assert torch.equal(output.sequences, plain.sequences)
    assert len(getattr(output, name)) == len(getattr(plain, name)) == max(ends)
    for step in range(max(ends)):
        for ours, theirs in zip(entries(output, name, step), entries(plain, name, step), strict=True):
            assert ours.shape == theirs.shape
            for row, end in enumerate(ends):
                if step < end:
                    torch.testing.assert_close(ours[row], theirs[row], atol=CLOSE, rtol=CLOSE)
                else:
                    assert not ours[row].any()
    assert eos_offset is None or min(ends) < max(ends)


def test_transition_scores_of_a_batch():
    """D4: scores whose number or order does not fit the sequences."""
    target, plain, output, ends = setting(5)
    ours, theirs = (
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (output, plain)
    )
    assert ours.shape == theirs.shape == (3, max(ends))
    for row, end in enumerate(ends):
        torch.testing.assert_close(ours[row, :end], theirs[row, :end], atol=CLOSE, rtol=CLOSE)
    assert ours.isfinite().all()


def test_statistics_of_a_batch():
    """Steps of several rows counted once, or forwards that served three rows counted three times."""
    statistics = setting(None)[2].statistics
    rows = statistics.per_row
    assert statistics.per_step_accepted == [length for row in rows for length in row.per_step_accepted]
    assert statistics.num_output_tokens == sum(row.num_output_tokens for row in rows) == 3 * NEW_TOKENS
    assert statistics.num_target_forwards == max(row.num_target_forwards for row in rows)
    assert statistics.num_draft_forwards == max(row.num_draft_forwards for row in rows)
    assert statistics.verification == "greedy" and statistics.lossless and not statistics.per_row[0].per_row
