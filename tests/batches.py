"""Batches of prompts for the tests of ragged decoding, and what each row says alone."""

from functools import cache

import torch
from kit import PatternDrafter, decode, plain_greedy, prompt_of, shared_target, tiny_drafter

LENGTHS = (7, 12, 1, 3, 12, 9, 2, 20)  # the fifth prompt equals the second
SLACK = 8  # scripts know so much more than any row says


def target_of(family: str = "llama"):
    """SDPA, because a padding row of an eager float64 mask is NaN (see `kit.tiny_target`)."""
    return shared_target(family, attention="sdpa")


def prompt(row: int) -> torch.Tensor:
    """Prompt `[1, T]` of row `row`."""
    return prompt_of(LENGTHS[row], seed=1 if row == 4 else row)


def padded(prompts: list[torch.Tensor], width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, longest]` of prompts `[1, T]`, padded on the left with 0 (to `width` if that is more)."""
    longest = max(width, *(one.shape[1] for one in prompts))
    ids = torch.cat([torch.nn.functional.pad(one, (longest - one.shape[1], 0)) for one in prompts])
    mask = [torch.arange(longest)[None] >= longest - one.shape[1] for one in prompts]
    return ids, torch.cat(mask).long()


@cache
def text(row: int, new_tokens: int, family: str = "llama") -> torch.Tensor:
    """What plain greedy decoding says to row `row` alone, without padding: `[1, T + new_tokens]`."""
    return plain_greedy(target_of(family), prompt(row), new_tokens)


def following(drafter_class, rows, new_tokens: int, *, family: str = "llama", block_size: int = 8, **attributes):
    """A scripted drafter for the batch of `rows`; `attributes` are the script's."""
    drafter = tiny_drafter(target_of(family), block_size, drafter_class=drafter_class)
    for name, value in attributes.items():
        setattr(drafter, name, value)
    return drafter.follow_rows([(text(row, new_tokens + SLACK, family), LENGTHS[row]) for row in rows])


def generate(rows, drafter, new_tokens: int, *, family: str = "llama", width: int = 0, **options):
    """The output object of a `speculation_type="dflow"` call for the batch of `rows`, greedy unless told otherwise."""
    ids, mask = padded([prompt(row) for row in rows], width)
    arguments = options
    if "generation_config" not in options:
        greedy = {"do_sample": False, "return_dict_in_generate": True, "speculation_type": "dflow"}
        arguments = {**greedy, "max_new_tokens": new_tokens, **options}
    return target_of(family).generate(ids, attention_mask=mask, assistant_model=drafter, **arguments)


def plain_ids(row: int, new_tokens: int, eos=(), family: str = "llama") -> list[int]:
    """The new tokens of `text`, as far as the first of `eos`."""
    tokens = text(row, new_tokens, family)[0, LENGTHS[row] :].tolist()
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), new_tokens)
    return tokens[:end]


def new_tokens_of(output, row: int, rows) -> list[int]:
    """What row `row` of a batch of `rows` says behind its prompt, padding included."""
    return output.sequences[row, max(LENGTHS[i] for i in rows) :].tolist()


# -- three rows whose options differ: what each says alone has the batch's padding, which processors may read

ROWS = (0, 1, 3)
IDS, MASK = padded([prompt(row) for row in ROWS])
WIDTH = IDS.shape[1]


def alone(place: int, new_tokens: int, **options) -> torch.Tensor:
    """Ids `[T]` of plain greedy decoding for one of the three rows."""
    one = slice(place, place + 1)
    return plain_greedy(target_of(), IDS[one], new_tokens, attention_mask=MASK[one], pad_token_id=0, **options)[0]


def drafter_for(texts, drafter_class=PatternDrafter):
    """A drafter that follows `texts`, ids with padding, of the three rows; each row is a step ahead of the last."""
    drafter = tiny_drafter(target_of(), 8, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [5, 1, 0, 3], 1
    rows = zip(texts, ROWS, strict=True)
    return drafter.follow_rows([(text[WIDTH - LENGTHS[row] :], LENGTHS[row]) for text, row in rows])


def decode_three(drafter, new_tokens: int, **options):
    """The output object of a call for the three rows."""
    return decode(target_of(), drafter, IDS, new_tokens, attention_mask=MASK, **options)


def new_ids(output, place: int) -> list[int]:
    """Of one of the three rows, padding included."""
    return output.sequences[place, WIDTH:].tolist()


def padded_texts(texts, pad: int = 0) -> list[list[int]]:
    """New tokens of `texts`, ids with the prompts' padding, padded with `pad` to the longest."""
    longest = max(len(text) for text in texts)
    return [text[WIDTH:].tolist() + [pad] * (longest - len(text)) for text in texts]
