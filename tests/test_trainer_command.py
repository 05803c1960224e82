"""`hf-dflow train`: one command from rows to a folder that `generate` takes; and the same in several processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import MASK_TOKEN_ID, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from safetensors.torch import load_file
from trainer_kit import STAGES, differing, tiny_training
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter
from hf_dflow.cli import app
from hf_dflow.training import checkpoint
from hf_dflow.training.config import PRESETS
from hf_dflow.training.trainer import Trainer, Update

ROOT = Path(__file__).parent.parent
PROMPT_LENGTH, NEW_TOKENS = 4, 20


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def files(target, tmp_path_factory):
    """A folder with a target, two files of its greedy answers, and a run's configuration."""
    folder = tmp_path_factory.mktemp("files")
    target.save_pretrained(folder / "target")
    records = []
    for seed in range(24):
        prompt = prompt_of(PROMPT_LENGTH, seed)
        answer = plain_greedy(target, prompt, NEW_TOKENS)[0, PROMPT_LENGTH:].tolist()
        records.append({"prompt": f"p{seed}", "prompt_ids": prompt[0].tolist(), "answer_ids": answer})
    for name, part in (("one", records[:14]), ("two", records[14:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    record = tiny_training(stages=STAGES, evaluate_every=10, evaluate_prompts=3, evaluate_tokens=12).to_dict()
    (folder / "training.json").write_text(json.dumps(record))
    return folder


def train(files, output, *options):
    data = [str(files / "one.jsonl"), str(files / "two.jsonl")]
    return CliRunner().invoke(
        app, ["train", str(files / "target"), *data, "--output", str(output), "--held-out", "0.2", *map(str, options)]
    )


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    result = train(files, output, "--config", files / "training.json")
    assert result.exit_code == 0, result.output
    return output, result.output


def test_one_command_trains_evaluates_and_leaves_a_folder_that_generate_takes(trained, files, target):
    """Catches: a pipeline whose parts work and whose result does not load, or is not the trained weights."""
    output, said = trained
    drafter = DFlowDrafter.from_pretrained(output / "drafter")
    assert drafter.dtype == torch.bfloat16 and drafter.relay.down_proj.weight.any()
    last = load_file(checkpoint.checkpoints(output)[-1] / "model.safetensors")
    assert (
        differing(
            {name: weight.bfloat16() for name, weight in last.items()}, load_file(output / "drafter/model.safetensors")
        )
        == []
    )
    prompt = prompt_of(PROMPT_LENGTH, 100)
    result = dflow_greedy(target, drafter.float(), prompt, max_new_tokens=NEW_TOKENS)
    assert result.sequences.equal(plain_greedy(target, prompt, NEW_TOKENS))
    assert "20 updates (0 skipped)" in said and "3 held-out prompts, greedy, relay on:" in said


def test_what_is_left_beside_the_drafter_says_how_it_was_made(trained, files):
    """Catches: a drafter that nobody can make again, or whose figures nobody can check."""
    output, _ = trained
    records = {
        name: json.loads((output / "drafter" / f"{name}.json").read_text())
        for name in ("training", "provenance", "evaluation")
    }
    given = json.loads((files / "training.json").read_text())
    assert {key: records["training"][key] for key in given if given[key] is not None} == {
        key: value for key, value in given.items() if value is not None
    }
    assert records["training"]["loss_decay"] == 4.0, "what was left open is filled in"
    assert records["training"]["initialise_from_target"] is True
    data = records["provenance"]["data"]
    assert [(one["file"], one["rows"], one["supervised_tokens"]) for one in data] == [
        ("one.jsonl", 14, 280),
        ("two.jsonl", 10, 200),
    ]
    assert records["provenance"]["rows_trained_on"] + records["provenance"]["rows_held_out"] == 24
    assert records["provenance"]["target"]["weights"] and records["provenance"]["target"]["name"] == "target"
    assert str(files) not in json.dumps(records), "no path of this machine"
    assert records["evaluation"]["relay_on"]["prompts"] == records["evaluation"]["relay_off"]["prompts"] == 3
    assert 1.0 <= records["evaluation"]["relay_on"]["tokens_per_step"] <= 4.0


def test_tokens_per_step_are_decoded_during_training(trained):
    """Catches: a curve of the loss alone, which can look fine while drafts are refused."""
    output, _ = trained
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    decoded = [line for line in lines if "tokens_per_step" in line]
    assert [line["update"] for line in decoded] == [0, 10, 20]
    for line in decoded:
        accepted = sum(i * steps for i, steps in enumerate(line["acceptance_histogram"]))
        assert line["tokens_per_step"] == pytest.approx(1 + accepted / line["steps"], abs=1e-4) and line["prompts"] == 3
    assert all(len(line["losses"]) == (1 if line["update"] <= 8 else 3) for line in lines if "losses" in line)


def test_features_made_when_needed_give_the_run_that_cached_ones_give(trained, files, tmp_path):
    """Catches: `--features none` that trains on other states, or still writes them."""
    output, _ = trained
    result = train(files, tmp_path, "--config", files / "training.json", "--features", "none")
    assert result.exit_code == 0, result.output
    assert (output / "features").exists() and not (tmp_path / "features").exists()
    weights = [load_file(folder / "drafter" / "model.safetensors") for folder in (output, tmp_path)]
    assert differing(*weights) == []


def test_started_again_a_finished_run_only_saves_and_a_new_one_may_continue_from_it(
    trained, files, tmp_path, monkeypatch
):
    """Catches: a second start that trains on, and `--from` that starts anew or forgets sizes."""
    output, _ = trained
    before = load_file(output / "drafter" / "model.safetensors")
    again = train(files, output, "--config", files / "training.json")
    assert again.exit_code == 0 and "resumed after update 20 of 20" in again.output
    assert differing(before, load_file(output / "drafter" / "model.safetensors")) == []
    quick = replace(PRESETS["cpu"], evaluate_every=0, evaluate_tokens=4)
    monkeypatch.setitem(PRESETS, "cpu", quick)
    options = ("--from", output / "drafter", "--train-only", "relay", "--updates", 2, "--features", output / "features")
    result = train(files, tmp_path, *options)
    assert result.exit_code == 0, result.output
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
        (["--held-out", "0.9", "--max-length", "5"], "no row"),
    ],
)
def test_mistakes_end_in_words_before_anything_is_loaded(files, tmp_path, monkeypatch, options, message):
    """Catches: minutes of loading before a misspelt option, or a traceback in place of a sentence."""
    from hf_dflow.training import run

    monkeypatch.setattr(run, "load_frozen_target", lambda *arguments: pytest.fail("loaded"))
    result = train(files, tmp_path, *options)
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


def test_rows_of_another_tokenizer_are_refused_and_a_run_that_learned_nothing_saves_nothing(
    files, tmp_path, monkeypatch
):
    """Bug: an IndexError out of the target's forward; or an untrained drafter that is exported with exit code 0."""
    row = {"prompt": "p", "prompt_ids": [1, 2], "answer_ids": [8, 9, 99999, 3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "prompt": "q"}))
    command = ["train", str(files / "target"), str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "a")]
    result = CliRunner().invoke(app, [*command, "--config", str(files / "training.json"), "--held-out", "0"])
    assert result.exit_code == 2 and "made with another tokenizer" in " ".join(result.stderr.split())
    nothing = Update([float("nan")], 1.0, "the loss is not finite")
    monkeypatch.setattr(Trainer, "step", lambda self, stage, rate: nothing)
    result = train(files, tmp_path / "b", "--config", files / "training.json", "--updates", 4)
    assert result.exit_code == 2 and "all 4 updates were skipped" in " ".join(result.stderr.split())
    assert not (tmp_path / "b" / "drafter").exists()


def test_two_processes_draw_different_rows_and_keep_equal_weights(tmp_path):
    """Catches: processes that train on the same rows, or drift apart because a gradient was not shared."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = (
        "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    )
    child = Path(__file__).with_name("trainer_child.py")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *launch.split(),
        str(child),
        "together",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    weights = [torch.load(tmp_path / f"weights-{process}.pt", weights_only=True) for process in (0, 1)]
    assert differing(*weights) == []
    drawn = [json.loads((tmp_path / f"drawn-{process}.json").read_text()) for process in (0, 1)]
    numbers = [[i for pair in pairs for i in pair] for pairs in drawn]
    together = [i for both in zip(*numbers, strict=True) for i in both]
    assert all(sorted(together[epoch : epoch + 7]) == list(range(7)) for epoch in range(0, 77, 7))
    newest = checkpoint.checkpoints(tmp_path / "run")[-1]
    states = [checkpoint.read_process_state(newest, process)["draws"] for process in (0, 1)]
    assert not states[0].equal(states[1]), "anchors and noise of their own"
    single = tiny_drafter(tiny_target("llama"), 4)
    assert set(weights[0]) >= {name for name in single.state_dict() if name.startswith("relay.")}
