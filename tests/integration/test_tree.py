"""Tree drafts: which nodes grow, what the target sees of them, and that the step goes on as that of a chain."""

import itertools
import math

import pytest
import torch
from kit import (
    NudgedDrafter,
    assert_not_vacuous,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)
from memorize import memorize

from hf_dflow import DFlowGenerationConfig, UnsupportedGenerationError
from hf_dflow.generation import drafting
from hf_dflow.generation.cache import DraftCache
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.trees import Worth, grow
from hf_dflow.generation.step import DraftTree

PROMPT_LENGTH, NEW_TOKENS, BLOCK = 9, 48, 6
PARITY = 1e-4  # RMSNorm computes in float32, whose rounding depends on the shape; a wrong row is off by whole units
CORRECTION = {"correction_intermediate_size": 16, "correction_top_k": 8}


def decode(target, drafter, prompt, budget=12, **options):
    config = {"do_sample": False, "return_dict_in_generate": True, "tree_budget": budget, "pad_token_id": 0}
    mask = options.pop("attention_mask", None)
    extra = {} if mask is None else {"attention_mask": mask}
    config = DFlowGenerationConfig(**{**config, "max_new_tokens": NEW_TOKENS, **options})
    return target.generate(prompt, generation_config=config, assistant_model=drafter, **extra)


def learned_pair(family="llama", attention="eager", **fields):
    """A pair whose drafter knows most of the target's text, the relay alive."""
    target = tiny_target(family, attention=attention)
    drafter = tiny_drafter(target, BLOCK, **fields)
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.02)
    prompt = prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH, steps=60)
    return target, drafter, prompt, text[:, : PROMPT_LENGTH + NEW_TOKENS]


@pytest.mark.parametrize("budget", [1, 4, 12, 40])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_likeliest_nodes_grow(budget, depth):
    """Bug: a child without its parent, a sibling left out, or another order than that of probability."""
    generator = torch.Generator().manual_seed(budget)
    log_probs = torch.randn(3, 4, generator=generator).log_softmax(-1).sort(descending=True).values.tolist()
    found = grow(lambda slot, previous: ([10, 11, 12, 13], log_probs[slot]), 5, depth, budget)
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(4), repeat=length)]
    scores = {path: sum(log_probs[slot][rank] for slot, rank in enumerate(path)) for path in paths}
    grown = []
    for node in range(1, found.size + 1):
        path, at = [], node
        while at:
            path.insert(0, found.token_ids[at - 1] - 10)
            at = found.parents[at - 1]
        grown.append(tuple(path))
    assert grown == sorted(paths, key=lambda path: -scores[path])[:budget]
    assert found.depths == [len(path) for path in grown]


def test_children_follow_their_parents_token():
    """Bug: slots that hear of each other expanded behind another path's token."""
    asked = []

    def expand(slot, previous):
        asked.append((slot, previous))
        return [previous + 1, previous + 2], [math.log(0.6), math.log(0.4)]

    found = grow(expand, 100, 2, 5)
    assert set(asked) <= {(0, 100), (1, 101), (1, 102)}
    assert all(
        token - (100 if parent == 0 else found.token_ids[parent - 1]) in (1, 2)
        for token, parent in zip(found.token_ids, found.parents, strict=True)
    )


@pytest.mark.parametrize("costs", [[1.0] * 65, [1.0 + 0.02 * n for n in range(65)], [1.0 + 0.9 * n for n in range(65)]])
def test_a_tree_ends_where_more_does_not_pay(costs):
    """Bug: an end at the first node that does not pay, past a dear step to a cheap one, or nodes of negative worth."""
    costs = [cost + 0.5 * (index > 3) for index, cost in enumerate(costs)]  # a kernel's tile ends there
    generator = torch.Generator().manual_seed(3)
    log_probs = (2 * torch.randn(5, 4, generator=generator)).log_softmax(-1).sort(descending=True).values.tolist()

    def expand(slot, previous):
        return [10, 11, 12, 13], log_probs[slot]

    whole = grow(expand, 5, 5, 64)
    scores = [0.0]
    for token, parent, depth in zip(whole.token_ids, whole.parents, whole.depths, strict=True):
        scores.append(scores[parent] + log_probs[depth - 1][token - 10])
    expected = list(itertools.accumulate([1.0, *(math.exp(score) for score in scores[1:])]))
    best = max(range(1, 65), key=lambda size: expected[size] / (0.3 + costs[size]))
    found = grow(expand, 5, 5, 64, Worth(StepCosts(0.3, tuple(costs))))
    assert found.size == best
    assert found.token_ids == whole.token_ids[:best] and found.parents == whole.parents[:best]
    assert all(child <= best for children in found.children for child in children)
    assert len(found.children) == best + 1


@pytest.mark.parametrize(("verify", "sizes"), [([1.0] * 65, {64}), ([1.0 + 3.0 * n for n in range(65)], {1})])
def test_the_budget_follows_the_costs(verify, sizes):
    """Bug: costs that never reach the loop, too few times for so large a tree, or a text that depends on them."""
    target, drafter, prompt, text = learned_pair()
    output = decode(target, drafter, prompt, budget="auto", step_costs={"draft": 0.1, "verify": verify})
    assert torch.equal(output.sequences, text)
    assert set(output.statistics.per_step_drafted[:-4]) == sizes
    if sizes != {1}:
        assert_not_vacuous(output.statistics)
    with pytest.raises(UnsupportedGenerationError, match="64 drafts need 65"):
        decode(target, drafter, prompt, budget="auto", step_costs={"draft": 0.1, "verify": verify[:9]})
    with pytest.raises(UnsupportedGenerationError, match="auto"):
        decode(target, drafter, prompt, budget="automatic")


