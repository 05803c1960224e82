"""Processors, grammars, stop strings and criteria in a batch: each row is asked about alone, as in a call for it."""

import threading

import pytest
import torch
from batches import LENGTHS, SLACK, padded, prompt, target_of
from kit import (
    VOCAB_SIZE,
    NudgedDrafter,
    PatternDrafter,
    RecordingStreamer,
    assert_not_vacuous,
    dflow_greedy,
    plain_greedy,
    tiny_drafter,
    tiny_tokenizer,
)
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
)

from hf_dflow import AcceptanceProcessor, DFlowGenerationConfig, UnsupportedGenerationError

NEW_TOKENS = 20
ROWS = [0, 1, 3]
WIDTH = max(LENGTHS[row] for row in ROWS)
IDS, MASK = padded([prompt(row) for row in ROWS])
EOS = 11


class Counting(LogitsProcessor):
    """Keeps state from call to call: what it forbids depends on how often it was asked. Knows one row only."""

    def __init__(self, asked=None):
        self.count, self.asked = 0, asked

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        if self.asked is not None:
            self.asked.append(input_ids[0].tolist())
        self.count += 1
        return scores.index_fill(-1, scores[0].topk(3).indices[: self.count % 3], -torch.inf)


class Flip(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.where(torch.arange(scores.shape[-1]) % 2 == input_ids[:, -1:] % 2, scores, scores - 3.0)


def automaton(row, input_ids):
    """A language of its own for each row."""
    return [token for token in range(1, 63) if (token + int(input_ids[-1])) % (row + 2)]


NEGATIVE = torch.tensor([[5, 9], [8, 2], [40, 41]])
OPTIONS = {
    "repetition penalty": lambda row: {"repetition_penalty": 1.5},
    "no repeated n-grams": lambda row: {"no_repeat_ngram_size": 2},
    "encoder penalty": lambda row: {"encoder_repetition_penalty": 3.0},
    "encoder n-grams": lambda row: {"encoder_no_repeat_ngram_size": 1},
    "minimum length": lambda row: {"min_new_tokens": 9, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "forced end": lambda row: {"forced_eos_token_id": EOS},
    "decay": lambda row: {"exponential_decay_length_penalty": (6, 1.4), "eos_token_id": EOS},
    "guidance": lambda row: {"guidance_scale": 1.7},
    "guidance, negative prompts": lambda row: {
        "guidance_scale": 2.0,
        "negative_prompt_ids": NEGATIVE if row is None else NEGATIVE[row : row + 1],
    },
    "watermark": lambda row: {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}},
    "synthid": lambda row: {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3], sampling_table_size=16)
    },
    "grammar": lambda row: {
        "prefix_allowed_tokens_fn": automaton if row is None else lambda _, ids: automaton(row, ids)
    },
    "own, pure": lambda row: {"logits_processor": LogitsProcessorList([Flip()])},
    "own, stateful": lambda row: {"logits_processor": LogitsProcessorList([Counting()])},
}


