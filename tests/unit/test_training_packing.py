"""Which rows an update sees, where its anchors stand, and who sees whom in a packed row."""

import itertools

import pytest
import torch
from kit import tiny_drafter
from torch.nn.attention.flex_attention import create_mask, flex_attention
from trainer_kit import tiny_rows, training_target

from hf_dflow.training import masks
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.masks import PackedMask, flex_fits
from hf_dflow.training.packing import (
    IGNORED,
    Anchors,
    BlockLayout,
    RowOrder,
    Sequences,
    context_places,
    draw_anchors,
    lay_out,
    place_rows,
)
from hf_dflow.training.rounds import draft_round

BLOCK = 4
LENGTHS = [11, 7]
STARTS = [[0, 0, 0, 0, 0, 5, 5, 5, 9, 9, 9, 0], [0] * 12]  # three documents in the first row, one in the second
ANCHORS = [(0, 3), (0, 4), (1, 2), (0, 7), (1, 6), (0, 9)]  # rows and positions, in no order
RULES = [(False, None), (True, None), (False, 3), (True, 2)]


def sequences(width: int = 1) -> Sequences:
    token_ids = torch.arange(24).view(2, 12)
    return Sequences(token_ids, torch.tensor(LENGTHS), torch.randn(2, 12, width), document_starts=torch.tensor(STARTS))


def anchors() -> Anchors:
    return Anchors(*(torch.tensor(column) for column in zip(*ANCHORS, strict=True)))


def document(row: int, index: int) -> int | None:
    """By hand: which document a token belongs to."""
    return STARTS[row][index] if index < LENGTHS[row] else None


def may_look(row: int, anchor: int, slot: int, key: tuple, is_causal: bool, reach: int | None) -> bool:
    """By hand. `key` is ("context", index) or ("block", anchor, slot)."""
    if key[0] == "context":
        if key[1] >= anchor or document(row, key[1]) != document(row, anchor):
            return False
        distance = anchor + slot - key[1]
    else:
        if key[1] != anchor:
            return False
        distance = slot - key[2]
    return (distance >= 0 or not is_causal) and (reach is None or abs(distance) <= reach)


def nested_loops(is_causal: bool, reach: int | None) -> dict[tuple, list[bool]]:
    """What each slot sees: the row's 12 context places, then the row's blocks in the order of `ANCHORS`."""
    seen = {}
    for row, anchor in ANCHORS:
        blocks = [other for other_row, other in ANCHORS if other_row == row]
        keys = [("context", index) for index in range(12)]
        keys += [("block", other, slot) for other in blocks for slot in range(BLOCK)]
        for slot in range(BLOCK):
            seen[row, anchor, slot] = [may_look(row, anchor, slot, key, is_causal, reach) for key in keys]
    return seen


@pytest.fixture
def packed():
    own = BlockLayout(anchors(), 2, BLOCK).places(sequences())
    return PackedMask(own, context_places(sequences()) + own)


@pytest.mark.parametrize(("is_causal", "reach"), RULES)
def test_the_mask_is_the_nested_loops(packed, is_causal, reach):
    """Catches: a block that sees its anchor's successor, another block, another document or padding, and a window that
    is measured from the wrong slot (acceptance collapses in decoding while the loss looks fine)."""
    dense = packed.dense(is_causal, reach)[:, 0]
    for (row, anchor, slot), expected in nested_loops(is_causal, reach).items():
        place = [other for other_row, other in ANCHORS if other_row == row].index(anchor)
        found = dense[row, place * BLOCK + slot].tolist()
        assert found[: len(expected)] == expected, (row, anchor, slot)
        assert not any(found[len(expected) :]), "a slot sees a place that holds no block"
    assert dense.any(-1).all(), "a query that sees nothing becomes NaN"


