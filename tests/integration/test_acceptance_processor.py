"""The LogitsProcessor-style hook: what it may change without changing the law, and what is announced as lossy."""

import logging
from dataclasses import replace

import batches
import internals
import kit
import pytest
import torch
from law import PLAIN, Loop, law_error, three_token_drafter

from hf_dflow import AcceptanceProcessor, DFlowDecoder, UnsupportedGenerationError

EXACT = 1e-9
BROKEN = 1e-3
RULES = ("token", "block")


class MixesFeedback(AcceptanceProcessor):
    """Pulls the draft law towards what the target said on the rejected rows."""

    steps_with_feedback = 0  # over all copies

    def adjust_draft_logits(self, draft_logits, feedback):
        if feedback is None:
            return draft_logits
        MixesFeedback.steps_with_feedback += bool(feedback.is_fed.any())
        num_drafts = draft_logits.shape[1]
        shift = torch.where(feedback.is_fed[..., None], feedback.target_logits, 0.0)[:, :num_drafts]
        return draft_logits + 0.7 * torch.nn.functional.pad(shift, (0, 0, 0, num_drafts - shift.shape[1]))


class Recycles(AcceptanceProcessor):
    """Proposes, for certain, what the target said on the rejected row of the first slot; other slots are sampled."""

    def adjust_draft_logits(self, draft_logits, feedback):
        token = 1 if feedback is None else int(feedback.target_logits[0, 0].argmax())
        certain = torch.full_like(draft_logits[:, 0], -torch.inf)
        certain[:, token] = 0.0
        return torch.cat([certain[:, None], draft_logits[:, 1:]], dim=1)


class MovesAcceptance(AcceptanceProcessor):
    """Changes acceptance, but does not say that this is lossy."""

    def adjust_acceptance(self, context):
        raise AssertionError("asked though it is not lossy")


