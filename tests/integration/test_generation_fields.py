"""Every field of `GenerationConfig`: the same result as plain decoding, or refused with these words.

A field that a new release of transformers adds makes this fail until somebody has found out which of the two it is.
"""

import pytest
import torch
from kit import PatternDrafter, assert_not_vacuous, plain_greedy, prompt_of, tiny_drafter, tiny_tokenizer
from transformers import CompileConfig, GenerationConfig, __version__
from transformers.generation.configuration_utils import ContinuousBatchingConfig

NEW_TOKENS, EOS = 24, 11  # greedy: 49 38 27 56 8 38 2 7 6 38 24 35, then 49 for ever
PROMPT = prompt_of(9)
FLOAT32 = 1e-4  # scores are float32, and a block sums in another order than single tokens
NEWEST = "5.24"

# Greedy text and scores equal plain decoding's under the same options, which change the text.
SAME = {
    "bad_words_ids": {"bad_words_ids": [[27], [28], [24, 35], [3, 4]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 64, 2))},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "eos_token_id": {"eos_token_id": [EOS, 24]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (6, 1.4), "eos_token_id": EOS},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "guidance_scale": {"guidance_scale": 1.7},
    "guidance_scale, negative prompt": {"guidance_scale": 2.0, "negative_prompt_ids": prompt_of(4, seed=3)},
    "max_length": {"max_length": 9 + 17},
    "max_new_tokens": {"max_new_tokens": 17},
    "min_length": {"min_length": 18, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": EOS, "sequence_bias": [[[EOS], 6.0]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "sequence_bias": [[[7], 2.5]]},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition_penalty, several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [13, 28]},
    "sequence_bias": {"sequence_bias": [[[5], 2.5], [[5, 9], 2.0], [[20], -5.0]]},
    "stop_strings": {"stop_strings": ["My"], "tokenizer": tiny_tokenizer()},
    "suppress_tokens": {"suppress_tokens": list(range(0, 64, 3))},
    "watermarking_config": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "lefthash"}},
    "watermarking_config, selfhash": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}},
}
# The same, by options that do not change the text.
NEUTRAL = {
    "bos_token_id": {"bos_token_id": 5},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "disable_compile": {"disable_compile": True},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "max_cache_len": {"max_cache_len": 64},
    "max_time": {"max_time": 1e6},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 5},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "use_cache": {"use_cache": True},
    "compile_config": {"compile_config": CompileConfig()},  # of static caches: test_static_compiled.py
    "cache_config": {"cache_config": {"backend": "quanto"}},  # of quantised caches, which are refused
    # Of beams and of other generators; plain greedy decoding does not read them either.
    "continuous_batching_config": {"continuous_batching_config": ContinuousBatchingConfig()},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 2.0},
    "low_memory": {"low_memory": True},
    "num_beam_groups": {"num_beam_groups": 2},
    # Of classic assisted generation: the drafter's block and num_draft_tokens decide.
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "is_assistant": {"is_assistant": False},  # set by transformers; True fails in plain decoding as well
    "max_matching_ngram_size": {"max_matching_ngram_size": 4},
    "num_assistant_tokens": {"num_assistant_tokens": 2},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "target_lookbehind": {"target_lookbehind": 3},
}
# Sampled: each token's law is plain decoding's behind the same text (test_sampling_law.py has the law of the loop).
SAMPLED = {
    "do_sample": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "num_return_sequences": {"num_return_sequences": 3},
    "temperature, all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
}
# Refused by name: test_refusals.py.
REFUSED = {
    "assistant_early_exit", "assistant_ensemble_weight", "constraints", "dola_layers", "force_words_ids", "num_beams",
    "penalty_alpha", "prompt_lookup_num_tokens", "token_healing", "use_mtp",
}  # fmt: skip
NOT_OPTIONS = {"speculation_type", "transformers_version"}  # the flag itself, and who wrote the file


def fields() -> set[str]:
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def test_every_field_is_here():
    """A new option that nobody has looked at, silently ignored."""
    known = {name.split(",")[0] for name in (*SAME, *NEUTRAL, *SAMPLED)} | REFUSED | NOT_OPTIONS
    assert fields() <= known, sorted(fields() - known)
    if __version__.startswith(NEWEST):
        assert known <= fields(), sorted(known - fields())


def present(names):
    return [name for name in names if name.split(",")[0] in fields()]


def following(target, texts):
    drafter = tiny_drafter(target, drafter_class=PatternDrafter)
    drafter.pattern = [5, 1, 0, 3]
    return drafter.follow_rows([(text, PROMPT.shape[1]) for text in texts])


@pytest.mark.parametrize("name", present({**SAME, **NEUTRAL}))
def test_same_result(name, target):
    """An option that reaches plain decoding only, the bonus token only, or another prefix; or a row of this table that
    shows nothing."""
    options = {**SAME, **NEUTRAL}[name]
    length = {} if {"max_length", "max_new_tokens"} & set(options) else {"max_new_tokens": NEW_TOKENS}
    slack = {"max_new_tokens": NEW_TOKENS + 8} if name != "forced_eos_token_id" else length
    alone = {key: value for key, value in options.items() if not key.startswith(("output", "return", "max_"))}
    if name in NEUTRAL:
        text = plain_greedy(target, PROMPT, NEW_TOKENS + 8)
    else:
        text = target.generate(PROMPT, do_sample=False, **alone, **slack)
    drafted = {"assistant_model": following(target, [text]), "speculation_type": "dflow"}
    arguments = {**options, **length, "do_sample": False, "return_dict_in_generate": True}
    if name in SAME:
        arguments["output_scores"] = True
    plain, ours = target.generate(PROMPT, **arguments), target.generate(PROMPT, **arguments, **drafted)
    for field in ("scores", "logits", "hidden_states", "attentions"):
        is_asked = f"output_{field}" in arguments
        assert (getattr(plain, field) is None) == (getattr(ours, field) is None) != is_asked
        torch.testing.assert_close(getattr(ours, field), getattr(plain, field), atol=FLOAT32, rtol=FLOAT32)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.equal(plain.sequences, plain_greedy(target, PROMPT, NEW_TOKENS)) == (name in NEUTRAL)
    assert_not_vacuous(ours.statistics)


@pytest.mark.parametrize("name", present(SAMPLED))
def test_same_law(name, target):
    """A warper that reaches drafts or target only, positions that swap their prefixes, or rows of one prompt that share
    a law by mistake."""
    options = {"do_sample": True, "top_k": 0, "temperature": 0.4, **SAMPLED[name]}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    drafter = following(target, [plain_greedy(target, PROMPT, NEW_TOKENS)] * options.get("num_return_sequences", 1))
    torch.manual_seed(0)
    ours = target.generate(PROMPT, **options, max_new_tokens=12, assistant_model=drafter, speculation_type="dflow")
    assert ours.statistics.num_accepted_draft_tokens > 0
    rows = options.pop("num_return_sequences", 1)
    assert ours.sequences.shape == (rows, PROMPT.shape[1] + 12)
    for i, scores in enumerate(ours.scores):
        prefix = ours.sequences[:, : PROMPT.shape[1] + i]
        plain = target.generate(prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=1, **options).scores[0]
        assert torch.equal(scores.isfinite(), plain.isfinite())
        torch.testing.assert_close(scores, plain, atol=FLOAT32, rtol=FLOAT32)
        assert scores.gather(1, ours.sequences[:, prefix.shape[1]][:, None]).isfinite().all()