def drafter_for(texts, drafter_class=PatternDrafter):
    drafter = tiny_drafter(target_of(), 8, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [5, 1, 0, 3], 1
    return drafter.follow_rows([(text[WIDTH - LENGTHS[row] :], LENGTHS[row]) for text, row in zip(texts, ROWS)])  # noqa: B905


def alone(row: int, new_tokens: int = NEW_TOKENS, **options):
    """Ids that plain greedy decoding gives for one row with the batch's padding."""
    one = slice(row, row + 1)
    return plain_greedy(target_of(), IDS[one], new_tokens, attention_mask=MASK[one], pad_token_id=0, **options)[0]


def batch(texts, **options):
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **options}
    return dflow_greedy(target_of(), drafter_for(texts), IDS, attention_mask=MASK, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_processors_judge_each_row_alone(name):
    """A7 in a batch: a processor that is shown several rows at once, another row's state, or the wrong row's number."""
    make = OPTIONS[name]
    slack = 0 if name == "forced end" else SLACK
    texts = [alone(row, NEW_TOKENS + slack, **make(row)) for row in range(3)]
    expected = [alone(row, **make(row)).tolist()[WIDTH:] for row in range(3)]
    output = batch(texts, **make(None))
    for row in range(3):
        found = output.sequences[row, WIDTH:].tolist()
        assert found == expected[row] + [0] * (len(found) - len(expected[row]))
    assert_not_vacuous(output.statistics)
    assert expected != [alone(row).tolist()[WIDTH:] for row in range(3)]


def test_a_stateful_processor_is_asked_once_for_each_token_of_each_row():
    """A7: state shared by rows; rejected drafts shown; prefixes of neighbours."""
    asked = [[] for _ in range(4)]
    texts = [
        alone(row, NEW_TOKENS + SLACK, logits_processor=LogitsProcessorList([Counting(asked[row])])) for row in range(3)
    ]

    class Shared(list):
        def __deepcopy__(self, memo):
            return self  # one list for all copies

    together = Shared()
    output = batch(texts, logits_processor=LogitsProcessorList([Counting(together)]))
    assert_not_vacuous(output.statistics)
    expected = [prefix for row in asked[:3] for prefix in row if len(prefix) < WIDTH + NEW_TOKENS]
    assert sorted(map(tuple, together)) == sorted(map(tuple, expected))


def test_a_processor_that_cannot_be_copied_is_refused():
    """Rows that share a lock, a file or a model's state without a word."""

    class Locked(Flip):
        def __init__(self):
            self.lock = threading.Lock()

    calls = []
    handle = target_of().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UnsupportedGenerationError, match="Locked"):
            dflow_greedy(
                target_of(), tiny_drafter(target_of()), IDS, attention_mask=MASK, max_new_tokens=4,
                logits_processor=LogitsProcessorList([Locked()]),
            )  # fmt: skip
    finally:
        handle.remove()
    assert not calls


@pytest.mark.parametrize("offset", [0, 3, 4, 9, 12])
def test_stop_strings_of_a_batch(offset):
    """A stop string looked for in padding, in a neighbour's text, or at the ends of blocks only."""
    tokenizer = tiny_tokenizer()
    texts = [alone(row, NEW_TOKENS + SLACK) for row in range(3)]
    stop = tokenizer.decode(texts[1][WIDTH + offset - (offset > 0) : WIDTH + offset + 1])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = [alone(row, **options).tolist()[WIDTH:] for row in range(3)]
    output = batch(texts, **options)
    longest = max(map(len, expected))
    assert [output.sequences[row, WIDTH:].tolist() for row in range(3)] == [
        one + [0] * (longest - len(one)) for one in expected
    ]
    assert len(expected[1]) <= offset + 1


class Fires(StoppingCriteria):
    def __init__(self):
        self.asked = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= WIDTH + 3 + int(input_ids[0, WIDTH - 1]) % 5] * len(input_ids))


def test_criteria_of_a_batch():
    """A criterion that ends all rows when it ends one, or is asked about a row that has ended."""
    texts, expected, asked = [alone(row, NEW_TOKENS + SLACK) for row in range(3)], [], []
    for row in range(3):
        criterion = Fires()
        expected.append(alone(row, stopping_criteria=StoppingCriteriaList([criterion])).tolist()[WIDTH:])
        asked += criterion.asked
    criterion = Fires()
    output = batch(texts, stopping_criteria=StoppingCriteriaList([criterion]))
    longest = max(map(len, expected))
    assert [output.sequences[row, WIDTH:].tolist() for row in range(3)] == [
        one + [0] * (longest - len(one)) for one in expected
    ]
    assert len({len(one) for one in expected}) > 1
    assert sorted(criterion.asked) == sorted(asked)


def test_no_time_left_in_a_batch():
    """max_time looked at only when all rows have ended."""
    assert batch([alone(row) for row in range(3)], max_time=0.0).statistics.num_output_tokens == 3


