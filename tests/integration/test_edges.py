"""Where callers' caches, grammars and option values meet the loop's edges."""

import pytest
import torch
from kit import OracleDrafter, cache_of, plain_greedy, prompt_of, tiny_drafter, tiny_target
from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig, StoppingCriteriaList
from transformers.generation import GenerationMixin

import hf_dflow
from hf_dflow import DFlowDecoder, UnsupportedGenerationError
from hf_dflow.generation._compat import CACHE_NAMES, is_croppable

CACHE = next(name for name in CACHE_NAMES if name in GenerationMixin.prepare_inputs_for_generation.__annotations__)


def dflow(target, ids, drafter, **kwargs):
    return target.generate(
        ids,
        assistant_model=drafter,
        speculation_type="dflow",
        do_sample=False,
        return_dict_in_generate=True,
        **kwargs,
    )


@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize("new_tokens", [3, 20])
def test_conversation_goes_on_with_new_tokens_only(only_new, new_tokens):
    """Catches: new tokens taken for cached ones when `input_ids` leave out what the cache already holds."""
    target = tiny_target("llama", attention="sdpa")
    drafter = tiny_drafter(target, 8, drafter_class=OracleDrafter)
    texts = []
    for use_drafter in (False, True):
        first = target.generate(prompt_of(5), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        cache = cache_of(first)
        whole = torch.cat([first.sequences, prompt_of(new_tokens, seed=5)], dim=1)
        ids = whole[:, cache.get_seq_length() :] if only_new else whole
        options = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 24, CACHE: cache}
        if use_drafter:
            drafter.follow(plain_greedy(target, whole, 40), whole.shape[1])
            output = dflow(target, ids, drafter, **options)
            assert max(output.statistics.per_step_accepted) >= 2
            texts.append(output.sequences)
        else:
            texts.append(target.generate(ids, do_sample=False, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("stop_at", [18, 26])  # within the first block; in the second, behind one that was all right
def test_grammar_is_not_asked_behind_a_stop(stop_at):
    """Catches: a stateful processor called for drafts behind the token at which a stopping criterion ends the text, or
    a criterion asked twice about a token."""
    target, ids = tiny_target("llama", attention="sdpa"), prompt_of(12)
    drafter = tiny_drafter(target, 8, drafter_class=OracleDrafter).follow(plain_greedy(target, ids, 40), 12)
    prefixes, asked = [], []

    def grammar(_, prefix):
        prefixes.append(len(prefix))
        return list(range(64))

    def stop(input_ids, scores, **kwargs):
        asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= stop_at])

    options = {
        "prefix_allowed_tokens_fn": grammar,
        "stopping_criteria": StoppingCriteriaList([stop]),
        "max_new_tokens": 24,
    }
    plain = target.generate(ids, do_sample=False, **options)
    expected = (list(prefixes), list(asked))
    prefixes.clear()
    asked.clear()
    output = dflow(target, ids, drafter, **options)
    assert torch.equal(output.sequences, plain)
    assert (prefixes, asked) == expected
    assert max(output.statistics.per_step_accepted) >= 2


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_callers_cache_holds_committed_tokens_only_after_an_exception(family):
    """Catches: rejected or uncommitted drafts left in a cache that the caller goes on with."""
    target, ids = tiny_target(family), prompt_of(12)
    continuation = plain_greedy(target, ids, 40)
    drafter = tiny_drafter(target, 8, drafter_class=OracleDrafter).follow(continuation, 12)

    def fails(input_ids, scores, **kwargs):
        if input_ids.shape[1] == 25:
            raise KeyError("on purpose")
        return torch.tensor([False])

    cache = DynamicCache(config=target.config)
    criteria = StoppingCriteriaList([fails])
    with pytest.raises(KeyError):
        dflow(target, ids, drafter, max_new_tokens=30, stopping_criteria=criteria, **{CACHE: cache})
    held = cache.get_seq_length()
    assert 12 <= held < 25
    whole = torch.cat([ids, torch.as_tensor(continuation).view(1, -1)[:, -40:]], dim=1)[:, : held + 1]
    again = target.generate(whole, max_new_tokens=8, do_sample=False, **{CACHE: cache})
    assert torch.equal(again, plain_greedy_ids(target, ids, held + 9 - 12))


def plain_greedy_ids(target, ids, new_tokens):
    return target.generate(ids, max_new_tokens=new_tokens, do_sample=False)


@pytest.mark.parametrize(
    "options",
    [
        {"acceptance_processors": hf_dflow.AcceptanceThreshold(0.5)},
        {"acceptance_processors": [object()]},
        {"acceptance_threshold": "0.5"},
        {"acceptance_threshold": 0.0},
        {"num_draft_tokens": True},
        {"num_draft_tokens": 8},
        {"verification": "tree"},
    ],
)
def test_bad_option_values_are_refused_at_construction(options):
    """Catches: a raw TypeError in the middle of a call, or a value that is taken for another."""
    drafter = tiny_drafter(tiny_target("llama"), 8)
    with pytest.raises(UnsupportedGenerationError, match=next(iter(options))):
        DFlowDecoder(drafter, **options)


def test_sparse_attention_is_refused():
    """Catches: a target whose own block and single-token forwards disagree, decoded as if it were exact."""

    class IndexedLayer:
        pass

    class Held:
        is_croppable = True
        layers = [IndexedLayer()]

    assert not is_croppable(Held())
    assert is_croppable(DynamicCache(config=tiny_target("llama").config))


def test_states_that_are_not_one_vector_a_token_are_refused():
    """Catches: Gemma3n's four-dimensional states failing deep inside the drafter."""
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[48] * 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        altup_num_inputs=2,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    target = Gemma3nForCausalLM(config).eval()
    drafter = tiny_drafter(tiny_target("llama"), 8).float()
    with pytest.raises(UnsupportedGenerationError, match="dimensions"):
        dflow(target, prompt_of(6), drafter, max_new_tokens=4)
