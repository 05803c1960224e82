"""What only the caller decides: lossy options, the options that exist, and the precision around a call."""

import json

import kit
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from hf_dflow import DFlowDecoder, DFlowGenerationConfig, UnsupportedGenerationError
from hf_dflow.generation import configuration


@pytest.fixture
def drafter(target):
    return kit.scripted(kit.PatternDrafter, target, kit.prompt_of(7), 24, block_size=4, pattern=[2, 0, 3, 1])


@pytest.fixture
def warnings(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(configuration.logger, "warning_once", texts.append)
    return texts


def test_a_checkpoint_cannot_make_output_lossy(target, drafter, warnings):
    """N2: `acceptance_threshold` in a downloaded config.json accepts wrong tokens, and only a log line mentions it."""
    plain = kit.plain_greedy(target, kit.prompt_of(7), 24)
    drafter.config.generation_defaults = {"acceptance_threshold": 1e-9, "num_draft_tokens": 3}
    output = kit.decode(target, drafter, kit.prompt_of(7), 24)
    assert torch.equal(output.sequences, plain) and output.statistics.lossless
    assert "acceptance_threshold" in warnings[0] and "ignored" in warnings[0]
    lossy = kit.decode(target, drafter, kit.prompt_of(7), 24, acceptance_threshold=1e-9)
    assert not lossy.statistics.lossless and not torch.equal(lossy.sequences, plain)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tree_buget", "tree_budget"), ("seed", "seeds"), ("acceptance_treshold", "acceptance_threshold"),
        ("max_new_token", "max_new_tokens"), ("useRelay", "use_relay"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_refused_with_the_nearest(name, nearest):
    """N3: a misspelt option vanishes, and the call runs without it."""
    with pytest.raises(UnsupportedGenerationError, match=f"{name!r}.*{nearest!r}"):
        DFlowGenerationConfig(**{name: 3})


def test_options_are_keywords_of_generate(target, drafter):
    """N3: `generate(num_draft_tokens=3)` fails with transformers' "model_kwargs are not used"."""
    call = {"assistant_model": drafter, "speculation_type": "dflow", "max_new_tokens": 24, "do_sample": False}
    output = target.generate(kit.prompt_of(7), num_draft_tokens=2, return_dict_in_generate=True, **call)
    assert max(output.statistics.per_step_drafted) == 2
    configured = DFlowGenerationConfig(num_draft_tokens=3, return_dict_in_generate=True)
    output = target.generate(kit.prompt_of(7), num_draft_tokens=2, generation_config=configured, **call)
    assert max(output.statistics.per_step_drafted) == 2, "a keyword wins over the configuration"
    with pytest.raises(UnsupportedGenerationError, match=r"'num_draft_token'.*'num_draft_tokens'"):
        target.generate(kit.prompt_of(7), num_draft_token=2, **call)
    states = target.generate(kit.prompt_of(7), output_hidden_states=True, return_dict_in_generate=True, **call)
    assert len(states.hidden_states) == 24, "generate hands this field on to the model, which is no misspelling"
    with pytest.raises(ValueError, match="not used by the model"):  # no option's misspelling: transformers' own words
        target.generate(kit.prompt_of(7), pixel_vlaues=2, **call)


def test_every_field_of_a_plain_configuration_is_taken(tmp_path):
    """N3, the other way round: a field that transformers knows is refused, or a saved file cannot be read again."""
    plain = {name: value for name, value in vars(GenerationConfig()).items() if not name.startswith("_")}
    DFlowGenerationConfig(**{**plain, "speculation_type": "dflow"})
    DFlowGenerationConfig(tree_budget=3, max_new_tokens=4).save_pretrained(tmp_path)
    assert DFlowGenerationConfig.from_pretrained(tmp_path).tree_budget == 3
    with pytest.raises(TypeError, match="tree_buget"):
        DFlowDecoder(kit.shared_drafter(), tree_buget=3)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("around", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("drafts_in", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_of_any_kind_around_a_drafter_of_any_type(drafts_in, around, do_sample):
    """N5: `torch.cat` of float16 and bfloat16 under autocast, where plain decoding works."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    drafter = kit.tiny_drafter(target, 4).to(drafts_in)
    with torch.autocast("cpu", dtype=around):
        output = kit.decode(target, drafter, kit.prompt_of(7), 12, do_sample=do_sample)
    assert output.sequences.shape == (1, 19) and output.statistics.num_draft_forwards > 0


def test_autocast_around_a_tree_of_corrected_drafts():
    """N5's kind: what grows a tree asks the causal correction outside of the drafter's forward."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    drafter = kit.tiny_drafter(target, 4, correction_intermediate_size=8, correction_top_k=4).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        output = kit.decode(target, drafter, kit.prompt_of(7), 12, tree_budget=5)
    assert output.sequences.shape == (1, 19) and output.statistics.num_draft_forwards > 0


def test_autocast_leaves_the_drafter_in_its_own_type(monkeypatch):
    """N5: a drafter that computes in another type under autocast drafts other tokens, and is accepted less."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    drafter, states = kit.tiny_drafter(target, 4).float(), []
    forward = drafter.draft_hidden
    monkeypatch.setattr(drafter, "draft_hidden", lambda *args: states.append(forward(*args)) or states[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kit.decode(target, drafter, kit.prompt_of(7), 8)
    assert states and {state.dtype for state in states} == {torch.float32}


def _target_with(folder, **fields):
    """A target like `kit.tiny_target()`, whose generation_config.json holds `fields`."""
    kit.tiny_target().save_pretrained(folder)
    path = folder / "generation_config.json"
    recorded = json.loads(path.read_text())
    recorded.pop("_from_model_config", None)  # with it, transformers leaves out fields that it does not know
    path.write_text(json.dumps({**recorded, **fields}))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


CALLS = {
    "the flag": lambda drafter: {"assistant_model": drafter, "speculation_type": "dflow"},
    "a configuration": lambda drafter: {"assistant_model": drafter, "generation_config": DFlowGenerationConfig()},
    "custom_generate": lambda drafter: {"custom_generate": DFlowDecoder(drafter)},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_file_of_a_target_cannot_make_output_lossy_either(call, drafter, warnings, tmp_path):
    """N2's kind: generate merges generation_config.json of the target into every call, a pipeline hands it over."""
    target = _target_with(tmp_path, acceptance_threshold=1e-9)
    plain = kit.plain_greedy(target, kit.prompt_of(7), 24)
    arguments = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **CALLS[call](drafter)}
    output = target.generate(kit.prompt_of(7), **arguments)
    assert torch.equal(output.sequences, plain) and output.statistics.lossless
    assert "generation_config.json sets acceptance_threshold=1e-09" in warnings[0]
    handed_over = {"generation_config": target.generation_config, **arguments}
    assert target.generate(kit.prompt_of(7), **handed_over).statistics.lossless
    asked = {"acceptance_threshold": 1e-9}
    if call == "the flag":
        arguments.update(asked)
    elif call == "a configuration":
        arguments["generation_config"] = DFlowGenerationConfig(**asked)
    else:
        arguments["custom_generate"] = DFlowDecoder(drafter, **asked)
    assert not target.generate(kit.prompt_of(7), **arguments).statistics.lossless, "the caller may ask for it"


def test_a_file_cannot_fix_what_is_sampled(drafter, warnings, tmp_path):
    """N2's kind: `seeds` in a file, which sample the same text at every call."""
    target = _target_with(tmp_path, seeds=[5])
    drafter.config.generation_defaults = {"seeds": [6]}
    texts = [kit.decode(target, drafter, kit.prompt_of(7), 24, do_sample=True).sequences for _ in range(2)]
    assert not torch.equal(*texts) and len(set(warnings)) == 2
    texts = [kit.decode(target, drafter, kit.prompt_of(7), 24, do_sample=True, seeds=[5]).sequences for _ in range(2)]
    assert torch.equal(*texts)


def test_an_option_that_was_set_under_a_misspelt_name(target, drafter, warnings):
    """N3's kind: on a plain configuration, as an attribute, or recorded with the drafter."""
    prompt, call = kit.prompt_of(7), {"max_new_tokens": 8, "do_sample": False}
    plain = GenerationConfig(speculation_type="dflow", tree_buget=8, **call)
    changed = DFlowGenerationConfig(**call)
    changed.tree_buget = 8
    for config in (plain, changed):
        with pytest.raises(UnsupportedGenerationError, match=r"'tree_buget'.*'tree_budget'"):
            target.generate(prompt, assistant_model=drafter, generation_config=config)
    drafter.config.generation_defaults = {"tree_buget": 8}
    kit.decode(target, drafter, prompt, 8)
    assert "'tree_buget' among its generation_defaults" in warnings[0]


def test_an_option_without_the_flag_says_where_it_goes(target, drafter):
    """N3's kind: transformers' "model_kwargs are not used" for an option beside `custom_generate`."""
    call = {"max_new_tokens": 8, "do_sample": False, "tree_budget": 4}
    for way in ({"custom_generate": DFlowDecoder(drafter)}, {}):
        with pytest.raises(UnsupportedGenerationError, match=r'dflow".*DFlowGenerationConfig.*DFlowDecoder'):
            target.generate(kit.prompt_of(7), **way, **call)


@pytest.mark.parametrize("name", ["use_relay", "tree_budget", "stale_mixture", "verification", "seeds"])
def test_a_tensor_is_refused_as_an_option_in_words(name, target, drafter):
    """N3's kind: "Boolean value of Tensor with more than one value is ambiguous"."""
    with pytest.raises(UnsupportedGenerationError, match=f"{name}=tensor"):
        kit.decode(target, drafter, kit.prompt_of(7), 4, **{name: torch.tensor([1, 0])})


def test_transformers_verbosity_silences_warnings(target, drafter, caplog):
    """N16's kind: `transformers.logging.set_verbosity_error()` leaves warnings of this package, at each call again."""
    before = transformers_logging.get_verbosity()
    for verbosity, number in ((transformers_logging.WARNING, 1), (transformers_logging.ERROR, 0)):
        transformers_logging.warning_once.cache_clear()
        caplog.clear()
        transformers_logging.set_verbosity(verbosity)
        try:
            for _ in range(2):
                kit.decode(target, drafter, kit.prompt_of(7), 4, acceptance_threshold=0.5)
        finally:
            transformers_logging.set_verbosity(before)
        assert len([text for text in kit.our_warnings(caplog) if "makes acceptance lossy" in text]) == number
