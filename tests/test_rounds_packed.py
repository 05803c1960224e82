"""Many blocks in one masked forward: nothing leaks, labels and anchors are the right ones."""

import pytest
import torch
from kit import MASK_TOKEN_ID, tiny_drafter, tiny_target

from hf_dflow.training.loss import HeadRows, decayed_cross_entropy, slot_targets
from hf_dflow.training.packing import IGNORED, Anchors, Sequences, draw_anchors
from hf_dflow.training.rounds import draft_round

BLOCK, SEED = 4, 5
DOCUMENTS = (14, 9, 11)  # tokens of each document of the packed row
CONTEXT_ONLY = 1e-4  # RMSNorm computes in float32; a leak moves logits by whole units
FORMATS = {
    "full": {},
    "causal": {"full_is_causal": True},
    "z-lab": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "sliding_is_causal": True,
        "window_is_inclusive": False,
    },
    "native": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 5},
}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request):
    target = tiny_target("llama")
    return target, tiny_drafter(target, BLOCK, **FORMATS[request.param])


def documents(width: int) -> list[Sequences]:
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for length in DOCUMENTS:
        token_ids = torch.randint(1, MASK_TOKEN_ID, (1, length), generator=generator)
        features = torch.randn(1, length, width, generator=generator, dtype=torch.float64)
        made.append(Sequences(token_ids, torch.tensor([length]), features))
    return made


