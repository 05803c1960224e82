"""What a trained drafter's configuration says of its target: what the pair check compares later."""

import json

import data_kit as kit
import pytest
from data_kit import chat_target, chat_tokenizer
from kit import tiny_drafter, tiny_target
from test_pair_check import REVISION, named_target, warnings  # noqa: F401
from trainer_kit import tiny_training
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, check_pair, tokenizer_fingerprint
from hf_dflow.cli import app
from hf_dflow.training import run
from hf_dflow.training.config import Stage
from hf_dflow.training.data import DataFile
from hf_dflow.training.templates import ChatTemplate, chat_mode

# A template that thinks unless told otherwise, under the other name that the switch has.
OFF_UNLESS_ASKED = kit.CHATML + "{% if add_generation_prompt and not thinking %}{{ '<think></think>' }}{% endif %}"
SAYS_THE_WORD = kit.CHATML + "{% if false %}{{ m.thinking }}{% endif %}"


def run_command(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on a target that can think and was asked not to; the target's folder beside it."""
    folder = tmp_path_factory.mktemp("record")
    chat_target(folder / "target", kit.THINKING)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(8)))
    options = ("--max-new-tokens", 12, "--batch", 8, "--template-options", '{"enable_thinking": false}')
    run_command("data", folder / "target", folder / "rows.jsonl", "--prompts", folder / "prompts.jsonl", *options)
    training = tiny_training(stages=[Stage(2, 0, 2, 4)], use_relay=False, mask_token_id=None, save_every=1)
    (folder / "training.json").write_text(json.dumps(training.to_dict()))
    train(folder, folder / "run")
    return folder


def train(folder, output, *options):
    command = ("train", folder / "target", folder / "rows.jsonl", "--output", output, "--held-out", 0, *options)
    return run_command(*command, *(() if "--from" in options else ("--config", folder / "training.json")))


def test_a_trained_drafter_says_what_it_was_trained_for(trained, warnings):  # noqa: F811
    """Bug: `check_pair` has nothing to compare for exactly those drafters that users make themselves."""
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    for folder in ("drafter", "checkpoint-2"):
        drafter = DFlowDrafter.from_pretrained(trained / "run" / folder)
        config = drafter.config
        assert config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer), folder
        assert (config.chat_mode, config.num_target_layers) == ("non-thinking", 4)
        assert config.target_name is None, "a folder's name means nothing elsewhere"
    target = tiny_target("llama", vocab_size=len(tokenizer))
    check_pair(target, drafter, tokenizer, "non-thinking")
    assert warnings == []
    check_pair(target, drafter, chat_tokenizer(None).train_new_from_iterator(["other words"], 300), "thinking")
    assert len(warnings) == 2 and "tokenizer" in warnings[0] + warnings[1] and "'non-thinking'" in "".join(warnings)


def test_started_again_and_gone_on_from(trained, tmp_path):
    """Bug: a finished run that is refused, since what was recorded is taken for another drafter."""
    assert "resumed after update 2 of 2" in train(trained, trained / "run").output
    train(
        trained, tmp_path, "--from", trained / "run" / "drafter", "--updates", 2, "--features", trained / "run/features"
    )
    config = DFlowDrafter.from_pretrained(tmp_path / "drafter").config
    assert config.chat_mode == "non-thinking" and config.tokenizer_fingerprint


def data_file(*descriptions):
    return [DataFile([], one if one is None else {"template": one}, 0, 0) for one in descriptions]


RAW = {"sha256": None, "options": {}, "eos_token_ids": []}
THINKS = {"sha256": "1", "options": {"thinking": True}}


def test_name_and_revision_are_those_of_the_hub_and_nothing_stays_of_an_earlier_target():
    """Bug: a drafter that was continued for a fine-tune still claims the base model, its commit and its tokenizer."""
    target, tokenizer = named_target(), chat_tokenizer(None)
    drafter = tiny_drafter(target, target_name="org/base", target_revision="b" * 40, tokenizer_fingerprint="0" * 16)
    run.record_pair(drafter, target, tokenizer, data_file(RAW))
    config = drafter.config
    assert (config.target_name, config.target_revision, config.chat_mode) == ("org/target", REVISION, "raw")
    assert config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    target.config._name_or_path = "/models/fine-tune"
    run.record_pair(drafter, target, None, data_file(None))
    assert (config.target_name, config.target_revision, config.tokenizer_fingerprint) == (None, None, None)
    assert config.chat_mode == "raw", "files that say nothing change nothing"


@pytest.mark.parametrize("described", [(RAW, THINKS), (RAW, None), (None, THINKS)])
def test_files_that_do_not_agree_give_no_mode(described):
    """Bug: the mode of whichever file comes first is claimed for all."""
    drafter = tiny_drafter(tiny_target(), chat_mode="chat")
    run.record_pair(drafter, tiny_target(), None, data_file(*described))
    assert drafter.config.chat_mode is None


MODES = {
    "no switch": (kit.CHATML, {}, "chat"),
    "on by default": (kit.THINKING, {}, "thinking"),
    "switched on": (kit.THINKING, {"enable_thinking": True}, "thinking"),
    "switched off": (kit.THINKING, {"enable_thinking": False}, "non-thinking"),
    "off by default, by another name": (OFF_UNLESS_ASKED, {}, "non-thinking"),
    "on, by another name": (OFF_UNLESS_ASKED, {"thinking": True}, "thinking"),
    "a word that is no switch": (SAYS_THE_WORD, {}, "chat"),
    "a template that refuses the question": ("{{ raise_exception('no') }}{{ thinking }}", {}, None),
}


@pytest.mark.parametrize("case", MODES)
def test_the_mode_of_a_template_and_its_options(case):
    """Bug: a thinking model's data called "chat" because nobody gave the option, or a switch taken for its opposite."""
    template, options, mode = MODES[case]
    tokenizer = chat_tokenizer(template)
    described = json.loads(json.dumps(ChatTemplate(tokenizer, {2}, options).describe()))
    assert chat_mode(described, tokenizer) == mode
    if not options:
        others = [None, chat_tokenizer(None), chat_tokenizer(template + " ")]
        assert [chat_mode(described, other) for other in others] == [None] * 3
