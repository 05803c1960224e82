"""Every logits processor judges every committed token as in plain decoding, on the prefix that plain decoding has."""

import pytest
import torch
from kit import (
    MASK_TOKEN_ID,
    VOCAB_SIZE,
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
from transformers import LogitsProcessor, LogitsProcessorList, set_seed

from hf_dflow import AcceptanceProcessor, DFlowGenerationConfig, UnsupportedGenerationError

NEW_TOKENS, EOS, BANNED = 30, 11, 7
PATTERN = [5, 1, 0, 3]
PROCESSED_BY_DRAFTS_TOO = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "sequence_bias": [[[BANNED], 2.5]]},
    "sequence_bias": {"sequence_bias": [[[5], 2.5], [[5, 9], 2.0], [[20], -5.0]]},
    "bad_words_ids": {"bad_words_ids": [[13], [28], [47], [3, 4]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "min_length": {"min_length": 18, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB_SIZE, 3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, VOCAB_SIZE, 2))},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay": {"exponential_decay_length_penalty": (6, 1.4), "eos_token_id": EOS},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [13, 28], "top_k": None},
}
HARMLESS = {
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
}
# Not known to be pure functions: they judge target rows one by one, and drafts not at all.
JUDGED_ONE_BY_ONE = {
    "guidance_scale": {"guidance_scale": 1.7},
    "guidance with a negative prompt": {"guidance_scale": 2.0, "negative_prompt_ids": prompt_of(4, seed=3)},
    "watermark": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "lefthash"}},
    "watermark, selfhash": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}},
}
WARPERS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "top_h": {"top_h": 0.4},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
}


class Clairvoyant(AcceptanceProcessor):
    """Drafts from the target's own law along its likeliest continuation: sampled drafts are then accepted as well."""

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


def _clairvoyant(target, prompt):
    return tiny_drafter(target, 5, generation_defaults={"acceptance_processors": [Clairvoyant(target, prompt)]})


def _following(drafter_class, target, prompt, pattern=None, **kwargs):
    """A drafter that follows what `target` says alone under `kwargs`."""
    drafter = scripted(drafter_class, target, prompt, 1, pattern=pattern)
    length = {} if "forced_eos_token_id" in kwargs else {"max_new_tokens": NEW_TOKENS + 8}
    text = plain_greedy(target, prompt, **{"max_new_tokens": NEW_TOKENS, **length}, **kwargs)
    return drafter.follow(text, prompt.shape[1])


@pytest.mark.parametrize("name", {**PROCESSED_BY_DRAFTS_TOO, **HARMLESS, **JUDGED_ONE_BY_ONE})
def test_greedy_equals_plain(name):
    """Catches a processor that is skipped, applied to the bonus token only, or shown another prefix."""
    options = {**PROCESSED_BY_DRAFTS_TOO, **HARMLESS, **JUDGED_ONE_BY_ONE}[name]
    target, prompt = tiny_target(), prompt_of(9)
    drafter = _following(PatternDrafter, target, prompt, PATTERN, **options)
    kwargs = {**options, "return_dict_in_generate": True, "output_scores": True, "max_new_tokens": NEW_TOKENS}
    expected = target.generate(prompt, do_sample=False, **kwargs)
    out = dflow_greedy(target, drafter, prompt, **kwargs)
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.scores) == len(expected.scores)
    for mine, plain in zip(out.scores, expected.scores, strict=True):
        assert torch.allclose(mine, plain, rtol=1e-4, atol=1e-4)
    assert_not_vacuous(out.statistics)
    if name not in HARMLESS:
        assert not torch.equal(expected.sequences, plain_greedy(target, prompt, NEW_TOKENS))


