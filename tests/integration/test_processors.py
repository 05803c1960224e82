"""Every logits processor judges every committed token as in plain decoding, on the prefix that plain decoding has.

The options of `generate` that make processors: test_generation_fields.py.
"""

import threading

import kit
import pytest
import torch
from batches import SLACK, WIDTH, alone, decode_three, drafter_for, new_ids, target_of
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    set_seed,
)

from hf_dflow import AcceptanceProcessor, UnsupportedGenerationError

NEW_TOKENS, BANNED, EOS = 30, 7, 11
PROMPT = kit.prompt_of(9)
FLOAT32 = 1e-4


def following(drafter_class, target, text, prompt=PROMPT, **options):
    drafter = kit.tiny_drafter(target, 8, drafter_class=drafter_class, **options)
    drafter.pattern = [5, 1, 0, 3]
    return drafter.follow(text, prompt.shape[1])


class Clairvoyant(AcceptanceProcessor):
    """Drafts from the target's own law along its likeliest plain_ids: sampled drafts are then accepted as well."""

    def __init__(self, target, prompt):
        self.target, self.prefix = target, prompt

    def __deepcopy__(self, memo):
        return Clairvoyant(self.target, self.prefix)

    def observe(self, draft, verification):
        accepted = draft.token_ids[:, : int(verification.accepted_length)]
        self.prefix = torch.cat([self.prefix, accepted, verification.bonus_ids[:, None]], dim=1)

    def adjust_draft_logits(self, draft_logits, feedback):
        path, rows = self.prefix, []
        for _ in range(draft_logits.shape[1]):
            rows.append(self.target(path).logits[:, -1])
            path = torch.cat([path, rows[-1].argmax(-1, keepdim=True)], dim=1)
        return torch.stack(rows, dim=1).to(draft_logits)


# -- the caller's own processors (A7)


class Flip(LogitsProcessor):
    """Pure, and far from neutral."""

    def __call__(self, input_ids, scores):
        return torch.where(torch.arange(scores.shape[-1]) % 2 == input_ids[:, -1:] % 2, scores, scores - 3.0)


class InPlaceFlip(Flip):
    def __call__(self, input_ids, scores):
        return scores.copy_(super().__call__(input_ids, scores))


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, torch.tensor([BANNED]), -torch.inf)


class Asked(list):
    """Prefixes that a processor and all of its copies were asked about."""

    def __deepcopy__(self, memo):
        return self


class Counting(LogitsProcessor):
    """Keeps state from call to call: what it forbids depends on how often it was asked. Knows one row only."""

    def __init__(self):
        self.count, self.asked = 0, Asked()

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.asked.append(input_ids[0].tolist())
        self.count += 1
        return scores.index_fill(-1, scores[0].topk(3).indices[: self.count % 3], -torch.inf)


class Locked(Flip):
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize("processor", [Flip, InPlaceFlip, Ban, Counting])
def test_own_processor_equals_plain(processor, target):
    """A processor asked about drafts that are then rejected, asked twice, or given rows that it may overwrite."""
    mine, ahead = processor(), processor()
    plain = Flip() if processor is InPlaceFlip else processor()  # in place, plain generate spoils its raw logits
    text = kit.plain_greedy(target, PROMPT, NEW_TOKENS + 8, logits_processor=LogitsProcessorList([ahead]))
    options = {"output_logits": True, "return_dict_in_generate": True}
    expected = kit.plain_greedy(target, PROMPT, NEW_TOKENS, logits_processor=LogitsProcessorList([plain]), **options)
    drafter = following(kit.PatternDrafter, target, text)
    out = kit.decode(target, drafter, PROMPT, NEW_TOKENS, logits_processor=LogitsProcessorList([mine]), **options)
    assert torch.equal(out.sequences, expected.sequences)
    kit.assert_not_vacuous(out.statistics)
    torch.testing.assert_close(out.logits, expected.logits, rtol=FLOAT32, atol=FLOAT32)
    if processor is Counting:
        assert mine.asked == plain.asked