HAND = DraftTree([7, 8, 9, 6], [0, 0, 1, 3], [1, 1, 2, 3], [[1, 2], [3], [], [4], []])


def test_the_first_nodes_know_no_others():
    """Bug: children behind the cut, which the kept path would follow."""
    first = HAND.first(2)
    assert first == DraftTree([7, 8], [0, 0], [1, 1], [[1, 2], [], []])
    assert first.path([7, 9, 0]) == [1]


def test_a_node_sees_its_ancestors_and_itself():
    """Bug: siblings that see each other, which a wrong draft would then condition."""
    rows = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert HAND.visible(torch.device("cpu")).long().tolist() == rows


@pytest.mark.parametrize(
    ("best", "path"),
    [
        ([7, 9, 0, 6, 0], [1, 3, 4]),  # all of it
        ([8, 0, 0, 0, 0], [2]),  # the other branch, which ends
        ([7, 5, 0, 6, 0], [1, 3, 4]),  # fails at the second; goes on along what was drafted there
        ([5, 9, 0, 6, 0], [1, 3, 4]),  # fails at once; agreement further on counts for nothing
    ],
)
def test_the_path_that_stays(best, path):
    """Bug: a path that returns to the likeliest one though the target agreed with another, or stops at a failure."""
    assert HAND.path(best) == path


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("llama", CORRECTION), ("gpt2", {}), ("gpt2", CORRECTION), ("qwen3", {})],
    ids=["llama", "llama corrected", "gpt2", "gpt2 corrected", "qwen3"],
)
def test_greedy_text_is_the_targets(family, fields):
    """Bug (A1): nodes that see their siblings, positions that count nodes, a cache whose rows are another path's."""
    layers = {"target_layer_ids": [0, 1]} if family == "gpt2" else {}
    target, drafter, prompt, text = learned_pair(family, **layers, **fields)
    output = decode(target, drafter, prompt, output_scores=True, output_logits=True)
    assert torch.equal(output.sequences, text)
    plain = plain_greedy(target, prompt, NEW_TOKENS, output_logits=True, return_dict_in_generate=True)
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_not_vacuous(output.statistics)
    assert max(output.statistics.per_step_drafted) == 12


@pytest.mark.parametrize("fields", [{}, CORRECTION], ids=["independent", "corrected"])
def test_a_tree_without_branches_is_the_chain(monkeypatch, fields):
    """Bug: relayed rows, context features or drafts of a tree's step that are not those of the path it kept."""
    target, drafter, prompt, _ = learned_pair(**fields)
    monkeypatch.setattr(drafting, "CHILDREN", 1)
    chain = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS).statistics
    alike = decode(target, drafter, prompt, budget=BLOCK - 1).statistics
    assert alike.per_step_accepted == chain.per_step_accepted
    assert_not_vacuous(chain)
    off = decode(target, drafter, prompt, budget=BLOCK - 1, use_relay=False).statistics
    assert off.per_step_accepted != alike.per_step_accepted, "the relay does something"


def test_context_features_are_those_of_the_text(monkeypatch):
    """Bug: states of another path, or of its siblings, that all later drafts are conditioned on."""
    target, prompt = tiny_target("llama"), prompt_of(PROMPT_LENGTH)
    drafter = scripted(NudgedDrafter, target, prompt, NEW_TOKENS, block_size=BLOCK)
    drafter.nudge = 1.5
    seen, honest = [], DraftCache.append_context

    def watching(cache, features, positions, counts):
        seen.append((positions[0], features[0, : counts[0]]))
        return honest(cache, features, positions, counts)

    monkeypatch.setattr(DraftCache, "append_context", watching)
    output = decode(target, drafter, prompt, budget=30)
    states = target(output.sequences, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)[0]
    for position, features in seen:
        torch.testing.assert_close(features, expected[position : position + len(features)], atol=PARITY, rtol=PARITY)
    assert_not_vacuous(output.statistics)


def test_a_second_choice_is_accepted():
    """Bug: a tree of which only the likeliest path can be accepted."""
    target, prompt = tiny_target("llama"), prompt_of(PROMPT_LENGTH)
    drafter = scripted(NudgedDrafter, target, prompt, NEW_TOKENS, block_size=BLOCK)
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
            decode(target, drafter, prompt, max_new_tokens=length).sequences, text[:, : PROMPT_LENGTH + length]
        )
    for place in range(PROMPT_LENGTH + 4, PROMPT_LENGTH + 12):
        stop = int(text[0, place])
        first = text[0, PROMPT_LENGTH:].tolist().index(stop) + PROMPT_LENGTH
        assert torch.equal(decode(target, drafter, prompt, eos_token_id=stop).sequences, text[:, : first + 1])


def test_processors_decide_on_the_path():
    """Bug: a logits processor that the tree's walk ignores and the text too."""
    target, drafter, prompt, _ = learned_pair()
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    plain = plain_greedy(target, prompt, NEW_TOKENS, **options)
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
    target, drafter = tiny_target("llama"), tiny_drafter(tiny_target("llama"), BLOCK)
    target.register_forward_hook(lambda *_: pytest.fail("a forward was run"))
    with pytest.raises(UnsupportedGenerationError, match=message):
        decode(target, drafter, prompt_of(5), **options)


def test_batches_and_windows_are_refused():
    """Bug: rows that see each other's nodes; a window that counts nodes as positions."""
    target = tiny_target("llama")
    with pytest.raises(UnsupportedGenerationError, match="2 sequences at once"):
        decode(target, tiny_drafter(target, BLOCK), prompt_of(5).repeat(2, 1))
    sliding = tiny_target("gemma_sliding")
    with pytest.raises(UnsupportedGenerationError, match="not full attention"):
        decode(sliding, tiny_drafter(sliding, BLOCK), prompt_of(5))