def test_rows_that_may_end_apart_need_a_padding_token():
    """Rows padded with a token that means something."""
    target = target_of()
    pad, target.generation_config.pad_token_id = target.generation_config.pad_token_id, None
    try:
        with pytest.raises(UnsupportedGenerationError, match="pad_token_id"):
            dflow_greedy(
                target, tiny_drafter(target), IDS, attention_mask=MASK, max_new_tokens=4,
                stopping_criteria=StoppingCriteriaList([Fires()]),
            )  # fmt: skip
    finally:
        target.generation_config.pad_token_id = pad


@pytest.mark.parametrize("streamer", [RecordingStreamer(), TextStreamer(tiny_tokenizer())])
def test_streamed_batches_are_refused(streamer):
    """D4: rows streamed in turns that no reader can tell apart."""
    calls = []
    handle = target_of().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match=r"batch of 3|batch size 1"):
            dflow_greedy(
                target_of(), tiny_drafter(target_of()), IDS, attention_mask=MASK, max_new_tokens=4, streamer=streamer
            )
    finally:
        handle.remove()
    assert not calls


class Learns(AcceptanceProcessor):
    """Biases drafts by what it has seen rejected so far: state that rows must not share."""

    def __init__(self):
        self.rejected = torch.zeros(VOCAB_SIZE)

    def adjust_draft_logits(self, draft_logits, feedback):
        assert draft_logits.shape[0] == 1 and (feedback is None or feedback.is_fed.shape[0] == 1)
        if feedback is not None:
            stale = torch.where(feedback.is_fed[..., None], feedback.target_logits, 0.0).mean(dim=1)
            draft_logits = draft_logits + 0.05 * stale[:, None]
        return draft_logits - self.rejected

    def observe(self, draft, verification):
        assert draft.token_ids.shape[0] == verification.scores.shape[0] == 1
        self.rejected[draft.token_ids[0, int(verification.accepted_length) :]] += 0.4


def test_acceptance_processors_learn_one_row():
    """What is learned online shared by rows: acceptance, and with sampling the text, depend on the neighbours."""
    texts = [alone(row, NEW_TOKENS + SLACK) for row in range(3)]

    def run(ids, mask, drafter, processors):
        drafter.nudge = 3.5
        config = DFlowGenerationConfig(
            acceptance_processors=processors, max_new_tokens=NEW_TOKENS, pad_token_id=0, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        return target_of().generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)

    together = run(IDS, MASK, drafter_for(texts, NudgedDrafter), [Learns()])
    assert_not_vacuous(together.statistics)
    lengths = [row.per_step_accepted for row in together.statistics.per_row]
    for row in range(3):
        one = slice(row, row + 1)
        drafter = drafter_for(texts, NudgedDrafter)
        drafter.follow(texts[row][WIDTH - LENGTHS[ROWS[row]] :], LENGTHS[ROWS[row]])
        own = run(IDS[one], MASK[one], drafter, [Learns()])
        assert own.statistics.per_step_accepted == lengths[row]
        assert torch.equal(own.sequences[0], together.sequences[row])
    without = run(IDS, MASK, drafter_for(texts, NudgedDrafter), None)
    assert [row.per_step_accepted for row in without.statistics.per_row] != lengths


def test_threshold_in_a_batch():
    """I4: a relaxed rule that depends on the neighbours, or is not announced for each row."""
    config = DFlowGenerationConfig(
        acceptance_threshold=0.05, max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True
    )
    drafter = tiny_drafter(target_of(), 8)
    arguments = {"assistant_model": drafter, "generation_config": config, "do_sample": False}
    together = target_of().generate(IDS, attention_mask=MASK, **arguments)
    assert not together.statistics.lossless
    assert sum(together.statistics.per_step_accepted) > 0
    for row in range(3):
        own = target_of().generate(IDS[row : row + 1], attention_mask=MASK[row : row + 1], **arguments)
        assert torch.equal(own.sequences[0], together.sequences[row])
        assert own.statistics.per_step_accepted == together.statistics.per_row[row].per_step_accepted
        assert not together.statistics.per_row[row].lossless