@pytest.mark.parametrize("name", WARPERS)
def test_sampling_verifies_with_the_processed_law(name):
    """Catches warpers that reach the drafts but not the target's rows, or positions that swap their prefixes."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = _clairvoyant(target, prompt)
    options = {"do_sample": True, "top_k": 0, **WARPERS[name], "return_dict_in_generate": True, "output_scores": True}
    set_seed(5)
    out = target.generate(
        prompt, assistant_model=drafter, speculation_type="dflow", max_new_tokens=NEW_TOKENS, **options
    )
    assert out.statistics.num_accepted_draft_tokens > 3
    for i, scores in enumerate(out.scores):
        prefix = out.sequences[:, : prompt.shape[1] + i]
        mask = torch.ones_like(prefix)  # else a sampled 0, the pad token, is hidden
        plain = target.generate(prefix, attention_mask=mask, max_new_tokens=1, **options).scores[0]
        assert torch.equal(scores.isfinite(), plain.isfinite())
        assert torch.allclose(scores, plain, rtol=1e-4, atol=1e-4)
        assert scores[0, out.sequences[0, prefix.shape[1]]].isfinite()


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("allowed", [[MASK_TOKEN_ID], [20, 21]])
def test_a_drafter_that_may_say_nothing_legal(do_sample, verification, allowed):
    """Catches NaN from an empty draft law: all that the drafter knows is suppressed, the target goes on alone."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = tiny_drafter(target, 4, output_head="own", vocab_size=VOCAB_SIZE if len(allowed) == 1 else 16,
                           mask_token_id=MASK_TOKEN_ID if len(allowed) == 1 else 15)  # fmt: skip
    suppressed = [token for token in range(VOCAB_SIZE) if token not in allowed]
    config = DFlowGenerationConfig(
        do_sample=do_sample,
        verification=verification,
        suppress_tokens=suppressed,
        max_new_tokens=12,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    set_seed(2)
    out = target.generate(prompt, assistant_model=drafter, generation_config=config)
    assert out.sequences.shape[1] == prompt.shape[1] + 12
    assert set(out.sequences[0, prompt.shape[1] :].tolist()) <= set(allowed)
    assert out.statistics.num_accepted_draft_tokens == 0


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


class Counting(LogitsProcessor):
    """Keeps state from call to call: what it forbids depends on how often it was asked."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        forbidden = scores[0].topk(3).indices[: len(self.prefixes) % 3]
        return scores.index_fill(-1, forbidden, -torch.inf)


@pytest.mark.parametrize("processor", [Flip, InPlaceFlip, Ban, Counting])
def test_own_processor_equals_plain(processor):
    """Catches a processor asked about drafts that are then rejected, asked twice, or given rows it may overwrite."""
    target, prompt = tiny_target(), prompt_of(9)
    mine, ahead = processor(), processor()
    plain = Flip() if processor is InPlaceFlip else processor()  # in place, plain generate spoils its raw logits
    drafter = _following(PatternDrafter, target, prompt, PATTERN, logits_processor=LogitsProcessorList([ahead]))
    expected = plain_greedy(
        target, prompt, NEW_TOKENS, logits_processor=LogitsProcessorList([plain]), output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    out = dflow_greedy(
        target, drafter, prompt, max_new_tokens=NEW_TOKENS, logits_processor=LogitsProcessorList([mine]),
        output_logits=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, expected.sequences)
    assert_not_vacuous(out.statistics)
    for mine_raw, plain_raw in zip(out.logits, expected.logits, strict=True):
        assert torch.allclose(mine_raw, plain_raw, rtol=1e-4, atol=1e-4)
    if processor is Counting:
        assert mine.prefixes == plain.prefixes


class SayBanned(ScriptedDrafter):
    """Right in every other slot, the banned token in between."""

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, BANNED if (slot + step) % 3 == 0 else right)


class Drafted(AcceptanceProcessor):
    def __init__(self):
        self.ids = []

    def __deepcopy__(self, memo):
        return self

    def observe(self, draft, verification):
        self.ids.extend(draft.token_ids.flatten().tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_banned_token_is_never_emitted_though_drafted(do_sample):
    """Catches verification against raw logits: a sampled or argmax draft of the banned token would pass."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = _following(SayBanned, target, prompt, logits_processor=LogitsProcessorList([Ban()]))
    seen = Drafted()
    drafter.config.generation_defaults = {"acceptance_processors": [seen]}
    for seed in range(3):
        set_seed(seed)
        out = target.generate(
            prompt,
            assistant_model=drafter,
            speculation_type="dflow",
            do_sample=do_sample,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            logits_processor=LogitsProcessorList([Ban()]),
        )
        assert BANNED not in out[0, prompt.shape[1] :].tolist()
    assert seen.ids.count(BANNED) > 5


def test_sampling_asks_a_stateful_processor_once_for_each_token():
    """Catches a processor that is asked about rejected drafts, or not about the bonus token."""
    target, prompt = tiny_target(), prompt_of(9)
    drafter = _clairvoyant(target, prompt)
    asked = Counting()
    set_seed(4)
    out = target.generate(
        prompt, assistant_model=drafter, speculation_type="dflow", do_sample=True, max_new_tokens=NEW_TOKENS,
        logits_processor=LogitsProcessorList([asked]), return_dict_in_generate=True,
    )  # fmt: skip
    text = out.sequences[0].tolist()
    assert asked.prefixes == [text[:end] for end in range(prompt.shape[1], len(text))]
    assert out.statistics.verification == "token" and out.statistics.num_accepted_draft_tokens > 3
    assert_not_vacuous(out.statistics)


def test_block_verification_of_unknown_processors_is_refused():
    """Catches block verification that silently becomes another rule, or shows the processor a rejected path."""
    target, prompt = tiny_target(), prompt_of(9)
    config = DFlowGenerationConfig(do_sample=True, verification="block", max_new_tokens=4, pad_token_id=0)
    with pytest.raises(UnsupportedGenerationError, match="Counting"):
        target.generate(
            prompt,
            assistant_model=tiny_drafter(target, 4),
            generation_config=config,
            logits_processor=LogitsProcessorList([Counting()]),
        )
