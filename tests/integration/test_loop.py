"""Greedy text is the target's own, token for token, whatever the drafter proposes and however much of it is right."""

import kit
import pytest
import torch
from internals import PATIENCE

from hf_dflow import AcceptanceProcessor, DFlowDecoder

NEW_TOKENS = 48
PROMPT = kit.prompt_of(12)
PATTERNS = {2: [1, 0, 1, 1], 4: [2, 0, 3, 1], 8: [3, 0, 7, 1, 5], 16: [9, 0, 2, 15, 1]}
PAIRS = [(family, 8) for family in kit.FAMILIES]
PAIRS += [("llama", 2), ("llama", 4), ("llama", 16), ("gpt2", 2), ("gemma_sliding", 16), ("mistral_sliding", 4)]
every_family = pytest.mark.parametrize("family", kit.FAMILIES)
every_pair = pytest.mark.parametrize(("family", "block_size"), PAIRS)


def plain_text(family):
    return kit.plain_greedy(kit.shared_target(family), PROMPT, NEW_TOKENS)


def run(family, drafter_class, block_size, **kwargs):
    drafter = kit.scripted(
        drafter_class, kit.shared_target(family), PROMPT, NEW_TOKENS, block_size=block_size, **kwargs
    )
    return drafter, kit.dflow_greedy(kit.shared_target(family), drafter, PROMPT, max_new_tokens=NEW_TOKENS)


@every_pair
def test_partly_right_drafts(family, block_size):
    """Cache rows, positions or masks off by the accepted length; accepted lengths miscounted."""
    pattern = PATTERNS[block_size]
    _, output = run(family, kit.PatternDrafter, block_size, pattern=pattern)
    assert torch.equal(output.sequences, plain_text(family))
    kit.assert_not_vacuous(output.statistics)
    accepted, drafted, forwards = kit.scripted_steps(pattern, block_size, NEW_TOKENS)
    assert output.statistics.per_step_accepted == accepted
    assert output.statistics.per_step_drafted == drafted
    assert output.statistics.num_target_forwards == forwards


@every_pair
def test_right_drafts(family, block_size):
    """The bonus of a full acceptance dropped or doubled; a good draft not accepted to its end."""
    target, new_tokens = kit.shared_target(family), 1 + 2 * block_size  # the prefill's token and two full blocks
    drafter = kit.scripted(kit.OracleDrafter, target, PROMPT, new_tokens, block_size=block_size)
    output = kit.dflow_greedy(target, drafter, PROMPT, max_new_tokens=new_tokens)
    assert torch.equal(output.sequences, kit.plain_greedy(target, PROMPT, new_tokens))
    assert output.statistics.per_step_accepted == [block_size - 1] * 2
    assert output.statistics.tokens_per_step == block_size
    assert output.statistics.draft_acceptance_rate == 1.0


@every_pair
def test_wrong_drafts(family, block_size):
    """A rejected draft in the output; rejected rows left in the target's cache."""
    drafter, output = run(family, kit.HostileDrafter, block_size)
    assert torch.equal(output.sequences, plain_text(family))
    assert set(output.statistics.per_step_accepted) == {0}
    assert output.statistics.tokens_per_step == 1.0
    # After so many steps in vain the drafter is tried once more in the rest of the text.
    assert len(drafter.anchor_positions) == output.statistics.num_spec_steps == PATIENCE + 1


@every_pair
def test_real_drafter_with_relay(family, block_size):
    """Feedback that reaches the target's side; a draft cache that a real forward trips over."""
    drafter, output = run(family, kit.NudgedDrafter, block_size)
    assert drafter.relay is not None
    assert torch.equal(output.sequences, plain_text(family))
    kit.assert_not_vacuous(output.statistics)


@every_family
def test_unscripted_drafter(family):
    """A scripted drafter that hides a fault of the real interface."""
    output = kit.dflow_greedy(kit.shared_target(family), kit.shared_drafter(family), PROMPT, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, plain_text(family))