def packed(parts: list[Sequences], padding: int = 3) -> Sequences:
    """The documents side by side in one row, padding behind."""
    lengths = [int(part.lengths) for part in parts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    token_ids = torch.nn.functional.pad(torch.cat([part.token_ids for part in parts], dim=1), (0, padding))
    features = torch.nn.functional.pad(torch.cat([part.features for part in parts], dim=1), (0, 0, 0, padding))
    document_starts = torch.tensor(starts).repeat_interleave(torch.tensor(lengths))[None]
    document_starts = torch.nn.functional.pad(document_starts, (0, padding))
    return Sequences(token_ids, torch.tensor([sum(lengths)]), features, document_starts=document_starts)


def places(*pairs: tuple[int, int]) -> Anchors:
    return Anchors(*(torch.tensor(column) for column in zip(*pairs, strict=True)))


def test_a_packed_document_drafts_as_it_does_alone(pair):
    """Catches: positions that go on across documents, a window counted in another document, labels of the next one."""
    target, drafter = pair
    parts = documents(drafter.fc.in_features)
    row = packed(parts)
    inside = [(document, position) for document, length in enumerate(DOCUMENTS) for position in (1, 4, length - 2)]
    starts = [sum(DOCUMENTS[:document]) for document in range(len(DOCUMENTS))]
    result = draft_round(drafter, target, row, places(*((0, starts[d] + position) for d, position in inside)))
    for i, (document, position) in enumerate(inside):
        alone = draft_round(drafter, target, parts[document], places((0, position)))
        torch.testing.assert_close(result.hidden[i], alone.hidden[0], rtol=0, atol=CONTEXT_ONLY)
        assert result.labels[i].tolist() == alone.labels[0].tolist()


def test_a_block_sees_its_past_and_nothing_else(pair):
    """Catches: a leak from the anchor's own place or behind, from another block or from another packed document."""
    target, drafter = pair
    parts = documents(drafter.fc.in_features)
    anchor, other = DOCUMENTS[0] + 5, DOCUMENTS[0] + 7
    row = packed(parts)

    def hidden(changed: Sequences, second: int = other) -> torch.Tensor:
        return draft_round(drafter, target, changed, places((0, anchor), (0, second))).hidden[0]

    before = hidden(row)
    for index in range(row.token_ids.shape[1]):
        changed = packed(parts)
        changed.features[0, index] += 3.0
        if index != anchor:
            changed.token_ids[0, index] = (row.token_ids[0, index] + 1) % MASK_TOKEN_ID
        is_past = DOCUMENTS[0] <= index < anchor
        if not is_past:
            assert torch.equal(hidden(changed), before), index
    changed = packed(parts)
    changed.features[0, anchor - 1] += 3.0
    assert (hidden(changed) - before).abs().max() > 0.01, "the past matters"
    changed = packed(parts)
    changed.token_ids[0, anchor] = (row.token_ids[0, anchor] + 1) % MASK_TOKEN_ID
    assert (hidden(changed) - before).abs().max() > 0.01, "the anchor's own token matters"
    assert torch.equal(hidden(row, second=anchor - 2), before), "another block does not"


def test_many_anchors_draft_as_each_alone(pair):
    """Catches: blocks of one row that are mixed up, lost in a split over packed rows, or given another's position."""
    target, drafter = pair
    row = packed(documents(drafter.fc.in_features))
    two = Sequences(
        row.token_ids.repeat(2, 1), torch.tensor([int(row.lengths), 20]), row.features.repeat(2, 1, 1),
        document_starts=row.document_starts.repeat(2, 1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    chosen = [(int(r), int(p)) for r, p in zip(*torch.randint(0, 2, (2, 40), generator=generator), strict=True)]
    chosen = [(r, 2 + (7 * i) % (17 if r else 31)) for i, (r, _) in enumerate(chosen)]
    assert max(sum(r == row for r, _ in chosen) for row in (0, 1)) > 16, "a row is split"
    result = draft_round(drafter, target, two, places(*chosen))
    for i, place in enumerate(chosen):
        alone = draft_round(drafter, target, two, places(place))
        torch.testing.assert_close(result.hidden[i], alone.hidden[0], rtol=0, atol=CONTEXT_ONLY)
        assert result.labels[i].tolist() == alone.labels[0].tolist()


def test_a_shorter_block_is_drafted_as_by_a_drafter_of_that_length(pair):
    """Catches: a curriculum that masks with the full length, or cuts slots off a full block, which saw them."""
    target, drafter = pair
    row, chosen = packed(documents(drafter.fc.in_features)), places((0, 3), (0, 20))
    short = draft_round(drafter, target, row, chosen, block_size=2)
    long = draft_round(drafter, target, row, chosen)
    drafter.config.block_size = 2
    try:
        expected = draft_round(drafter, target, row, chosen)
    finally:
        drafter.config.block_size = BLOCK
    assert short.hidden.equal(expected.hidden) and short.labels.equal(expected.labels)
    assert short.labels.equal(long.labels[:, :1]) and short.hidden.shape[1] == 1
    if not drafter.config.full_is_causal and "sliding_attention" not in drafter.config.layer_types:
        assert not torch.allclose(short.hidden, long.hidden[:, :1]), "the first slot of a longer block sees the others"


def test_labels_end_with_the_document_and_with_the_answer(pair):
    """Catches: labels off by one, behind a document's end, in the user's turn, or in an answer behind that turn."""
    target, drafter = pair
    row = packed(documents(drafter.fc.in_features))
    first_end = DOCUMENTS[0]
    anchors = places((0, 3), (0, first_end - 2), (0, first_end - 1), (0, sum(DOCUMENTS) - 3))
    tokens = row.token_ids[0].tolist()
    labels = draft_round(drafter, target, row, anchors).labels.tolist()
    assert labels[0] == tokens[4:7]
    assert labels[1] == [tokens[first_end - 1], IGNORED, IGNORED]
    assert labels[2] == [IGNORED] * 3
    assert labels[3] == [*tokens[sum(DOCUMENTS) - 2 : sum(DOCUMENTS)], IGNORED]
    row.is_supervised = torch.ones_like(row.token_ids, dtype=torch.bool)
    row.is_supervised[0, 5] = False
    assert draft_round(drafter, target, row, anchors).labels.tolist()[0] == [tokens[4], IGNORED, IGNORED]


def test_a_batch_without_anchors_gives_a_zero_loss(pair):
    """Catches: a batch in which nothing is supervised stops the run, or makes a NaN."""
    target, drafter = pair
    row = packed(documents(drafter.fc.in_features))
    row.is_supervised = torch.zeros_like(row.token_ids, dtype=torch.bool)
    anchors = draw_anchors(row, 4, torch.Generator().manual_seed(0))
    assert len(anchors.row) == 0
    drafter.requires_grad_(True)
    result = draft_round(drafter, target, row, anchors)
    head = target.get_output_embeddings().weight
    loss = decayed_cross_entropy(result.hidden, slot_targets(result.labels), HeadRows(head), 4.0)
    loss.backward()
    drafter.requires_grad_(False)
    assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in drafter.parameters())
    drafter.zero_grad()


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
