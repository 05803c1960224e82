"""Training rounds draft what decoding drafts, and many blocks in one forward do not disturb each other."""

from dataclasses import dataclass

import internals
import pytest
import torch
from kit import MASK_TOKEN_ID, assert_not_vacuous, dflow_greedy, shared_target, tiny_drafter
from restless import restless_pair

from hf_dflow.training.loss import HeadRows, decayed_cross_entropy, slot_targets
from hf_dflow.training.packing import IGNORED, Anchors, Sequences, draw_anchors
from hf_dflow.training.proposals import greedy_proposals
from hf_dflow.training.rounds import accepted_lengths, draft_round, next_round

# RMSNorm computes in float32, whose rounding depends on the shape; a wrong row or a leak moves logits by whole units.
ROUNDING = 1e-4

# -- parity with decoding

NEW_TOKENS = 60
DECODED_FORMATS = {
    "native": {},
    "z-lab": {"sliding_is_causal": True, "window_is_inclusive": False},
    "corrected": {"correction_intermediate_size": 16, "correction_top_k": 4},
    "causal": {"sliding_is_causal": True, "full_is_causal": True},
}


@dataclass
class Decoded:
    """A greedy text as a training row, and of each whole step its anchor's position, logits and accepted length."""

    sequences: Sequences
    positions: list[int]
    logits: list[torch.Tensor]
    accepted: list[int]


def decode(target, drafter, use_relay: bool) -> Decoded:
    drafter.config.generation_defaults = {"use_relay": use_relay}
    with pytest.MonkeyPatch.context() as patch:
        blocks = internals.watch_blocks(patch)
        output = dflow_greedy(target, drafter, torch.tensor([[1, 5, 2]]), max_new_tokens=NEW_TOKENS)
    text, statistics = output.sequences, output.statistics
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    assert_not_vacuous(statistics)
    # The last steps are cut by the length limit, and training has no label behind the text.
    whole = [i for i, drafted in enumerate(statistics.per_step_drafted) if drafted == drafter.config.block_size - 1]
    return Decoded(
        Sequences(text, torch.tensor([text.shape[1]]), features),
        positions=[blocks[i][0] for i in whole],
        logits=[blocks[i][1] for i in whole],
        accepted=[statistics.per_step_accepted[i] for i in whole],
    )


@pytest.fixture(scope="module", params=DECODED_FORMATS)
def decoded_pair(request):
    """A pair, and its decoding without and with the relay."""
    target, drafter = restless_pair(**DECODED_FORMATS[request.param])
    if drafter.causal_correction is not None:
        drafter.load_state_dict(restless_pair()[1].state_dict(), strict=False)  # its seed gives partial rejections
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.05)
    without, with_relay = (decode(target, drafter, use_relay) for use_relay in (False, True))
    if drafter.causal_correction is not None:
        drafter.causal_correction, correction = None, drafter.causal_correction
        assert decode(target, drafter, True).accepted != with_relay.accepted, "the correction changes drafts"
        drafter.causal_correction = correction
    assert with_relay.accepted != without.accepted, "the relay changes drafts"
    assert len({*without.accepted}) > 2, "one accepted length would compare little"
    return target, drafter, without, with_relay


@pytest.mark.oldest
def test_the_mask_round_drafts_what_decoding_drafts(decoded_pair):
    """Catches: a training mask, position, context row, head or label that serving does not have (acceptance falls while
    the loss looks fine).

    All steps of the decoded text are anchors of one packed row.
    """
    target, drafter, decoded, _ = decoded_pair
    anchors = Anchors(torch.zeros(len(decoded.positions), dtype=torch.long), torch.tensor(decoded.positions))
    result = draft_round(drafter, target, decoded.sequences, anchors)
    logits = drafter.compute_logits(result.hidden, target.get_output_embeddings())
    torch.testing.assert_close(logits, torch.cat(decoded.logits), rtol=0, atol=ROUNDING)
    proposals = greedy_proposals(drafter, target, result.hidden, decoded.sequences.anchor_ids(anchors))
    assert accepted_lengths(proposals, result.labels).tolist() == decoded.accepted


@pytest.mark.oldest
def test_relay_rounds_draft_what_decoding_drafts(decoded_pair):
    """Catches: relayed rows, bonus or rejected token that differ between training and the loop by a row or a slot, and
    later rounds that start from the first one's anchors.

    Each step's block is drafted as the round after the step before.
    """
    target, drafter, _, decoded = decoded_pair
    anchors, relayed, num_fed = Anchors(torch.tensor([0]), torch.tensor(decoded.positions[:1])), None, 0
    for position, expected, accepted in zip(decoded.positions, decoded.logits, decoded.accepted, strict=True):
        assert anchors.position.tolist() == [position]
        result = draft_round(drafter, target, decoded.sequences, anchors, relayed)
        logits = drafter.compute_logits(result.hidden, target.get_output_embeddings())
        torch.testing.assert_close(logits, expected, rtol=0, atol=ROUNDING)
        proposals = greedy_proposals(drafter, target, result.hidden, decoded.sequences.anchor_ids(anchors))
        assert accepted_lengths(proposals, result.labels).tolist() == [accepted]
        num_fed += relayed is not None and bool(relayed.is_fed.any())
        anchors, relayed = next_round(drafter, target, decoded.sequences, anchors, result)
    assert num_fed > 3


# -- many blocks in one masked forward

BLOCK, SEED = 4, 5
DOCUMENTS = (14, 9, 11)  # tokens of each document of the packed row
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
    return shared_target(), tiny_drafter(shared_target(), BLOCK, **FORMATS[request.param])


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
        torch.testing.assert_close(result.hidden[i], alone.hidden[0], rtol=0, atol=ROUNDING)
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
        torch.testing.assert_close(result.hidden[i], alone.hidden[0], rtol=0, atol=ROUNDING)
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
