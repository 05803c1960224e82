"""Which pairs are refused, which are warned of once, and which pass: before anything is computed."""

import json

import data_kit
import internals
import pytest
import torch
from kit import dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_dflow import (
    DFlowDecoder,
    DFlowDrafter,
    DFlowGenerationConfig,
    PairMismatchError,
    UnsupportedGenerationError,
    check_pair,
    record_target,
    tokenizer_fingerprint,
)
from hf_dflow.bench import pairs
from hf_dflow.cli import app
from hf_dflow.training.templates import asked_mode

REVISION = "a" * 40


@pytest.fixture
def warnings(monkeypatch):
    """What is warned of; each text counts once."""
    return internals.pair_warnings(monkeypatch)


def named_target(name="org/target", commit=REVISION, **overrides):
    target = tiny_target(**overrides)
    target.config._name_or_path, target.config._commit_hash = name, commit
    return target


RECORDED = {"target_name": "org/target", "target_revision": REVISION, "chat_mode": "non-thinking"}
SLOW = {
    "another name": ({"name": "org/other"}, {}, "made for org/target, the target is org/other"),
    "another revision": ({"commit": "b" * 40}, {}, "revision " + REVISION),
    "another mode": ({}, {"chat_mode": "thinking"}, "'non-thinking', asked for is 'thinking'"),
    "another tokenizer": ({}, {"tokenizer": True}, "tokenizer"),
}


@pytest.mark.parametrize("case", SLOW)
def test_what_will_only_be_slow_is_warned_of_once(case, warnings):
    """Bug: a drafter of another target drafts badly and nobody learns why, or is refused though the text is right."""
    changes, asked, named = SLOW[case]
    target = named_target(**changes)
    drafter = tiny_drafter(target, tokenizer_fingerprint="0" * 16, **RECORDED)
    if "tokenizer" in asked:
        asked = {"tokenizer": tiny_tokenizer()}
    for _ in range(2):
        check_pair(target, drafter, **asked)
    assert len(warnings) == 1 and named in warnings[0]


def test_what_is_recorded_is_what_is_compared(warnings, tmp_path):
    """Bug: a drafter saved without what the check needs, or with the name of a folder on its maker's machine."""
    target, tokenizer = named_target(), tiny_tokenizer()
    drafter = tiny_drafter(target, num_target_layers=None)
    record_target(drafter, target, tokenizer, "thinking")
    drafter.save_pretrained(tmp_path)
    loaded = DFlowDrafter.from_pretrained(tmp_path)
    check_pair(target, loaded, tokenizer, "thinking")
    assert warnings == [] and loaded.config.num_target_layers == 4
    assert (loaded.config.target_name, loaded.config.target_revision) == ("org/target", REVISION)
    check_pair(named_target("org/other"), loaded, tokenizer, "raw")
    assert len(warnings) == 2
    target.config._name_or_path = str(tmp_path)
    record_target(drafter, target)
    assert drafter.config.target_name == "org/target" and drafter.config.chat_mode == "thinking"


def test_a_pair_that_fits_is_silent(warnings, tmp_path, monkeypatch):
    """Bug: a warning for a folder's name, for a mode or tokenizer nobody asked about, for what the drafter lacks."""
    tokenizer = tiny_tokenizer()
    target = named_target()
    drafter = tiny_drafter(target, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), **RECORDED)
    check_pair(target, drafter, tokenizer, "non-thinking")
    check_pair(target, drafter)
    for name in (str(tmp_path), "./models/other", "plain"):
        target.config._name_or_path = name
        check_pair(target, drafter)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "copy").mkdir()
    monkeypatch.chdir(tmp_path)
    target.config._name_or_path = "my/copy"
    check_pair(target, drafter)
    check_pair(named_target("org/any"), tiny_drafter(target))
    assert warnings == []


@pytest.mark.parametrize(
    "drafter_size, target_size, is_padding",
    [
        *((151936, 152064, True), (151936, 151669, True), (50257, 50304, True), (120, 128, True)),
        *((32000, 128256, False), (49152, 49664, False), (64, 128, False), (384, 256, False)),
    ],
)
def test_padding_and_another_vocabulary_are_told_apart(drafter_size, target_size, is_padding):
    """Bug: "different tokenizers" for one vocabulary in two paddings, or silence about two vocabularies."""
    ours, target = LlamaConfig(vocab_size=drafter_size), LlamaConfig(vocab_size=target_size)
    assert internals.may_be_padding(ours, target) is is_padding


ASKED = {"another mode": ("thinking", 1), "the same": ("non-thinking", 0), "not said": (None, 0)}


