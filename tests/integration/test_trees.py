"""Tree drafts: which nodes grow, what the target sees of them, and that the step goes on as that of a chain."""

from functools import cache

import internals
import kit
import pytest
import torch
from memorize import memorize

from hf_dflow import UnsupportedGenerationError
from hf_dflow.generation.drafting import Slots

PROMPT_LENGTH, NEW_TOKENS, BLOCK = 9, 48, 6
PARITY = 1e-4  # RMSNorm computes in float32, whose rounding depends on the shape; a wrong row is off by whole units
CORRECTION = {"correction_intermediate_size": 16, "correction_top_k": 8}


def decode(target, drafter, prompt, budget=12, new_tokens=NEW_TOKENS, **options):
    return kit.decode(target, drafter, prompt, new_tokens, tree_budget=budget, **options)


@cache
def learned_pair(family="llama", attention="eager", is_corrected=False):
    """A pair whose drafter knows most of the target's text, the relay alive; trained once, changed by nobody."""
    target = kit.shared_target(family, attention=attention)
    layers = {"target_layer_ids": [0, 1]} if family == "gpt2" else {}
    drafter = kit.tiny_drafter(target, BLOCK, **layers, **(CORRECTION if is_corrected else {}))
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.02)
    prompt = kit.prompt_of(PROMPT_LENGTH)
    text = kit.plain_greedy(target, prompt, NEW_TOKENS + BLOCK)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH, steps=60)
    return target, drafter, prompt, text[:, : PROMPT_LENGTH + NEW_TOKENS]


@pytest.mark.parametrize(("verify", "sizes"), [([1.0] * 65, {64}), ([1.0 + 3.0 * n for n in range(65)], {1})])
def test_the_budget_follows_the_costs(verify, sizes):
    """Bug: costs that never reach the loop, too few times for so large a tree, or a text that depends on them."""
    target, drafter, prompt, text = learned_pair()
    output = decode(target, drafter, prompt, budget="auto", step_costs={"draft": 0.1, "verify": verify})
    assert torch.equal(output.sequences, text)
    assert set(output.statistics.per_step_drafted[:-4]) == sizes
    if sizes != {1}:
        kit.assert_not_vacuous(output.statistics)
    with pytest.raises(UnsupportedGenerationError, match="64 drafts need 65"):
        decode(target, drafter, prompt, budget="auto", step_costs={"draft": 0.1, "verify": verify[:9]})
    with pytest.raises(UnsupportedGenerationError, match="auto"):
        decode(target, drafter, prompt, budget="automatic")


@pytest.mark.parametrize(
    ("family", "is_corrected"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("qwen3", False)]
)
def test_greedy_text_is_the_targets(family, is_corrected):
    """Bug (A1): nodes that see their siblings, positions that count nodes, a cache whose rows are another path's."""
    target, drafter, prompt, text = learned_pair(family, is_corrected=is_corrected)
    output = decode(target, drafter, prompt, output_scores=True, output_logits=True)
    assert torch.equal(output.sequences, text)
    plain = kit.plain_greedy(target, prompt, NEW_TOKENS, output_logits=True, return_dict_in_generate=True)
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    kit.assert_not_vacuous(output.statistics)
    assert max(output.statistics.per_step_drafted) == 12


@pytest.mark.parametrize(
    "head", [CORRECTION, {"selector_rank": 6, "selector_top_k": 5}], ids=["correction", "selector"]
)
@torch.no_grad()
def test_a_tree_continues_each_node_by_the_law_behind_its_token(head):
    """Bug: the table of all pairs of candidates is another slot's, or its axes change places."""
    target = kit.shared_target()
    drafter = kit.tiny_drafter(target, BLOCK, **head).double()
    torch.manual_seed(0)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    hidden = torch.randn(1, BLOCK - 1, drafter.config.hidden_size, dtype=torch.float64)
    modules = (target.get_input_embeddings(), target.get_output_embeddings())
    logits = drafter.compute_logits(hidden, modules[1])
    candidates, anchor = drafter.candidates(hidden, logits, *modules), torch.tensor([7])
    slots = Slots(logits, candidates, torch.tensor([True]), (BLOCK - 1,), hidden.device, anchor)
    expand, behind = slots.expansion(), [int(anchor)]
    laws = set()
    for slot in range(BLOCK - 1):
        for previous in behind:
            law = candidates.logits(slot, torch.tensor([previous]), logits.shape[-1])[0].log_softmax(-1)
            tokens, log_probs = expand(slot, previous)
            torch.testing.assert_close(torch.tensor(log_probs).double(), law[tokens], atol=1e-6, rtol=1e-6)
            assert log_probs == sorted(log_probs, reverse=True) and len(set(tokens)) == candidates.scores.shape[-1]
            laws.add((slot, *tokens))
        behind = candidates.token_ids[0, slot].tolist()
    assert len(laws) > 2 * BLOCK, "the token before made no difference"


