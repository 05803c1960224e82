"""`hf-dflow train`: one command from rows to a folder that `generate` takes and that says what it was made for."""

import json
from dataclasses import replace

import data_kit as templates
import internals
import pytest
import torch
from data_kit import chat_target, chat_tokenizer
from kit import MASK_TOKEN_ID, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from safetensors.torch import load_file
from trainer_kit import STAGES, differing, log_of, tiny_training, training_target
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, check_pair, tokenizer_fingerprint
from hf_dflow.cli import app
from hf_dflow.training import checkpoint, run
from hf_dflow.training.config import PRESETS, Stage
from hf_dflow.training.data import DataFile
from hf_dflow.training.trainer import Trainer, Update

PROMPT_LENGTH, NEW_TOKENS = 4, 20


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a target, two files of its greedy answers, and a run's configuration."""
    folder, target = tmp_path_factory.mktemp("files"), training_target()
    tiny_target("llama", dtype=torch.float32).save_pretrained(folder / "target")
    records = []
    for seed in range(24):
        prompt = prompt_of(PROMPT_LENGTH, seed)
        answer = plain_greedy(target, prompt, NEW_TOKENS)[0, PROMPT_LENGTH:].tolist()
        records.append({"prompt": f"p{seed}", "prompt_ids": prompt[0].tolist(), "answer_ids": answer})
    for name, part in (("one", records[:14]), ("two", records[14:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    training = tiny_training(stages=STAGES, evaluate_every=10, evaluate_prompts=3, evaluate_tokens=12)
    (folder / "training.json").write_text(json.dumps(training.to_dict()))
    return folder


def command(files, output, *options):
    data = (files / "one.jsonl", files / "two.jsonl")
    return ("train", files / "target", *data, "--output", output, "--held-out", "0.2", *options)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    result = succeed(*command(files, output, "--config", files / "training.json"))
    return output, result.output


def test_one_command_trains_evaluates_and_leaves_a_folder_that_generate_takes(trained):
    """Catches: a pipeline whose parts work and whose result does not load, or is not the trained weights."""
    output, text = trained
    drafter = DFlowDrafter.from_pretrained(output / "drafter")
    assert drafter.dtype == torch.bfloat16 and drafter.relay.down_proj.weight.any()
    last = load_file(checkpoint.checkpoints(output)[-1] / "model.safetensors")
    rounded = {name: weight.bfloat16() for name, weight in last.items()}
    assert differing(rounded, load_file(output / "drafter/model.safetensors")) == []
    prompt = prompt_of(PROMPT_LENGTH, 100)
    result = dflow_greedy(training_target(), drafter.float(), prompt, max_new_tokens=NEW_TOKENS)
    assert result.sequences.equal(plain_greedy(training_target(), prompt, NEW_TOKENS))
    assert "20 updates (0 skipped)" in text and "3 held-out prompts, greedy, relay on:" in text


def test_what_is_left_beside_the_drafter_says_how_it_was_made(trained, files):
    """Catches: a drafter that nobody can make again, or whose figures nobody can check."""
    training, provenance, evaluation = (
        json.loads((trained[0] / "drafter" / f"{name}.json").read_text())
        for name in ("training", "provenance", "evaluation")
    )
    given = {
        key: value for key, value in json.loads((files / "training.json").read_text()).items() if value is not None
    }
    assert {key: training[key] for key in given} == given
    assert training["loss_decay"] == 4.0 and training["initialise_from_target"] is True, "open fields are filled in"
    assert [(file["file"], file["rows"], file["supervised_tokens"]) for file in provenance["data"]] == [
        ("one.jsonl", 14, 280),
        ("two.jsonl", 10, 200),
    ]
    assert provenance["rows_trained_on"] + provenance["rows_held_out"] == 24
    assert provenance["target"]["weights"] and provenance["target"]["name"] == "target"
    assert str(files) not in json.dumps([training, provenance, evaluation]), "no path of this machine"
    assert evaluation["relay_on"]["prompts"] == evaluation["relay_off"]["prompts"] == 3
    assert 1.0 <= evaluation["relay_on"]["tokens_per_step"] <= 4.0


def test_tokens_per_step_are_decoded_during_training(trained):
    """Catches: a curve of the loss alone, which can look fine while drafts are refused."""
    lines = log_of(trained[0])
    decoded = [line for line in lines if "tokens_per_step" in line]
    assert [line["update"] for line in decoded] == [0, 10, 20]
    for line in decoded:
        accepted = sum(i * steps for i, steps in enumerate(line["acceptance_histogram"]))
        whole, cut = 1 + accepted / line["steps"], 3 / line["steps"]  # each of the three texts may cut one step
        assert whole - cut - 1e-4 < line["tokens_per_step"] < whole + 1e-4 and line["prompts"] == 3
    assert all(len(line["losses"]) == (1 if line["update"] <= 8 else 3) for line in lines if "losses" in line)


def test_live_features_give_the_run_that_cached_ones_give(trained, files, tmp_path):
    """Catches: `--features none` that trains on other states, or still writes them."""
    succeed(*command(files, tmp_path, "--config", files / "training.json", "--features", "none"))
    assert (trained[0] / "features").exists() and not (tmp_path / "features").exists()
    weights = [load_file(folder / "drafter" / "model.safetensors") for folder in (trained[0], tmp_path)]
    assert differing(*weights) == []


def test_a_finished_run_only_saves_and_a_new_one_may_continue_from_it(trained, files, tmp_path, monkeypatch):
    """Catches: a second start that trains on, and `--from` that starts anew or forgets sizes."""
    output, _ = trained
    before = load_file(output / "drafter" / "model.safetensors")
    again = succeed(*command(files, output, "--config", files / "training.json"))
    assert "resumed after update 20 of 20" in again.output
    assert differing(before, load_file(output / "drafter" / "model.safetensors")) == []
    monkeypatch.setitem(PRESETS, "cpu", replace(PRESETS["cpu"], evaluate_every=0, evaluate_tokens=4))
    options = ("--from", output / "drafter", "--train-only", "relay", "--updates", 2, "--features", output / "features")
    succeed(*command(files, tmp_path, *options))
    after = load_file(tmp_path / "drafter" / "model.safetensors")
    assert all(name.startswith("relay.") for name in differing(before, after))
    config = DFlowDrafter.from_pretrained(tmp_path / "drafter").config
    assert (config.num_hidden_layers, config.block_size, config.mask_token_id) == (1, 4, MASK_TOKEN_ID)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "missing.json"], "missing.json: no such file"),
        (["--preset", "tpu"], "--preset tpu is unknown; use one of cpu, gpu"),
        (["--train-only", "head"], '"train_only" is \'head\'; give one of null, "relay", "correction"'),
        (["--updates", "1"], "1 updates for 2 stages"),
        (["--learning-rate", "0"], '--learning-rate, stage 1: "learning_rate" is 0.0; give a number above 0'),
        (["--report-to", "tensorbored"], "--report-to tensorbored is unknown; use none or one of"),
        (["--report-to", "comet_ml"], "--report-to comet_ml: the package comet_ml is not installed"),
        (["--held-out", "0.9", "--max-length", "5"], "no row"),
    ],
)
def test_mistakes_are_reported_before_anything_is_loaded(files, tmp_path, monkeypatch, options, message):
    """Catches: minutes of loading before a misspelt option, or a traceback in place of a sentence."""
    monkeypatch.setattr(run, "load_frozen_target", lambda *arguments: pytest.fail("loaded"))
    result = invoke(*command(files, tmp_path, *options))
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


