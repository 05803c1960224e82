"""Kinds of caches, prompts in chunks, and caches that already hold something: the same text, or a refusal by name."""

import pytest
import torch
from batches import LENGTHS, following, generate, new_tokens_of, padded, prompt, said, target_of, text
from kit import (
    NudgedDrafter,
    OracleDrafter,
    PatternDrafter,
    assert_not_vacuous,
    cache_of,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)
from transformers import DynamicCache, StaticCache, StoppingCriteriaList

from hf_dflow import UnsupportedGenerationError
from hf_dflow.generation._compat import CACHE_NAMES, STATIC_IS_CROPPABLE
from hf_dflow.generation.output import GenerateDFlowOutput

NEW_TOKENS = 24
PATTERN = [3, 0, 7, 1, 5]
LONG = prompt_of(13, seed=8)
CACHE = next(name for name in CACHE_NAMES if name in GenerateDFlowOutput.__dataclass_fields__)
needs_croppable_static = pytest.mark.skipif(not STATIC_IS_CROPPABLE, reason="static caches cannot be cropped yet")


def hf_warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_dflow")]


# -- kinds (C3)


@needs_croppable_static
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("own", [False, True])
def test_static_cache(family, own):
    """C3: a static cache that is reallocated, keeps rejected drafts, or has no room for the last block."""
    target = tiny_target(family)
    plain = plain_greedy(target, LONG, NEW_TOKENS, cache_implementation="static", return_dict_in_generate=True)
    drafter = scripted(PatternDrafter, target, LONG, NEW_TOKENS, pattern=PATTERN)
    room = LONG.shape[1] + NEW_TOKENS - 1
    held = StaticCache(config=target.config, max_cache_len=room)
    options = {CACHE: held} if own else {"cache_implementation": "static"}
    output = dflow_greedy(
        target, drafter, LONG, max_new_tokens=NEW_TOKENS, output_attentions=True, output_hidden_states=True, **options
    )
    assert torch.equal(output.sequences, plain.sequences)
    assert torch.equal(output.sequences, plain_greedy(target, LONG, NEW_TOKENS))
    assert_not_vacuous(output.statistics)
    assert isinstance(cache_of(output), StaticCache) and (not own or cache_of(output) is held)
    assert int(cache_of(output).get_seq_length()) == int(cache_of(plain).get_seq_length()) == room
    assert {layer.shape[-1] for step in output.attentions[1:] for layer in step} == {room}
    for layer, other in zip(cache_of(output).layers, cache_of(plain).layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :room], other.keys[:, :, :room], atol=1e-5, rtol=1e-5)


@needs_croppable_static
def test_static_cache_that_is_just_large_enough():
    """C3: drafts written past the end of a static cache, where the text itself ends in time."""
    target = tiny_target()
    words = plain_greedy(target, LONG, NEW_TOKENS + 8)[0, 13:].tolist()
    # Inside a block: its other drafts would be written behind the end.
    end = next(i for i, token in enumerate(words) if i >= 3 and i % 8 in (1, 2, 3, 4) and token not in words[:i])
    held = StaticCache(config=target.config, max_cache_len=13 + end)
    drafter = scripted(OracleDrafter, target, LONG, NEW_TOKENS)
    options = {"eos_token_id": words[end], "max_new_tokens": NEW_TOKENS, CACHE: held}
    assert dflow_greedy(target, drafter, LONG, **options).sequences[0, 13:].tolist() == words[: end + 1]


@needs_croppable_static
def test_static_cache_of_a_batch(caplog):
    """C3: rows that share a static cache's one length."""
    rows = [0, 1, 3]
    drafter = following(PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN, offset=2)
    output = generate(rows, drafter, NEW_TOKENS, cache_implementation="static")
    assert [new_tokens_of(output, i, rows) for i in range(3)] == [said(row, NEW_TOKENS) for row in rows]
    assert getattr(output, CACHE) is None
    assert any("row by row" in warning for warning in hf_warnings(caplog))


@pytest.mark.parametrize("kind", ["offloaded", "quantized", "offloaded_static", "static"])
def test_caches_that_are_refused(kind):
    """C3: rejected drafts left for good in a cache that cannot give them back; or an error after the prefill."""
    if kind == "static" and STATIC_IS_CROPPABLE:
        pytest.skip("this release can crop them")
    target, calls = tiny_target(), []
    target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match="cache_implementation") as error:
        dflow_greedy(target, tiny_drafter(target), LONG, max_new_tokens=4, cache_implementation=kind)
    assert "dynamic" in str(error.value) and "\n" not in str(error.value) and not calls