@pytest.mark.parametrize(("is_causal", "reach"), RULES)
def test_flex_attention_reads_the_same_rule(packed, is_causal, reach):
    """Catches: a rule that only broadcasts, so that FlexAttention's element-wise evaluation of it differs."""
    rows, queries = packed.queries.index.shape
    keys = packed.keys.index.shape[1]
    elementwise = create_mask(packed.rule(is_causal, reach), rows, None, queries, keys, device="cpu")
    assert torch.equal(elementwise, packed.dense(is_causal, reach))


def test_flex_attention_drafts_what_dense_masks_draft(monkeypatch):
    """Catches: a block mask that reaches the wrong attention function, or is added to the scores as zeros and ones."""
    target = training_target()
    drafter = tiny_drafter(
        target, BLOCK, layer_types=["full_attention", "sliding_attention"], sliding_window=3, sliding_is_causal=True
    )
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    rows = sequences(drafter.fc.in_features)
    with torch.no_grad():
        expected = draft_round(drafter, target, rows, anchors(), use_flex=False).hidden
        found = draft_round(drafter, target, rows, anchors(), use_flex=True).hidden
        with torch.autocast("cpu", torch.bfloat16):
            rough = draft_round(drafter, target, rows, anchors(), use_flex=True).hidden
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert ((rough - expected).norm() / expected.norm()).item() < 0.1
    assert uncompiled.calls == 4


def uncompiled(query, key, value, training=False, return_lse=False, return_aux=None, **kwargs):
    """FlexAttention's own definition: compiling it for a CPU takes minutes."""
    uncompiled.calls += 1
    kwargs.pop("kernel_options", None)
    return flex_attention(query, key, value, **kwargs)


uncompiled.calls = 0