class SayBanned(kit.ScriptedDrafter):
    """Right in every other slot, the banned token in between."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, BANNED if (slot + step) % 3 == 0 else right)


class Drafted(AcceptanceProcessor):
    def __init__(self):
        self.ids = Asked()

    def observe(self, draft, verification):
        self.ids.extend(draft.token_ids.flatten().tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_banned_token_is_never_emitted_though_drafted(do_sample, target):
    """Verification against raw logits: a sampled or argmax draft of the banned token would pass."""
    text = kit.plain_greedy(target, PROMPT, NEW_TOKENS + 8, logits_processor=LogitsProcessorList([Ban()]))
    drafter, drafted = following(SayBanned, target, text), Drafted()
    drafter.config.generation_defaults = {"acceptance_processors": [drafted]}
    for seed in range(3):
        set_seed(seed)
        out = kit.decode(
            target, drafter, PROMPT, NEW_TOKENS, do_sample=do_sample, top_k=0,
            logits_processor=LogitsProcessorList([Ban()]),
        )  # fmt: skip
        assert BANNED not in out.sequences[0, PROMPT.shape[1] :].tolist()
    assert drafted.ids.count(BANNED) > 5


def test_sampling_asks_a_stateful_processor_once_for_each_token(target):
    """A processor that is asked about rejected drafts, or not about the bonus token."""
    processor, asked = Clairvoyant(target, PROMPT), Counting()
    set_seed(4)
    out = kit.decode(
        target, kit.tiny_drafter(target, 5), PROMPT, NEW_TOKENS, do_sample=True, acceptance_processors=[processor],
        logits_processor=LogitsProcessorList([asked]),
    )  # fmt: skip
    text = out.sequences[0].tolist()
    assert asked.asked == [text[:end] for end in range(PROMPT.shape[1], len(text))]
    assert out.statistics.verification == "token" and out.statistics.num_accepted_draft_tokens > 3
    kit.assert_not_vacuous(out.statistics)


def test_block_verification_of_unknown_processors_is_refused(target):
    """Block verification that silently becomes another rule, or shows the processor a rejected path."""
    processors = LogitsProcessorList([Counting()])
    with pytest.raises(UnsupportedGenerationError, match="Counting"):
        kit.decode(
            target,
            kit.tiny_drafter(target, 4),
            PROMPT,
            4,
            do_sample=True,
            verification="block",
            logits_processor=processors,
        )


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("allowed", [[kit.MASK_TOKEN_ID], [20, 21]])
def test_a_drafter_that_may_say_nothing_legal(do_sample, verification, allowed, target):
    """NaN from an empty draft law: all that the drafter knows is suppressed, the target goes on alone."""
    vocab_size = kit.VOCAB_SIZE if len(allowed) == 1 else 16
    drafter = kit.tiny_drafter(target, 4, output_head="own", vocab_size=vocab_size, mask_token_id=vocab_size - 1)
    suppressed = [token for token in range(kit.VOCAB_SIZE) if token not in allowed]
    set_seed(2)
    out = kit.decode(
        target, drafter, PROMPT, 12, do_sample=do_sample, verification=verification, suppress_tokens=suppressed
    )
    assert out.sequences.shape[1] == PROMPT.shape[1] + 12
    assert set(out.sequences[0, PROMPT.shape[1] :].tolist()) <= set(allowed)
    assert out.statistics.num_accepted_draft_tokens == 0


# -- in a batch: each row is asked about alone


def language(place, input_ids):
    """The tokens that may follow in the language of one row."""
    return [token for token in range(1, 63) if (token + int(input_ids[-1])) % (place + 2)]


NEGATIVE = torch.tensor([[5, 9], [8, 2], [40, 41]])
# Options of the whole batch (place None), and of one row alone.
OPTIONS = {
    "repetition penalty": lambda place: {"repetition_penalty": 1.5},
    "no repeated n-grams": lambda place: {"no_repeat_ngram_size": 2},
    "encoder penalty": lambda place: {"encoder_repetition_penalty": 3.0},
    "encoder n-grams": lambda place: {"encoder_no_repeat_ngram_size": 1},
    "minimum length": lambda place: {"min_new_tokens": 9, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "forced end": lambda place: {"forced_eos_token_id": EOS},
    "decay": lambda place: {"exponential_decay_length_penalty": (6, 1.4), "eos_token_id": EOS},
    "guidance": lambda place: {"guidance_scale": 1.7},
    "guidance, negative prompts": lambda place: {
        "guidance_scale": 2.0,
        "negative_prompt_ids": NEGATIVE if place is None else NEGATIVE[place : place + 1],
    },
    "watermark": lambda place: {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}},
    "synthid": lambda place: {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3], sampling_table_size=16)
    },
    "grammar": lambda place: {
        "prefix_allowed_tokens_fn": language if place is None else lambda _, ids: language(place, ids)
    },
    "own, pure": lambda place: {"logits_processor": LogitsProcessorList([Flip()])},
    "own, stateful": lambda place: {"logits_processor": LogitsProcessorList([Counting()])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_processors_judge_each_row_alone(name):
    """A7 in a batch: a processor that is shown several rows at once, another row's state, or the wrong row's number."""
    make, new_tokens = OPTIONS[name], 20
    slack = 0 if name == "forced end" else SLACK
    drafter = drafter_for([alone(place, new_tokens + slack, **make(place)) for place in range(3)])
    expected = [alone(place, new_tokens, **make(place)).tolist()[WIDTH:] for place in range(3)]
    output = decode_three(drafter, new_tokens, **make(None))
    for place in range(3):
        actual = new_ids(output, place)
        assert actual == expected[place] + [0] * (len(actual) - len(expected[place]))
    kit.assert_not_vacuous(output.statistics)
    assert expected != [alone(place, new_tokens).tolist()[WIDTH:] for place in range(3)]


def test_a_stateful_processor_is_asked_once_for_each_token_of_each_row():
    """A7: state shared by rows; rejected drafts shown; prefixes of neighbours."""
    processors, together, new_tokens = [Counting() for _ in range(3)], Counting(), 20
    texts = [
        alone(place, new_tokens + SLACK, logits_processor=LogitsProcessorList([processor]))
        for place, processor in enumerate(processors)
    ]
    output = decode_three(drafter_for(texts), new_tokens, logits_processor=LogitsProcessorList([together]))
    kit.assert_not_vacuous(output.statistics)
    asked = [prefix for processor in processors for prefix in processor.asked if len(prefix) < WIDTH + new_tokens]
    assert sorted(together.asked) == sorted(asked)


def test_a_processor_that_cannot_be_copied_is_refused():
    """Rows that share a lock, a file or a model's state without a word."""
    calls = []
    handle = target_of().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UnsupportedGenerationError, match="Locked"):
            decode_three(kit.tiny_drafter(target_of()), 4, logits_processor=LogitsProcessorList([Locked()]))
    finally:
        handle.remove()
    assert not calls