def test_static_cache_of_a_sliding_target_is_refused():
    """C3: a window that has moved on, which a static layer cannot take back."""
    target, calls = tiny_target("mistral_sliding"), []
    target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match=r"layers|cache_implementation"):
        dflow_greedy(target, tiny_drafter(target), LONG, max_new_tokens=4, cache_implementation="static")
    assert not calls


# -- prompts in chunks (C5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding", "gemma"])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 50])
def test_prompt_in_chunks(family, chunk_size):
    """C5: features dropped at a chunk's border, so that drafts get worse with no error."""
    target = tiny_target(family)
    drafter = scripted(NudgedDrafter, target, LONG, NEW_TOKENS)
    whole = dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS)
    output = dflow_greedy(target, drafter, LONG, max_new_tokens=NEW_TOKENS, prefill_chunk_size=chunk_size)
    plain = plain_greedy(target, LONG, NEW_TOKENS, prefill_chunk_size=chunk_size)
    assert torch.equal(output.sequences, plain) and torch.equal(plain, whole.sequences)
    assert output.statistics.per_step_accepted == whole.statistics.per_step_accepted
    assert_not_vacuous(output.statistics)


def test_padded_batch_in_chunks():
    """C5: chunks that are padding for one row and text for another."""
    rows = [0, 1, 3]
    whole, chunked = (
        generate(rows, following(NudgedDrafter, rows, NEW_TOKENS), NEW_TOKENS, **options)
        for options in ({}, {"prefill_chunk_size": 5})
    )
    for i, row in enumerate(rows):
        assert new_tokens_of(chunked, i, rows) == said(row, NEW_TOKENS)
        ours, other = chunked.statistics.per_row[i], whole.statistics.per_row[i]
        assert ours.per_step_accepted == other.per_step_accepted
    assert_not_vacuous(chunked.statistics)


# -- caches of batches that hold something


def test_batch_that_goes_on_from_its_cache(caplog):
    """C5: a returned cache whose rows are shifted, or hold rejected drafts; a filled cache read as an empty one."""
    rows, target = [0, 1, 3], target_of()
    first = generate(rows, following(PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN, offset=2), NEW_TOKENS)
    held = cache_of(first)
    width = max(LENGTHS[row] for row in rows)
    assert held.get_seq_length() == width and held.layers[0].keys.shape[0] == 3
    _, mask = padded([prompt(row) for row in rows])
    turn = torch.cat([first.sequences, prompt_of(4, seed=9).expand(3, -1)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, NEW_TOKENS + 4), value=1)
    second = target.generate(
        turn,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=tiny_drafter(target),
        speculation_type="dflow",
        **{CACHE: held},
    )
    for i, row in enumerate(rows):
        own = torch.cat([text(row, NEW_TOKENS), prompt_of(4, seed=9)], dim=1)
        assert second[i, turn.shape[1] :].tolist() == plain_greedy(target, own, 12)[0, own.shape[1] :].tolist()
    assert [f"already holds {width} tokens" in warning for warning in hf_warnings(caplog)].count(True) == 1


def test_cache_of_the_callers_holds_the_prompts_of_a_batch():
    """A caller's cache left with some rows only, or with half a block, also after an exception."""
    rows, target = [0, 1, 3], target_of()
    ids, mask = padded([prompt(row) for row in rows])
    expected = DynamicCache(config=target.config)
    target(
        ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True, **{CACHE: expected}
    )

    def fails(input_ids, scores, **kwargs):
        if input_ids.shape[1] > ids.shape[1] + 9:
            raise KeyError("on purpose")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    for criteria in (None, StoppingCriteriaList([fails])):
        held = DynamicCache(config=target.config)
        drafter = following(PatternDrafter, rows, NEW_TOKENS, pattern=PATTERN)
        options = {"return_dict_in_generate": False, CACHE: held}
        if criteria is None:
            generate(rows, drafter, NEW_TOKENS, **options)
        else:
            with pytest.raises(KeyError):
                generate(rows, drafter, NEW_TOKENS, stopping_criteria=criteria, pad_token_id=0, **options)
        for layer, other in zip(held.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer.values, other.values, atol=1e-5, rtol=1e-5)


def test_cache_of_another_batch_is_refused():
    """Rows broadcast or dropped where cache and ids have another number of them."""
    target = target_of()
    held = cache_of(generate([1, 2], tiny_drafter(target), 2))
    with pytest.raises(UnsupportedGenerationError, match="2 rows for 3 sequences"):
        target.generate(
            torch.cat([prompt(1)] * 3), assistant_model=tiny_drafter(target), speculation_type="dflow", **{CACHE: held}
        )
