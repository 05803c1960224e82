"""The experiment's script at its smallest: all stages, on a target made on the spot."""

import json
import time

import pytest
import torch
from commands import invoke
from data_kit import chat_target
from safetensors.torch import load_file
from trainer_kit import tiny_rows

from experiments import drafter_stages, four_drafters
from experiments.drafter_stages import KINDS, Recipe, Training
from experiments.resident import ResidentFeatures
from hf_dflow import DFlowDrafter
from hf_dflow.bench import figures as evaluation
from hf_dflow.bench.strategies import Run
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError
from hf_dflow.training.data import is_held_out, read_rows
from hf_dflow.training.features import FeatureStore

ROUNDING = 1e-4  # float32 sums over a padded batch
SMALL = "--rows-per-update 2 --anchors-per-row 2 --num-layers 1 --block-size 4 --max-new-tokens 16 --batch 8"
DECODING = "--held-out 1 --decode-tokens 6 --minutes 60 --check-identity 2"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return chat_target(tmp_path_factory.mktemp("four") / "target")


@pytest.fixture
def short(monkeypatch):
    """Two bundled prompts instead of 24."""
    prompts = [Prompt("chat", "How are you?"), Prompt("code", "print what?")]
    monkeypatch.setattr(four_drafters, "chosen_prompts", lambda **_: prompts)


def run(*arguments):
    return invoke(four_drafters.main, *arguments)


def test_every_stage_is_done_once_and_written_down(target, tmp_path, short, monkeypatch):
    """Bug: a kind gets other rows or updates, a stage runs again after a kill, or weight files are too large."""
    (tmp_path / "prompts.txt").write_text("\n".join(f"question number {i}?" for i in range(60)))
    monkeypatch.setattr(drafter_stages, "MAX_FILE_SIZE", "20KB")
    command = [target, tmp_path / "out", "--prompts", tmp_path / "prompts.txt", "--updates 2", SMALL, DECODING]
    trained = Training.train

    def dying(self, kind, updates):
        if kind == "dflow":
            raise KeyboardInterrupt
        return trained(self, kind, updates)

    monkeypatch.setattr(Training, "train", dying)
    assert run(*command).exit_code != 0
    before = json.loads((tmp_path / "out" / "results.json").read_text())["stages"]
    assert list(before) == ["answers", "updates", "dflash", "multi_round"]
    monkeypatch.setattr(Training, "train", trained)
    result = run(*command)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "results.json").read_text()
    record = json.loads(text)
    stages = record["stages"]
    assert list(stages) == ["answers", "updates", *KINDS, "evaluation", "conditions"]
    assert {name: stages[name] for name in before} == before
    assert all(stage["seconds"] >= 0 for stage in stages.values())

    asked = {row.prompt for row in read_rows(tmp_path / "out" / "work" / "answers.jsonl")}
    assert 0 < stages["answers"]["rows"] == len(asked) and not any(map(is_held_out, asked))
    configurations = {kind: stages[kind]["configuration"] for kind in KINDS}
    rounds = {kind: one.pop("stages")[0].pop("relay_rounds") for kind, one in configurations.items()}
    assert rounds == {"dflash": 0, "multi_round": 2, "dflow": 2, "autoregressive": 0}
    assert [kind for kind, one in configurations.items() if one.pop("use_relay")] == ["dflow"]
    assert all(one == configurations["dflow"] for one in configurations.values())
    assert {stages[kind]["updates"] for kind in KINDS} == {2}

    weights = tmp_path / "out" / "weights"
    files = list(weights.glob("*/*.safetensors"))
    assert max(path.stat().st_size for path in files) < 2**15 < sum(path.stat().st_size for path in files)
    assert {value.dtype for path in files for value in load_file(path).values()} == {torch.bfloat16}
    assert DFlowDrafter.from_pretrained(weights / "dflow").relay is not None
    assert DFlowDrafter.from_pretrained(weights / "multi_round").relay is None

    measured = stages["evaluation"]["modes"]
    assert list(measured) == ["T=0", "T=1, token verification", "T=1, block verification"]
    greedy = measured["T=0"]["all"]
    assert list(greedy["contestants"]) == ["dflash", "multi_round", "dflow", "dflow, relay off", "autoregressive"]
    assert {"dflow - dflash", "dflow - multi_round", "dflow, relay off - multi_round"} <= set(greedy["differences"])
    assert "autoregressive" not in measured["T=1, block verification"]["all"]["contestants"]
    assert greedy["prompts"] == 3 and evaluation.is_identical(stages["evaluation"])
    assert stages["evaluation"]["identity"]["compared_with_plain"] == 2
    assert "held out of prompts.txt" in measured["T=0"]["by_task"] and "question number" not in text
    assert str(tmp_path) not in text
    other = run(*command, "--seed 1")
    assert isinstance(other.exception, DFlowError) and "other recipe" in str(other.exception)


