"""A text ends at the same token as in plain decoding, wherever in a block that is, and everything returned agrees."""

from functools import cache

import batches
import kit
import pytest
import torch
from batches import following
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from hf_dflow import UnsupportedGenerationError

BLOCK_SIZE = 8
# The prefill's token, a partial rejection (two drafts and a bonus), then a block that is right to its end: the texts of
# these tests end at each of its offsets, at its bonus, and right behind it.
PATTERN = [2, 7, 7]
BLOCK_STARTS = 4
OFFSETS = range(BLOCK_STARTS + BLOCK_SIZE + 1)
NEW_TOKENS = 24
FLOAT32 = 1e-5  # eager softmax and norms run in float32, and blocks sum in another order than single tokens
# Family -> seed of the target, and of a prompt after which OFFSETS different tokens follow.
FAMILIES = {"llama": (0, 55), "gpt2": (2, 138), "mistral_sliding": (0, 2)}


@cache
def setting(family):
    """Target, prompt and the greedy text that it would go on with, a block longer than any test needs."""
    seed, prompt_seed = FAMILIES[family]
    target = kit.shared_target(family, seed=seed)
    prompt = kit.varied_prompt(target, len(OFFSETS), first_seed=prompt_seed)
    text = kit.plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE)[0, prompt.shape[1] :].tolist()
    return target, prompt, text


def script_for(family="llama", pattern=PATTERN):
    target, prompt, text = setting(family)
    drafter = kit.tiny_drafter(target, BLOCK_SIZE, drafter_class=kit.PatternDrafter)
    drafter.pattern = pattern
    return drafter.follow(prompt[0].tolist() + text, prompt.shape[1])


def both(family="llama", *, pattern=PATTERN, make_extra=dict, **kwargs):
    """Outputs of plain and of speculative decoding; `make_extra` makes fresh objects for each."""
    target, prompt, _ = setting(family)
    kwargs = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **kwargs}
    if "max_length" in kwargs:
        del kwargs["max_new_tokens"]
    extras = make_extra(), make_extra()
    plain = target.generate(prompt, do_sample=False, **kwargs, **extras[0])
    drafter = script_for(family, pattern)
    output = kit.dflow_greedy(target, drafter, prompt, **kwargs, **extras[1])
    assert torch.equal(output.sequences, plain.sequences)
    return plain, output, drafter, extras


def assert_cut_after(output, offset):
    """The text's last token is number `offset`, and the counts say so."""
    statistics = output.statistics
    assert output.sequences.shape[1] == setting("llama")[1].shape[1] + offset + 1
    assert statistics.num_output_tokens == offset + 1
    accepted = kit.scripted_steps(PATTERN, BLOCK_SIZE, NEW_TOKENS)[0]
    expected, written = [], 1
    for length in accepted:
        if written > offset:
            break
        expected.append(min(length, offset + 1 - written))
        written += length + 1
    assert statistics.per_step_accepted == expected
    if offset > BLOCK_STARTS:
        kit.assert_not_vacuous(statistics)


@pytest.mark.parametrize(
    ("family", "offset"),
    [("llama", offset) for offset in OFFSETS]
    + [(family, offset) for family in ("gpt2", "mistral_sliding") for offset in (0, 2, 3, 4, 7, 11, 12)],
)
def test_eos(family, offset):
    """D1: tokens after an EOS inside a block, in the text, the cache, the scores, the stream or the counts."""
    text = setting(family)[2]
    eos = text[offset] if offset % 2 else [text[offset], text[offset + 1]]
    plain, output, _, (before, after) = both(
        family, eos_token_id=eos, output_scores=True, make_extra=lambda: {"streamer": kit.RecordingStreamer()}
    )
    assert output.sequences[0, -1] == text[offset]
    assert_cut_after(output, offset)
    assert after["streamer"].puts == before["streamer"].puts
    assert after["streamer"].ends == 1
    assert len(output.scores) == offset + 1
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=FLOAT32, rtol=FLOAT32)
    assert (
        kit.cache_of(output).get_seq_length() == kit.cache_of(plain).get_seq_length() == output.sequences.shape[1] - 1
    )
    for ours, theirs in zip(kit.cache_of(output).layers, kit.cache_of(plain).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=FLOAT32, rtol=FLOAT32)
        torch.testing.assert_close(ours.values, theirs.values, atol=FLOAT32, rtol=FLOAT32)


