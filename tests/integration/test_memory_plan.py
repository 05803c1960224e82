"""`hf-dflow plan`: counted from configurations, and found again in memory that was really allocated."""

import gc
import json

import pytest
import torch
from hybrids import hybrid
from kit import FAMILIES, cache_of, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from hf_dflow import DFlowGenerationConfig, PairMismatchError
from hf_dflow.bench import quantized_weights
from hf_dflow.bench.memory_plan import (
    Load,
    cache_bytes,
    drafter_bytes,
    make_plan,
    read_drafter,
    read_target,
    target_bytes,
)
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError
from hf_dflow.generation import verification
from hf_dflow.generation.cache import DraftCache

ROWS, PROMPT, TOKENS = 48, 40, 66
TOLERANCE = 0.05


def live_bytes() -> int:
    """Storage of every tensor that is alive and not frozen, each storage once."""
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("do_sample", [False, True])
def test_plan_agrees_with_measured_memory(monkeypatch, request, do_sample):
    """Bug: a block forgotten, counted twice or in the wrong dtype: the plan is 5% off what a real pair allocates."""
    gc.collect()
    gc.freeze()  # what was there before is not looked at: it is much, and none of it is the pair's
    request.addfinalizer(gc.unfreeze)
    before = live_bytes()
    pair = load_pair(TINY_TARGET, TINY_DRAFTER, torch.float32)
    loaded = live_bytes() - before
    seen, decide = [], verification.verify_block

    def looking(inputs, backend):
        decision = decide(inputs, backend)
        if inputs.draft_ids.shape[1]:
            seen.append(live_bytes() - before)
        return decision

    monkeypatch.setattr(verification, "verify_block", looking)
    ids = torch.randint(5, 5000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).repeat(ROWS, 1)
    pair.target.generation_config.eos_token_id = None
    config = DFlowGenerationConfig(
        max_length=TOKENS,
        do_sample=do_sample,
        pad_token_id=0,
        seeds=[3] * ROWS if do_sample else None,
    )
    pair.target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=pair.drafter, generation_config=config
    )
    load = Load(TOKENS, PROMPT, "float32", do_sample=do_sample, has_holes=False)  # equal rows accept alike: no holes
    plan = make_plan(read_target(TINY_TARGET), read_drafter(TINY_DRAFTER), load)
    assert loaded == pytest.approx(plan.drafting_fixed, rel=TOLERANCE)
    assert ROWS * plan.drafting_row > plan.drafting_fixed  # else weights alone would pass
    assert max(seen) == pytest.approx(plan.drafting_fixed + ROWS * plan.drafting_row, rel=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_cache_of_every_family(family):
    """Bug: tied heads counted twice, grouped heads counted whole, a window that grows with the text."""
    target = tiny_target(family, dtype=torch.float32)
    tensors = {one.data_ptr(): one.nbytes for one in target.state_dict().values()}
    assert target_bytes(target.config, torch.float32) == sum(tensors.values())
    cache = DynamicCache(config=target.config)
    target(torch.ones(1, 40, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    counted = cache_bytes(target.config.get_text_config(), 40, 4)
    # transformers keeps one token less than the window.
    is_windowed = any("sliding" in kind for kind in getattr(target.config, "layer_types", None) or [family])
    assert counted == held if not is_windowed else held <= counted <= held * 8 / 7


def test_weights_of_a_drafter():
    """Bug: the relay or the context projection left out."""
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target)
    held = sum(one.nbytes for one in drafter.state_dict().values())
    assert drafter_bytes(drafter.config, torch.float32) == held
    plan = make_plan(target.config, drafter.config, Load(64, 8, "float32"))
    assert plan.drafter_weights == held


def test_draft_cache_as_it_grows():
    """Bug: keys without values, or the columns in use in place of those that are allocated."""
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter(target)
    cache, width = DraftCache(drafter), drafter.fc.in_features
    cache.append_context(torch.zeros(1, 70, width), [0], [70])
    for position in range(70, 230, 4):
        block = torch.zeros(1, drafter.config.num_key_value_heads, 8, drafter.config.head_dim)
        for layer in range(drafter.config.num_hidden_layers):
            cache.extend(layer, block, block)
        cache.append_context(torch.zeros(1, 8, width), [position], [4])
    held = sum(part.nbytes for pair in cache._buffers for part in pair)
    plan = make_plan(target.config, drafter.config, Load(230, 70, "float32"))
    assert held <= plan.drafter_cache_row <= 1.05 * held


def test_largest_batch_by_hand():
    """Bug: a drafter that costs nothing, or one more sequence than fits."""
    target, drafter = read_target(TINY_TARGET), read_drafter(TINY_DRAFTER)
    plan, taps = make_plan(target, drafter, Load(256, dtype="float32")), len(drafter.target_layer_ids)
    states = 4 * target.hidden_size * (target.num_hidden_layers + 1 + taps)  # of a token, tapped ones twice
    assert plan.prefill_buffers_row == 128 * states
    assert plan.relay_buffers_row == 8 * states + 7 * 4 * taps * target.hidden_size
    room = plan.drafting_fixed + 10 * plan.drafting_row
    assert plan.largest_batch(room)["drafting"] == 10 and plan.largest_batch(room - 1)["drafting"] == 9
    assert plan.largest_batch(room)["plain"] == (room - plan.target_weights) // plan.plain_row > 10
    assert plan.largest_batch(1000.0) == {"plain": 0, "drafting": 0}


def test_gpus_share_matrices():
    """Bug: heads cut into halves where there are fewer than GPUs, or a drafter that is divided unasked."""
    configs = read_target(TINY_TARGET), read_drafter(TINY_DRAFTER)
    one, two = make_plan(*configs, Load(256)), make_plan(*configs, Load(256, tensor_parallel_size=2))
    assert one.target_weights / 2 <= two.target_weights < 0.51 * one.target_weights
    assert two.target_cache_row == one.target_cache_row  # its single key-value head lies on both
    assert two.drafter_weights == one.drafter_weights


def test_only_configurations_are_read(tmp_path, monkeypatch):
    """Bug: a plan that needs the weights, which nobody has downloaded yet."""
    folders = []
    for name, source in (("target", TINY_TARGET), ("drafter", TINY_DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((source / "config.json").read_text())
        folders.append(str(tmp_path / name / "config.json"))
    out = tmp_path / "plan.json"
    options = ["--gpu-memory", "0.1", "--max-model-len", "256", "--gpu-memory-utilization", "0.5", "--json", str(out)]
    result = CliRunner().invoke(app, ["plan", "--target", folders[0], "--drafter", folders[1], *options])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["available_bytes"] == int(0.05 * 2**30)
    assert 0 < record["largest_batch"]["drafting"] < record["largest_batch"]["plain"]


def test_what_cannot_be_counted_is_refused():
    """Bug: a plausible number for a target that keeps something else, or for another target's drafter."""
    target, drafter = read_target(TINY_TARGET), read_drafter(TINY_DRAFTER)
    mixed = tiny_target("qwen3").config
    mixed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(DFlowError, match="linear_attention"):
        cache_bytes(mixed, 10, 4)
    mixed.kv_lora_rank = 16
    with pytest.raises(DFlowError, match="measure it"):
        cache_bytes(mixed, 10, 4)
    with pytest.raises(PairMismatchError, match="hidden size 192"):
        make_plan(tiny_target("llama").config, drafter, Load(64))
    for wrong in ({"dtype": "int4"}, {"prompt_len": 65}, {"tensor_parallel_size": 0}):
        with pytest.raises(DFlowError, match=r"use|give"):
            make_plan(target, drafter, Load(64, **wrong))


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
MULTI_QUERY = {
    "falcon with one head": ("falcon", {**SIZES, "multi_query": True, "new_decoder_architecture": False}),
    "falcon with groups": ("falcon", {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "multi_query": True}),
}


@pytest.mark.parametrize("name", MULTI_QUERY)
def test_caches_of_few_heads(name):
    """N14: a multi-query cache that is counted for every query head, four times and more too large."""
    kind, options = MULTI_QUERY[name]
    config = AutoConfig.for_model(kind, **options)
    model, cache = AutoModelForCausalLM.from_config(config).eval(), DynamicCache()
    model(torch.ones(1, 10, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes(config, 10, 4) == held


def stored(*tensors):
    """Bytes of tensors, each a dtype and a shape."""
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, *shape in tensors)


U8, I8, I32, I64, F8, F16, BF16, F32 = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
)  # fmt: skip
CT = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
# The tensors that a matrix of n outputs and k inputs is stored as, in checkpoints of each kind.
METHODS = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        lambda n, k: [(I32, k // 8, n), (I32, k // 32, n // 8), (F16, k // 32, n), (I32, k)],
    ),
    "gptq of 8 bits, one group": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        lambda n, k: [(I32, k // 4, n), (I32, 1, n // 4), (F16, 1, n), (I32, k)],
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        lambda n, k: [(I32, k, n // 8), (I32, k // 32, n // 8), (F16, k // 32, n)],
    ),
    "fp8 by blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
        lambda n, k: [(F8, n, k), (F32, n // 32, k // 32)],
    ),
    "bitsandbytes 8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda n, k: [(I8, n, k), (F32, n)],
    ),
    "bitsandbytes 4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda n, k: [(U8, n * k // 2, 1), (F32, n * k // 64), (F32, 16)],
    ),
    "bitsandbytes 4, nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda n, k: [
            (U8, n * k // 2, 1), (U8, n * k // 64), (F32, -(-n * k // 64 // 256)), (F32, 256), (F32, 1), (F32, 16)
        ],
    ),
    "compressed-tensors, packed": (
        {**CT, "format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}},
        lambda n, k: [(I32, n, k // 8), (BF16, n, k // 32), (I64, 2)],
    ),
    "compressed-tensors, float": (
        {**CT, "format": "float-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": FLOAT8}}},
        lambda n, k: [(F8, n, k), (BF16, n, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_quantized_weights_are_counted_as_they_are_stored(name):
    """N14: the bfloat16 size for a quantized target, or numbers without their scales; heads and embeddings stay."""
    given, tensors_of = METHODS[name]
    config = AutoConfig.for_model("llama", **SIZES, intermediate_size=128, num_key_value_heads=2)
    config.tie_word_embeddings = False
    plain = target_bytes(config, torch.bfloat16)
    matrices = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    expected = plain - sum(2 * n * k for n, k in matrices) + sum(stored(*tensors_of(n, k)) for n, k in matrices)
    config.quantization_config = given
    assert target_bytes(config, torch.bfloat16) == expected < plain


def test_float8_layers_of_transformers_hold_what_is_counted():
    """N14: scales of another number or type than those that transformers itself makes."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    given = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    with torch.device("meta"):
        layer = FP8Linear(80, 48, block_size=(32, 32), activation_scheme="dynamic")
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(80, 48, bias=False)})
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    assert quantized_weights._scheme("fp8", given)(48, 80) == held and model["up"].weight.nbytes > held


def test_experts_in_mxfp4():
    """N14: gpt-oss counted in bfloat16, four times too large."""
    config = AutoConfig.for_model(
        "gpt_oss", **SIZES, num_key_value_heads=2, intermediate_size=64, num_local_experts=4, head_dim=16
    )
    plain = target_bytes(config, torch.bfloat16)
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    numbers = 2 * 4 * (64 * 128 + 64 * 64)  # layers, experts, both matrices
    assert plain - target_bytes(config, torch.bfloat16) == numbers * 2 - numbers * 17 // 32


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "hqq"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*down_proj": {}}},
        {**CT, "format": "marlin-24", "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}},
        {**CT, "format": "pack-quantized", "config_groups": {}},
    ],
)
def test_unknown_storage_is_refused(given):
    """N14: a plausible number for a quantization of which nothing is known."""
    config = AutoConfig.for_model("llama", **SIZES, intermediate_size=128)
    config.quantization_config = given
    with pytest.raises(DFlowError, match=r"[Mm]easure it"):
        target_bytes(config, torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2", "zamba2", "mamba2"])
def test_recurrent_states_are_counted(family):
    """States left out, counted once for each token, or in the weights' dtype where they are kept in another."""
    target = hybrid(family, attention="eager")
    drafter = tiny_drafter(target, 8).config
    plan = make_plan(target.config, drafter, Load(max_model_len=40, dtype="float32", has_holes=False))
    output = target.generate(torch.ones(1, 10, dtype=torch.long), max_new_tokens=2, return_dict_in_generate=True)
    held = cache_of(output)
    tensors = [state for layer in held.layers for state in getattr(layer, "conv_states", {}).values()]
    tensors += [state for layer in held.layers for state in getattr(layer, "recurrent_states", {}).values()]
    assert plan.states_row == sum(state.nbytes for state in tensors if state is not None) > 0
    assert plan.rollback_row > plan.states_row
    keyed = [layer for layer in held.layers if getattr(layer, "keys", None) is not None]
    columns = sum(layer.keys.nbytes + layer.values.nbytes for layer in keyed) // 11
    assert plan.target_cache_row == columns * (40 + drafter.drafts_per_block)
    narrow = make_plan(target.config, drafter, Load(max_model_len=40, dtype="bfloat16", has_holes=False))
    assert plan.states_row / 2 <= narrow.states_row < plan.states_row


@pytest.mark.parametrize(
    "given",
    [
        ["gptq"],
        {"quant_method": "gptq", "bits": 4, "group_size": None},
        {"quant_method": "gptq", "bits": "4", "group_size": 32},
        {"quant_method": "awq", "bits": None},
        {"quant_method": "fp8", "weight_block_size": 128},
        {**CT, "format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "int"}}}},
        {**CT, "config_groups": [{}]},
    ],
    ids=str,
)
def test_fields_of_a_quantization_that_cannot_be_read(given):
    """N14: a traceback for a field that is missing or of another type, in place of a refusal in words."""
    config = AutoConfig.for_model("llama", **SIZES, intermediate_size=128)
    config.quantization_config = given
    with pytest.raises(DFlowError, match=r"config\.json"):
        target_bytes(config, torch.bfloat16)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "fp8"])
def test_only_matrices_of_experts_are_taken_for_experts(method):
    """N14: a hybrid's convolution or a vision tower's probe, of three dimensions too, refused or counted as experts."""
    given = {"quant_method": method, "load_in_4bit": method == "bitsandbytes", "bits": 4, "group_size": 32}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**SIZES, "intermediate_size": 128, "head_dim": 16}
    for config in (
        AutoConfig.for_model("gemma3", text_config=text, vision_config=vision),
        AutoConfig.for_model("mamba2", hidden_size=64, num_heads=8, head_dim=16, num_hidden_layers=2, vocab_size=256),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        stored = quantized_weights.quantized_bytes(model, given)
        linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        assert stored and stored.keys() <= linears
