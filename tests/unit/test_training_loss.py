"""The chunked loss is the plain one, gradients included, and its memory does not grow with anchors x vocabulary."""

import pytest
import torch
from kit import tiny_drafter, tiny_target
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hf_dflow import DFlowError
from hf_dflow.training import loss
from hf_dflow.training.frozen_target import linear_head
from hf_dflow.training.loss import (
    CandidateVocabulary,
    HeadRows,
    SlotTargets,
    decayed_cross_entropy,
    head_rows,
    slot_targets,
)
from hf_dflow.training.packing import IGNORED

ANCHORS, SLOTS, WIDTH, VOCAB = 9, 5, 12, 23
EXACT = 1e-6
DECAY = 3.0
SHAPES = {
    "plain": lambda logits: logits,
    "multiplier": lambda logits: 0.3 * logits,
    "soft-cap": lambda logits: 2.0 * torch.tanh(1.5 * logits / 2.0),
}


def problem(seed: int = 0, dtype: torch.dtype = torch.float64):
    """States, a head and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ANCHORS, SLOTS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (ANCHORS, SLOTS), generator=generator)
    labels[torch.rand(ANCHORS, SLOTS, generator=generator) < 0.3] = IGNORED
    labels[4] = IGNORED
    teacher_ids = torch.rand(ANCHORS, SLOTS, VOCAB, generator=generator).argsort(-1)[..., :4]
    return hidden, weight, bias, labels, (teacher_ids, torch.rand(ANCHORS, SLOTS, 4, generator=generator))


def plain_loss(hidden, weight, bias, labels, teacher, distillation, shape_logits) -> torch.Tensor:
    """By hand: all logits at once, a loop over slots."""
    total, weight_sum = 0.0, 0.0
    log_probs = shape_logits(hidden @ weight.T + bias).log_softmax(-1)
    for anchor in range(ANCHORS):
        for slot in range(SLOTS):
            if labels[anchor, slot] == IGNORED:
                continue
            said = log_probs[anchor, slot]
            probs = teacher[1][anchor, slot] / teacher[1][anchor, slot].sum()
            soft = sum(p * said[i] for p, i in zip(probs, teacher[0][anchor, slot], strict=True))
            slot_weight = torch.exp(torch.tensor(-slot / DECAY, dtype=torch.float64))
            total = total - slot_weight * ((1 - distillation) * said[labels[anchor, slot]] + distillation * soft)
            weight_sum = weight_sum + slot_weight
    return total / weight_sum


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("distillation", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_loss_and_gradients_are_the_unchunked_ones(monkeypatch, shape, distillation, chunk):
    """Catches (G8): a chunk left out or counted twice, a decay of the wrong slot, a soft-cap or bias without its
    gradient, a mix of trajectory and teacher that does not sum to 1."""
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", chunk * VOCAB)
    *inputs, labels, teacher = problem()
    expected = plain_loss(*inputs, labels, teacher, distillation, SHAPES[shape])
    expected_gradients = torch.autograd.grad(3.0 * expected, inputs)
    targets = slot_targets(labels, *teacher, distillation=distillation)
    found = decayed_cross_entropy(inputs[0], targets, HeadRows(*inputs[1:]), DECAY, SHAPES[shape])
    gradients = torch.autograd.grad(3.0 * found, inputs)
    torch.testing.assert_close(found, expected.to(found), rtol=EXACT, atol=EXACT)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
        assert theirs.abs().max() > 1e-2


def test_a_low_precision_head_sums_in_float32(monkeypatch):
    """Catches: gradients of many chunks added up in bfloat16, where small ones vanish."""
    hidden, weight, _, labels, _ = problem(dtype=torch.bfloat16)
    targets = slot_targets(labels)
    whole = torch.autograd.grad(decayed_cross_entropy(hidden, targets, HeadRows(weight), DECAY), [hidden, weight])
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", VOCAB)
    chunked = torch.autograd.grad(decayed_cross_entropy(hidden, targets, HeadRows(weight), DECAY), [hidden, weight])
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours - theirs).norm() / theirs.norm()).item() < 2.0**-8


def test_frozen_inputs_get_no_gradient():
    """Catches: time and memory for the gradient of a frozen target's head, and a loss that cannot run in evaluation."""
    hidden, weight, bias, labels, _ = problem()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    found = decayed_cross_entropy(hidden, slot_targets(labels), HeadRows(weight, bias), DECAY)
    found.backward()
    assert hidden.grad.abs().max() > 0 and weight.grad is None and bias.grad is None
    with torch.no_grad():
        again = decayed_cross_entropy(hidden, slot_targets(labels), HeadRows(weight, bias), DECAY)
    assert torch.equal(again, found)


