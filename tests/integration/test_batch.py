"""Every row of a batch is decoded as if it were alone, whatever its neighbours are and however much they accept."""

import itertools

import kit
import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, padded, plain_ids, prompt, target_of

from hf_dflow import DFlowDrafter

NEW_TOKENS = 24
PATTERN = [7, 0, 3, 5, 2]
ROWS = {1: [1], 2: [0, 1], 5: [0, 1, 2, 3, 4]}
DRAFTERS = [kit.OracleDrafter, kit.HostileDrafter, kit.PatternDrafter, kit.NudgedDrafter]
FLOAT32 = 1e-5  # norms run in float32 inside a float64 model


def turned(pattern: list[int], row: int) -> list[int]:
    """What row `row` of a batch does first where each row's script is two steps ahead of the row before."""
    return [pattern[(step + 2 * row) % len(pattern)] for step in range(len(pattern))]


def assert_rows_are_alone(output, rows, new_tokens=NEW_TOKENS):
    for i, row in enumerate(rows):
        assert new_tokens_of(output, i, rows) == plain_ids(row, new_tokens), i


@pytest.mark.parametrize("batch_size", ROWS)
@pytest.mark.parametrize("drafter_class", DRAFTERS)
def test_rows_say_what_they_say_alone(batch_size, drafter_class):
    """B1: rows that share an accepted length, a position, a hole in the mask or their padding."""
    rows = ROWS[batch_size]
    drafter = following(drafter_class, rows, NEW_TOKENS, pattern=PATTERN, offset=2)
    output = generate(rows, drafter, NEW_TOKENS)
    assert_rows_are_alone(output, rows)
    lengths = [row.per_step_accepted for row in output.statistics.per_row]
    if drafter_class is kit.PatternDrafter:
        expected = [kit.scripted_steps(turned(PATTERN, i), 8, NEW_TOKENS) for i in range(batch_size)]
        assert [(row.per_step_accepted, row.per_step_drafted, row.num_target_forwards)
                for row in output.statistics.per_row] == expected  # fmt: skip
        assert batch_size == 1 or lengths[0] != lengths[1]
    for i, row in enumerate(rows):
        alone = following(drafter_class, [row], NEW_TOKENS, pattern=turned(PATTERN, i))
        assert lengths[i] == generate([row], alone, NEW_TOKENS).statistics.per_step_accepted
    if drafter_class in (kit.PatternDrafter, kit.NudgedDrafter):
        for statistics in output.statistics.per_row:
            kit.assert_not_vacuous(statistics)


def test_pad_token_that_is_the_end_of_text():
    """B1: padding recognised by its id, which an ordinary token may have."""
    rows, eos = [1, 3, 0], plain_ids(1, NEW_TOKENS)[9]
    drafter = following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN, offset=2)
    output = generate(rows, drafter, NEW_TOKENS, eos_token_id=eos, pad_token_id=eos)
    longest = max(len(plain_ids(row, NEW_TOKENS, [eos])) for row in rows)
    for i, row in enumerate(rows):
        expected = plain_ids(row, NEW_TOKENS, [eos])
        assert new_tokens_of(output, i, rows) == expected + [eos] * (longest - len(expected))
    kit.assert_not_vacuous(output.statistics)


