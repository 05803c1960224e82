"""The seam into `generate`: nothing else changes, options keep their precedence, and every door leads to one loop."""

import json
import subprocess
import sys
from pathlib import Path

import kit
import pytest
import torch
import untouched
from internals import OPTION_NAMES, WRAPPED, resolve_options
from transformers import AutoConfig, AutoModel, GenerationConfig, GenerationMixin, set_seed

import hf_dflow
from hf_dflow import (
    DFlowDecoder,
    DFlowDrafter,
    DFlowDrafterConfig,
    DFlowGenerationConfig,
    UnsupportedGenerationError,
)

NEW_TOKENS = 30


@pytest.fixture
def uninstalled():
    """Without the seam; it is back afterwards, whatever the test does."""
    hf_dflow.uninstall()
    yield
    hf_dflow.install()


# -- everything else is left alone


def test_other_generation_is_bit_equal_with_and_without_the_package():
    """Catches a seam that changes plain, beam or classic assisted decoding, or the random numbers they draw."""
    env = {"PYTHONPATH": "", "PATH": "", "HF_HUB_OFFLINE": "1"}
    script = Path(untouched.__file__)
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=True)
    without = json.loads(run.stdout.splitlines()[-1])
    with_seam = untouched.generate_all()
    hf_dflow.uninstall()
    try:
        after_uninstall = untouched.generate_all()
    finally:
        hf_dflow.install()
    for mode in untouched.MODES:
        assert with_seam[mode] == without[mode] == after_uninstall[mode], mode
    assert with_seam["sampled"]["tokens"] != with_seam["greedy"]["tokens"]


@pytest.mark.parametrize("do_sample", [False, True])
def test_native_dflash_is_bit_equal_with_and_without_the_seam(do_sample):
    """Catches a seam that claims `speculation_type="dflash"` as well."""
    target, prompt = kit.shared_target("qwen3"), kit.prompt_of(9)
    drafter = kit.tiny_drafter(target, 4)

    def generate():
        set_seed(3)
        return target.generate(
            prompt, assistant_model=drafter, speculation_type="dflash", do_sample=do_sample, max_new_tokens=NEW_TOKENS
        )

    with_seam = generate()
    hf_dflow.uninstall()
    try:
        without = generate()
    finally:
        hf_dflow.install()
    assert torch.equal(with_seam, without)


def test_install_is_idempotent_and_uninstall_restores_the_function_objects():
    """Catches a second install that wraps the wrapper, which one uninstall would not take off."""
    wrapped = [GenerationMixin.__dict__[name] for name in WRAPPED]
    hf_dflow.install()
    assert [GenerationMixin.__dict__[name] for name in WRAPPED] == wrapped
    hf_dflow.uninstall()
    originals = [GenerationMixin.__dict__[name] for name in WRAPPED]
    try:
        for original, wrapper in zip(originals, wrapped, strict=True):
            assert original is not wrapper and original.__module__ == "transformers.generation.utils"
        hf_dflow.uninstall()
        assert [GenerationMixin.__dict__[name] for name in WRAPPED] == originals
    finally:
        hf_dflow.install()
    hf_dflow.uninstall()
    try:
        assert all(
            GenerationMixin.__dict__[name] is original for name, original in zip(WRAPPED, originals, strict=True)
        )
    finally:
        hf_dflow.install()


def test_the_decoder_works_without_the_seam(uninstalled):
    """Catches a decoder that leans on the wrapped methods: `custom_generate` must not need them."""
    target, prompt = kit.shared_target(), kit.prompt_of(9)
    drafter = kit.scripted(kit.OracleDrafter, target, prompt, NEW_TOKENS)
    text = target.generate(prompt, custom_generate=DFlowDecoder(drafter), do_sample=False, max_new_tokens=NEW_TOKENS)
    assert torch.equal(text, kit.plain_greedy(target, prompt, NEW_TOKENS))


# -- the decoder as custom_generate


