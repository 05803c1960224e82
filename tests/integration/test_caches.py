"""Caches that are handed in, returned, filled in chunks or of another kind: the same text, or a refusal by name.

Static caches: test_static_cache.py.
"""

import copy

import kit
import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, padded, plain_ids, prompt, target_of, text
from internals import STATIC_IS_CROPPABLE, is_croppable
from transformers import DynamicCache, StoppingCriteriaList

from hf_dflow import UnsupportedGenerationError

NEW_TOKENS = 24
PATTERN = [3, 0, 7, 1, 5]
LONG, HALF = kit.prompt_of(13, seed=8), 6
FAMILIES = ("llama", "gpt2", "gemma_sliding", "mistral_sliding")
FLOAT32 = 1e-5  # norms and eager softmax run in float32 inside a float64 model


def assert_layers_equal(held, expected):
    for layer, other in zip(held.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, atol=FLOAT32, rtol=FLOAT32)
        torch.testing.assert_close(layer.values, other.values, atol=FLOAT32, rtol=FLOAT32)


# -- returned


@pytest.mark.parametrize("family", FAMILIES)
def test_returned_cache_continues(family):
    """A returned cache with rejected rows, or with one row too few, under the text it belongs to."""
    target = kit.shared_target(family)
    plain = kit.plain_greedy(target, LONG, NEW_TOKENS, return_dict_in_generate=True)
    drafter = kit.scripted(kit.PatternDrafter, target, LONG, NEW_TOKENS, pattern=PATTERN)
    output = kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS)
    kit.assert_not_vacuous(output.statistics)
    held = kit.cache_of(output)
    assert isinstance(held, DynamicCache)
    assert held.get_seq_length() == LONG.shape[1] + NEW_TOKENS - 1
    assert_layers_equal(held, kit.cache_of(plain))
    longer = kit.plain_greedy(target, LONG, 2 * NEW_TOKENS)
    for out in (output, plain):
        continued = kit.plain_greedy(target, out.sequences, NEW_TOKENS, past_key_values=kit.cache_of(out))
        assert torch.equal(continued, longer)
    # A sliding layer that still recorded its past would keep every row from here on.
    assert [layer.keys.shape for layer in held.layers] == [layer.keys.shape for layer in kit.cache_of(plain).layers]


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize("new_tokens", [3, 20])
def test_conversation_resumes_from_a_returned_cache(family, only_new, new_tokens):
    """A returned cache that only plain decoding can use, or that is a token ahead of its text; new tokens taken for
    cached ones where `input_ids` leave out what the cache already holds."""
    target, turn = kit.shared_target(family, attention="sdpa"), kit.prompt_of(new_tokens, seed=5)
    first = kit.dflow_greedy(target, kit.scripted(kit.NudgedDrafter, target, LONG, 12), LONG, max_new_tokens=12)
    whole = torch.cat([first.sequences, turn], dim=1)
    held = kit.cache_of(first)
    ids = whole[:, held.get_seq_length() :] if only_new else whole
    drafter = kit.scripted(kit.OracleDrafter, target, whole, NEW_TOKENS)
    options = {"attention_mask": torch.ones_like(whole), "max_new_tokens": NEW_TOKENS, kit.CACHE: held}
    second = kit.dflow_greedy(target, drafter, ids, **options)
    expected = kit.plain_greedy(target, whole, NEW_TOKENS)
    assert second.sequences[0, ids.shape[1] :].tolist() == expected[0, whole.shape[1] :].tolist()
    assert max(second.statistics.per_step_accepted) >= 2


# -- the caller's own


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding"])
@pytest.mark.parametrize("knows_config", [True, False])
def test_empty_cache_of_the_callers(family, knows_config, caplog):
    """A caller's cache replaced by another, or taken for one that holds a prefix."""
    target = kit.shared_target(family)
    drafter = kit.scripted(kit.NudgedDrafter, target, LONG, NEW_TOKENS)
    held = DynamicCache(config=target.config) if knows_config else DynamicCache()
    output = kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, past_key_values=held)
    assert torch.equal(output.sequences, kit.plain_greedy(target, LONG, NEW_TOKENS))
    kit.assert_not_vacuous(output.statistics)
    assert kit.cache_of(output) is held and held.get_seq_length() == LONG.shape[1] + NEW_TOKENS - 1
    assert not kit.our_warnings(caplog)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding"])