def test_slots_without_a_label_weigh_nothing():
    """Catches: ignored slots in the mean, and NaN where no slot has a label."""
    hidden, weight, _, labels, _ = problem()
    spoiled = hidden.detach().clone()
    spoiled[labels == IGNORED] = torch.nan
    spoiled.requires_grad_()
    found = decayed_cross_entropy(spoiled, slot_targets(labels), HeadRows(weight), DECAY)
    assert torch.equal(found, decayed_cross_entropy(hidden, slot_targets(labels), HeadRows(weight), DECAY))
    nothing = decayed_cross_entropy(hidden, slot_targets(torch.full_like(labels, IGNORED)), HeadRows(weight), DECAY)
    nothing.backward()
    assert nothing.item() == 0 and not hidden.grad.any()


# -- memory


def peak_bytes(anchors: int, vocab_size: int) -> int:
    """The most bytes that one loss and its backward hold at a time, beside its inputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(anchors, 7, 16, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, 16, generator=generator)
    targets = slot_targets(torch.randint(vocab_size, (anchors, 7), generator=generator))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        decayed_cross_entropy(hidden, targets, HeadRows(weight), DECAY).backward()
    held = peak = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_peak_memory_does_not_grow_with_anchors_times_vocabulary(monkeypatch):
    """Catches (G8): full-vocabulary logits of all anchors, which run out of memory at 150,000 tokens."""
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", 2**17)
    chunk = 4 * 2**17
    small, more_anchors, more_tokens = peak_bytes(40, 4096), peak_bytes(320, 4096), peak_bytes(40, 32768)
    assert chunk < small < 6 * chunk
    states = 4 * 320 * 7 * 16
    assert more_anchors < small + 10 * states < 4 * 320 * 7 * 4096 / 4
    assert more_tokens < 1.5 * small
    monkeypatch.setitem(loss.LOGITS_PER_CHUNK, "cpu", 2**30)
    assert peak_bytes(320, 4096) > 4 * 320 * 7 * 4096, "the measure sees what is not chunked"


# -- heads and targets of the loss


def test_the_drafters_own_head_learns_and_the_targets_does_not():
    """Catches: the target's head in place of a drafter's own, whose rows then never move."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, 4, output_head="own").requires_grad_(True)
    candidates = torch.tensor([5, 2, 40, 7])
    hidden = torch.randn(3, 3, 32, dtype=torch.float64)
    targets = SlotTargets(torch.randint(4, (3, 3, 1)), torch.ones(3, 3, 1))
    head = head_rows(drafter, linear_head(drafter, target), candidates)
    assert torch.equal(head.weight, drafter.lm_head.weight[candidates]) and head.bias is None
    decayed_cross_entropy(hidden, targets, head, DECAY).backward()
    moved = drafter.lm_head.weight.grad.abs().sum(-1) > 0
    assert moved.nonzero()[:, 0].tolist() == sorted(candidates.tolist())
    sharing = tiny_drafter(target, 4)
    shared = head_rows(sharing, linear_head(sharing, target), candidates)
    assert torch.equal(shared.weight, target.lm_head.weight[candidates]) and not shared.weight.requires_grad


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2"])
def test_the_loss_sees_the_logits_that_decoding_sees(family):
    """Catches: a head's bias, the multiplier or the soft-cap in one of training and decoding only; a tied head that is
    not the embedding (G1)."""
    target = tiny_target(family)
    if family == "gpt2":
        target.lm_head.bias = nn.Parameter(torch.randn(64, dtype=torch.float64))
    drafter = tiny_drafter(target, 4, output_multiplier=0.7, final_logit_softcapping=5.0)
    if family == "qwen3":
        everything = head_rows(drafter, linear_head(drafter, target), torch.arange(64))
        assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
        assert torch.equal(everything.weight, target.get_input_embeddings().weight)
    hidden = torch.randn(6, 3, 32, dtype=torch.float64)
    labels = torch.randint(64, (6, 3))
    head = head_rows(drafter, linear_head(drafter, target), torch.arange(64))
    found = decayed_cross_entropy(hidden, slot_targets(labels), head, 1e9, drafter.shape_logits)
    served = drafter.compute_logits(hidden, target.get_output_embeddings())
    expected = nn.functional.cross_entropy(served.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_distillation_without_a_teacher_is_refused():
    """Catches: distillation without a teacher that silently trains on the trajectory."""
    with pytest.raises(
        DFlowError, match=r"distillation is 0.5, .*teacher_top_k of 1 or more, or set distillation to 0"
    ):
        slot_targets(torch.zeros(2, 3, dtype=torch.long), distillation=0.5)


def test_the_teacher_counts_where_there_is_a_label_only():
    """Catches: a teacher of padding or of the user's words in the loss, and weights that do not sum to 1."""
    labels = torch.tensor([[3, IGNORED]])
    ids, probs = torch.tensor([[[3, 9], [1, 2]]]), torch.tensor([[[0.6, 0.2], [0.5, 0.5]]])
    targets = slot_targets(labels, ids, probs, distillation=0.5)
    assert targets.ids.tolist() == [[[3, 3, 9], [0, 1, 2]]]
    torch.testing.assert_close(targets.weights, torch.tensor([[[0.5, 0.375, 0.125], [0.0, 0.0, 0.0]]]))


def test_the_candidates_softmax_is_the_full_one_when_all_are_candidates():
    """Catches: labels mapped to the wrong candidate, or a random candidate that is one of the data's."""
    hidden, weight, bias, labels, _ = problem()
    labels[labels != IGNORED] = torch.tensor([3, 5, 19])[labels[labels != IGNORED] % 3]
    vocabulary = CandidateVocabulary(torch.tensor([3, 5, 19]), VOCAB, num_others=100)
    ids = vocabulary.sample(torch.Generator().manual_seed(0))
    assert sorted(ids.tolist()) == list(range(VOCAB))
    candidates = decayed_cross_entropy(
        hidden, vocabulary.relabel(slot_targets(labels)), HeadRows(weight[ids], bias[ids]), DECAY
    )
    everything = decayed_cross_entropy(hidden, slot_targets(labels), HeadRows(weight, bias), DECAY)
    torch.testing.assert_close(candidates, everything, rtol=EXACT, atol=EXACT)
    few = CandidateVocabulary(torch.tensor([3, 5, 19]), VOCAB, num_others=4).sample(torch.Generator().manual_seed(0))
    assert few[:3].tolist() == [3, 5, 19] and len(set(few.tolist())) == 7


class Int8Head(nn.Module):
    """A quantised head: its weight is no floating-point matrix."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.scale = head.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((head.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden):
        return hidden @ (self.weight * self.scale).T


def test_a_quantised_head_is_read_by_its_logits():
    """Catches: a crash, or training against codes in place of weights."""
    target = tiny_target("llama")
    target.lm_head = Int8Head(target.lm_head)
    drafter = tiny_drafter(target, 4)
    hidden = torch.randn(3, 32, dtype=torch.float64)
    head = head_rows(drafter, linear_head(drafter, target), torch.arange(64))
    torch.testing.assert_close(nn.functional.linear(hidden, head.weight, head.bias), target.lm_head(hidden))


def test_the_weight_of_tokens_outside_the_data_goes_to_those_inside():
    """Catches: a teacher's tokens mapped to other candidates, and slots whose weights no longer sum to 1."""
    targets = SlotTargets(torch.tensor([[[3, 9, 5], [9, 9, 9]]]), torch.tensor([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]))
    relabelled = CandidateVocabulary(torch.tensor([3, 5, 19]), VOCAB, num_others=4).relabel(targets)
    assert relabelled.ids[0, 0, [0, 2]].tolist() == [0, 1]
    torch.testing.assert_close(relabelled.weights, torch.tensor([[[5 / 7, 0.0, 2 / 7], [0.0, 0.0, 0.0]]]))