class Recorder:
    def __init__(self):
        self.put_values, self.ended = [], 0

    def put(self, value):
        self.put_values.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def test_custom_generate_equals_the_seam_with_streamer_and_options():
    """Catches a bound streamer or option that is lost, or that leaks into the next call."""
    target, prompt = kit.shared_target(), kit.prompt_of(9)
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, pattern=[5, 1, 0, 3])
    ours, seams = Recorder(), Recorder()
    kwargs = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    decoder = DFlowDecoder(drafter, streamer=ours, num_draft_tokens=4, use_relay=False)
    custom = target.generate(prompt, custom_generate=decoder, **kwargs)
    config = DFlowGenerationConfig(num_draft_tokens=4, use_relay=False, pad_token_id=0, **kwargs)
    seam = target.generate(prompt, assistant_model=drafter, generation_config=config, streamer=seams)
    assert torch.equal(custom.sequences, seam.sequences)
    assert custom.statistics == seam.statistics
    assert max(seam.statistics.per_step_drafted) == 4
    kit.assert_not_vacuous(seam.statistics)
    assert ours.put_values == seams.put_values and ours.put_values[0] == prompt[0].tolist()
    assert [token for value in ours.put_values for token in value] == custom.sequences[0].tolist()
    assert ours.ended == seams.ended == 1
    unbound = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert max(unbound.statistics.per_step_drafted) == drafter.config.block_size - 1


def test_custom_generate_samples_as_the_seam_does():
    """Catches a second source of random numbers behind one of the doors."""
    target, prompt = kit.shared_target(), kit.prompt_of(9)
    drafter = kit.tiny_drafter(target)
    kwargs = {"do_sample": True, "temperature": 0.7, "max_new_tokens": NEW_TOKENS}
    set_seed(1)
    custom = target.generate(prompt, custom_generate=DFlowDecoder(drafter), **kwargs)
    set_seed(1)
    seam = target.generate(prompt, assistant_model=drafter, speculation_type="dflow", **kwargs)
    assert torch.equal(custom, seam)


def test_unknown_options_are_listed():
    """Catches a misspelt option that is swallowed."""
    with pytest.raises(TypeError, match="verificatoin") as error:
        DFlowDecoder(kit.tiny_drafter(kit.shared_target()), verificatoin="token")
    assert all(name in str(error.value) for name in OPTION_NAMES)
    with pytest.raises(TypeError, match="by hand"):
        DFlowDecoder(kit.tiny_drafter(kit.shared_target()))(kit.tiny_target(), kit.prompt_of(4))


# -- options


@pytest.mark.parametrize("name, values", [("num_draft_tokens", (2, 3, 4)), ("use_relay", (False, True, False))])
def test_precedence(name, values):
    """Catches a source of options that wins over a nearer one, and a False that is taken for "not given"."""
    keyword, configured, recorded = values
    drafter = kit.tiny_drafter(kit.shared_target())
    plain = GenerationConfig()
    package = {"num_draft_tokens": drafter.config.block_size - 1, "use_relay": True}
    assert getattr(resolve_options(drafter, plain), name) == package[name]
    drafter.config.generation_defaults = {name: recorded}
    assert getattr(resolve_options(drafter, plain), name) == recorded
    config = DFlowGenerationConfig(**{name: configured})
    assert getattr(resolve_options(drafter, config), name) == configured
    assert getattr(resolve_options(drafter, config, {name: keyword}), name) == keyword


def test_false_switches_off_what_the_drafter_switches_on():
    """Catches a tree that a drafter's maker recorded and nobody can get rid of."""
    drafter = kit.tiny_drafter(kit.shared_target(), generation_defaults={"tree_budget": 8})
    assert resolve_options(drafter, DFlowGenerationConfig()).tree_budget == 8
    assert resolve_options(drafter, DFlowGenerationConfig(tree_budget=False)).tree_budget is None


@pytest.mark.parametrize("name", ["tree_budget", "acceptance_threshold"])
def test_true_is_no_number(name):
    """Catches `True` taken for 1: a tree of one draft, or a rule that accepts sure tokens only."""
    with pytest.raises(UnsupportedGenerationError, match=name):
        resolve_options(kit.shared_drafter(), DFlowGenerationConfig(**{name: True}))


