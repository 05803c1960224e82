"""Training and serving count alike: match rates per position in training are the acceptance histogram of decoding."""

import pytest
import torch
from kit import assert_not_vacuous, dflow_greedy
from restless import restless_pair

from hf_dflow.generation.drafting import DraftSession
from hf_dflow.training.packing import Anchors, Sequences
from hf_dflow.training.proposals import greedy_proposals
from hf_dflow.training.rounds import accepted_lengths, draft_round, next_round

BLOCK, NEW_TOKENS = 5, 60
FORMATS = {
    "native": {},
    "z-lab": {"sliding_is_causal": True, "window_is_inclusive": False},
    "corrected": {"correction_intermediate_size": 16, "correction_top_k": 4},
    "causal": {"sliding_is_causal": True, "full_is_causal": True},
}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request):
    target, drafter = restless_pair(**FORMATS[request.param])
    if drafter.causal_correction is not None:
        drafter.load_state_dict(restless_pair()[1].state_dict(), strict=False)  # its seed gives partial rejections
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.05)
    decoded = {use_relay: decode(target, drafter, use_relay) for use_relay in (False, True)}
    if drafter.causal_correction is not None:
        drafter.causal_correction, correction = None, drafter.causal_correction
        assert decode(target, drafter, True)[0] != decoded[True][0], "the correction changes drafts"
        drafter.causal_correction = correction
    return target, drafter, decoded


def decode(target, drafter, use_relay: bool):
    """Accepted length of each whole step, the text as training rows, and where each step's anchor stood."""
    positions = []
    original = DraftSession.slots

    def spy(session, rows, *args, **kwargs):
        positions.append(rows[0].next_position)
        return original(session, rows, *args, **kwargs)

    drafter.config.generation_defaults = {"use_relay": use_relay}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftSession, "slots", spy)
        output = dflow_greedy(target, drafter, torch.tensor([[1, 5, 2]]), max_new_tokens=NEW_TOKENS)
    text = output.sequences
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    statistics = output.statistics
    assert_not_vacuous(statistics)
    whole = [i for i, drafted in enumerate(statistics.per_step_drafted) if drafted == BLOCK - 1]
    # The last steps are cut by the length limit, and training has no label behind the text.
    accepted = [statistics.per_step_accepted[i] for i in whole]
    return accepted, Sequences(text, torch.tensor([text.shape[1]]), features), [positions[i] for i in whole]


def match_rates(accepted: list[int]) -> list[float]:
    return [sum(a >= i for a in accepted) / len(accepted) for i in range(1, BLOCK)]


def test_match_rates_of_the_mask_round_are_the_histogram_of_decoding(pair):
    """Catches: training that measures other blocks than decoding drafts: mask, positions, context rows, head, labels.

    All steps of the decoded text are anchors of one packed row.
    """
    target, drafter, decoded = pair
    accepted, sequences, positions = decoded[False]
    anchors = Anchors(torch.zeros(len(positions), dtype=torch.long), torch.tensor(positions))
    result = draft_round(drafter, target, sequences, anchors)
    proposals = greedy_proposals(drafter, target, result.hidden, sequences.token_ids[0, anchors.position])
    trained = accepted_lengths(proposals, result.labels)
    assert trained.tolist() == accepted
    is_match = (proposals == result.labels).cumprod(dim=1).double().mean(dim=0)
    assert is_match.tolist() == pytest.approx(match_rates(accepted))
    assert len({*accepted}) > 2, "one accepted length would compare little"


def test_match_rates_of_relay_rounds_are_the_histogram_of_decoding(pair):
    """Catches: relayed rows, bonus or rejected token of training that the loop does not feed: each step's block is
    drafted as the round after the step before."""
    target, drafter, decoded = pair
    accepted, sequences, positions = decoded[True]
    anchors, relayed, trained, fed = Anchors(torch.tensor([0]), torch.tensor([positions[0]])), None, [], 0
    for position in positions:
        assert anchors.position.tolist() == [position]
        result = draft_round(drafter, target, sequences, anchors, relayed)
        proposals = greedy_proposals(drafter, target, result.hidden, sequences.token_ids[0, anchors.position])
        trained += accepted_lengths(proposals, result.labels).tolist()
        fed += relayed is not None and bool(relayed.is_fed.any())
        anchors, relayed = next_round(drafter, target, sequences, anchors, result)
    assert trained == accepted
    assert match_rates(trained) == match_rates(accepted)
    assert fed > 3 and accepted != decoded[False][0], "the relay changes drafts"
