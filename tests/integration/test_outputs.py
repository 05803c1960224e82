"""What comes back beside the text: one entry for each generated token, as from plain decoding, and honest counts."""

from functools import cache

import kit
import pytest
import torch
from batches import IDS, LENGTHS, MASK, ROWS, WIDTH
from transformers import TextIteratorStreamer, TextStreamer

from hf_dflow import DFlowDecoder, GenerateDFlowOutput

NEW_TOKENS = 22
PROMPT = kit.prompt_of(12)
PATTERN = [3, 0, 7, 1, 5]
# GPT-2 computes in float64 throughout; the softmax and norms of the others run in float32 inside a float64 model, and
# scores and logits are cast to float32 by plain decoding as well.
FLOAT64, FLOAT32 = 1e-9, 1e-5
BATCH_TOKENS, BATCHED = 20, 2e-4  # float32: blocks and single tokens, holes and none, round differently
ASKS = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
FAMILIES = ("llama", "gpt2", "gemma_sliding", "mistral_sliding")


@cache
def both_asked(family):
    """Everything that can be asked for, of plain and of speculative decoding; computed once."""
    return both(family, **ASKS)


def both(family, **kwargs):
    target = kit.shared_target(family)
    kwargs = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **kwargs}
    plain = target.generate(PROMPT, do_sample=False, **kwargs)
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, NEW_TOKENS, pattern=PATTERN)
    output = kit.dflow_greedy(target, drafter, PROMPT, **kwargs)
    assert torch.equal(output.sequences, plain.sequences)
    kit.assert_not_vacuous(output.statistics)
    return plain, output


def assert_close(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_logits(family):
    """Rows of rejected drafts among the scores, or rows of accepted ones missing or shifted."""
    # Warpers are switched off when greedy; a penalty makes scores differ from logits.
    plain, output = both_asked(family)
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(plain, name)
        assert len(ours) == NEW_TOKENS
        assert all(entry.dtype == torch.float32 for entry in ours)
        assert_close(ours, theirs, FLOAT32)
    assert [int(row.argmax()) for row in output.scores] == output.sequences[0, PROMPT.shape[1] :].tolist()


def test_processed_scores_beside_raw_logits():
    """Logits edited in place by processors before they are recorded."""
    target = kit.shared_target()
    kwargs = {**ASKS, "repetition_penalty": 1.8, "return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}
    plain = target.generate(PROMPT, do_sample=False, **kwargs)
    drafter = kit.tiny_drafter(target, drafter_class=kit.PatternDrafter)
    drafter.pattern = PATTERN
    drafter.follow(plain.sequences, PROMPT.shape[1])
    output = kit.dflow_greedy(target, drafter, PROMPT, **kwargs)
    assert torch.equal(output.sequences, plain.sequences)
    kit.assert_not_vacuous(output.statistics)
    assert_close(output.scores, plain.scores, FLOAT32)
    assert_close(output.logits, plain.logits, FLOAT32)
    assert not torch.allclose(output.scores[5], output.logits[5])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["hidden_states", "attentions"])
def test_states(family, name):
    """States by step instead of by token; attention rows with the keys of later drafts; a prompt's row lost."""
    plain, output = both_asked(family)
    ours, theirs = getattr(output, name), getattr(plain, name)
    assert len(ours) == len(theirs) == NEW_TOKENS
    for mine, other in zip(ours, theirs, strict=True):
        assert [tuple(layer.shape) for layer in mine] == [tuple(layer.shape) for layer in other]
        assert_close(tuple(mine), tuple(other), FLOAT64 if family == "gpt2" else FLOAT32)


def test_nothing_unasked():
    """Context features, which need hidden states, returned to a caller who did not ask."""
    _, output = both("llama")
    assert isinstance(output, GenerateDFlowOutput)
    assert [output.scores, output.logits, output.hidden_states, output.attentions] == [None] * 4
    drafter = kit.tiny_drafter(kit.shared_target())
    assert isinstance(
        kit.dflow_greedy(kit.shared_target(), drafter, PROMPT, max_new_tokens=4, return_dict_in_generate=False),
        torch.Tensor,
    )


@pytest.mark.parametrize("via_decoder", [False, True])
def test_streamer(via_decoder):
    """The prompt streamed twice or not at all, drafts streamed before they are accepted, no end."""
    target = kit.shared_target()
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, NEW_TOKENS, pattern=PATTERN)
    streamer, plain_streamer = kit.RecordingStreamer(), kit.RecordingStreamer()
    kit.plain_greedy(target, PROMPT, NEW_TOKENS, streamer=plain_streamer)
    kwargs = {"max_new_tokens": NEW_TOKENS}
    if via_decoder:
        sequences = target.generate(
            PROMPT, custom_generate=DFlowDecoder(drafter, streamer=streamer), do_sample=False, **kwargs
        )
    else:
        sequences = kit.dflow_greedy(target, drafter, PROMPT, streamer=streamer, **kwargs).sequences
    assert streamer.puts == plain_streamer.puts
    assert streamer.puts == [PROMPT[0].tolist()] + [[token] for token in sequences[0, PROMPT.shape[1] :].tolist()]
    assert streamer.ends == plain_streamer.ends == 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamers(skip_prompt, capsys):
    """A put of another shape than text streamers take."""
    target, tokenizer = kit.shared_target(), kit.tiny_tokenizer()
    drafter = kit.scripted(kit.PatternDrafter, target, PROMPT, NEW_TOKENS, pattern=PATTERN)
    text = kit.plain_greedy(target, PROMPT, NEW_TOKENS)[0]
    expected = tokenizer.decode(text[PROMPT.shape[1] :] if skip_prompt else text)
    printer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
    kit.dflow_greedy(target, drafter, PROMPT, max_new_tokens=NEW_TOKENS, streamer=printer)
    assert capsys.readouterr().out == expected + "\n"
    iterator = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=5)
    kit.dflow_greedy(target, drafter, PROMPT, max_new_tokens=NEW_TOKENS, streamer=iterator)
    assert "".join(iterator) == expected