def test_precedence_reaches_the_loop():
    """Catches options that are resolved and then not used."""
    target, prompt = kit.shared_target(), kit.prompt_of(9)
    drafter = kit.scripted(kit.OracleDrafter, target, prompt, NEW_TOKENS, generation_defaults={"num_draft_tokens": 5})
    kwargs = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    config = DFlowGenerationConfig(num_draft_tokens=3, pad_token_id=0, **kwargs)
    calls = {
        5: {"assistant_model": drafter, "speculation_type": "dflow", **kwargs},
        3: {"assistant_model": drafter, "generation_config": config},
        2: {"custom_generate": DFlowDecoder(drafter, num_draft_tokens=2), "generation_config": config},
    }
    for expected, arguments in calls.items():
        assert max(target.generate(prompt, **arguments).statistics.per_step_drafted) == expected


def test_the_config_survives_a_round_trip(tmp_path):
    """Catches options lost on disk, and a processor object in the JSON."""
    config = DFlowGenerationConfig(
        use_relay=False,
        verification="token",
        num_draft_tokens=3,
        acceptance_threshold=0.5,
        acceptance_processors=[hf_dflow.AcceptanceProcessor()],
        temperature=0.5,
        do_sample=True,
    )
    assert "acceptance_processors" not in config.to_dict()
    config.save_pretrained(tmp_path)
    read = DFlowGenerationConfig.from_pretrained(tmp_path)
    for loaded in (DFlowGenerationConfig.from_dict(config.to_dict()), read):
        assert isinstance(loaded, DFlowGenerationConfig) and loaded.speculation_type == "dflow"
        assert (loaded.use_relay, loaded.verification, loaded.num_draft_tokens) == (False, "token", 3)
        assert (loaded.acceptance_threshold, loaded.temperature, loaded.do_sample) == (0.5, 0.5, True)
        assert loaded.acceptance_processors is None
    assert config.acceptance_processors is not None  # to_dict must not eat the object's own


def test_the_config_keeps_the_validation_of_its_base():
    """Catches a subclass that swallows misspelt or contradicting fields."""
    with pytest.raises(ValueError, match="max_new_tokens"):
        DFlowGenerationConfig(max_new_tokens=-1)
    with pytest.raises(ValueError):
        kit.tiny_target().generate(
            kit.prompt_of(4),
            generation_config=DFlowGenerationConfig(pad_token_id=0),
            no_such_option=1,
            max_new_tokens=2,
        )


# -- pipeline and auto classes


@pytest.mark.parametrize("pad_token_id", [0, None])
def test_pipeline(pad_token_id):
    """Catches a drafter without what `pipeline` reads from an assistant: vocabulary and token ids.

    Where the ids differ, `pipeline` asks for the assistant's tokenizer and hands it on; that must not be refused.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w1")
    target = kit.tiny_target()
    text = "w5 w9 w12 w3 w7"
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    options = {"pattern": [5, 1, 0, 3], "pad_token_id": pad_token_id}
    drafter = kit.scripted(kit.PatternDrafter, target, prompt, NEW_TOKENS, **options)
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    assistant = {} if pad_token_id == 0 else {"assistant_tokenizer": tokenizer}
    alone = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **kwargs)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, **assistant, assistant_model=drafter)
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    drafted = assisted(text, speculation_type="dflow", **kwargs)
    handle.remove()
    assert drafted == alone and len(alone[0]["generated_text"]) > 2 * len(text)
    assert len(forwards) < NEW_TOKENS // 2


def test_auto_classes_know_the_drafter(tmp_path):
    """Catches a missing registration: no trust_remote_code may be needed."""
    drafter = kit.tiny_drafter(kit.shared_target(), dtype=torch.float32)
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DFlowDrafterConfig)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, DFlowDrafter) and loaded.config.hidden_size == kit.HIDDEN_SIZE
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