def test_what_cannot_be_trained_is_refused_before_any_target_state_is_computed(trained, files, tmp_path, monkeypatch):
    """N25's kind: hours of target states, and then the refusal of a drafter or of a run that was known before."""
    monkeypatch.setattr(run.FeatureStore, "fill", lambda *_: pytest.fail("computed"))
    options = ("--config", files / "training.json")
    result = invoke(*command(files, trained[0], *options, "--seed", 1, "--features", tmp_path / "states"))
    assert result.exit_code == 2 and "belongs to another run" in result.stderr
    other = tiny_drafter(tiny_target("llama", hidden_size=64, head_dim=16), 4, target_layer_ids=[0, 2])
    other.save_pretrained(tmp_path / "other")
    result = invoke(*command(files, tmp_path / "run", "--from", tmp_path / "other"))
    assert result.exit_code == 2 and "does not fit this target" in result.stderr


def test_learning_rate_batch_and_length_of_a_finished_run_have_flags(files, tmp_path, monkeypatch):
    """N23: a JSON file for the two numbers that everybody changes; `--updates` on a finished run is an error."""
    stages = [replace(STAGES[0], updates=1), replace(STAGES[1], updates=1, learning_rate=5e-4, rows_per_update=4)]
    monkeypatch.setitem(
        PRESETS, "cpu", tiny_training(stages=stages, evaluate_every=0, evaluate_tokens=4, evaluate_prompts=1)
    )
    options = ("--learning-rate", 0.01, "--batch", 2, "--report-to", "none")
    result = invoke(*command(files, tmp_path, *options, "--updates", 2, "--extend"))
    assert result.exit_code == 2 and "holds no run to extend" in result.stderr
    succeed(*command(files, tmp_path, *options, "--updates", 2))
    result = invoke(*command(files, tmp_path, *options, "--updates", 4))
    assert result.exit_code == 2 and "--extend trains a finished run further" in result.stderr.replace("\n", " ")
    result = succeed(*command(files, tmp_path, *options, "--updates", 4, "--extend"))
    assert "resumed after update 2 of 4" in result.output and "4 updates (0 skipped)" in result.output
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    settings = [(stage["updates"], stage["learning_rate"], stage["rows_per_update"]) for stage in record["stages"]]
    assert settings == [(1, 0.01, 1), (3, 0.005, 2)] and not (tmp_path / "tensorboard").exists()