class Remembers(AcceptanceProcessor):
    """Keeps what it was told, in a place that survives the call's copies."""

    told: list[tuple[int, int]] = []

    def __init__(self):
        self.own = 0

    def observe(self, draft, verification):
        self.own += 1
        Remembers.told.append((self.own, draft.token_ids.shape[1], int(verification.accepted_length)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("processor", "block_size"), [(MixesFeedback, 2), (Recycles, 2), (Recycles, 3)])
def test_any_draft_law_keeps_the_output_law(monkeypatch, three_tokens, rule, processor, block_size):
    """Bug (A4): a law that enters sampling is not the one in ratio and residual; a recycled token counts as sampled."""
    MixesFeedback.steps_with_feedback = 0
    drafter = three_token_drafter(three_tokens, block_size)
    loop = Loop(monkeypatch, three_tokens, drafter, verification=rule, acceptance_processors=[processor()])
    assert law_error(loop, 2 if block_size == 2 else 1, block_size - 1) < EXACT
    assert (MixesFeedback.steps_with_feedback > 0) == (processor is MixesFeedback)


@pytest.mark.parametrize("rule", RULES)
def test_control_a_recycled_token_counted_as_sampled(monkeypatch, three_tokens, rule):
    """Control (A4): a law with weight elsewhere in place of the point mass must be seen."""

    def forget_the_point_mass(inputs):
        return replace(inputs, draft_logits=torch.zeros_like(inputs.draft_logits))

    loop = Loop(
        monkeypatch, three_tokens, three_token_drafter(three_tokens), verification=rule, alter=forget_the_point_mass,
        acceptance_processors=[Recycles()],
    )  # fmt: skip
    assert law_error(loop, 1) > BROKEN


def test_what_is_not_lossy_is_never_asked(monkeypatch, three_tokens):
    """Bug: acceptance that a processor changes without saying so."""
    drafter = three_token_drafter(three_tokens)
    loop = Loop(monkeypatch, three_tokens, drafter, verification="token", acceptance_processors=[MovesAcceptance()])
    assert law_error(loop, 1) < EXACT


def test_a_threshold_breaks_the_law(monkeypatch, three_tokens):
    """Bug: a relaxed rule that is not applied, or is applied to the residual too and cannot be told from a fault."""
    loop = Loop(monkeypatch, three_tokens, three_token_drafter(three_tokens), acceptance_threshold=0.05)
    assert law_error(loop, 1) > BROKEN


def _generate(target, drafter, **options):
    return kit.decode(target, drafter, torch.tensor([[1, 2]]), 24, **{**PLAIN, **options})


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_threshold_is_announced(three_tokens, caplog, do_sample):
    """Bug: text that is not the target's own, and no word of it."""
    drafter = three_token_drafter(three_tokens)
    with caplog.at_level(logging.WARNING, logger="hf_dflow"):
        torch.manual_seed(0)
        lossless = _generate(three_tokens, drafter, do_sample=do_sample).statistics
        assert lossless.lossless and "LOSSY" not in str(lossless)
        assert "lossy" not in caplog.text
        relaxed = _generate(three_tokens, drafter, do_sample=do_sample, acceptance_threshold=0.01).statistics
    assert not relaxed.lossless and not relaxed.per_row[0].lossless
    assert "LOSSY" in str(relaxed)
    assert "AcceptanceThreshold makes acceptance lossy" in caplog.text
    assert relaxed.verification == ("token" if do_sample else "greedy")
    assert relaxed.draft_acceptance_rate > lossless.draft_acceptance_rate


def test_a_threshold_is_refused_with_block_verification(three_tokens):
    """Bug: a relaxed rule under block verification, which has no acceptance per token, silently does something else."""
    with pytest.raises(UnsupportedGenerationError, match="verification='token'"):
        _generate(three_tokens, three_token_drafter(three_tokens), acceptance_threshold=0.1, verification="block")


def test_observe_is_told_each_step_and_forgets_with_the_call(three_tokens):
    """Bug (C4): what was learned in one call leaks into the next, or a step's outcome is told twice or never."""
    processor, drafter = Remembers(), three_token_drafter(three_tokens)
    decoder = DFlowDecoder(drafter, acceptance_processors=[processor])  # generate copies a config, but not this
    sampling = {**PLAIN, "max_new_tokens": 24, "return_dict_in_generate": True, "pad_token_id": 0}
    for _ in range(2):
        Remembers.told = []
        torch.manual_seed(3)
        statistics = three_tokens.generate(torch.tensor([[1, 2]]), custom_generate=decoder, **sampling).statistics
        assert [count for count, _, _ in Remembers.told] == list(range(1, statistics.num_target_forwards + 1))
        told = [(drafted, accepted) for _, drafted, accepted in Remembers.told if drafted]
        known = list(zip(statistics.per_step_drafted, statistics.per_step_accepted, strict=True))
        assert told[:-1] == known[:-1]  # the last step's acceptance may be clipped by the length limit
        assert len(told) == len(known)
    assert processor.own == 0


def test_feedback_holds_the_rejected_rows_logits(target):
    """Bug: logits in the feedback that belong to other rows than its states: a calibration would learn noise."""
    prompt = kit.prompt_of(7)
    recorded = []

    class Watches(AcceptanceProcessor):
        def adjust_draft_logits(self, draft_logits, feedback):
            recorded.append(["draft", feedback])
            return draft_logits

        def observe(self, draft, verification):
            recorded.append(["verified", draft, verification])

    drafter = kit.scripted(kit.PatternDrafter, target, prompt, 30, block_size=4, pattern=[1, 0, 3, 2])
    kit.decode(target, drafter, prompt, 30, acceptance_processors=[Watches()])
    checked, lengths = 0, []
    for (_, draft, verification), after in zip(recorded[2::2], recorded[3::2], strict=False):
        accepted, feedback = int(verification.accepted_length), after[1]
        assert int(feedback.accepted_length) == accepted
        if draft.token_ids.shape[1]:
            assert torch.equal(feedback.fed_logits, verification.raw_logits[:, accepted + 1 :])
            lengths.append(accepted)
        for slot in range(1, 4 - accepted):
            assert torch.equal(feedback.target_logits[:, slot - 1], verification.raw_logits[:, accepted + slot])
        for slot in range(1, 4 - accepted - 1):
            assert torch.equal(feedback.draft_logits[:, slot - 1], draft.logits[:, accepted + slot])
            checked += 1
    assert checked > 3
    assert {0, 1, 2, 3} <= set(lengths), "steps that reject all drafts, some of them, and none"


def test_wide_logits_are_not_moved_for_nobody(monkeypatch, target):
    """Bug: a relay that reads states alone, and yet lines up a vocabulary's width of logits in each step."""
    drafter, moved = kit.tiny_drafter(target, 6, target_layer_ids=[0, 1, 2]), []

    def watched(rows, *others):
        moved.append(rows.shape[-1])
        return shift(rows, *others)

    shift = internals.replace_shift(monkeypatch, watched)
    kit.decode(target, drafter, kit.prompt_of(5), 20, stale_mixture=True)
    features = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    assert features != target.config.vocab_size and set(moved) == {features}


# -- in a batch


class Learns(AcceptanceProcessor):
    """Biases drafts by what it has seen rejected so far: state that rows must not share."""

    def __init__(self):
        self.rejected = torch.zeros(kit.VOCAB_SIZE)

    def adjust_draft_logits(self, draft_logits, feedback):
        assert draft_logits.shape[0] == 1 and (feedback is None or feedback.is_fed.shape[0] == 1)
        if feedback is not None:
            stale = torch.where(feedback.is_fed[..., None], feedback.target_logits, 0.0).mean(dim=1)
            draft_logits = draft_logits + 0.5 * stale[:, None]
        return draft_logits - self.rejected

    def observe(self, draft, verification):
        assert draft.token_ids.shape[0] == verification.scores.shape[0] == 1
        self.rejected[draft.token_ids[0, int(verification.accepted_length) :]] += 0.4


def test_acceptance_processors_learn_one_row():
    """What is learned online shared by rows: acceptance, and with sampling the text, depend on the neighbours."""
    texts = [batches.alone(place, 28) for place in range(3)]

    def run(places, processors):
        drafter = batches.drafter_for(texts, kit.NudgedDrafter)
        drafter.nudge = 3.5
        if len(places) == 1:
            (place,) = places
            length = batches.LENGTHS[batches.ROWS[place]]
            drafter.follow(texts[place][batches.WIDTH - length :], length)
        ids, mask = batches.IDS[places], batches.MASK[places]
        target = batches.target_of()
        return kit.decode(target, drafter, ids, 20, attention_mask=mask, acceptance_processors=processors)

    together = run([0, 1, 2], [Learns()])
    kit.assert_not_vacuous(together.statistics)
    lengths = [row.per_step_accepted for row in together.statistics.per_row]
    for place in range(3):
        own = run([place], [Learns()])
        assert own.statistics.per_step_accepted == lengths[place]
        assert torch.equal(own.sequences[0], together.sequences[place])
    assert [row.per_step_accepted for row in run([0, 1, 2], None).statistics.per_row] != lengths


def test_threshold_in_a_batch():
    """I4: a relaxed rule that depends on the neighbours, or is not announced for each row."""

    def run(rows):
        ids, mask = batches.IDS[rows], batches.MASK[rows]
        target = batches.target_of()
        return kit.decode(target, drafter, ids, 20, attention_mask=mask, acceptance_threshold=0.05)

    drafter = kit.tiny_drafter(batches.target_of(), 8)
    together = run([0, 1, 2])
    assert not together.statistics.lossless
    assert sum(together.statistics.per_step_accepted) > 0
    for row in range(3):
        own = run([row])
        assert torch.equal(own.sequences[0], together.sequences[row])
        assert own.statistics.per_step_accepted == together.statistics.per_row[row].per_step_accepted
        assert not together.statistics.per_row[row].lossless


def test_the_prefill_is_observed_whole():
    """N29: a row's verification of the prefill holds the features of one token in place of the prompt's."""
    seen = []

    class Watching(AcceptanceProcessor):
        def observe(self, proposal, verification):
            seen.append((proposal.num_drafts, verification.features.shape[1]))

    target, prompt = kit.shared_target(), kit.prompt_of(7)
    kit.decode(target, kit.shared_drafter(), torch.cat([prompt, prompt]), 6, acceptance_processors=[Watching()])
    assert seen[:2] == [(0, 7)] * 2 and all(rows == drafts + 1 for drafts, rows in seen[2:])