def test_rejected_eos_does_not_end():
    """EOS looked for among the drafts instead of among what was accepted."""
    target, prompt, text = setting("llama")
    drafter = script_for()
    unsaid = next(token for token in range(kit.VOCAB_SIZE - 1) if token not in text)
    drafter._wrong = lambda right: unsaid
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=unsaid)
    assert output.sequences[0, prompt.shape[1] :].tolist() == text[:NEW_TOKENS]
    kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize(("offset", "length"), [*((i, 2) for i in OFFSETS), (0, 1), (2, 1), (9, 1)])
def test_stop_strings(offset, length):
    """A stop string asked for only at a block's end, or one that spans two blocks missed."""
    text, tokenizer = setting("llama")[2], kit.tiny_tokenizer()
    stop = tokenizer.decode(text[max(0, offset + 1 - length) : offset + 1])
    _, output, _, _ = both(stop_strings=[stop], tokenizer=tokenizer)
    assert_cut_after(output, offset)


class Fires(StoppingCriteria):
    """Ends the text after `length` tokens; keeps what it was asked."""

    def __init__(self, length):
        self.length, self.calls = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("offset", OFFSETS)
def test_custom_criterion(offset):
    """A criterion that is skipped for a prefix, asked twice, or shown a rejected draft."""
    length = setting("llama")[1].shape[1] + offset + 1
    _, output, _, (before, after) = both(
        output_scores=bool(offset % 2), make_extra=lambda: {"stopping_criteria": StoppingCriteriaList([Fires(length)])}
    )
    assert_cut_after(output, offset)
    assert after["stopping_criteria"][0].calls == before["stopping_criteria"][0].calls
    assert len(before["stopping_criteria"][0].calls) == offset + 1


def test_criterion_that_never_fires():
    """The calls of a whole text differ from plain decoding's where nothing cuts a block."""
    _, output, _, (before, after) = both(make_extra=lambda: {"stopping_criteria": StoppingCriteriaList([Fires(999)])})
    assert after["stopping_criteria"][0].calls == before["stopping_criteria"][0].calls
    kit.assert_not_vacuous(output.statistics)


def test_no_time_left():
    """Time looked at only after a whole block."""
    _, output, drafter, _ = both(max_time=0.0)
    assert output.statistics.num_output_tokens == 1
    assert drafter.anchor_positions == []


LIMITS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("pattern", [[7], [0], PATTERN], ids=str)
def test_length_budget(limit, pattern):
    """A block, a draft or a target row beyond the room that is left."""
    target = setting("llama")[0]
    widths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        output, drafter = both(max_new_tokens=limit, pattern=pattern)[1:3]
    finally:
        handle.remove()
    accepted, drafted, forwards = kit.scripted_steps(pattern, BLOCK_SIZE, limit)
    assert output.statistics.num_output_tokens == limit
    assert output.statistics.per_step_accepted == accepted
    assert output.statistics.per_step_drafted == drafted
    assert len(drafter.anchor_positions) == len(drafted)
    assert len(drafter.anchor_positions) == 0 or limit > 2
    prefill = setting("llama")[1].shape[1]
    following = widths[-(forwards - 1) :] if forwards > 1 else []
    assert widths[-forwards] == prefill
    assert following == [count + 1 for count in drafted] + [1] * (forwards - 1 - len(drafted))


def test_max_length_of_prompt_and_one():
    """max_length read as if it were max_new_tokens; a drafter asked for nothing."""
    prompt = setting("llama")[1]
    _, output, drafter, _ = both(pattern=[7], max_length=prompt.shape[1] + 1)
    assert output.sequences.shape[1] == prompt.shape[1] + 1
    assert drafter.anchor_positions == []


@pytest.mark.parametrize("eos_offset", [0, 3, 6])
def test_min_new_tokens_beyond_a_block(eos_offset):
    """A minimum length checked once a block, so that an EOS inside it passes."""
    target, prompt, text = setting("llama")
    kwargs = {"eos_token_id": text[eos_offset], "min_new_tokens": 2 * BLOCK_SIZE, "max_new_tokens": NEW_TOKENS}
    plain = kit.plain_greedy(target, prompt, **kwargs)
    drafter = script_for()
    drafter.follow(plain, prompt.shape[1])
    output = kit.dflow_greedy(target, drafter, prompt, **kwargs)
    assert torch.equal(output.sequences, plain)
    assert output.statistics.num_output_tokens >= 2 * BLOCK_SIZE
    kit.assert_not_vacuous(output.statistics)


