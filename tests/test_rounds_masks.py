"""Who sees whom in a packed row: the one rule against nested loops, and FlexAttention against dense masks."""

import pytest
import torch
from kit import tiny_drafter, tiny_target
from torch.nn.attention.flex_attention import create_mask, flex_attention

from hf_dflow.training import masks
from hf_dflow.training.masks import PackedMask, flex_fits
from hf_dflow.training.packing import Anchors, BlockLayout, Sequences, context_places
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
    target = tiny_target("llama", dtype=torch.float32)
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