def test_a_processor_with_a_value_for_each_row_is_named(target):
    """Scores of another shape fail deep inside, in words about tensors that the caller never made."""
    prompts = torch.cat([kit.prompt_of(12, seed) for seed in (1, 4)])

    class OfEachRow:
        def __call__(self, input_ids, scores):
            return scores + torch.zeros(2, scores.shape[-1], dtype=scores.dtype)

    options = {"logits_processor": LogitsProcessorList([OfEachRow()]), "max_new_tokens": 14, "do_sample": False}
    assert target.generate(prompts, **options).shape[0] == 2
    with pytest.raises(UnsupportedGenerationError, match=r"OfEachRow.*one row of a batch at a time"):
        target.generate(prompts, assistant_model=kit.tiny_drafter(target), speculation_type="dflow", **options)


def test_a_grammar_of_each_prompt_holds_for_all_of_its_rows(target):
    """The function asked about a row where plain decoding names the prompt, so that rows get another's grammar."""
    prompts, asked = torch.cat([kit.prompt_of(12, 1), kit.prompt_of(12, 4)]), set()

    def grammar(prompt, _):
        asked.add(prompt)
        return list(range(1 + prompt % 3, 60, 3))

    options = {"prefix_allowed_tokens_fn": grammar, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    plain = target.generate(prompts, max_new_tokens=14, **options)
    named = set(asked)
    asked.clear()
    drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter)
    drafter.pattern = [5, 1, 0, 3]
    output = kit.decode(target, drafter.follow_rows([(row, prompts.shape[1]) for row in plain]), prompts, 14, **options)
    assert output.sequences.equal(plain)
    assert asked == named
    for row in output.statistics.per_row:
        kit.assert_not_vacuous(row)


# -- grammars (A6): only legal prefixes are asked about, each once

DIGITS, CLOSE, END = list(range(20, 30)), 30, 31
NUM_DIGITS = 17