def test_time_decides_how_much_is_done(target, tmp_path):
    """Bug: answers go on past their share of the minutes, or a slow machine gets updates for hours."""
    model = four_drafters.load_target(str(target), "float32", "cpu")
    answering = {"temperatures": [0.0], "max_new_tokens": 12, "batch_size": 8}
    (tmp_path / "prompts.txt").write_text("\n".join(f"question number {i}?" for i in range(60)))
    data = tmp_path / "answers.jsonl"
    arguments = (str(target), model, data, [str(tmp_path / "prompts.txt")], 0, answering, 0)
    found = drafter_stages.collect(*arguments, time.time() - 1)
    assert 0 < found["rows"] <= 8 and not found["all_prompts_answered"]  # one batch; very short answers are left out
    training = Training(str(target), model, data, Recipe(rows_per_update=2, num_layers=1), tmp_path, tmp_path)
    few = training.count_updates(KINDS, time.time() - 1)
    many = training.count_updates(KINDS, time.time() + 1000)
    assert few["updates"] == 1
    # 1 + 3 + 3 + 1 rounds where DFlow alone has 3.
    assert many["updates"] == pytest.approx(900 / (8 / 3 * many["seconds_per_dflow_update"]), rel=0.1)


def test_resident_features_are_those_of_the_store(target, tmp_path):
    """Bug: rows mixed up in a batch, padding among the features, or a teacher of another place."""
    model = four_drafters.load_target(str(target), "float32", "cpu")
    rows = tiny_rows(5)
    store = FeatureStore(tmp_path, rows, model, [0, 2], teacher_top_k=3)
    store.fill()
    resident = ResidentFeatures(rows, model, [0, 2], teacher_top_k=3)
    for i in range(len(rows)):
        torch.testing.assert_close(resident[i], store[i], atol=ROUNDING, rtol=ROUNDING)
        torch.testing.assert_close(resident.teacher(i).probs, store.teacher(i).probs, atol=1e-3, rtol=1e-2)
        assert resident.teacher(i).ids[:, 0].equal(store.teacher(i).ids[:, 0])


def test_processes_share_the_prompts(monkeypatch):
    """Bug: a prompt is decoded twice or by nobody, or two prompts draw the same random numbers."""
    numbers = []

    class Pool:
        def __init__(self, processes, **options):
            assert processes == 2

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def starmap(self, function, arguments):
            return [function(*one) for one in arguments]

    def decode_prompts(settings, prompts):
        numbers.extend(number for number, _ in prompts)
        return [
            evaluation.Answer(prompt, four_drafters.Mode(), 0, {"dflash": Run([1], 1, 0.1)}) for _, prompt in prompts
        ]

    monkeypatch.setattr(four_drafters, "decode_prompts", decode_prompts)
    context = type("Context", (), {"Pool": Pool})
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)
    prompts = [Prompt("chat", str(i)) for i in range(5)]
    settings = four_drafters.Evaluation("t", "w", ("dflash",), "float32", "cpu", (), 1, 0, 0.0)
    record = four_drafters.evaluate(settings, prompts, 2)
    assert sorted(numbers) == list(range(5)) and numbers != list(range(5))
    assert record["processes"] == 2
    assert sorted(row["prompt"] for row in record["rows"]) == list("01234")