def test_statistics_by_hand():
    """A ratio with another denominator than its name says; the bonus counted among the drafts."""
    # 1 prefill token, then 3+1, 0+1, 7+1, 1+1, 5+1: 22 tokens. The last steps have room for 7, 7, 7, 7 and 5 drafts.
    statistics = both("llama")[1].statistics
    assert statistics.per_step_accepted == [3, 0, 7, 1, 5]
    assert statistics.per_step_drafted == [7, 7, 7, 7, 5]
    assert statistics.num_spec_steps == statistics.num_draft_forwards == 5
    assert statistics.num_target_forwards == 6
    assert statistics.num_output_tokens == 22
    assert statistics.num_draft_tokens == 33
    assert statistics.num_accepted_draft_tokens == 16
    assert statistics.mean_accepted_length == pytest.approx(16 / 5)
    assert statistics.tokens_per_step == statistics.mean_acceptance_length == pytest.approx(21 / 5)
    assert statistics.draft_acceptance_rate == pytest.approx(16 / 33)
    assert statistics.wasted_ratio == pytest.approx(17 / 33)
    assert statistics.acceptance_histogram == [1, 1, 0, 1, 0, 1, 0, 1]
    # Four of the five steps have room for positions 6 and 7.
    assert statistics.acceptance_rate_per_position == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.4, 0.25, 0.25])
    assert statistics.accepted_length_std == pytest.approx(2.5612496949731396)  # of 3, 0, 7, 1, 5 around 3.2
    assert statistics.target_forwards_per_token == pytest.approx(6 / 22)
    assert statistics.tokens_per_target_forward == pytest.approx(22 / 6)
    assert statistics.verification == "greedy"
    assert statistics.lossless is True
    (row,) = statistics.per_row
    assert row.per_step_accepted == statistics.per_step_accepted
    assert "4.20 tokens per step" in str(statistics)


# -- batches: one entry a step for all rows, as in plain decoding, and 0 behind a row's end


@cache
def batch_setting(eos_offset: int | None):
    """Plain and dflow outputs of one padded batch, and where its rows end. Eager, which returns attentions."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    arguments = {"attention_mask": MASK, **ASKS, "repetition_penalty": 1.2}
    text = kit.plain_greedy(target, IDS, BATCH_TOKENS + 8, **arguments)
    eos = None if eos_offset is None else int(text[0, WIDTH + eos_offset])
    arguments |= {"return_dict_in_generate": True, "eos_token_id": eos, "pad_token_id": 0}
    plain = kit.plain_greedy(target, IDS, BATCH_TOKENS, **arguments)
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
    drafter.pattern, drafter.offset = PATTERN, 2
    drafter.follow_rows([(text[i, WIDTH - LENGTHS[row] :], LENGTHS[row]) for i, row in enumerate(ROWS)])
    output = kit.dflow_greedy(target, drafter, IDS, max_new_tokens=BATCH_TOKENS, **arguments)
    words = text[:, WIDTH : WIDTH + BATCH_TOKENS].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token == eos), BATCH_TOKENS) for row in words]
    return target, plain, output, ends


def entries(output, name: str, step: int) -> list[torch.Tensor]:
    entry = getattr(output, name)[step]
    return [entry] if isinstance(entry, torch.Tensor) else list(entry)


@pytest.mark.parametrize("name", ["scores", "logits", "hidden_states", "attentions"])
@pytest.mark.parametrize("eos_offset", [None, 5])
def test_one_entry_a_step(name, eos_offset):
    """D4: entries of another row or step, keys counted in cache columns instead of tokens, holes among them, or
    something else than 0 behind a row's end."""
    _, plain, output, ends = batch_setting(eos_offset)
    kit.assert_not_vacuous(output.statistics)
    assert torch.equal(output.sequences, plain.sequences)
    assert len(getattr(output, name)) == len(getattr(plain, name)) == max(ends)
    for step in range(max(ends)):
        for ours, theirs in zip(entries(output, name, step), entries(plain, name, step), strict=True):
            assert ours.shape == theirs.shape
            for row, end in enumerate(ends):
                if step < end:
                    torch.testing.assert_close(ours[row], theirs[row], atol=BATCHED, rtol=BATCHED)
                else:
                    assert not ours[row].any()
    assert eos_offset is None or min(ends) < max(ends)


def test_transition_scores_of_a_batch():
    """D4: scores whose number or order does not fit the sequences."""
    target, plain, output, ends = batch_setting(5)
    ours, theirs = (
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (output, plain)
    )
    assert ours.shape == theirs.shape == (3, max(ends))
    for row, end in enumerate(ends):
        torch.testing.assert_close(ours[row, :end], theirs[row, :end], atol=BATCHED, rtol=BATCHED)
    assert ours.isfinite().all()


def test_statistics_of_a_batch():
    """Steps of several rows counted once, or forwards that served three rows counted three times."""
    statistics = batch_setting(None)[2].statistics
    rows = statistics.per_row
    assert statistics.per_step_accepted == [length for row in rows for length in row.per_step_accepted]
    assert statistics.num_output_tokens == sum(row.num_output_tokens for row in rows) == 3 * BATCH_TOKENS
    assert statistics.num_target_forwards == max(row.num_target_forwards for row in rows)
    assert statistics.num_draft_forwards == max(row.num_draft_forwards for row in rows)
    assert statistics.verification == "greedy" and statistics.lossless and not statistics.per_row[0].per_row
