"""Missing, wrong, truncated, oversized and malicious checkpoints: the right error, nothing allocated, nothing run."""

import json
import os
import shutil
import tracemalloc

import pytest
import torch
from kit import shared_target, tiny_drafter
from layouts import Payload, edit, original
from safetensors.torch import load_file, save_file

from hf_dflow import DFlowDrafter, DrafterConfigError, DrafterWeightsError

HUGE = 2**40


def weights_of(path):
    return load_file(path / "model.safetensors")


def write(path, weights):
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def header(path, change):
    """Rewrite the safetensors header by `change(dict)`, the data left as it is."""
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    new = json.dumps(entries).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


def pickle_only(path):
    (path / "model.safetensors").unlink()
    torch.save(Payload(path / "executed"), path / "pytorch_model.bin")


def pickle_named_safetensors(path):
    torch.save(Payload(path / "executed"), path / "model.safetensors")


def pickle_beside(path):
    (path / "model.safetensors").unlink()
    torch.save(Payload(path / "executed"), path / "pytorch_model.bin")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "pytorch_model.bin"}}))


def remote_code(path):
    (path / "evil.py").write_text(f"from pathlib import Path\nPath({str(path / 'executed')!r}).touch()\n")
    edit(path, {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, "model_type": "evil"})


def adapter(path):
    """transformers would follow an adapter's base model to another repository."""
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/base", "peft_type": "LORA"}))
    (path / "model.safetensors").unlink()


def sharded(name):
    def break_it(path):
        os.rename(path / "model.safetensors", path.parent / "outside.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))

    return break_it


def layers(path):
    config = json.loads((path / "config.json").read_text())
    count = 10**5
    edit(path, {"num_hidden_layers": count, "layer_types": config["layer_types"][:1] * count})


def truncated(kept):
    def break_it(path):
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])

    return break_it


def longer_header(path):
    file = path / "model.safetensors"
    file.write_bytes(HUGE.to_bytes(8, "little") + file.read_bytes()[8:])


def long_json(path):
    with open(path / "config.json", "a") as stream:
        stream.write(" " * (17 * 2**20))


def edited(**changes):
    return lambda path: edit(path, changes)


def wrong_type(path):
    weights = weights_of(path)
    write(path, {**weights, "fc.weight": weights["fc.weight"].to(torch.int8)})


CONFIG, WEIGHTS = DrafterConfigError, DrafterWeightsError
CASES = {
    "no configuration": (lambda path: (path / "config.json").unlink(), CONFIG, "config.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), WEIGHTS, "safetensors"),
    "empty file": (truncated(0), WEIGHTS, "cannot read"),
    "cut in the header": (truncated(60), WEIGHTS, "cannot read"),
    "cut in the data": (truncated(5000), WEIGHTS, "cannot read"),
    "header of a terabyte": (longer_header, WEIGHTS, "cannot read"),
    "offsets past the end": (
        lambda path: header(path, lambda h: h["fc.weight"].update(data_offsets=[0, HUGE])), WEIGHTS, "cannot read"
    ),
    "shape that its bytes do not hold": (
        lambda path: header(path, lambda h: h["fc.weight"].update(shape=[HUGE, HUGE])), WEIGHTS, "cannot read"
    ),
    "integers for weights": (wrong_type, WEIGHTS, "I8"),
    "pickle only": (pickle_only, WEIGHTS, "never pickles"),
    "pickle in disguise": (pickle_named_safetensors, WEIGHTS, "cannot read"),
    "index that names a pickle": (pickle_beside, WEIGHTS, "pytorch_model.bin"),
    "remote code": (remote_code, CONFIG, "evil"),
    "adapter of another repository": (adapter, WEIGHTS, "safetensors"),
    "shard above the folder": (sharded("../outside.safetensors"), WEIGHTS, "beside its index"),
    "shard by absolute path": (sharded("/etc/passwd"), WEIGHTS, "beside its index"),
    "shard that is missing": (sharded("model-00001-of-00001.safetensors"), WEIGHTS, "cannot read"),
    "width of a terabyte": (edited(hidden_size=2**20, target_hidden_size=2**20), WEIGHTS, "wrong shape"),
    "width past all numbers": (edited(intermediate_size=2**62), CONFIG, "sizes that no model can have"),
    "a hundred thousand layers": (layers, WEIGHTS, "100000"),
    "relay of a terabyte": (edited(relay_intermediate_size=HUGE), WEIGHTS, "relay.up_proj"),
    "vocabulary of a terabyte": (edited(vocab_size=HUGE), CONFIG, "no tokenizer"),
    "block of a gigabyte": (edited(block_size=2**30, max_position_embeddings=2**31), CONFIG, "block_size"),
    "negative size": (edited(num_attention_heads=-4), CONFIG, "num_attention_heads"),
    "size as text": (edited(num_key_value_heads="2"), CONFIG, "num_key_value_heads"),
    "attention from a repository": (edited(attn_implementation="evil/kernel"), None, ""),
    "dtype that is a function": (edited(dtype="load"), CONFIG, "dtype"),
    "activation out of thin air": (edited(hidden_act="__import__"), CONFIG, "hidden_act"),
    "rotary table of another kind": (edited(rope_parameters={"rope_type": "evil", "rope_theta": 1.0}), CONFIG, "evil"),
    "quantised": (edited(quantization_config={"quant_method": "bitsandbytes"}), CONFIG, "quantised"),
    "config of 17 MiB": (long_json, CONFIG, "bytes"),
    "config nested without end": (
        lambda path: (path / "config.json").write_text('{"a":' * 10**5 + "1" + "}" * 10**5), CONFIG, "nested"
    ),
    "config with NaN": (lambda path: (path / "config.json").write_text('{"rms_norm_eps": NaN}'), CONFIG, "NaN"),
    "config that is a list": (lambda path: (path / "config.json").write_text("[]"), CONFIG, "object"),
    "config that is no text": (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"), CONFIG, "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_checkpoint(name, tmp_path, monkeypatch):
    """Bug: a bare KeyError, gigabytes allocated on a file's word, or code of a stranger run."""
    path = shutil.copytree(original("dflow", layers="full"), tmp_path / "drafter")
    break_it, error, named = CASES[name]
    break_it(path)
    monkeypatch.setattr("torch.nn.Module.to", lambda *args, **kwargs: pytest.fail("a model was built"))
    tracemalloc.start()
    try:
        if error is None:  # harmless, because the key is not read
            assert DFlowDrafter.from_pretrained(path).config._attn_implementation in ("sdpa", "eager")
        else:
            with pytest.raises(error) as caught:
                DFlowDrafter.from_pretrained(path)
            assert named in str(caught.value) and str(tmp_path) in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert not (path / "executed").exists()


def test_shards_beside_their_index_load(tmp_path):
    """Bug: the check of shard names refuses what transformers itself writes."""
    drafter = tiny_drafter(shared_target(dtype=torch.float32))
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    loaded = DFlowDrafter.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in drafter.state_dict().items())


def test_an_attention_kernel_of_a_configuration_object(tmp_path):
    """Bug: AutoModel's configuration, read by transformers, brings "org/kernel" along, which is code from the Hub."""
    drafter = tiny_drafter(shared_target(dtype=torch.float32))
    drafter.save_pretrained(tmp_path)
    drafter.config._attn_implementation_internal = "evil/kernel"
    with pytest.raises(DrafterConfigError, match="evil/kernel"):
        DFlowDrafter.from_pretrained(tmp_path, config=drafter.config)