# -- batches: each row ends where it ends alone


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8, 10, 12])
def test_eos_at_an_offset_of_a_row(offset):
    """D1 in a batch: tokens behind an EOS inside a block, or a row cut where its neighbour ends."""
    rows, eos = [0, 3, 1], batches.plain_ids(3, 20)[offset]
    expected = [batches.plain_ids(row, 20, [eos]) for row in rows]
    drafter = following(kit.PatternDrafter, rows, 20, pattern=[2, 7, 7])
    output = batches.generate(rows, drafter, 20, eos_token_id=eos, pad_token_id=0)
    lengths = [len(tokens) for tokens in expected]
    longest = max(lengths)
    assert [batches.new_tokens_of(output, i, rows) for i in range(3)] == [
        tokens + [0] * (longest - len(tokens)) for tokens in expected
    ]
    assert [row.num_output_tokens for row in output.statistics.per_row] == lengths
    if min(lengths) > 5:
        kit.assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("limit", LIMITS)
def test_length_budget_of_a_batch(limit):
    """D3 in a batch: a block, a draft or a target row beyond the room that is left."""
    rows, widths = [0, 3, 1], []
    drafter = following(kit.PatternDrafter, rows, limit, pattern=[7, 0, 2], offset=1)
    handle = batches.target_of().register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        output = batches.generate(rows, drafter, limit)
    finally:
        handle.remove()
    assert [batches.new_tokens_of(output, i, rows) for i in range(3)] == [batches.plain_ids(row, limit) for row in rows]
    assert max(widths[1:], default=0) <= max(limit - 1, 1)
    assert limit > 2 or drafter.anchors == [[], [], []]


@pytest.mark.parametrize("offset", [0, 3, 4, 9, 12])
def test_stop_strings_of_a_batch(offset):
    """A stop string looked for in padding, in a neighbour's text, or at the ends of blocks only."""
    tokenizer, texts = kit.tiny_tokenizer(), [batches.alone(place, 20 + batches.SLACK) for place in range(3)]
    stop = tokenizer.decode(texts[1][batches.WIDTH + offset - (offset > 0) : batches.WIDTH + offset + 1])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = [batches.alone(place, 20, **options) for place in range(3)]
    output = batches.decode_three(batches.drafter_for(texts), 20, **options)
    assert [batches.new_ids(output, place) for place in range(3)] == batches.padded_texts(expected)
    assert len(expected[1]) <= batches.WIDTH + offset + 1


class FiresByPrompt(StoppingCriteria):
    """Ends a row at a length that follows from its prompt; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids[0].tolist())
        return torch.tensor(
            [input_ids.shape[1] >= batches.WIDTH + 3 + int(input_ids[0, batches.WIDTH - 1]) % 5] * len(input_ids)
        )


def test_criteria_of_a_batch():
    """A criterion that ends all rows when it ends one, or is asked about a row that has ended."""
    single, together = FiresByPrompt(), FiresByPrompt()
    expected = [batches.alone(place, 20, stopping_criteria=StoppingCriteriaList([single])) for place in range(3)]
    drafter = batches.drafter_for([batches.alone(place, 20 + batches.SLACK) for place in range(3)])
    output = batches.decode_three(drafter, 20, stopping_criteria=StoppingCriteriaList([together]))
    assert [batches.new_ids(output, place) for place in range(3)] == batches.padded_texts(expected)
    assert len({len(text) for text in expected}) > 1
    assert sorted(together.asked) == sorted(single.asked)
    assert (
        batches.decode_three(drafter, 20, max_time=0.0).statistics.num_output_tokens == 3
    )  # looked at before all have ended


def test_rows_that_may_end_apart_need_a_padding_token():
    """Rows padded with a token that means something."""
    criteria = StoppingCriteriaList([FiresByPrompt()])
    with pytest.raises(UnsupportedGenerationError, match="pad_token_id"):
        target = kit.tiny_target("llama", attention="sdpa")
        target.generation_config.pad_token_id = None
        ids = torch.cat([batches.alone(0, 1)[None, : batches.WIDTH]] * 2)
        kit.dflow_greedy(target, kit.tiny_drafter(target), ids, max_new_tokens=4, stopping_criteria=criteria)


@pytest.mark.parametrize("streamer", [kit.RecordingStreamer(), TextStreamer(kit.tiny_tokenizer())])
def test_streamed_batches_are_refused(streamer):
    """D4: rows streamed in turns that no reader can tell apart."""
    calls = []
    handle = batches.target_of().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match=r"batch of 3|batch size 1"):
            batches.decode_three(kit.tiny_drafter(batches.target_of()), 4, streamer=streamer)
    finally:
        handle.remove()
    assert not calls
