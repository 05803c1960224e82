"""The example that compares with vLLM, against a stand-in for vLLM: CI has none."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import read_prompts

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_with_vllm.py"
NEW_TOKENS = 12
# Answers with what `answers.json` holds, counts 3 steps of 7 drafts for each, 2 accepted, and notes its options.
STAND_IN = """
import json, os, pathlib

FOLDER = pathlib.Path(os.environ["STAND_IN_FOLDER"])
COUNTS = {"num_drafts": 1000, "num_draft_tokens": 7000, "num_accepted_tokens": 500}
PLAN = json.loads((FOLDER / "plan.json").read_text())


class SamplingParams:
    def __init__(self, **wanted):
        self.wanted = wanted


class LLM:
    def __init__(self, **options):
        if PLAN["refusal"]:
            raise ValueError(PLAN["refusal"])
        folder = pathlib.Path(options["speculative_config"]["model"])
        self.log = {
            "options": options,
            "drafter": json.loads((folder / "config.json").read_text()),
            "has_weights": (folder / "model.safetensors").is_file(),
            "offline": os.environ.get("HF_HUB_OFFLINE"),
            "requests": [],
        }

    def generate(self, prompts, params, use_tqdm):
        (prompt,) = prompts
        self.log["requests"].append({**prompt, **params.wanted})
        for name, more in (("num_drafts", 3), ("num_draft_tokens", 21), ("num_accepted_tokens", 2)):
            COUNTS[name] += more
        layout = pathlib.Path(self.log["options"]["speculative_config"]["model"]).name
        (FOLDER / f"{layout}.json").write_text(json.dumps(self.log))
        answer = PLAN["answers"][json.dumps(prompt["prompt_token_ids"])]
        return [Namespace(outputs=[Namespace(token_ids=tuple(answer))])]

    def get_metrics(self):
        counters = [Namespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in COUNTS.items()]
        return [*counters, Namespace(name="vllm:e2e_request_latency_seconds", sum=1.5)]


class Namespace:
    def __init__(self, **fields):
        self.__dict__.update(fields)
"""


@pytest.fixture(scope="module")
def plain_answers():
    """Prompt ids, as JSON -> the target's own greedy answer."""
    pair, answers = load_pair(TINY_TARGET, TINY_DRAFTER), {}
    for prompt in read_prompts(TINY_PROMPTS):
        inputs = pair.encode(prompt.text)
        run = decode(pair.target, inputs, Contestant("plain"), Mode(), NEW_TOKENS)
        answers[json.dumps(inputs["input_ids"][0].tolist())] = run.new_tokens
    assert len(answers) > 1
    return answers


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the example against the stand-in: exit code, what it printed, and the folder of what was recorded."""

    def run_with(answers, refusal="", python=sys.executable):
        package = tmp_path / "path" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STAND_IN)
        about = tmp_path / "path" / "vllm-0.0.7.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.7\n")
        (tmp_path / "plan.json").write_text(json.dumps({"answers": answers, "refusal": refusal}))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        monkeypatch.setenv("STAND_IN_FOLDER", str(tmp_path))
        options = ["--vllm-python", str(python), "--target", str(TINY_TARGET), "--drafter", str(TINY_DRAFTER)]
        options += ["--prompts", str(TINY_PROMPTS), "--max-new-tokens", str(NEW_TOKENS)]
        options += ["--json", str(tmp_path / "record.json")]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        return ended.value.code, capsys.readouterr().out, tmp_path

    return run_with


def test_options_of_vllm_and_the_record(run, plain_answers):
    """Bug: vLLM drafts nothing, has no room for the last block, earlier steps count too, a path in the record."""
    code, printed, folder = run(plain_answers)
    total = len(plain_answers)
    assert code == 0
    for layout, mark in (
        ("dflash", ("architectures", ["DFlashDraftModel"])),
        ("speculators", ("speculators_model_type", "dflash")),
    ):
        log = json.loads((folder / f"{layout}.json").read_text())
        options, speculative = log["options"], log["options"]["speculative_config"]
        assert options["model"] == str(TINY_TARGET) and options["dtype"] == "float32"
        assert speculative["method"] == "dflash" and speculative["num_speculative_tokens"] == 7
        assert log["drafter"][mark[0]] == mark[1] and log["has_weights"]
        longest = max(len(json.loads(prompt)) for prompt in plain_answers)
        assert options["max_model_len"] == longest + NEW_TOKENS + 2 * 8
        assert options["disable_log_stats"] is False and log["offline"] == "1"
        assert [json.dumps(request["prompt_token_ids"]) for request in log["requests"]] == list(plain_answers)
        assert all(request["temperature"] == 0.0 and request["max_tokens"] == NEW_TOKENS for request in log["requests"])
        assert f"{layout}: {total} of {total} texts the same" in printed
    text = (folder / "record.json").read_text()
    record = json.loads(text)
    for layout in record["layouts"].values():
        assert layout["prompts"] == layout["texts_the_same"] == total and layout["versions"]["vllm"] == "0.0.7"
        assert layout["vllm"]["steps_by_prompt"] == [3] * total
        assert (layout["vllm"]["drafted"], layout["vllm"]["accepted"]) == (21 * total, 2 * total)
        ours = layout["hf_dflow"]
        assert ours["tokens"] == sum(map(len, plain_answers.values()))
        assert ours["accepted"] >= 2 and ours["steps"] < ours["tokens"]
    conditions = record["conditions"]
    assert conditions["relay"] == conditions["correction"] == "off" and conditions["dtype"] == "float32"
    assert conditions["max_new_tokens"] == NEW_TOKENS
    assert str(folder) not in text and str(TINY_TARGET) not in text


def test_a_text_that_differs_is_a_failure(run, plain_answers):
    """Bug: a comparison by length, or of the first texts alone; a difference that ends with exit code 0."""
    *same, (last, tokens) = plain_answers.items()
    code, printed, folder = run({**dict(same), last: [*tokens[:-1], tokens[-1] + 1]})
    assert code == 1
    total = len(plain_answers)
    assert printed.count(f"{total - 1} of {total} texts the same") == 2
    record = json.loads((folder / "record.json").read_text())
    assert record["layouts"]["speculators"]["texts_the_same"] == total - 1


def test_a_refusal_is_shown_with_what_was_asked(run, plain_answers):
    """Bug: vLLM's own words lost in another process, or a record written of a run that did not happen."""
    code, _, folder = run(plain_answers, refusal="Speculative decoding with dflash is not supported here")
    assert "dflash is not supported here" in code and "num_speculative_tokens" in code
    assert not (folder / "record.json").exists()


def test_an_environment_that_is_not_there(run, plain_answers):
    """Bug: a traceback for a mistyped path, after the minutes that decoding here takes."""
    code, printed, folder = run(plain_answers, python="/no/such/python")
    assert "/no/such/python" in code and "vllm-env/bin/python" in code and printed == ""
    assert not (folder / "record.json").exists()