class Digits:
    """`prefix_allowed_tokens_fn` of digits, then ")", then the end. Fails on anything else."""

    def __init__(self, prompt_length: int, num_digits: int = NUM_DIGITS):
        self.prompt_length, self.num_digits, self.asked = prompt_length, num_digits, []

    def __call__(self, batch_id, input_ids):
        ids = input_ids[self.prompt_length :].tolist()
        self.asked.append(ids)
        if CLOSE in ids:
            assert ids.index(CLOSE) == self.num_digits and len(ids) == self.num_digits + 1, f"illegal prefix {ids}"
            return [END]
        assert all(token in DIGITS for token in ids) and len(ids) <= self.num_digits, f"illegal prefix {ids}"
        return DIGITS if len(ids) < self.num_digits else [CLOSE]


class IllegalDrafter(kit.ScriptedDrafter):
    """Proposes letters where digits belong."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, 40 + (slot + step) % (kit.MASK_TOKEN_ID - 40))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drafter_class", [kit.PatternDrafter, IllegalDrafter, kit.OracleDrafter, kit.NudgedDrafter])
def test_output_is_in_the_language_and_only_legal_prefixes_are_asked(drafter_class, do_sample, target):
    """An automaton advanced by a rejected or illegal draft, or asked what follows the end."""
    plain, grammar = Digits(PROMPT.shape[1]), Digits(PROMPT.shape[1])
    expected = kit.plain_greedy(target, PROMPT, 40, eos_token_id=END, prefix_allowed_tokens_fn=plain)
    drafter = following(drafter_class, target, expected)
    torch.manual_seed(0)
    options = kit.SAMPLED if do_sample else {}
    out = kit.decode(target, drafter, PROMPT, 40, eos_token_id=END, prefix_allowed_tokens_fn=grammar, **options)
    ids = out.sequences[0, PROMPT.shape[1] :].tolist()
    assert ids[-2:] == [CLOSE, END] and len(ids) == NUM_DIGITS + 2 and all(token in DIGITS for token in ids[:-2])
    assert grammar.asked == [ids[:end] for end in range(len(ids))]
    assert out.statistics.num_draft_tokens > NUM_DIGITS
    if do_sample:
        return
    assert torch.equal(out.sequences, expected)
    if drafter_class in (kit.PatternDrafter, kit.NudgedDrafter):
        kit.assert_not_vacuous(out.statistics)
    else:
        assert out.statistics.per_step_accepted[:2] == ([7, 7] if drafter_class is kit.OracleDrafter else [0, 0])


@pytest.mark.parametrize("drafter_class", [kit.PatternDrafter, IllegalDrafter])
def test_a_grammar_for_each_row_of_a_batch(drafter_class):
    """An automaton that is shown its neighbour's prefix, a rejected draft, or what follows a row's end."""
    sizes = [17, 3, 9]
    plain, ours = ([Digits(WIDTH, size) for size in sizes] for _ in range(2))
    texts = [
        alone(place, 40, eos_token_id=END, prefix_allowed_tokens_fn=grammar) for place, grammar in enumerate(plain)
    ]
    out = decode_three(
        drafter_for(texts, drafter_class), 40, eos_token_id=END,
        prefix_allowed_tokens_fn=lambda row, prefix: ours[row](row, prefix),
    )  # fmt: skip
    for i, text in enumerate(texts):
        assert out.sequences[i, : len(text)].equal(text) and not out.sequences[i, len(text) :].any()
        assert ours[i].asked == plain[i].asked and len(ours[i].asked) == sizes[i] + 2
    if drafter_class is kit.PatternDrafter:
        kit.assert_not_vacuous(out.statistics)


@pytest.mark.parametrize("stop_at", [18, 26])  # within the first block; in the second, behind one that was all right
def test_a_grammar_is_not_asked_behind_a_stop(stop_at):
    """A stateful processor called for drafts behind the token at which a stopping criterion ends the text, or a
    criterion asked twice about a token."""
    target, prompt, prefixes, asked = target_of(), kit.prompt_of(12), [], []

    def grammar(_, prefix):
        prefixes.append(len(prefix))
        return list(range(64))

    def stop(input_ids, scores, **kwargs):
        asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= stop_at])

    options = {"prefix_allowed_tokens_fn": grammar, "stopping_criteria": StoppingCriteriaList([stop])}
    plain = kit.plain_greedy(target, prompt, 24, **options)
    expected = (list(prefixes), list(asked))
    prefixes.clear()
    asked.clear()
    drafter = following(kit.OracleDrafter, target, kit.plain_greedy(target, prompt, 40), prompt)
    output = kit.decode(target, drafter, prompt, 24, **options)
    assert torch.equal(output.sequences, plain)
    assert (prefixes, asked) == expected
    assert max(output.statistics.per_step_accepted) >= 2
