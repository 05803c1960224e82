"""Which slot a rejected row feeds. Any alignment keeps the law and merely drafts worse, so no law test can see it."""

import internals
import kit
import pytest
import torch

from hf_dflow import AcceptanceProcessor

BLOCK_SIZE = 6
FULL = BLOCK_SIZE - 1
PROMPT_LENGTH = 7
MASK_SAYS = 5  # what a plain slot of the see-through drafter proposes


class Watch(AcceptanceProcessor):
    """Scripts what is proposed in each step and keeps what was drafted and verified."""

    def __init__(self, text: torch.Tensor, pattern: list[int]):
        self.text, self.pattern = text, pattern
        self.position, self.step = PROMPT_LENGTH, -1  # the anchor's; the prefill is step -1
        self.proposals: list[torch.Tensor] = []  # [1, N, V] of each step, before the script
        self.steps: list = []

    def __deepcopy__(self, memo):
        return self  # one call only, read afterwards

    def adjust_draft_logits(self, draft_logits, feedback):
        self.proposals.append(draft_logits.clone())
        scripted = draft_logits.clone()
        if self.step < len(self.pattern):
            for slot in range(1, draft_logits.shape[1] + 1):
                right = int(self.text[0, self.position + slot])
                token = right if slot <= self.pattern[self.step] else (right + slot) % kit.MASK_TOKEN_ID
                scripted[:, slot - 1, token] = 1e4
        return scripted

    def observe(self, draft, verification):
        if self.step >= 0:
            self.steps.append((draft, verification))
            self.position += int(verification.accepted_length) + 1
        self.step += 1


@pytest.fixture(scope="module")
def text(target):
    return kit.plain_greedy(target, kit.prompt_of(PROMPT_LENGTH), 40)


def see_through_drafter(target, **overrides):
    """Its relay adds the relayed state, its layers do nothing, its head is the target's: slot = what the row predicts.

    The tap is the target's last layer, whose entry carries the final norm, so the target's head turns a relayed state
    into the verifier's own prediction (norms only scale a state that has unit scale, which no argmax sees).
    """
    last = target.config.num_hidden_layers - 1
    drafter = kit.tiny_drafter(
        target, BLOCK_SIZE, target_layer_ids=[0, last], input_embedding="own", relay_hidden_act="linear",
        relay_intermediate_size=kit.HIDDEN_SIZE, **overrides,
    )  # fmt: skip
    width = kit.HIDDEN_SIZE
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, width:] = torch.eye(width)
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.embed_tokens.weight.zero_()
        # Too short to decide between a relayed state's near ties, long enough to be what a plain slot says.
        drafter.embed_tokens.weight[kit.MASK_TOKEN_ID] = 1e-4 * target.lm_head.weight[MASK_SAYS]
        relay = drafter.relay
        for parameter in relay.parameters():
            parameter.zero_()
        relay.up_proj.weight[:, 2 * width :] = torch.eye(width)
        relay.down_proj.weight[width:] = torch.eye(width)  # beta 0, gamma the state
    return drafter


def watch(target, drafter, text, pattern, max_new_tokens: int = 24, **options) -> Watch:
    """Greedy decoding whose first steps accept what `pattern` says; the text must come out unchanged."""
    watcher = Watch(text, pattern)
    prompt = text[:, :PROMPT_LENGTH]
    output = kit.decode(target, drafter, prompt, max_new_tokens, acceptance_processors=[watcher], **options)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + max_new_tokens])
    return watcher


def plain_logits(target, drafter, num_drafts: int) -> torch.Tensor:
    """What the see-through drafter says in plain slots, wherever they are."""
    mask = drafter.norm(drafter.embed_tokens.weight[kit.MASK_TOKEN_ID])
    logits = drafter.compute_logits(mask, target.get_output_embeddings())
    assert int(logits.argmax()) == MASK_SAYS
    return logits.expand(num_drafts, -1)