def test_rows_of_another_tokenizer_are_refused_and_a_run_that_learned_nothing_saves_nothing(
    files, tmp_path, monkeypatch
):
    """Bug: an IndexError out of the target's forward; or an untrained drafter that is exported with exit code 0."""
    row = {"prompt": "p", "prompt_ids": [1, 2], "answer_ids": [8, 9, 99999, 3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "prompt": "q"}))
    arguments = ("train", files / "target", tmp_path / "rows.jsonl", "--output", tmp_path / "a")
    result = invoke(*arguments, "--config", files / "training.json", "--held-out", "0")
    assert result.exit_code == 2 and "a row holds token 99999, this target has the tokens 0 … 63" in result.stderr
    monkeypatch.setattr(Trainer, "step", lambda *_: Update([0.0], 0.0, "the loss is not finite"))
    result = invoke(*command(files, tmp_path / "b", "--config", files / "training.json", "--updates", 4))
    assert result.exit_code == 2 and "all 4 updates were skipped" in result.stderr
    assert not (tmp_path / "b" / "drafter").exists()


# -- what a trained drafter's configuration says of its target


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """The folder of a run on a target that can think and was told not to; the target's folder beside it."""
    folder = tmp_path_factory.mktemp("record")
    chat_target(folder / "target", templates.THINKING)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(8)))
    options = ("--max-new-tokens", 12, "--batch", 8, "--template-options", '{"enable_thinking": false}')
    succeed("data", folder / "target", folder / "rows.jsonl", "--prompts", folder / "prompts.jsonl", *options)
    training = tiny_training(stages=[Stage(2, 0, 2, 4)], use_relay=False, mask_token_id=None, save_every=1)
    (folder / "training.json").write_text(json.dumps(training.to_dict()))
    train_chats(folder, folder / "run", "--config", folder / "training.json")
    return folder


def train_chats(folder, output, *options):
    return succeed("train", folder / "target", folder / "rows.jsonl", "--output", output, "--held-out", 0, *options)


def test_a_trained_drafter_says_what_it_was_trained_for(chat_run, tmp_path, monkeypatch):
    """Bug: `check_pair` has nothing to compare for exactly those drafters that users make themselves; or a finished run
    is refused, since what was recorded is taken for another drafter."""
    warnings = internals.pair_warnings(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(chat_run / "target")
    for folder in ("drafter", "checkpoint-2"):
        drafter = DFlowDrafter.from_pretrained(chat_run / "run" / folder)
        config = drafter.config
        assert config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer), folder
        assert (config.chat_mode, config.num_target_layers) == ("non-thinking", 4)
        assert config.target_name is None, "a folder's name means nothing elsewhere"
    target = tiny_target("llama", vocab_size=len(tokenizer))
    check_pair(target, drafter, tokenizer, "non-thinking")
    assert warnings == []
    check_pair(target, drafter, chat_tokenizer(None).train_new_from_iterator(["other words"], 300), "thinking")
    assert len(warnings) == 2 and "tokenizer" in "".join(warnings) and "'non-thinking'" in "".join(warnings)
    again = train_chats(chat_run, chat_run / "run", "--config", chat_run / "training.json")
    assert "resumed after update 2 of 2" in again.output
    start = ("--from", chat_run / "run" / "drafter", "--updates", 2, "--features", chat_run / "run/features")
    train_chats(chat_run, tmp_path, *start)
    config = DFlowDrafter.from_pretrained(tmp_path / "drafter").config
    assert config.chat_mode == "non-thinking" and config.tokenizer_fingerprint


RAW = {"sha256": None, "options": {}, "eos_token_ids": []}
THINKS = {"sha256": "1", "options": {"thinking": True}}


def data_files(*descriptions):
    return [DataFile([], template and {"template": template}, 0, 0) for template in descriptions]


def test_name_and_revision_are_those_of_the_hub_and_nothing_stays_of_an_earlier_target():
    """Bug: a drafter that was continued for a fine-tune still claims the base model, its commit and its tokenizer."""
    target, tokenizer, revision = tiny_target(), chat_tokenizer(None), "a" * 40
    target.config._name_or_path, target.config._commit_hash = "org/target", revision
    drafter = tiny_drafter(target, target_name="org/base", target_revision="b" * 40, tokenizer_fingerprint="0" * 16)
    config = drafter.config
    run.record_pair(drafter, target, tokenizer, data_files(RAW))
    assert (config.target_name, config.target_revision, config.chat_mode) == ("org/target", revision, "raw")
    assert config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    target.config._name_or_path = "/models/fine-tune"
    run.record_pair(drafter, target, None, data_files(None))
    assert (config.target_name, config.target_revision, config.tokenizer_fingerprint) == (None, None, None)
    assert config.chat_mode == "raw", "files that say nothing change nothing"


@pytest.mark.parametrize("descriptions", [(RAW, THINKS), (RAW, None), (None, THINKS)])
def test_files_that_do_not_agree_give_no_mode(descriptions):
    """Bug: the mode of whichever file comes first is claimed for all."""
    drafter = tiny_drafter(tiny_target(), chat_mode="chat")
    run.record_pair(drafter, tiny_target(), None, data_files(*descriptions))
    assert drafter.config.chat_mode is None