def test_right_padding_is_as_in_transformers(caplog):
    """B1: right-padded prompts decoded otherwise than plain decoding does, or without its warning."""
    target = target_of()
    ids = torch.nn.functional.pad(prompt(3), (0, 4))
    ids = torch.cat([ids, prompt(0)])
    mask = (torch.arange(7) < torch.tensor([[3], [7]])).long()
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    caplog.clear()
    output = kit.dflow_greedy(target, kit.tiny_drafter(target), ids, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(output.sequences, plain)
    assert "right-padding" in caplog.text


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_neighbours_do_not_matter(batch_size):
    """B3: draft state or masks that leak between rows: acceptance falls, or text changes, with the neighbours."""
    rows = list(range(batch_size))
    kept = 1  # a row in the middle of what follows
    alone = generate([kept], following(kit.NudgedDrafter, [kept], NEW_TOKENS), NEW_TOKENS)
    expected = (plain_ids(kept, NEW_TOKENS), alone.statistics.per_step_accepted)
    kit.assert_not_vacuous(alone.statistics)
    permuted = [*rows[2:], kept, rows[0]]
    replaced = [(row + 5) % 8 if row != kept else row for row in rows]
    duplicated = [kept] * batch_size
    for batch in (rows, permuted, replaced, duplicated):
        output = generate(batch, following(kit.NudgedDrafter, batch, NEW_TOKENS), NEW_TOKENS)
        for i in (j for j, row in enumerate(batch) if row == kept):
            actual = (new_tokens_of(output, i, batch), output.statistics.per_row[i].per_step_accepted)
            assert actual == expected, batch


class RecordedDrafter(kit.PatternDrafter):
    """Keeps the real logits of each block, by row of the batch and position."""

    def compute_logits(self, hidden, target_head):
        real = DFlowDrafter.compute_logits(self, hidden[..., :-4], target_head)
        for logits, marks in zip(real, hidden[..., -4:].long().tolist(), strict=True):
            row, position, *_ = marks[0]
            self.recorded[self.places[row], position] = logits.clone()
        return super().compute_logits(hidden, target_head)


def test_draft_logits_do_not_depend_on_neighbours():
    """B3: a ragged draft cache whose mask or positions are another row's; too small a fault to change an argmax."""

    def recorded(rows):
        drafter = following(RecordedDrafter, rows, NEW_TOKENS, pattern=PATTERN, places=rows, recorded={})
        generate(rows, drafter, NEW_TOKENS)
        return drafter.recorded

    rows = [0, 1, 2, 7]
    together, single = recorded(rows), {}
    for row in rows:
        single |= recorded([row])
    assert len(single) > 16
    torch.testing.assert_close(together, single, atol=FLOAT32, rtol=FLOAT32)


@pytest.fixture
def forwards():
    """Keyword arguments of the target's forwards."""
    calls = []
    handle = target_of().register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    yield calls
    handle.remove()


def test_a_finished_row_leaves_the_batch(forwards):
    """B4: rows that end early go on costing a share of every forward, or go on being counted."""
    rows = [1, 0, 3]
    eos = next(token for token in plain_ids(1, NEW_TOKENS)[2:] if token not in plain_ids(0, NEW_TOKENS))
    drafter = following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=[2, 0, 1])
    forwards.clear()
    statistics = generate(rows, drafter, NEW_TOKENS, eos_token_id=eos, pad_token_id=0).statistics
    batch_sizes = [kwargs["input_ids"].shape[0] for kwargs in forwards]
    assert [row.num_output_tokens for row in statistics.per_row] == [
        len(plain_ids(row, NEW_TOKENS, [eos])) for row in rows
    ]
    assert batch_sizes[0] == 3 > batch_sizes[-1]
    assert sum(batch_sizes) == sum(row.num_target_forwards for row in statistics.per_row)
    assert statistics.num_target_forwards == len(batch_sizes)
    assert [len(anchors) for anchors in drafter.anchors] == [row.num_draft_forwards for row in statistics.per_row]
    assert statistics.num_output_tokens == sum(row.num_output_tokens for row in statistics.per_row)


def test_rows_stay_themselves_when_a_neighbour_leaves():
    """B4: states, context or feedback of the row that left handed to one that stays."""
    rows = [1, 0, 3]
    eos = [next(token for token in plain_ids(1, NEW_TOKENS)[3:] if token not in plain_ids(0, NEW_TOKENS))]
    options = {"eos_token_id": eos, "pad_token_id": 0}
    output = generate(rows, following(kit.NudgedDrafter, rows, NEW_TOKENS), NEW_TOKENS, **options)
    assert len(plain_ids(1, NEW_TOKENS, eos)) < NEW_TOKENS
    kit.assert_not_vacuous(output.statistics)
    for i, row in enumerate(rows):
        alone = generate([row], following(kit.NudgedDrafter, [row], NEW_TOKENS), NEW_TOKENS, **options)
        expected = alone.sequences[0, LENGTHS[row] :].tolist()
        assert new_tokens_of(output, i, rows)[: len(expected)] == expected
        assert output.statistics.per_row[i].per_step_accepted == alone.statistics.per_step_accepted