@pytest.mark.parametrize("is_corrected", [False, True])
def test_a_tree_without_branches_is_the_chain(monkeypatch, is_corrected):
    """Bug: relayed rows, context features or drafts of a tree's step that are not those of the path it kept."""
    target, drafter, prompt, _ = learned_pair(is_corrected=is_corrected)
    internals.one_child_for_each_node(monkeypatch)
    chain = kit.decode(target, drafter, prompt, NEW_TOKENS).statistics
    alike = decode(target, drafter, prompt, budget=BLOCK - 1).statistics
    assert alike.per_step_accepted == chain.per_step_accepted
    kit.assert_not_vacuous(chain)
    off = decode(target, drafter, prompt, budget=BLOCK - 1, use_relay=False).statistics
    assert off.per_step_accepted != alike.per_step_accepted, "the relay does something"


def test_context_features_are_those_of_the_text(target):
    """Bug: states of another path, or of its siblings, that all later drafts are conditioned on."""
    prompt = kit.prompt_of(PROMPT_LENGTH)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, NEW_TOKENS, block_size=BLOCK, relay=None)
    drafter.nudge = 1.5
    context = kit.ContextRecorder(drafter)
    output = decode(target, drafter, prompt, budget=30)
    states = target(output.sequences, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    rows = torch.cat(context.rows, dim=1)
    assert rows.shape[1] > PROMPT_LENGTH + NEW_TOKENS // 2
    torch.testing.assert_close(rows, expected[:, : rows.shape[1]], atol=PARITY, rtol=PARITY)
    kit.assert_not_vacuous(output.statistics)


def test_a_second_choice_is_accepted(target):
    """Bug: a tree of which only the likeliest path can be accepted."""
    prompt = kit.prompt_of(PROMPT_LENGTH)
    drafter = kit.scripted(kit.NudgedDrafter, target, prompt, NEW_TOKENS, block_size=BLOCK)
    drafter.nudge = 1.5
    few = decode(target, drafter, prompt, budget=BLOCK - 1).statistics
    many = decode(target, drafter, prompt, budget=60).statistics
    assert many.tokens_per_step > 1.15 * few.tokens_per_step


def test_padding_limits_and_stops():
    """Bug: padding that a tree's nodes see, tokens past the end, or an end in the middle of a path overlooked."""
    target, drafter, prompt, text = learned_pair(attention="sdpa")
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    output = decode(target, drafter, padded, attention_mask=mask)
    assert torch.equal(output.sequences[:, 3:], text)
    for length in (1, 2, 7, 8, 9):
        assert torch.equal(
            decode(target, drafter, prompt, new_tokens=length).sequences, text[:, : PROMPT_LENGTH + length]
        )
    for place in range(PROMPT_LENGTH + 4, PROMPT_LENGTH + 12):
        stop = int(text[0, place])
        first = text[0, PROMPT_LENGTH:].tolist().index(stop) + PROMPT_LENGTH
        assert torch.equal(decode(target, drafter, prompt, eos_token_id=stop).sequences, text[:, : first + 1])


def test_processors_decide_on_the_path():
    """Bug: a logits processor that the tree's walk ignores and the text too."""
    target, drafter, prompt, _ = learned_pair()
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    plain = kit.plain_greedy(target, prompt, NEW_TOKENS, **options)
    output = decode(target, drafter, prompt, **options)
    assert torch.equal(output.sequences, plain)
    assert max(output.statistics.per_step_accepted) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "sampling"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cache_implementation": "static"}, "dynamic cache"),
        ({"adaptive_length": True}, "adaptive_length"),
        ({"budget": 0}, "1 … 512"),
        ({"budget": True}, "1 … 512"),
    ],
)
def test_what_a_tree_cannot_do_is_refused_before_any_forward(options, message):
    """Bug: text that is not the target's, or a crash in the middle of it."""
    target = kit.tiny_target()
    drafter = kit.tiny_drafter(target, BLOCK)
    target.register_forward_hook(lambda *_: pytest.fail("a forward was run"))
    with pytest.raises(UnsupportedGenerationError, match=message):
        decode(target, drafter, kit.prompt_of(5), **options)


def test_batches_and_windows_are_refused():
    """Bug: rows that see each other's nodes; a window that counts nodes as positions."""
    target = kit.shared_target()
    with pytest.raises(UnsupportedGenerationError, match="2 sequences at once"):
        decode(target, kit.tiny_drafter(target, BLOCK), kit.prompt_of(5).repeat(2, 1))
    sliding = kit.shared_target("gemma_sliding")
    with pytest.raises(UnsupportedGenerationError, match="not full attention"):
        decode(sliding, kit.tiny_drafter(sliding, BLOCK), kit.prompt_of(5))