def misaligned_slots(target, drafter, watcher: Watch) -> tuple[int, int]:
    """How many slots propose anything but what their rejected row predicts, or mask what none feeds; and all fed."""
    wrong = fed = 0
    proposals = watcher.proposals
    before = [None, *watcher.steps]
    for step, proposal in zip(before, proposals, strict=False):
        num_drafts = proposal.shape[1]
        expected = plain_logits(target, drafter, num_drafts).argmax(-1).clone()
        if step is not None:
            accepted, verified = int(step[1].accepted_length), step[0].token_ids.shape[1]
            for slot in range(1, min(num_drafts, verified - accepted) + 1):  # row j = accepted + slot
                expected[slot - 1] = step[1].raw_logits[0, accepted + slot].argmax()
                fed += 1
        wrong += int((proposal[0].argmax(-1) != expected).sum())
    return wrong, fed


@pytest.mark.parametrize("accepted", range(FULL + 1))
def test_slot_proposes_what_its_rejected_row_predicts(target, text, accepted):
    """Bug: rows shifted by a or a + 1 in the wrong direction, a relay that outlives a step, or one from nowhere: the
    first block, and one behind a full acceptance, have plain masks."""
    drafter = see_through_drafter(target)
    watcher = watch(target, drafter, text, [accepted, (accepted + 2) % BLOCK_SIZE])
    assert int(watcher.steps[0][1].accepted_length) == accepted
    wrong, fed = misaligned_slots(target, drafter, watcher)
    assert wrong == 0
    assert fed >= FULL - accepted
    proposed_ids = {int(token) for proposal in watcher.proposals for token in proposal[0].argmax(-1)}
    assert len(proposed_ids) > 3  # not one token for everything


@pytest.mark.parametrize(("num_draft_tokens", "accepted"), [(n, a) for n in range(1, FULL) for a in range(n + 1)])
def test_a_verified_prefix_feeds_its_own_rows_only(target, text, num_draft_tokens, accepted):
    """Bug: slots past N - a fed by rows that were never computed, when only a prefix of the block is verified."""
    drafter = see_through_drafter(target)
    blocks = record_blocks(drafter)
    watcher = watch(target, drafter, text, [accepted], num_draft_tokens=num_draft_tokens)
    assert int(watcher.steps[0][1].accepted_length) == accepted
    assert misaligned_slots(target, drafter, watcher)[0] == 0
    for step, block in zip(watcher.steps, blocks[1:], strict=False):  # the whole block, past what is verified
        is_plain = (block[0, 1:] == drafter.embed_tokens.weight[kit.MASK_TOKEN_ID]).all(-1)
        fed = num_draft_tokens - int(step[1].accepted_length)
        if step[0].token_ids.shape[1] == num_draft_tokens:
            assert is_plain.tolist() == [False] * fed + [True] * (FULL - fed)


