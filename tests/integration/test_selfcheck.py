"""What a target can do is measured before it decodes: what it cannot is refused, or decoded row by row."""

import copy
import threading
import types

import families
import kit
import pytest
import torch
from batches import padded
from hybrids import hybrid
from internals import check_of, forget_checks
from transformers import (
    Cache,
    DogeConfig,
    DogeForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_dflow import UnsupportedGenerationError

NEW_TOKENS = 30
PROMPTS = [kit.prompt_of(length, seed=length) for length in (12, 3, 9)]
SIZES = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
WINDOW = 8
ROW_BY_ROW = "row by row"


@pytest.fixture(autouse=True)
def _nothing_is_known_yet():
    forget_checks()


def build(model_class, config):
    torch.manual_seed(0)
    return model_class(config).eval().requires_grad_(False)


def gpt_neo(dtype=torch.float64, window=WINDOW):
    """Masks its local layers by the column of the cache."""
    config = GPTNeoConfig(
        **SIZES, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=window,
        max_position_embeddings=4 * window + 64, initializer_range=0.3, attention_dropout=0.0,
    )  # fmt: skip
    return build(GPTNeoForCausalLM, config).to(dtype)


def doge():
    config = DogeConfig(
        **SIZES, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        keep_window_size=WINDOW, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return build(DogeForCausalLM, config)


def texts_of(target, new_tokens=NEW_TOKENS):
    return [(kit.plain_greedy(target, prompt, new_tokens + 8), prompt.shape[1]) for prompt in PROMPTS]


def warnings_of(caplog) -> list[str]:
    return [text for text in kit.our_warnings(caplog) if ROW_BY_ROW in text]


@pytest.mark.parametrize("window", [WINDOW, 256])
@pytest.mark.parametrize("drafter_class", [kit.PatternDrafter, kit.NudgedDrafter])
def test_a_window_counted_in_columns_gives_every_greedy_row_its_own_text(window, drafter_class, caplog):
    """N1: holes push a row's own tokens out of GPT-Neo's window, and its text changes without a word."""
    new_tokens = NEW_TOKENS if window == WINDOW else 12
    target = gpt_neo(window=window, dtype=torch.float32)
    texts = texts_of(target, new_tokens)
    drafter = kit.tiny_drafter(target, 8, drafter_class=drafter_class).follow_rows(texts)
    drafter.pattern = [3, 0, 7, 1, 5]
    ids, mask = padded(PROMPTS)
    output = kit.dflow_greedy(target, drafter, ids, attention_mask=mask, max_new_tokens=new_tokens)
    for row, (text, length) in enumerate(texts):
        assert output.sequences[row, ids.shape[1] :].tolist() == text[0, length : length + new_tokens].tolist()
    kit.assert_not_vacuous(output.statistics)
    (warning,) = warnings_of(caplog)
    assert "a known fault" in warning


def test_a_window_counted_in_columns_gives_every_sampled_row_its_own_text():
    """N1: sampled logits that are off by up to 4.3."""
    target = gpt_neo(dtype=torch.float32)
    drafter, options = kit.tiny_drafter(target, 8), {"max_new_tokens": NEW_TOKENS, **kit.SAMPLED}
    ids, mask = padded(PROMPTS)
    together = kit.decode(target, drafter, ids, attention_mask=mask, seeds=[1, 2, 3], **options)
    for row, prompt in enumerate(PROMPTS):
        alone = kit.decode(target, drafter, prompt, seeds=[row + 1], **options)
        assert together.sequences[row, ids.shape[1] :].tolist() == alone.sequences[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [WINDOW, 256])
def test_a_window_counted_in_columns_takes_no_tree(window, dtype):
    """N1: `tree_budget=20` changes greedy text; in 16 bits, and with a window that a tree hardly fills, too."""
    target = gpt_neo(dtype=dtype, window=window)
    with pytest.raises(UnsupportedGenerationError, match=r"path of a tree.*differ by") as refusal:
        kit.decode(target, kit.tiny_drafter(target, 8), PROMPTS[0], NEW_TOKENS, tree_budget=20)
    assert "\n" not in str(refusal.value)


def test_one_row_of_a_target_without_holes_decodes():
    """A refusal of what a lone row does not need."""
    target = gpt_neo()
    drafter = kit.scripted(kit.NudgedDrafter, target, PROMPTS[0], NEW_TOKENS)
    output = kit.dflow_greedy(target, drafter, PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert output.sequences.equal(kit.plain_greedy(target, PROMPTS[0], NEW_TOKENS))


def test_a_target_whose_blocks_differ_from_single_tokens_is_refused():
    """N28: Doge beyond keep_window_size says another text than plain generate."""
    target, calls = doge(), []
    target.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedGenerationError, match=r"a block of tokens.*differ by.*a known fault") as refusal:
        kit.dflow_greedy(target, kit.tiny_drafter(target, 8), PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert not calls and "\n" not in str(refusal.value)


FAULTS = {"cpmant": "differ by", "moshi": "differ by", "xlm": "it fails"}  # what the refusal says


@pytest.mark.parametrize("name", FAULTS)
def test_targets_that_contradict_themselves_are_refused(name):
    """N28: another text than plain generate's for CPMAnt, Moshi past its window; a bare error of XLM."""
    target = family_named(name)
    with pytest.raises(UnsupportedGenerationError, match=f"random tokens.*{FAULTS[name]}"):
        kit.dflow_greedy(target, kit.tiny_drafter(target, 8), PROMPTS[0], max_new_tokens=NEW_TOKENS)


def test_padding_that_sparse_attention_counts_is_refused():
    """N28: MiniMax-M3 chooses blocks of columns by position, so a padded row sees its drafts; a lone row is exact."""
    target = family_named("minimax_m3_vl_text")
    drafter = kit.scripted(kit.NudgedDrafter, target, PROMPTS[0], NEW_TOKENS)
    output = kit.dflow_greedy(target, drafter, PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert output.sequences.equal(kit.plain_greedy(target, PROMPTS[0], NEW_TOKENS))
    ids, mask = padded(PROMPTS)
    with pytest.raises(UnsupportedGenerationError, match=r"of a padded row.*differ by"):
        kit.dflow_greedy(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    with pytest.raises(UnsupportedGenerationError, match=r"of a padded row.*differ by"):
        kit.dflow_greedy(target, drafter, ids[1:2], attention_mask=mask[1:2], max_new_tokens=NEW_TOKENS)


def test_padded_rows_of_other_targets_decode():
    """A refusal of sliding windows behind padding."""
    target = kit.tiny_target("mistral_sliding")
    ids, mask = padded(PROMPTS)
    kit.dflow_greedy(target, kit.tiny_drafter(target, 8), ids, attention_mask=mask, max_new_tokens=4)
    assert check_of(target, padding=True).padding.passes


def family_named(name: str):
    """A tiny model of a model type, which never says the mask token."""
    config_class = next(found for found in families.MODEL_FOR_CAUSAL_LM_MAPPING if found.model_type == name)
    target = families.build(config_class, families.MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    target.get_output_embeddings().weight[kit.MASK_TOKEN_ID] *= 0.01
    return target


class Raises(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise IndexError("an error\nof two lines")


class Forgets(LlamaForCausalLM):
    """Behind a cache, a token's logits depend on how many come with it."""

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        outputs = super().forward(input_ids, logits_to_keep=logits_to_keep, **kwargs)
        outputs.logits = outputs.logits + 0.01 * input_ids.shape[1] * torch.arange(64)
        return outputs


def llama(model_class):
    return build(model_class, LlamaConfig(**SIZES, num_hidden_layers=4, num_attention_heads=4, initializer_range=0.3))


@pytest.mark.parametrize(("model_class", "says"), [(Raises, r"IndexError \(an error\)"), (Forgets, "differ by")])
def test_what_a_target_of_any_class_does_is_measured(model_class, says):
    """N28: a check by names of known classes; a bare error out of a target that cannot run."""
    target = llama(model_class)
    with pytest.raises(UnsupportedGenerationError, match=says) as refusal:
        kit.dflow_greedy(target, kit.tiny_drafter(target, 8), PROMPTS[0], max_new_tokens=4)
    assert model_class.__name__ in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("rows", [1, 3])
def test_checking_leaves_no_trace(rows):
    """A check that moves random numbers, fires the caller's hooks, ends training mode or stays in a buffer."""
    target, fired = kit.tiny_target(attention="sdpa"), []
    drafter = kit.tiny_drafter(target, 8)
    target.model.layers[0].train()
    for module in (target, target.model, target.lm_head):
        module.register_forward_hook(lambda *_: fired.append("after"))
        module.register_forward_pre_hook(lambda *_: fired.append("before"))
    before = [dict(vars(module)) for module in target.modules()]
    inside = [dict(module._buffers) for module in target.modules()]
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    check = check_of(target, holes=True, tree=True)
    assert check.holes.passes and check.tree.passes and check.num_forwards > 0
    assert torch.random.get_rng_state().equal(state) and not fired
    for module, attributes, buffers in zip(target.modules(), before, inside, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert module._buffers.keys() == buffers.keys() and all(
            module._buffers[name] is buffers[name] for name in buffers
        )
    ids = torch.cat([PROMPTS[0]] * rows)
    sampled = []
    for known in (True, False):
        if not known:
            forget_checks()
        torch.manual_seed(5)
        sampled.append(kit.decode(target, drafter, ids, 12, **kit.SAMPLED))
    assert sampled[0].sequences.equal(sampled[1].sequences)
    assert sampled[0].statistics == sampled[1].statistics


def test_a_model_that_needs_its_callers_hook_is_measured_with_it():
    """A refusal because the check runs without a hook that gives a module its inputs."""
    target = kit.tiny_target()
    head = target.lm_head
    head.forward = lambda states, scale: torch.nn.functional.linear(states, head.weight) * scale
    head.register_forward_pre_hook(lambda module, args, kwargs: (args, {"scale": 1.0}), with_kwargs=True)
    assert check_of(target).block.passes


def test_a_target_is_checked_once_for_what_decides_how_it_computes():
    """A check at every call; or one that is not repeated where attention, precision, adapters or windows changed."""
    peft = pytest.importorskip("peft")
    first = check_of(kit.tiny_target(seed=1))
    assert check_of(kit.tiny_target(seed=2)) is first
    others = [
        kit.tiny_target(attention="sdpa"),
        kit.tiny_target(dtype=torch.float32),
        kit.tiny_target(rms_norm_eps=0.1),
    ]
    others.append(gpt_neo())
    checks = [first, *map(check_of, others)]
    adapted = kit.tiny_target(seed=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(adapted, config).double()
    checks.append(check_of(adapted))
    with torch.autocast("cpu", torch.bfloat16):
        checks.append(check_of(kit.tiny_target(dtype=torch.float32)))
    assert len({id(check) for check in checks}) == len(checks)
    forwards = first.num_forwards
    assert check_of(kit.tiny_target(seed=3), holes=True) is first
    assert first.num_forwards > forwards and first.tree is None


@pytest.mark.parametrize("where", ["module", "class"])
def test_a_replaced_forward_is_measured_anew(where, monkeypatch):
    """A mixer patched after its kind of target had passed: its blocks forget the state, and the check knew already."""
    target = copy.deepcopy(hybrid("lfm2"))
    assert check_of(target).lacks("block") is None
    mixer = target.model.layers[0].conv
    original = type(mixer).forward

    def forgets(self, *args, **kwargs):
        values = [*args, *kwargs.values()]
        states = next(value for value in values if isinstance(value, torch.Tensor))
        for cache in [value for value in values if isinstance(value, Cache)] if states.shape[1] > 1 else []:
            for state in cache.layers[self.layer_idx].conv_states.values():
                if state is not None:
                    state.zero_()
        return original(self, *args, **kwargs)

    owner = mixer if where == "module" else type(mixer)
    monkeypatch.setattr(owner, "forward", types.MethodType(forgets, mixer) if where == "module" else forgets)
    assert "differ" in (check_of(target).lacks("block") or "passes")
    monkeypatch.undo()
    assert check_of(target).lacks("block") is None


def test_only_what_a_call_needs_is_measured():
    """A lone greedy row that pays for holes and trees."""
    target = kit.tiny_target()
    kit.dflow_greedy(target, kit.tiny_drafter(target, 8), PROMPTS[0], max_new_tokens=4)
    check = check_of(target)
    assert check.holes is None and check.tree is None and check.num_forwards <= 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("std", [0.02, 0.3])
def test_rounding_is_no_fault(dtype, std):
    """A target that is refused because 16 bits round a block in another way, or because its weights are small."""
    target = kit.tiny_target("qwen3", dtype=dtype, attention="sdpa", initializer_range=std, num_hidden_layers=8)
    check = check_of(target, holes=True, tree=True)
    assert check.block.passes and check.rollback.passes and check.holes.passes and check.tree.passes
    assert min(check.block.control, check.holes.control, check.tree.control) > 4 * check.block.error


def test_numbers_that_are_none_show_nothing_and_are_not_remembered():
    """One broken model by which every other of its class is judged."""
    broken = kit.tiny_target()
    broken.lm_head.weight.fill_(float("nan"))
    assert not check_of(broken).block.is_finite
    assert check_of(kit.tiny_target()).block.is_finite


def test_filled_cache_of_a_refused_target_costs_no_forward():
    """N27: a forward over the prompt, before the refusal that an empty cache gets without one."""
    target, calls = hybrid("jamba"), []
    held = kit.cache_of(kit.plain_greedy(target, PROMPTS[0], 2, return_dict_in_generate=True))
    handle = target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    whole = torch.cat([PROMPTS[0], PROMPTS[0]], dim=1)
    with pytest.raises(UnsupportedGenerationError, match="logits differ by"):
        kit.dflow_greedy(target, kit.tiny_drafter(target, 8), whole, max_new_tokens=4, **{kit.CACHE: held})
    handle.remove()
    assert not calls


def test_first_calls_of_several_threads():
    """One thread's check takes away what the others' forwards read: hooks that transformers puts in at its first."""
    target, prompt, results = kit.tiny_target(dtype=torch.float32, seed=5), kit.prompt_of(12), []
    text = kit.plain_greedy(target, prompt, 40)

    def call():
        drafter = kit.tiny_drafter(target, 8, drafter_class=kit.PatternDrafter).follow(text, 12)
        drafter.pattern = [3, 0, 7, 1]
        try:
            output = kit.decode(target, drafter, prompt, 24)
            kit.assert_not_vacuous(output.statistics)
            results.append(torch.equal(output.sequences, text[:, :36]))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