@pytest.mark.parametrize("way", ["flag", "custom_generate"])
@pytest.mark.parametrize("case", ASKED)
def test_generate_compares_the_mode_it_is_told(case, way, warnings):
    """Bug: `chat_mode` reaches neither way of decoding, warns at each step, or changes the text."""
    mode, number = ASKED[case]
    target, prompt = named_target(), prompt_of(5)
    drafter = tiny_drafter(target, **RECORDED)
    config = DFlowGenerationConfig(max_new_tokens=8, do_sample=False, chat_mode=mode)
    if way == "flag":
        arguments = {"assistant_model": drafter, "generation_config": config}
    else:
        arguments = {"custom_generate": DFlowDecoder(drafter, chat_mode=mode), "max_new_tokens": 8, "do_sample": False}
    texts = [target.generate(prompt, **arguments) for _ in range(2)]
    assert len(warnings) == number and all("asked for is 'thinking'" in one for one in warnings)
    assert all(torch.equal(text, plain_greedy(target, prompt, 8)) for text in texts)


def test_a_mode_that_is_none(warnings):
    """Bug: a mistyped mode that warns of every drafter, or of none."""
    target = named_target()
    config = DFlowGenerationConfig(max_new_tokens=4, chat_mode="no-thinking")
    with pytest.raises(UnsupportedGenerationError, match="non-thinking"):
        target.generate(prompt_of(5), assistant_model=tiny_drafter(target), generation_config=config)


def test_generate_compares_the_tokenizer_it_is_given(warnings, monkeypatch):
    """Bug: `tokenizer=` is ignored, its vocabulary hashed at every call, or tokens added later not seen."""
    hashed = internals.watch_fingerprints(monkeypatch)
    target, tokenizer = named_target(), tiny_tokenizer()
    drafter = tiny_drafter(target, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), **RECORDED)
    for _ in range(3):
        dflow_greedy(target, drafter, prompt_of(5), max_new_tokens=4, tokenizer=tokenizer)
    assert warnings == [] and len(hashed) == 1
    tokenizer.add_tokens(["<new>"])
    dflow_greedy(target, drafter, prompt_of(5), max_new_tokens=4, tokenizer=tokenizer)
    assert len(warnings) == 1 and "tokenizer" in warnings[0]


@pytest.mark.parametrize(
    "template, thinking, mode",
    [
        (data_kit.THINKING, True, "thinking"),
        (data_kit.THINKING, False, "non-thinking"),
        (data_kit.THINKING, None, "thinking"),  # what it does unasked
        (data_kit.CHATML, None, "chat"),
        (data_kit.CHATML, False, "chat"),  # it does not know the switch
        (None, None, None),
    ],
)
def test_how_a_template_asks(template, thinking, mode):
    """Bug: the flag believed where the template never reads it, or the template's own default not looked at."""
    assert asked_mode(data_kit.chat_tokenizer(template), thinking) == mode


@pytest.mark.parametrize("flags, number", [(["--no-thinking"], 0), (["--thinking"], 1), ([], 1)])
def test_the_check_command_compares_the_mode(flags, number, warnings, monkeypatch, tmp_path):
    """Bug: `hf-dflow check` asks in another mode than the drafter was made for, and says nothing."""
    tokenizer = data_kit.chat_tokenizer(data_kit.THINKING)
    target = named_target(vocab_size=len(tokenizer))
    drafter = tiny_drafter(target, **RECORDED)
    recorded = []

    def load(*_, thinking=None, **__):
        recorded.append(pairs.Pair(target, drafter, tokenizer, "tiny", thinking))
        return recorded[-1]

    monkeypatch.setattr(pairs, "load_pair", load)
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"chat": ["What is the capital?"]}')
    result = CliRunner().invoke(app, ["check", "--prompts", str(prompts), "--max-new-tokens", "4", *flags])
    assert result.exit_code == 0, result.output
    assert len(warnings) == number and all("'non-thinking', asked for is 'thinking'" in one for one in warnings)
    asked = tokenizer.decode(recorded[0].encode("What")["input_ids"][0])
    assert ("<think>\n\n</think>" in asked) == (flags == ["--no-thinking"])


def test_an_equal_fingerprint_settles_the_vocabulary(warnings):
    """Bug: a warning about sizes though the tokenizer is known to be the same."""
    target, tokenizer = named_target(vocab_size=600), tiny_tokenizer()
    drafter = tiny_drafter(target, vocab_size=64, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    check_pair(target, drafter, tokenizer)
    assert warnings == []
    check_pair(target, drafter)
    assert "knows 64 tokens, the target 600" in warnings[0]


SENTENCE = "the quick brown fox jumps over one lazy dog while seven other animals are asleep in their barn"
WORDS = SENTENCE.split()


def words_tokenizer(words):
    """A tokenizer of whole words."""
    vocab = {word: token_id for token_id, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))


