"""`hf-dflow plan`: counted from configurations, and found again in memory that was really allocated."""

import gc
import json

import pytest
import torch
from kit import FAMILIES, tiny_drafter, tiny_target
from transformers import DynamicCache
from typer.testing import CliRunner

from hf_dflow import DFlowGenerationConfig, PairMismatchError
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