def test_flex_attention_is_left_alone_where_it_does_not_fit(monkeypatch, caplog):
    """Catches: training that dies where FlexAttention does not compile, on sizes it refuses, or on a CPU."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(masks, "_flex_compiles", lambda device: True)
    assert flex_fits(cuda, torch.bfloat16, 64, 0.0)
    assert not flex_fits(torch.device("cpu"), torch.bfloat16, 64, 0.0)
    assert not flex_fits(cuda, torch.float64, 64, 0.0)
    assert not flex_fits(cuda, torch.bfloat16, 8, 0.0)
    assert not flex_fits(cuda, torch.bfloat16, 64, 0.1)
    monkeypatch.undo()
    monkeypatch.setattr(masks, "create_block_mask", lambda *args, **kwargs: 1 / 0)
    masks._flex_compiles.cache_clear()
    assert not masks._flex_compiles("cpu")
    assert "SDPA with dense masks" in caplog.text
    masks._flex_compiles.cache_clear()


def test_blocks_come_back_from_where_they_were_packed():
    """Catches: two blocks on one place, or results handed back to other anchors, with a row split and one empty."""
    row = torch.tensor([3, 0, 3, 3, 1, 0, 3, 3])
    layout = BlockLayout(Anchors(row, torch.arange(8)), 5, 2, max_blocks=2)
    values = torch.arange(1, 17).view(8, 2)
    packed = layout.pack(values)
    assert torch.equal(layout.unpack(packed), values)
    assert sorted(packed[packed > 0].tolist()) == list(range(1, 17))
    by_row = torch.arange(5)
    assert torch.equal(layout.repeat(by_row)[layout.row], row)
    assert packed.shape == (7, 4)  # rows 0, 1 and the empty 2 and 4 once, row 3 three times


# -- anchors


def answers(*spans: tuple[int, int], length: int) -> torch.Tensor:
    flags = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        flags[start:end] = True
    return flags


def test_every_document_with_an_answer_gets_an_anchor():
    """Catches: anchors drawn per packed row, so that short documents beside a long one are never trained on."""
    lengths = [4, 200, 5, 3, 6]
    starts = torch.tensor([0, 4, 204, 209, 212]).repeat_interleave(torch.tensor(lengths))[None]
    supervised = answers((2, 4), (10, 204), (206, 209), (211, 212), (212, 214), length=218)[None]
    row = Sequences(
        torch.zeros(1, 218, dtype=torch.long), torch.tensor([218]), torch.zeros(1, 218, 1),
        document_starts=starts, is_supervised=supervised,
    )  # fmt: skip
    for seed in range(20):
        anchors = draw_anchors(row, 6, torch.Generator().manual_seed(seed))
        found = anchors.position.tolist()
        assert len(found) == len(set(found)) == 6
        assert {starts[0, p].item() for p in found} == {0, 4, 204, 212}, "209 holds one supervised token: no label"
        assert all(supervised[0, p] and supervised[0, p + 1] for p in found)
        assert 2 in found and 212 in found, "the only place in its document"
    few = draw_anchors(row, 2, torch.Generator().manual_seed(0))
    assert len(few.row) == 4, "documents come before the number"


def test_anchors_stay_within_rows_and_are_drawn_evenly():
    """Catches: anchors in padding or on a last token, a place that is never drawn, one that is drawn twice."""
    rows = Sequences(torch.zeros(2, 12, dtype=torch.long), torch.tensor([12, 5]), torch.zeros(2, 12, 1))
    counts = torch.zeros(2, 12)
    for seed in range(300):
        anchors = draw_anchors(rows, 3, torch.Generator().manual_seed(seed))
        assert anchors.row.tolist() == [0, 0, 0, 1, 1, 1]
        counts[anchors.row, anchors.position] += 1
    assert counts.max() <= 300 and not counts[0, 11] and not counts[1, 4:].any()
    assert (counts[0, :11] > 300 * 3 / 11 * 0.7).all() and (counts[1, :4] > 300 * 3 / 4 * 0.8).all()


# -- rows of an update


def test_every_row_comes_once_before_any_comes_again_and_processes_share_them():
    """Catches: drawing with replacement (a third of the data unseen in an epoch), and processes on the same rows."""
    order = RowOrder(7, seed=3)
    epochs = [[order[epoch * 7 + i] for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [RowOrder(7, 3)[i] for i in (16, 2)] == [epochs[2][2], epochs[0][2]], "a function of the number alone"
    assert [RowOrder(7, 4)[i] for i in range(7)] != epochs[0]
    shares = [order.share(4, 2, process, 3) for process in range(3)]
    assert sorted(itertools.chain(*shares)) == sorted(order[i] for i in range(4, 10))


def test_packed_rows_give_the_states_of_rows_apart():
    """Catches: packed documents at wrong places: an anchor in its neighbour, or positions that count on."""
    target = training_target()
    drafter = tiny_drafter(target, BLOCK, target_layer_ids=[0, 2])
    lengths = (24, 15, 13, 11, 9, 8)
    rows = [
        TrainingRow(row.token_ids[:length], row.prompt_length, "", 0.0)
        for row, length in zip(tiny_rows(7)[:0:-1], lengths, strict=True)
    ]
    features = [torch.randn(length, 64, generator=torch.Generator().manual_seed(length)) for length in lengths]

    def drafted(pack: bool):
        generator = torch.Generator().manual_seed(5)
        options = {"anchors_per_row": 3, "pack": pack, "generator": generator, "device": torch.device("cpu")}
        sequences, anchors = lay_out(rows, features, [], **options)
        return sequences, draft_round(drafter, target, sequences, anchors)

    (apart, expected), (packed, found) = drafted(pack=False), drafted(pack=True)
    assert len(packed.token_ids) < len(apart.token_ids) and packed.token_ids.shape[1] == apart.token_ids.shape[1]
    assert expected.labels.equal(found.labels) and bool((found.labels == IGNORED).any())
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=0, atol=1e-5)  # the same sums in another order
    places, starts = place_rows(rows, True)
    assert any(start > 0 for start in starts), "a row that is not the first of its packed row"
    for place in set(places):
        spans = sorted((starts[i], starts[i] + lengths[i]) for i in range(len(rows)) if places[i] == place)
        assert spans[0][0] == 0 and all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