def three_endings() -> tuple[list[int], list[int]]:
    """Rows and two EOS: the first row ends inside its first block, the second at that block's bonus, the third never.

    With the pattern 4, 2, 0 the first block's drafts are tokens 1 to 4 and its bonus is token 5.
    """
    for rows in itertools.permutations(range(8), 3):
        first, second, _ = (plain_ids(row, NEW_TOKENS) for row in rows)
        for eos in itertools.product(first[1:4], second[5:6]):
            lengths = [len(plain_ids(row, NEW_TOKENS, eos)) for row in rows]
            if lengths[0] in (2, 3, 4) and lengths[1:] == [6, NEW_TOKENS] and 0 not in eos:
                return list(rows), list(eos)
    raise ValueError("no such rows")


@pytest.mark.parametrize("kind", ["list", "with one that nobody says"])
def test_ends_in_the_middle_at_the_bonus_and_never(kind):
    """B4: an EOS overwritten by padding, text behind it, or rows that go on until the last one ends."""
    rows, eos = three_endings()
    if kind != "list":
        eos = [next(t for t in range(1, 63) if all(t not in plain_ids(row, NEW_TOKENS) for row in rows)), *eos]
    drafter = following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=[4, 2, 0])
    output = generate(rows, drafter, NEW_TOKENS, eos_token_id=eos, pad_token_id=0)
    for i, row in enumerate(rows):
        expected = plain_ids(row, NEW_TOKENS, eos)
        assert new_tokens_of(output, i, rows) == expected + [0] * (NEW_TOKENS - len(expected))
    lengths = [len(plain_ids(row, NEW_TOKENS, eos)) for row in rows]
    assert [row.num_output_tokens for row in output.statistics.per_row] == lengths
    assert [row.per_step_accepted[0] for row in output.statistics.per_row] == [lengths[0] - 1, 4, 4]
    kit.assert_not_vacuous(output.statistics.per_row[2])


def test_the_output_is_as_long_as_the_longest_row():
    """B4: columns of nothing but padding up to the length limit."""
    rows, eos = three_endings()
    rows = rows[:2]
    output = generate(
        rows, following(kit.OracleDrafter, rows, NEW_TOKENS), NEW_TOKENS, eos_token_id=eos, pad_token_id=0
    )
    assert output.sequences.shape == (2, max(LENGTHS[row] for row in rows) + 6)


@pytest.mark.parametrize("block_size", [4, 16])
def test_holes_stay_few(forwards, block_size):
    """Columns of rejected drafts that pile up: a row costs more than 4/3 of the longest row's tokens and a block."""
    rows, new_tokens = [0, 1, 3, 6], 100
    pattern = [block_size - 1, 0, 0, 0, 0, 0, 0]
    drafter = following(kit.PatternDrafter, rows, new_tokens, block_size=block_size, pattern=pattern, offset=2)
    forwards.clear()
    output = generate(rows, drafter, new_tokens)
    steps, had_holes = forwards[1:], False
    assert_rows_are_alone(output, rows, new_tokens)
    for kwargs in steps:
        cached = kwargs["attention_mask"][:, : -kwargs["input_ids"].shape[1]]
        longest = int(cached.sum(1).max())
        assert cached.shape[1] * 0.75 <= longest
        had_holes |= cached.shape[1] > longest
    assert had_holes
    # Without squeezing, each step would leave as many columns as its best row kept.
    kept = sum(max(accepted) + 1 for accepted in zip(*(r.per_step_accepted for r in output.statistics.per_row),
                                                    strict=False))  # fmt: skip
    assert kept > 1.5 * new_tokens


def test_rows_of_one_batch_end_at_one_limit():
    """A shorter last block for one row cut short for all, or drafts beyond a row's own limit that count."""
    rows, limit = [0, 1, 3], 11
    ids, mask = padded([prompt(row) for row in rows])
    drafter = following(kit.PatternDrafter, rows, limit, pattern=PATTERN, offset=2)
    output = kit.dflow_greedy(target_of(), drafter, ids, attention_mask=mask, max_length=ids.shape[1] + limit)
    assert_rows_are_alone(output, rows, limit)
    for i, row in enumerate(output.statistics.per_row):
        assert (row.per_step_accepted, row.per_step_drafted, row.num_target_forwards) == kit.scripted_steps(
            turned(PATTERN, i), 8, limit
        )
