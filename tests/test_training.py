"""What training drafts is what decoding drafts; rows, features and candidates are what they are said to be."""

import json
from itertools import pairwise

import pytest
import torch
from kit import tiny_target
from restless import restless_pair

from hf_dflow import DFlowError, DFlowGenerationConfig
from hf_dflow.generation.drafting import DraftSession
from hf_dflow.training.data import TrainingRow, read_rows, split_rows
from hf_dflow.training.features import FeatureStore
from hf_dflow.training.loss import CandidateVocabulary, HeadRows, decayed_cross_entropy, slot_targets
from hf_dflow.training.packing import IGNORED, Anchors, Sequences
from hf_dflow.training.rounds import draft_round, next_round

PROMPT_LENGTH, NEW_TOKENS = 3, 60
PARITY = 1e-4  # RMSNorm computes in float32, whose rounding depends on the shape; a wrong row is off by whole units


@pytest.fixture(scope="module")
def decoded():
    """A pair whose relay does something, a greedy answer, and every block that decoding drafted on the way."""
    target, drafter = restless_pair()
    blocks = []
    original = DraftSession.block_hidden

    def spy(session, anchor_ids, anchor_positions, feedback):
        hidden = original(session, anchor_ids, anchor_positions, feedback)
        blocks.append((anchor_positions[0], feedback, drafter.compute_logits(hidden, session.head)))
        return hidden

    DraftSession.block_hidden = spy
    try:
        config = DFlowGenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
        prompt = torch.tensor([[1, 5, 2]])
        output = target.generate(prompt, generation_config=config, assistant_model=drafter)
    finally:
        DraftSession.block_hidden = original
    token_ids = output.sequences
    states = target(token_ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    sequences = Sequences(token_ids, torch.tensor([token_ids.shape[1]]), features)
    accepted = output.statistics.per_step_accepted
    assert max(accepted) >= 2 and 0 in accepted
    return target, drafter, sequences, blocks


def test_mask_round_is_what_decoding_drafts(decoded):
    """Catches: a training mask, position or context that serving does not have (acceptance falls, loss looks fine)."""
    target, drafter, sequences, blocks = decoded
    anchor_position, feedback, served = blocks[0]
    assert feedback is None
    anchors = Anchors(torch.tensor([0]), torch.tensor([anchor_position]))
    result = draft_round(drafter, target, sequences, anchors)
    trained = drafter.compute_logits(result.hidden, target.get_output_embeddings())
    torch.testing.assert_close(trained, served, rtol=0, atol=PARITY)


def test_relay_round_is_what_decoding_drafts(decoded):
    """Catches: relayed rows, bonus or rejected token that differ between training and the loop by a row or a slot."""
    target, drafter, sequences, blocks = decoded
    compared = 0
    for (position, feedback, _), (next_position, next_feedback, served) in pairwise(blocks):
        if feedback is not None or next_feedback is None or not bool(next_feedback.is_fed.any()):
            continue
        anchors = Anchors(torch.tensor([0]), torch.tensor([position]))
        plain = draft_round(drafter, target, sequences, anchors)
        anchors, relayed = next_round(drafter, target, sequences, anchors, plain)
        assert anchors.position.tolist() == [next_position]
        result = draft_round(drafter, target, sequences, anchors, relayed)
        trained = drafter.compute_logits(result.hidden, target.get_output_embeddings())
        torch.testing.assert_close(trained, served, rtol=0, atol=PARITY)
        compared += 1
    assert compared


def test_a_later_round_follows_the_one_before(decoded):
    """Catches: a second reject-conditioned round that starts from the first round's anchors or plain drafts."""
    target, drafter, sequences, blocks = decoded
    fed = [i for i in range(len(blocks) - 1) if i > 0 and bool(blocks[i][1].is_fed.any())]
    position = blocks[fed[0] - 1][0]
    anchors, relayed = Anchors(torch.tensor([0]), torch.tensor([position])), None
    assert blocks[fed[0] - 1][1] is None, "the chain starts at a block that nothing was fed to"
    for position, _, served in blocks[fed[0] - 1 : fed[0] + 2]:
        assert anchors.position.tolist() == [position]
        result = draft_round(drafter, target, sequences, anchors, relayed)
        trained = drafter.compute_logits(result.hidden, target.get_output_embeddings())
        torch.testing.assert_close(trained, served, rtol=0, atol=PARITY)
        anchors, relayed = next_round(drafter, target, sequences, anchors, result)


def test_nothing_leaks_from_the_answer_or_another_row(decoded):
    """Catches: a block that sees tokens at or behind its anchor, or another sequence's context."""
    target, drafter, sequences, _ = decoded
    position = 20
    anchors = Anchors(torch.tensor([1]), torch.tensor([position]))

    def draft(change):
        features = sequences.features.repeat(2, 1, 1).clone()
        token_ids = sequences.token_ids.repeat(2, 1).clone()
        change(features, token_ids)
        two = Sequences(token_ids, sequences.lengths.repeat(2), features)
        return draft_round(drafter, target, two, anchors).hidden

    def spoil_what_is_hidden(features, token_ids):
        features[1, position:] = 7.0
        features[0] = 7.0
        token_ids[1, position + 1 :] = 3
        token_ids[0] = 3

    def spoil_the_context(features, token_ids):
        features[1, position - 1] = 7.0

    untouched = draft(lambda features, token_ids: None)
    assert torch.equal(draft(spoil_what_is_hidden), untouched)
    assert not torch.equal(draft(spoil_the_context), untouched)


def test_labels_are_what_follows_the_anchor(decoded):
    """Catches: labels off by one, and labels behind the end of a row."""
    target, drafter, sequences, _ = decoded
    last = int(sequences.lengths[0]) - 1
    anchors = Anchors(torch.tensor([0, 0]), torch.tensor([10, last - 2]))
    labels = draft_round(drafter, target, sequences, anchors).labels
    assert labels[0].tolist() == sequences.token_ids[0, 11:15].tolist()
    assert labels[1].tolist() == [*sequences.token_ids[0, last - 1 : last + 1].tolist(), IGNORED, IGNORED]


def test_candidate_softmax_is_the_full_one_when_all_are_candidates():
    """Catches: labels mapped to the wrong candidate, and a decay that weighs the wrong slot."""
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 4, 8), torch.randn(20, 8)
    labels = torch.randint(20, (3, 4))
    labels[1, 2:] = IGNORED
    vocabulary = CandidateVocabulary(torch.tensor([3, 5, 19]), 20, num_others=100)
    labels[labels != IGNORED] = torch.tensor([3, 5, 19])[torch.randint(3, (int((labels != IGNORED).sum()),))]
    ids = vocabulary.sample(torch.Generator().manual_seed(0))
    assert sorted(ids.tolist()) == list(range(20))
    loss = decayed_cross_entropy(hidden, vocabulary.relabel(slot_targets(labels)), HeadRows(head[ids]), decay=2.0)
    total, weight_sum = 0.0, 0.0
    for block in range(3):
        for slot in range(4):
            if labels[block, slot] != IGNORED:
                weight = torch.exp(torch.tensor(-slot / 2.0))
                log_probs = (hidden[block, slot] @ head.T).log_softmax(-1)
                total, weight_sum = total - weight * log_probs[labels[block, slot]], weight_sum + weight
    torch.testing.assert_close(loss, total / weight_sum)