def test_relay_changes_drafts_and_nothing_else():
    """A relay that is computed and thrown away, applied when switched off, or not nothing at its initial zero."""

    def lengths(use_relay, relay, **options):
        drafter = kit.scripted(kit.NudgedDrafter, kit.shared_target(), PROMPT, NEW_TOKENS, relay=relay)
        output = kit.decode(kit.shared_target(), drafter, PROMPT, NEW_TOKENS, use_relay=use_relay, **options)
        assert torch.equal(output.sequences, plain_text("llama"))
        kit.assert_not_vacuous(output.statistics)
        return output.statistics.per_step_accepted

    off = lengths(False, "random")
    assert lengths(True, "random") != off == lengths(False, "zero") == lengths(True, "zero")
    # A processor asks for feedback; that must not switch the relay on.
    assert off == lengths(False, "random", acceptance_processors=[AcceptanceProcessor()])


@every_family
@pytest.mark.parametrize("padding", [1, 5])
def test_left_padding(family, padding):
    """Positions, features or masks that count padding: wrong text, or a script asked about the wrong position."""
    target = kit.shared_target(family, dtype=torch.float32)  # see `tiny_target`
    input_ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), PROMPT], dim=1)
    mask = torch.ones_like(input_ids)
    mask[:, :padding] = 0
    alone = kit.plain_greedy(target, input_ids, NEW_TOKENS, attention_mask=mask)
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, NEW_TOKENS, pattern=PATTERNS[8])
    drafter.follow(alone[0, padding:], PROMPT.shape[1])
    output = kit.dflow_greedy(target, drafter, input_ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, alone)
    assert output.statistics.per_step_accepted == kit.scripted_steps(PATTERNS[8], 8, NEW_TOKENS)[0]
    assert drafter.anchor_positions[0] == PROMPT.shape[1]


def test_left_padding_does_not_change_drafts():
    """Context features of padding rows handed to the drafter."""
    target = kit.shared_target(attention="sdpa")
    input_ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(input_ids.shape[1]) >= 5).long()[None]
    lengths = []
    for ids, attention_mask in ((PROMPT, torch.ones_like(PROMPT)), (input_ids, mask)):
        drafter = kit.scripted(kit.NudgedDrafter, target, PROMPT, NEW_TOKENS)
        output = kit.dflow_greedy(target, drafter, ids, attention_mask=attention_mask, max_new_tokens=NEW_TOKENS)
        lengths.append(output.statistics.per_step_accepted)
        kit.assert_not_vacuous(output.statistics)
    assert lengths[0] == lengths[1]


@every_family
def test_prompt_of_one_token(family):
    """A prefill that is mistaken for a decoding step; an empty context."""
    target, prompt = kit.shared_target(family), kit.prompt_of(1)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=PATTERNS[8])
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output.sequences, kit.plain_greedy(target, prompt, NEW_TOKENS))
    assert output.statistics.per_step_accepted == kit.scripted_steps(PATTERNS[8], 8, NEW_TOKENS)[0]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_shorter_verification(num_draft_tokens):
    """A prefix of the block verified with rows or feedback of the whole block."""
    target = kit.shared_target("gemma")
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, NEW_TOKENS, pattern=PATTERNS[8])
    decoder = DFlowDecoder(drafter, num_draft_tokens=num_draft_tokens)
    output = target.generate(
        PROMPT, custom_generate=decoder, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, do_sample=False
    )
    assert torch.equal(output.sequences, plain_text("gemma"))
    steps = kit.scripted_steps(PATTERNS[8], num_draft_tokens + 1, NEW_TOKENS)
    assert (output.statistics.per_step_accepted, output.statistics.per_step_drafted) == steps[:2]


class _LovesMasks(kit.OracleDrafter):
    def scripted_logits(self, logits, right, *, slot, step):
        logits = super().scripted_logits(logits, right, slot=slot, step=step)
        logits[kit.MASK_TOKEN_ID] = 50.0
        return logits


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_mask_token_is_never_drafted(do_sample):
    """Bug (F4): the drafter's own answer to a masked slot is the mask, and a target that may emit it agrees."""
    target, prompt = kit.shared_target(), kit.prompt_of(9)
    drafter = kit.scripted(_LovesMasks, target, prompt, 24)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.1, "top_k": 0} if do_sample else {}
    output = kit.decode(target, drafter, prompt, 24, **options)
    assert kit.MASK_TOKEN_ID not in output.sequences[0, 9:].tolist()
    assert max(output.statistics.per_step_accepted) >= 2
    assert do_sample or set(output.statistics.per_step_accepted[:-1]) == {7}
