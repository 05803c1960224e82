"""Each feature of generate with each kind of drafter, alone and in a batch: what one hides, another shows.

Right drafts fill whole blocks, wrong ones none, scripted lengths cut blocks anywhere, and the relay's drafter makes its
own. What a feature does to the text is compared with plain decoding of the same row, which has the same padding.
"""

from functools import cache

import kit
import pytest
import torch
from batches import IDS, LENGTHS, MASK, ROWS, WIDTH, alone, padded_texts, target_of
from internals import STATIC_IS_CROPPABLE
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

NEW_TOKENS, SLACK, BLOCK_SIZE = 20, 8, 8
DRAFTERS = [kit.OracleDrafter, kit.HostileDrafter, kit.PatternDrafter, kit.NudgedDrafter]


@cache
def words(row: int) -> list[int]:
    """The new tokens of row `row` without any option."""
    return alone(row, NEW_TOKENS)[WIDTH:].tolist()


def end(row: int, least: int) -> int:
    """A token that row `row` says for the first time behind `least` others."""
    new_ids = words(row)
    return next(token for i, token in enumerate(new_ids) if i >= least and token not in new_ids[:i])


class Counting(LogitsProcessor):
    """What it forbids depends on how often it was asked."""

    def __init__(self):
        self.count = 0

    def __call__(self, input_ids, scores):
        self.count += 1
        return scores.index_fill(-1, scores[0].topk(3).indices[: self.count % 3], -torch.inf)


class EndsBehind(StoppingCriteria):
    """Behind one token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == self.token) & (input_ids.shape[1] > WIDTH)


# Each makes the arguments anew: what keeps state must not keep it from call to call.
FEATURES = {
    "ends of text, one of them the padding": lambda: {
        "eos_token_id": [end(0, 4), end(1, 9)], "pad_token_id": end(1, 9)
    },
    "minimum length": lambda: {"eos_token_id": words(0)[2], "min_new_tokens": 12},
    "stop string": lambda: {
        "stop_strings": [kit.tiny_tokenizer().decode(words(0)[8:10])], "tokenizer": kit.tiny_tokenizer()
    },
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([EndsBehind(end(1, 9))])},
    "no time": lambda: {"max_time": 0.0},
    "grammar": lambda: {
        "prefix_allowed_tokens_fn": lambda _, ids: [token for token in range(1, 63) if (token + int(ids[-1])) % 3]
    },
    "stateful processor": lambda: {"logits_processor": LogitsProcessorList([Counting()])},
    "penalty": lambda: {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "prompt in chunks": lambda: {"prefill_chunk_size": 5},
    "static cache": lambda: {"cache_implementation": "static"},
    "fewer drafts": lambda: {"num_draft_tokens": 3},
    "cold sampling, token by token": lambda: {"do_sample": True, "top_k": 1, "verification": "token"},
    "cold sampling, by blocks": lambda: {"do_sample": True, "top_k": 1, "verification": "block"},
}  # fmt: skip
OURS = ("num_draft_tokens", "verification")


@cache
def plain(name: str) -> list[torch.Tensor]:
    """What plain decoding says to each row alone `[1, T]`, longer than asked for where the text goes on."""
    texts = []
    for row in range(len(ROWS)):
        options = {"do_sample": False, "pad_token_id": 0, **FEATURES[name]()}
        options = {key: value for key, value in options.items() if key not in OURS}
        one = slice(row, row + 1)
        texts.append(
            target_of().generate(IDS[one], attention_mask=MASK[one], max_new_tokens=NEW_TOKENS + SLACK, **options)
        )
    return texts


@cache
def drafter_of(drafter_class):
    drafter = kit.tiny_drafter(target_of(), BLOCK_SIZE, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [5, 1, 0, 3], 1
    return drafter


@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=["alone", "batch"])
@pytest.mark.parametrize("drafter_class", DRAFTERS)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_gives_the_plain_text(name, drafter_class, rows):
    """A1 to D4 with the four kinds of drafters: a feature that only works where blocks are short, full, or equally
    long in all rows."""
    if name == "static cache" and not STATIC_IS_CROPPABLE:
        pytest.skip("this release cannot crop static caches")
    drafter, texts = drafter_of(drafter_class), plain(name)
    drafter.follow_rows([(texts[row][0, WIDTH - LENGTHS[ROWS[row]] :], LENGTHS[ROWS[row]]) for row in rows])
    options = {"pad_token_id": 0, **FEATURES[name]()}
    output = kit.decode(target_of(), drafter, IDS[rows], NEW_TOKENS, attention_mask=MASK[rows], **options)
    expected = padded_texts([texts[row][0, : WIDTH + NEW_TOKENS] for row in rows], options["pad_token_id"])
    assert output.sequences[:, WIDTH:].tolist() == expected
    accepted = output.statistics.per_step_accepted
    if name == "no time":
        assert accepted == []
    elif drafter_class is kit.HostileDrafter:
        assert accepted and not any(accepted)
    elif drafter_class is kit.OracleDrafter:
        assert max(accepted) == (3 if name == "fewer drafts" else BLOCK_SIZE - 1)
    elif name != "fewer drafts" or drafter_class is kit.PatternDrafter:
        kit.assert_not_vacuous(output.statistics)