def test_features_of_another_target_are_refused(tmp_path):
    """Catches: training on cached features of other layers or another target."""
    rows = [TrainingRow([1, 2, 3, 4, 5], 2, "", 0.0)]
    target = tiny_target("llama", dtype=torch.float32)
    FeatureStore(tmp_path / "features", rows, target, [0, 2])
    with pytest.raises(DFlowError, match="layer_ids"):
        FeatureStore(tmp_path / "features", rows, target, [0, 1])
    other = tiny_target("llama", dtype=torch.float32, seed=1)
    with pytest.raises(DFlowError, match="target"):
        FeatureStore(tmp_path / "features", rows, other, [0, 2])


def test_rows_are_read_split_and_refused_in_words(tmp_path):
    """Catches: a bad line without its number, and a split that depends on the order of lines."""
    path = tmp_path / "data.jsonl"
    good = [{"prompt": f"p{i}", "prompt_ids": [1, 2], "answer_ids": [3, 4, 5]} for i in range(200)]
    path.write_text("\n".join(json.dumps(record) for record in good))
    rows = read_rows(path)
    train, held_out = split_rows(rows)
    assert len(train) + len(held_out) == 200 and 0 < len(held_out) < 40
    assert {row.prompt for row in split_rows(rows[::-1])[1]} == {row.prompt for row in held_out}
    path.write_text(json.dumps(good[0]) + "\nnot json\n")
    with pytest.raises(DFlowError, match="line 2"):
        read_rows(path)
    path.write_text(json.dumps({**good[0], "answer_ids": [3]}))
    with pytest.raises(DFlowError, match="no row"):
        read_rows(path)
