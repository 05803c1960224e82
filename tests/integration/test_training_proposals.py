"""What the frozen target computes on proposals in training is what it computes on them in verification."""

import pytest
import torch
from kit import FAMILIES, MASK_TOKEN_ID, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dflow import DFlowError
from hf_dflow.training import loss
from hf_dflow.training.packing import Anchors, Sequences
from hf_dflow.training.proposals import greedy_proposals, proposal_features
from hf_dflow.training.rounds import draft_round, next_round

BLOCK = 5
ROUNDING = 1e-3  # float32 inside norms and softmax; states of a wrong row differ by whole units
DOCUMENTS = (13, 21)  # longer than the sliding families' window
ANCHORS = [(0, 3), (1, 20), (0, 11), (0, 15), (0, 32), (1, 9)]


def rows(target, drafter, with_documents: bool) -> Sequences:
    """Two rows of 34 and 21 tokens, padded to 37; the first may hold two documents."""
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(1, MASK_TOKEN_ID, (2, 37), generator=generator)
    starts = torch.tensor([0, DOCUMENTS[0], 0]).repeat_interleave(torch.tensor([*DOCUMENTS, 3]))
    return Sequences(
        token_ids,
        torch.tensor([sum(DOCUMENTS), DOCUMENTS[1]]),
        torch.randn(2, 37, drafter.fc.in_features, generator=generator).to(target.dtype),
        document_starts=torch.stack([starts, torch.zeros_like(starts)]) if with_documents else None,
    )


def anchors() -> Anchors:
    return Anchors(*(torch.tensor(column) for column in zip(*ANCHORS, strict=True)))


def verified(target, drafter, sequences: Sequences, place: int, proposals: torch.Tensor) -> torch.Tensor:
    """By hand: one plain forward of the target over the anchor's document and its block, the block's tapped states."""
    row, position = ANCHORS[place]
    start = 0 if sequences.document_starts is None else int(sequences.document_starts[row, position])
    tokens = torch.cat([sequences.token_ids[row, start : position + 1], proposals[place]])
    states = target(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)[0]
    return features[position - start :]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "eager") for family in FAMILIES), *((f, "sdpa") for f in FAMILIES if "gemma" not in f)],
)
def test_proposals_get_the_states_that_verification_computes(family, attention, with_documents):
    """Catches: a target pass whose blocks see one another, another document, their anchor's real successors, the
    cache's leavings of an earlier round, or the whole past where the target's layers have a window."""
    target = tiny_target(family, attention=attention)
    last = target.config.num_hidden_layers - 1
    drafter = tiny_drafter(target, BLOCK, target_layer_ids=[0, 1, last])  # the last with the final norm
    sequences = rows(target, drafter, with_documents)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        proposals = torch.randint(1, MASK_TOKEN_ID, (len(ANCHORS), BLOCK - 1), generator=generator)
        found = proposal_features(target, sequences, anchors(), proposals, drafter.config.target_layer_ids)
        for place in range(len(ANCHORS)):
            expected = verified(target, drafter, sequences, place, proposals)
            torch.testing.assert_close(found[place], expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_bfloat16_target_relays_too():
    """Catches: masks or features in a dtype that a low-precision target or drafter does not take."""
    target = tiny_target("gemma_sliding", dtype=torch.bfloat16)
    drafter = tiny_drafter(target, BLOCK, dtype=torch.float32)
    sequences = rows(target, drafter, with_documents=True)
    result = draft_round(drafter, target, sequences, anchors())
    following, relayed = next_round(drafter, target, sequences, anchors(), result)
    exact = tiny_target("gemma_sliding", dtype=torch.float32)
    again = rows(exact, drafter, with_documents=True)
    proposals = greedy_proposals(drafter, target, result.hidden, sequences.anchor_ids(anchors()))
    reference = proposal_features(exact, again, anchors(), proposals, drafter.config.target_layer_ids)[:, 1:]
    states = proposal_features(target, sequences, anchors(), proposals, drafter.config.target_layer_ids)[:, 1:]
    assert states.dtype == torch.bfloat16 and relayed.is_fed.any()
    assert (states - reference).norm() / reference.norm() < 0.05
    assert draft_round(drafter, target, sequences, following, relayed).hidden.isfinite().all()


def test_a_block_may_reach_past_the_targets_last_position():
    """Catches: an index error in a table of learned positions, near the end of a text as long as the table."""
    target = tiny_target("gpt2", n_positions=sum(DOCUMENTS))
    drafter = tiny_drafter(target, BLOCK, target_layer_ids=[0, 1])
    sequences = rows(target, drafter, with_documents=False)
    proposals = torch.ones(len(ANCHORS), BLOCK - 1, dtype=torch.long)
    place = ANCHORS.index((0, 32))
    found = proposal_features(target, sequences, anchors(), proposals, drafter.config.target_layer_ids)[place, :2]
    expected = verified(target, drafter, sequences, place, proposals[:, :1])
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_round_costs_its_blocks_states_and_nothing_else():
    """Catches: every round running the target over the whole sequence again, or computing logits that nobody reads."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, BLOCK)
    sequences = rows(target, drafter, with_documents=False)
    widths, head_calls = [], []
    target.get_input_embeddings().register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    target.get_output_embeddings().register_forward_hook(lambda *_: head_calls.append(1))
    proposals = torch.ones(len(ANCHORS), BLOCK - 1, dtype=torch.long)
    for _ in range(3):
        proposal_features(target, sequences, anchors(), proposals, drafter.config.target_layer_ids)
    assert widths == [37, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK] and not head_calls
    greedy_proposals(drafter, target, torch.zeros(1, BLOCK - 1, 32, dtype=torch.float64), torch.tensor([1]))
    assert head_calls, "the hook sees the head where it is used"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_attn_implementation": "flash_attention_2"}, "load the target with attn_implementation='sdpa'"),
        (
            {"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 8},
            "chunked_attention.*relay_rounds=0",
        ),
    ],
)
def test_a_target_that_cannot_run_blocks_side_by_side_is_refused(change, message, monkeypatch):
    """Catches: relayed states silently computed with another mask."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, BLOCK)
    for name, value in change.items():
        monkeypatch.setattr(type(target.config), name, value, raising=False)
    proposals = torch.ones(len(ANCHORS), BLOCK - 1, dtype=torch.long)
    with pytest.raises(DFlowError, match=message):
        proposal_features(target, rows(target, drafter, False), anchors(), proposals, drafter.config.target_layer_ids)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return result


def test_proposals_hold_a_chunk_of_logits_at_a_time(monkeypatch):
    """Catches: full-vocabulary logits of all anchors at once, and a chunk that is put back in another order."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, BLOCK)
    hidden = torch.randn(50, BLOCK - 1, 32, dtype=torch.float64)
    logits = drafter.compute_logits(hidden, target.get_output_embeddings())
    logits[..., MASK_TOKEN_ID] = -torch.inf
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", 7 * 64)
    with LargestTensor() as largest:
        found = greedy_proposals(drafter, target, hidden, torch.ones(50, dtype=torch.long))
    assert torch.equal(found, logits.argmax(-1))
    assert largest.elements <= hidden.numel() < logits.numel()