def test_cache_that_holds_half_the_prompt(family, caplog):
    """Positions or rows counted from the start of what is computed instead of from the start of the text."""
    target = kit.shared_target(family)
    held = kit.cache_of(kit.plain_greedy(target, LONG[:, :HALF], 1, return_dict_in_generate=True))
    assert held.get_seq_length() == HALF
    plain = kit.plain_greedy(target, LONG, NEW_TOKENS, past_key_values=copy.deepcopy(held))
    drafter = kit.scripted(kit.NudgedDrafter, target, LONG, NEW_TOKENS)
    output = kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, past_key_values=held)
    assert torch.equal(output.sequences, plain)
    assert torch.equal(plain, kit.plain_greedy(target, LONG, NEW_TOKENS))
    assert drafter.anchor_positions[0] == LONG.shape[1]
    kit.assert_not_vacuous(output.statistics)
    (warning,) = kit.our_warnings(caplog)
    assert "already holds tokens" in warning


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
@pytest.mark.parametrize("place", ["a criterion", "the target"])
def test_callers_cache_holds_committed_tokens_only_after_an_exception(family, place):
    """Rejected or uncommitted drafts left in a cache that the caller resumes from; committed ones taken out of layers
    that a failed forward did not reach."""
    target, ids = kit.shared_target(family), kit.prompt_of(12)
    whole_text = kit.plain_greedy(target, ids, 40)
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.OracleDrafter).follow(whole_text, 12)

    def fails(input_ids, scores, **kwargs):
        if input_ids.shape[1] == 25:
            raise KeyError("on purpose")
        return torch.tensor([False])

    def fails_in_the_target(*_):
        if cache.get_seq_length() >= 25:
            raise KeyError("on purpose")

    cache, criteria = DynamicCache(config=target.config), StoppingCriteriaList([fails])
    if place == "the target":
        criteria = StoppingCriteriaList()
        handle = target.model.layers[2].register_forward_pre_hook(fails_in_the_target)
    with pytest.raises(KeyError):
        kit.dflow_greedy(target, drafter, ids, max_new_tokens=30, stopping_criteria=criteria, **{kit.CACHE: cache})
    if place == "the target":
        handle.remove()
    held = cache.get_seq_length()
    assert [layer.get_seq_length() for layer in cache.layers] == [held] * len(cache.layers)
    assert 12 <= held < 25
    again = kit.plain_greedy(target, whole_text[:, : held + 1], 8, **{kit.CACHE: cache})
    assert torch.equal(again, whole_text[:, : held + 9])


# -- prompts in chunks (C5)


@pytest.mark.parametrize(
    ("family", "chunk_size"),
    [("llama", 1), ("llama", 4), ("llama", 13), ("llama", 50), ("gpt2", 4), ("mistral_sliding", 1),
     ("mistral_sliding", 4), ("gemma", 4)],
)  # fmt: skip
def test_prompt_in_chunks(family, chunk_size):
    """C5: features dropped at a chunk's border, so that drafts get worse with no error."""
    target = kit.shared_target(family)
    drafter = kit.scripted(kit.NudgedDrafter, target, LONG, NEW_TOKENS)
    whole = kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS)
    output = kit.dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, prefill_chunk_size=chunk_size)
    plain = kit.plain_greedy(target, LONG, NEW_TOKENS, prefill_chunk_size=chunk_size)
    assert torch.equal(output.sequences, plain) and torch.equal(plain, whole.sequences)
    assert output.statistics.per_step_accepted == whole.statistics.per_step_accepted
    kit.assert_not_vacuous(output.statistics)


def test_padded_batch_in_chunks():
    """C5: chunks that are padding for one row and text for another."""
    rows = [0, 1, 3]
    whole, chunked = (
        generate(rows, following(kit.NudgedDrafter, rows, NEW_TOKENS), NEW_TOKENS, **options)
        for options in ({}, {"prefill_chunk_size": 5})
    )
    for i, row in enumerate(rows):
        assert new_tokens_of(chunked, i, rows) == plain_ids(row, NEW_TOKENS)
        ours, other = chunked.statistics.per_row[i], whole.statistics.per_row[i]
        assert ours.per_step_accepted == other.per_step_accepted
    kit.assert_not_vacuous(chunked.statistics)


# -- batches


