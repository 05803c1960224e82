"""Batches of prompts for the tests of ragged decoding, and what each row says alone."""

from functools import cache

import torch
from kit import plain_greedy, prompt_of, tiny_drafter, tiny_target

LENGTHS = (7, 12, 1, 3, 12, 9, 2, 20)  # the fifth prompt equals the second
SLACK = 8  # scripts know so much more than any row says


_target = cache(tiny_target)


def target_of(family: str = "llama"):
    """SDPA, because a padding row of an eager float64 mask is NaN (see `kit.tiny_target`)."""
    return _target(family, attention="sdpa")


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


def said(row: int, new_tokens: int, eos=(), family: str = "llama") -> list[int]:
    """The new tokens of `text`, as far as the first of `eos`."""
    tokens = text(row, new_tokens, family)[0, LENGTHS[row] :].tolist()
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), new_tokens)
    return tokens[:end]


def new_tokens_of(output, row: int, rows) -> list[int]:
    """What row `row` of a batch of `rows` says behind its prompt, padding included."""
    return output.sequences[row, max(LENGTHS[i] for i in rows) :].tolist()