@pytest.mark.parametrize("lengths", [[5, 2, 0, 3], [1, 1, 1, 0]])
def test_feedback_of_a_row_is_what_it_would_be_alone(lengths):
    """Bug: slots of a row that verified fewer drafts than its neighbours fed by rows that mean nothing."""
    generator = torch.Generator().manual_seed(0)
    num_drafts, rows = max(lengths), len(lengths)
    counts = torch.tensor(lengths)
    token_ids = torch.randint(60, (rows, num_drafts), generator=generator)
    draft = internals.proposal(token_ids, torch.randn(rows, num_drafts, 8, generator=generator), lengths)
    for accepted in (counts, counts // 2, counts * 0):
        raw_logits, features = (torch.randn(rows, num_drafts + 1, width, generator=generator) for width in (8, 6))
        verification = internals.verified(accepted, torch.arange(rows), raw_logits, features)
        together = internals.feedback_of(draft, verification, lengths, accepted.tolist())
        for row, length in enumerate(lengths):
            own = (internals.one_row(part, row, length) for part in (draft, verification))
            alone = internals.feedback_of(*own, [length], [int(accepted[row])])
            actual = together.row(row)
            last = together.select(torch.tensor([row]), [row])
            assert (actual is None) == (alone is None) == (length == 0)
            assert int(together.is_fed[row].sum()) == length - int(accepted[row])
            if alone is not None:
                for field in ("features", "is_fed", "bonus_ids", "rejected_ids", "target_logits", "draft_logits"):
                    assert torch.equal(getattr(actual, field), getattr(alone, field)), field
                for one in (actual, alone, last):
                    assert torch.equal(one.fed_logits, actual.target_logits[:, : length - int(accepted[row])])
        with pytest.raises(ValueError, match=r"row\(i\)"):
            _ = together.fed_logits


def record_blocks(drafter) -> list[torch.Tensor]:
    """The input embeddings `[1, L, H]` of every draft forward from now on."""
    blocks, forward = [], drafter.draft_hidden

    def recording(block_embeds, *args):
        blocks.append(block_embeds.clone())
        return forward(block_embeds, *args)

    drafter.draft_hidden = recording
    return blocks


@pytest.mark.parametrize("max_new_tokens", range(6, 14))
def test_near_the_length_limit(target, text, max_new_tokens):
    """Bug: a shorter last verification whose rows are lined up as though the block were whole."""
    drafter = see_through_drafter(target)
    watcher = watch(target, drafter, text, [1, 0, 2, 0, 0], max_new_tokens=max_new_tokens)
    lengths = [draft.token_ids.shape[1] for draft, _ in watcher.steps]
    assert min(lengths) < FULL
    wrong, fed = misaligned_slots(target, drafter, watcher)
    assert wrong == 0 and fed > 0


@pytest.mark.parametrize("offset", [-1, 1])
def test_control_shifted_by_one(monkeypatch, target, text, offset):
    """Control: a relay that is one slot off must be seen."""

    def shifted(rows, shift, lengths):
        return honest(torch.roll(rows, -offset, dims=1), shift, lengths)[0], honest(rows, shift, lengths)[1]

    honest = internals.replace_shift(monkeypatch, shifted)
    drafter = see_through_drafter(target)
    wrong, _ = misaligned_slots(target, drafter, watch(target, drafter, text, [1, 2]))
    assert wrong > 2


def test_relay_is_replaced_never_accumulated(target, text):
    """Bug: additions on top of the last step's masks, so that slots drift away from what training showed."""
    drafter = kit.tiny_drafter(target, BLOCK_SIZE)
    blocks = record_blocks(drafter)
    watcher = watch(target, drafter, text, [0, 0, 1, 0, FULL, 1])
    mask = drafter.embed(torch.tensor([kit.MASK_TOKEN_ID]), target.get_input_embeddings())
    assert torch.equal(blocks[0][0, 1:], mask.expand(FULL, -1))
    for (draft, verification), block in zip(watcher.steps, blocks[1:], strict=False):
        if draft.token_ids.shape[1] < FULL:
            break
        expected, accepted = mask.repeat(FULL, 1), int(verification.accepted_length)
        if accepted < FULL:
            rejected, first = verification.features[:, accepted + 1 :], draft.token_ids[:, accepted]
            embedding = target.get_input_embeddings()
            expected[: FULL - accepted] += drafter.relay_additions(rejected, verification.bonus_ids, first, embedding)[
                0
            ]
        torch.testing.assert_close(block[0, 1:], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("relay", ["zero", "random"])
def test_zero_relay_is_no_relay(target, text, relay):
    """Bug: a converted DFlash checkpoint that does not start as exactly that DFlash; or a relay that is never read."""
    drafter = kit.tiny_drafter(target, BLOCK_SIZE, relay=relay)
    pattern = [1, 0, 3, 0, FULL, 2]
    on, off = (watch(target, drafter, text, pattern, use_relay=use_relay) for use_relay in (True, False))
    accepted = [[int(verification.accepted_length) for _, verification in watcher.steps] for watcher in (on, off)]
    assert accepted[0][:5] == accepted[1][:5] == pattern[:5]
    same = [torch.equal(*pair) for pair in zip(on.proposals, off.proposals, strict=False)]
    if relay == "zero":
        assert accepted[0] == accepted[1] and all(same)
    else:
        assert same[:6] == [True, False, False, False, False, True]  # the first, and the one after full acceptance