def test_batch_that_resumes_from_its_cache(caplog):
    """C5: a returned cache whose rows are shifted, or hold rejected drafts; a filled cache read as an empty one."""
    rows, target = [0, 1, 3], target_of()
    first = generate(rows, following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN, offset=2), NEW_TOKENS)
    held = kit.cache_of(first)
    width = max(LENGTHS[row] for row in rows)
    assert held.get_seq_length() == width and held.layers[0].keys.shape[0] == 3
    _, mask = padded([prompt(row) for row in rows])
    turn = torch.cat([first.sequences, kit.prompt_of(4, seed=9).expand(3, -1)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, NEW_TOKENS + 4), value=1)
    options = {"attention_mask": mask, "max_new_tokens": 12, kit.CACHE: held}
    second = kit.dflow_greedy(target, kit.tiny_drafter(target), turn, **options).sequences
    for i, row in enumerate(rows):
        own = torch.cat([text(row, NEW_TOKENS), kit.prompt_of(4, seed=9)], dim=1)
        assert second[i, turn.shape[1] :].tolist() == kit.plain_greedy(target, own, 12)[0, own.shape[1] :].tolist()
    assert ["already holds tokens" in warning for warning in kit.our_warnings(caplog)].count(True) == 1


def test_cache_of_the_callers_holds_the_prompts_of_a_batch():
    """A caller's cache left with some rows only, or with half a block, also after an exception."""
    rows, target = [0, 1, 3], target_of()
    ids, mask = padded([prompt(row) for row in rows])
    expected = DynamicCache(config=target.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    target(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{kit.CACHE: expected})

    def fails(input_ids, scores, **kwargs):
        if input_ids.shape[1] > ids.shape[1] + 9:
            raise KeyError("on purpose")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    for criteria in (None, StoppingCriteriaList([fails])):
        held = DynamicCache(config=target.config)
        drafter = following(kit.PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN)
        options = {"return_dict_in_generate": False, kit.CACHE: held}
        if criteria is None:
            generate(rows, drafter, NEW_TOKENS, **options)
        else:
            with pytest.raises(KeyError):
                generate(rows, drafter, NEW_TOKENS, stopping_criteria=criteria, pad_token_id=0, **options)
        assert_layers_equal(held, expected)


# -- refused


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "offloaded"), ("llama", "quantized"), ("llama", "offloaded_static"), ("mistral_sliding", "static")]
    + [("llama", "static")] * (not STATIC_IS_CROPPABLE),
)
def test_caches_that_are_refused(family, kind):
    """C3: rejected drafts left for good in a cache that cannot give them back, or in a window that has moved on; or an
    error after the prefill."""
    target, calls = kit.tiny_target(family), []
    target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match=r"layers|cache_implementation") as error:
        kit.dflow_greedy(target, kit.tiny_drafter(target), LONG, max_new_tokens=4, cache_implementation=kind)
    assert "\n" not in str(error.value) and not calls
    assert family != "llama" or "dynamic" in str(error.value)


def test_cache_of_another_batch_is_refused():
    """Rows broadcast or dropped where cache and ids have another number of them."""
    target = target_of()
    held = kit.cache_of(generate([1, 2], kit.tiny_drafter(target), 2))
    with pytest.raises(UnsupportedGenerationError, match="2 rows for 3 sequences"):
        kit.dflow_greedy(target, kit.tiny_drafter(target), torch.cat([prompt(1)] * 3), **{kit.CACHE: held})


def test_sparse_attention_is_refused():
    """A target whose own block and single-token forwards disagree, decoded as if it were exact."""

    class IndexedLayer:
        pass

    class Held:
        is_croppable = True
        layers = [IndexedLayer()]

    assert not is_croppable(Held())
    assert is_croppable(DynamicCache(config=kit.shared_target().config))


def test_turns_of_a_conversation_warn_once(caplog):
    """N16: the warning about a filled cache at every turn."""
    target = kit.shared_target("llama")
    whole, held = LONG, None
    for _ in range(3):
        options = {} if held is None else {kit.CACHE: held}
        output = kit.dflow_greedy(target, kit.shared_drafter("llama"), whole, max_new_tokens=3, **options)
        whole, held = torch.cat([output.sequences, kit.prompt_of(2)], dim=1), kit.cache_of(output)
    assert sum("already holds tokens" in warning for warning in kit.our_warnings(caplog)) == 1
