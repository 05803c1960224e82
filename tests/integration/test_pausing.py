"""A drafter that is of no use, breaks, or has no positions left: plain decoding at a bounded price, and one warning."""

import kit
import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, plain_ids, target_of, text
from internals import FIRST_PAUSE, LONGEST_PAUSE, PATIENCE, BackOff

LONG = 200


def test_a_useless_drafter_is_asked_seldom(caplog):
    """H3: the price of a drafter that is never right paid for every token."""
    drafter = following(kit.HostileDrafter, [1], LONG, block_size=4)
    output = generate([1], drafter, LONG)
    assert new_tokens_of(output, 0, [1]) == plain_ids(1, LONG)
    statistics = output.statistics
    assert statistics.num_draft_forwards == len(drafter.anchor_positions) <= PATIENCE + 4 + LONG / LONGEST_PAUSE
    assert statistics.num_draft_forwards > PATIENCE  # it is not given up either
    assert statistics.num_target_forwards == LONG  # no forward beyond plain decoding's
    assert [warning for warning in kit.our_warnings(caplog) if "now and then" in warning] == kit.our_warnings(caplog)
    assert len(kit.our_warnings(caplog)) == 1


@pytest.mark.parametrize("good_from", [60, 120])
def test_a_drafter_that_turns_good_is_found_again(good_from):
    """H3: a drafter given up for good, or found again only after as long as it was bad."""
    drafter = following(kit.TurnsGood, [1], LONG, block_size=4)
    drafter.good_from = good_from
    output = generate([1], drafter, LONG)
    assert new_tokens_of(output, 0, [1]) == plain_ids(1, LONG)
    asked_again = next(anchor for anchor in drafter.anchor_positions if anchor >= good_from)
    assert asked_again <= good_from + LONGEST_PAUSE + 1
    first = output.statistics.per_step_accepted.index(3)
    assert set(output.statistics.per_step_accepted[:first]) == {0}
    assert set(output.statistics.per_step_accepted[first:-1]) == {3}


def test_rows_back_off_by_themselves(caplog):
    """A row that stops drafting because its neighbours' drafts are wrong, or a warning for each row."""

    class Mixed(kit.HostileDrafter):
        def compute_logits(self, hidden, target_head):
            logits = super().compute_logits(hidden, target_head)
            for i, row in enumerate(self.drafting_rows):
                for slot, position in enumerate(hidden[i, :, -3].long().tolist()):
                    if row == 1:
                        logits[i, slot] = self._say(logits[i, slot], self.sequences[row][position])
            return logits

    rows = [1, 0, 3]
    output = generate(rows, following(Mixed, rows, 60, block_size=4), 60)
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [plain_ids(row, 60) for row in rows]
    bad, good, other = (row.per_step_accepted for row in output.statistics.per_row)
    assert set(good[:-1]) == {3} and bad == other == [0] * len(bad) and len(bad) < 45
    assert len(kit.our_warnings(caplog)) == 1


class OverflowsLate(kit.OracleDrafter):
    """Not a number from a position on, for one row."""

    def compute_logits(self, hidden, target_head):
        logits = super().compute_logits(hidden, target_head)
        for i, row in enumerate(self.drafting_rows):
            if row == 1 and int(hidden[i, 0, -3]) > 25:
                logits[i] = torch.nan
        return logits


def test_one_row_with_a_broken_drafter(caplog):
    """E4 in a batch: NaN of one row that reaches the others, is accepted, or is warned of at every step."""
    rows = [0, 1, 3]
    output = generate(rows, following(OverflowsLate, rows, 40, block_size=4), 40)
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [plain_ids(row, 40) for row in rows]
    (warning,) = kit.our_warnings(caplog)
    assert "non-finite" in warning
    first, broken, third = output.statistics.per_row
    assert set(first.per_step_accepted[:-1]) == set(third.per_step_accepted[:-1]) == {3}
    assert first.num_target_forwards == third.num_target_forwards == 11 < broken.num_target_forwards
    assert broken.per_step_accepted[-1] == 0


def test_one_row_beyond_the_drafters_positions(caplog):
    """C9 in a batch: drafts at positions that the drafter never saw, or all rows stopped by the longest."""
    rows, limit = [0, 1, 7], 32  # prompts of 7, 12 and 20 tokens
    drafter = kit.tiny_drafter(target_of(), 4, drafter_class=kit.OracleDrafter, max_position_embeddings=limit)
    drafter.follow_rows([(text(row, 48), LENGTHS[row]) for row in rows])
    output = generate(rows, drafter, 40)
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [plain_ids(row, 40) for row in rows]
    counts = [row.num_accepted_draft_tokens for row in output.statistics.per_row]
    assert counts[0] > counts[1] > counts[2] > 0
    assert len(kit.our_warnings(caplog)) == 1


def test_rows_at_the_targets_last_position():
    """C9 in a batch: a row that needs fewer drafts than its neighbours pushed past the target's learned positions."""
    gpt2 = kit.tiny_target("gpt2", n_positions=32, attention="sdpa")
    prompts = [kit.prompt_of(20, seed=1), kit.prompt_of(6, seed=2)]
    ids = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (14, 0))])
    mask = torch.cat([torch.ones(1, 20), torch.arange(20)[None] >= 14]).long()
    texts = [(kit.plain_greedy(gpt2, one, 12), one.shape[1]) for one in prompts]
    drafter = kit.tiny_drafter(gpt2, 8, drafter_class=kit.PatternDrafter).follow_rows(texts)
    drafter.pattern, drafter.offset = [5, 2], 1
    output = kit.dflow_greedy(gpt2, drafter, ids, attention_mask=mask, max_length=32)
    # After the first step the first row has room for 4 drafts, up to position 31, and the second for 7.
    assert [row.per_step_drafted[1] for row in output.statistics.per_row] == [4, 7]
    for row, (text_, length) in enumerate(texts):
        assert output.sequences[row, 20:].tolist() == text_[0, length:].tolist()


def test_policy_by_hand():
    """Pauses that do not grow, grow for ever, or survive an accepted draft."""
    policy, drafted = BackOff(), []
    for step in range(600):
        if policy.may_draft():
            drafted.append(step)
            policy.learn(5, 0)
    trials = drafted[PATIENCE:]
    assert drafted[:PATIENCE] == list(range(PATIENCE))
    assert [b - a - 1 for a, b in zip([PATIENCE - 1, *trials], trials, strict=False)][:5] == [
        FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE,
    ]  # fmt: skip
    policy = BackOff()
    assert [policy.learn(5, 0) for _ in range(PATIENCE + 1)] == [False] * (PATIENCE - 1) + [True, False]
    policy.learn(5, 1)
    assert policy.in_vain == 0 and policy.next_pause == FIRST_PAUSE
