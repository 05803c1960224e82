"""Constrained decoding: a grammar is only ever asked about legal prefixes, each once."""

import pytest
import torch
from batches import LENGTHS, padded, prompt, target_of
from kit import (
    MASK_TOKEN_ID,
    NudgedDrafter,
    OracleDrafter,
    PatternDrafter,
    ScriptedDrafter,
    assert_not_vacuous,
    dflow_greedy,
    plain_greedy,
    prompt_of,
    scripted,
    tiny_drafter,
    tiny_target,
)

DIGITS, CLOSE, EOS = list(range(20, 30)), 30, 31
NUM_DIGITS, NEW_TOKENS = 17, 40


class Digits:
    """`prefix_allowed_tokens_fn` of: digits, then ")", then EOS. Loses its temper over anything else."""

    def __init__(self, prompt_length: int, num_digits: int = NUM_DIGITS):
        self.prompt_length, self.num_digits, self.asked = prompt_length, num_digits, []

    def __call__(self, batch_id, input_ids):
        said = input_ids[self.prompt_length :].tolist()
        self.asked.append(said)
        if CLOSE in said:
            assert said.index(CLOSE) == self.num_digits and len(said) == self.num_digits + 1, f"illegal prefix {said}"
            return [EOS]
        assert all(token in DIGITS for token in said) and len(said) <= self.num_digits, f"illegal prefix {said}"
        return DIGITS if len(said) < self.num_digits else [CLOSE]


class IllegalDrafter(ScriptedDrafter):
    """Proposes letters where digits belong."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, 40 + (slot + step) % (MASK_TOKEN_ID - 40))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drafter_class", [PatternDrafter, IllegalDrafter, OracleDrafter, NudgedDrafter])
def test_output_is_in_the_language_and_only_legal_prefixes_are_asked(drafter_class, do_sample):
    """A6: catches an automaton advanced by a rejected or illegal draft, and one that is asked what follows the end."""
    target, prompt = tiny_target(), prompt_of(9)
    kwargs = {"eos_token_id": EOS, "max_new_tokens": NEW_TOKENS}
    plain = Digits(prompt.shape[1])
    expected = plain_greedy(target, prompt, NEW_TOKENS, eos_token_id=EOS, prefix_allowed_tokens_fn=plain)
    drafter = scripted(drafter_class, target, prompt, 1, pattern=[5, 1, 0, 3]).follow(expected, prompt.shape[1])
    grammar = Digits(prompt.shape[1])
    options = {"do_sample": True, "top_k": 0} if do_sample else {}
    arguments = {**kwargs, **options, "prefix_allowed_tokens_fn": grammar}
    if do_sample:
        torch.manual_seed(0)
        out = target.generate(
            prompt, assistant_model=drafter, speculation_type="dflow", return_dict_in_generate=True, **arguments
        )
    else:
        out = dflow_greedy(target, drafter, prompt, **arguments)
        assert torch.equal(out.sequences, expected)
        assert grammar.asked == plain.asked
    said = out.sequences[0, prompt.shape[1] :].tolist()
    assert said[-2:] == [CLOSE, EOS] and len(said) == NUM_DIGITS + 2 and all(token in DIGITS for token in said[:-2])
    assert grammar.asked == [said[:end] for end in range(len(said))]
    assert out.statistics.num_draft_tokens > NUM_DIGITS
    if drafter_class in (PatternDrafter, NudgedDrafter) and not do_sample:
        assert_not_vacuous(out.statistics)
    elif drafter_class is IllegalDrafter and not do_sample:
        assert out.statistics.num_accepted_draft_tokens == 0
    elif not do_sample:
        assert out.statistics.per_step_accepted[:2] == [7, 7]


@pytest.mark.parametrize("drafter_class", [PatternDrafter, IllegalDrafter])
def test_a_grammar_for_each_row_of_a_batch(drafter_class):
    """A6: an automaton that is shown its neighbour's prefix, a rejected draft, or what follows a row's end."""
    target, rows, sizes = target_of(), [0, 1, 3], [17, 3, 9]
    ids, mask = padded([prompt(row) for row in rows])
    width = ids.shape[1]
    plain, ours = ([Digits(width, size) for size in sizes] for _ in range(2))
    texts = []
    for i, grammar in enumerate(plain):
        one = slice(i, i + 1)
        options = {"attention_mask": mask[one], "eos_token_id": EOS, "prefix_allowed_tokens_fn": grammar}
        texts.append(plain_greedy(target, ids[one], NEW_TOKENS, **options))
    drafter = tiny_drafter(target, 8, drafter_class=drafter_class)
    drafter.pattern, drafter.offset = [5, 1, 0, 3], 1
    drafter.follow_rows(
        [(text[0, width - LENGTHS[row] :], LENGTHS[row]) for text, row in zip(texts, rows, strict=True)]
    )
    out = dflow_greedy(
        target,
        drafter,
        ids,
        attention_mask=mask,
        eos_token_id=EOS,
        pad_token_id=0,
        max_new_tokens=NEW_TOKENS,
        prefix_allowed_tokens_fn=lambda row, prefix: ours[row](row, prefix),
    )
    for i, text in enumerate(texts):
        assert out.sequences[i, : text.shape[1]].tolist() == text[0].tolist()
        assert not out.sequences[i, text.shape[1] :].any()
        assert ours[i].asked == plain[i].asked and len(ours[i].asked) == sizes[i] + 2
    if drafter_class is PatternDrafter:
        assert_not_vacuous(out.statistics)