def test_a_drafter_of_another_tokenizer_is_refused_naming_both(warnings, tmp_path):
    """N26: the same number of tokens with other ids; every draft is rejected, and only a digest is warned of."""
    target = named_target("org/target")
    drafter = tiny_drafter(target)
    record_target(drafter, target, words_tokenizer(WORDS))
    drafter.save_pretrained(tmp_path / "drafter")
    drafter = DFlowDrafter.from_pretrained(tmp_path / "drafter")
    other = words_tokenizer(WORDS[::-1])
    for check in (
        lambda: check_pair(target, drafter, other),
        lambda: dflow_greedy(target, drafter.double(), prompt_of(5), max_new_tokens=4, tokenizer=other),
    ):
        with pytest.raises(PairMismatchError, match="other tokenizer than that of the target org/target") as refusal:
            check()
        assert str(tmp_path) in str(refusal.value) and "'animals' is 12 for the drafter and 5 for" in str(refusal.value)
    assert warnings == []


def test_added_and_renamed_tokens_are_no_other_tokenizer(warnings):
    """N26: a fine-tune that added a token or renamed a few loses its drafter."""
    target = named_target("org/target")
    drafter = tiny_drafter(target)
    record_target(drafter, target, words_tokenizer(WORDS))
    check_pair(target, drafter, words_tokenizer(WORDS))
    assert warnings == []
    for number, words in enumerate(([*WORDS, "<pad>"], ["<tool>", *WORDS[1:]]), 1):
        check_pair(target, drafter, words_tokenizer(words))
        assert len(warnings) == number and "DFlowDrafter may draft badly for the target org/target" in warnings[-1]


def test_a_processor_is_asked_for_its_tokenizer(warnings):
    """N26's kind: "object of type … has no len()" for the processor of a multimodal target."""

    class Processor:
        tokenizer = words_tokenizer(WORDS)

    target = named_target("org/target")
    drafter = tiny_drafter(target)
    record_target(drafter, target, Processor())
    assert drafter.config.tokenizer_fingerprint == tokenizer_fingerprint(Processor.tokenizer)
    check_pair(target, drafter, Processor())
    check_pair(target, drafter, tokenizer=object())  # nothing to compare
    assert warnings == []
    Processor.tokenizer = words_tokenizer(WORDS[::-1])
    with pytest.raises(PairMismatchError, match="another tokenizer"):
        check_pair(target, drafter, Processor())


def test_sizes_of_two_small_vocabularies_are_warned_of_naming_both(warnings):
    """N26: 64 tokens against 128 taken for padding."""
    target = named_target("org/target", vocab_size=128)
    drafter = tiny_drafter(target, vocab_size=64)
    for _ in range(2):
        check_pair(target, drafter)
    assert len(warnings) == 1 and "DFlowDrafter may draft badly for the target org/target: it knows 64" in warnings[0]


def test_the_fingerprint_is_of_ids_and_tokens():
    """Bug: a digest that depends on the order of a dict, or does not see that two tokens changed places."""
    tokenizer = tiny_tokenizer()
    vocab = tokenizer.get_vocab()

    class Other:
        def __init__(self, vocab):
            self.vocab = vocab

        def get_vocab(self):
            return self.vocab

    reordered = Other(dict(sorted(vocab.items(), key=lambda item: -item[1])))
    swapped = Other({**vocab, "a": vocab["b"], "b": vocab["a"]})
    assert tokenizer_fingerprint(reordered) == tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(swapped)
    assert json.dumps(tokenizer_fingerprint(tokenizer))


@pytest.mark.parametrize("drafter_size, padded", [(56, 64), (64, 72), (72, 64)])
def test_a_padded_vocabulary_decodes_to_the_same_text(drafter_size, padded, warnings):
    """F6: an error for 120 against 128 rows; a padded id proposed; a target's token that is never reached."""
    target, prompt = tiny_target(vocab_size=padded), prompt_of(9)
    target.get_output_embeddings().weight[:, 0] += 0.2
    drafter = tiny_drafter(target, vocab_size=drafter_size, mask_token_id=min(drafter_size, padded) - 1)
    out = dflow_greedy(target, drafter, prompt, max_new_tokens=24)
    text = plain_greedy(target, prompt, 24)
    assert torch.equal(out.sequences, text) and warnings == []
