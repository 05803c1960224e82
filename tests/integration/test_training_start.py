"""The drafter that a run starts from: new, continued, with an adapter on the target, from any family."""

import json
from dataclasses import replace

import layouts
import pytest
import torch
from kit import FAMILIES, MASK_TOKEN_ID, ROPE, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from trainer_kit import STAGES, differing, tiny_rows, tiny_trainer, tiny_training, training_target, weights_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dflow import DFlowDrafter, DFlowError, DrafterConfigError, PairMismatchError
from hf_dflow.training import checkpoint
from hf_dflow.training.config import TrainingConfig, TrainingConfigError
from hf_dflow.training.evaluate import decode
from hf_dflow.training.features import LiveFeatures
from hf_dflow.training.frozen_target import linear_head
from hf_dflow.training.loss import head_rows
from hf_dflow.training.start import drafter_config, new_drafter, resolve, spread_layers

ONE_UPDATE = [replace(STAGES[1], updates=1)]


@pytest.fixture(scope="module")
def target():
    return training_target()


@pytest.fixture
def zlab_folder(target, tmp_path):
    """A drafter as z-lab lays it out: no relay, its own names in the configuration, bfloat16."""
    drafter = tiny_drafter(target, 8, relay=None, target_layer_ids=[0, 2])
    folder = tmp_path / "DFlash-b8"
    drafter.bfloat16().save_pretrained(folder)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2]},
        "block_size": 8,
        "rope_theta": ROPE["rope_theta"],
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    config |= {key: getattr(drafter.config, key) for key in sizes.split()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_dflash_checkpoint_continues_with_a_relay_at_zero(target, zlab_folder, tmp_path):
    """Catches: continuing that loses weights, trains in bfloat16, changes drafts before the first update, or a relay
    that stays out of the saved drafter."""
    drafter = DFlowDrafter.from_pretrained(zlab_folder)
    assert drafter.relay is None and drafter.dtype == torch.bfloat16
    open_fields = {"num_hidden_layers": None, "block_size": None, "mask_token_id": None, "target_layer_ids": None}
    open_fields["relay_intermediate_size"] = 5
    trainer = tiny_trainer(tmp_path / "run", target=target, drafter=drafter, stages=ONE_UPDATE, **open_fields)
    assert trainer.training.block_size == 8 and trainer.training.target_layer_ids == [0, 2]
    assert trainer.drafter.relay.up_proj.out_features == 5
    assert {weight.dtype for weight in weights_of(trainer).values()} == {torch.float32}
    given = {name: weight.float() for name, weight in drafter.state_dict().items()}
    assert differing({name: weight for name, weight in weights_of(trainer).items() if "relay" not in name}, given) == []
    assert not trainer.drafter.relay.down_proj.weight.any() and not trainer.drafter.relay.down_proj.bias.any()
    prompts = [prompt_of(6, seed)[0].tolist() for seed in range(3)]
    assert decode(trainer.drafter, target, prompts, 16) == decode(drafter.float(), target, prompts, 16)
    trainer.run()
    assert trainer.drafter.relay.down_proj.weight.any()
    checkpoint.export(trainer.drafter, tmp_path / "drafter", torch.bfloat16, {"training": trainer.training.to_dict()})
    saved = DFlowDrafter.from_pretrained(tmp_path / "drafter")
    assert saved.relay is not None and saved.dtype == torch.bfloat16
    expected = {name: weight.bfloat16() for name, weight in weights_of(trainer).items()}
    assert differing(saved.state_dict(), expected) == []
    assert trainer.drafter.dtype == torch.float32, "the run may go on"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "has 2"),
        ({"mask_token_id": 5}, f"has {MASK_TOKEN_ID}"),
        ({"target_layer_ids": [1]}, "has \\[0, 2\\]"),
        ({"relay_intermediate_size": 5}, "relay_intermediate_size"),
    ],
)
def test_configuration_that_contradicts_the_drafter_is_refused(target, tmp_path, changes, message):
    """Catches: a drafter that is trained on other taps or another mask than it was made with."""
    drafter = tiny_drafter(target, 4, target_layer_ids=[0, 2])
    with pytest.raises(TrainingConfigError, match=message):
        tiny_trainer(tmp_path, target=target, drafter=drafter, **{"num_hidden_layers": 2, **changes})


def test_shorter_blocks_continue_and_longer_ones_warn(target, tmp_path):
    """Catches: a block size of the configuration that the saved drafter does not have."""
    drafter = tiny_drafter(target, 8, target_layer_ids=[0, 2])
    shorter = tiny_trainer(tmp_path, target=target, drafter=drafter, num_hidden_layers=2, block_size=4)
    assert shorter.drafter.config.block_size == 4 and drafter.config.block_size == 8
    with pytest.warns(UserWarning, match="longer than the 8"):
        tiny_trainer(tmp_path, target=target, drafter=drafter, num_hidden_layers=2, block_size=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_drafter_fits_any_family_and_its_save_is_what_it_drafts_with(family, tmp_path):
    """Catches: target families without rotary or gated layers that cannot start, weights left out of the file, target
    tensors or unset memory in it."""
    target = tiny_target(family, dtype=torch.float32)
    data_ids = torch.arange(1, MASK_TOKEN_ID)
    open_run = tiny_training(
        num_hidden_layers=2, mask_token_id=None, target_layer_ids=None, loss_decay=None, evaluate_every=None
    )
    training = resolve(open_run, target, data_ids)
    assert resolve(training, target, data_ids) == training
    assert training.mask_token_id == MASK_TOKEN_ID and training.loss_decay == 4.0 and training.evaluate_every == 10
    assert training.initialise_from_target == (family in ("llama", "qwen3", "mistral_sliding"))
    drafter = new_drafter(target, training).eval()
    assert differing(drafter.state_dict(), new_drafter(target, training).state_dict()) == [], "a function of the seed"
    if training.initialise_from_target:
        assert drafter.layers[1].self_attn.q_proj.weight.equal(target.model.layers[-1].self_attn.q_proj.weight)
        assert drafter.layers[0].mlp.up_proj.weight.equal(target.model.layers[-2].mlp.up_proj.weight)
    else:
        with pytest.raises(DFlowError, match='set "initialise_from_target" to false'):
            new_drafter(target, replace(training, initialise_from_target=True))
    checkpoint.export(drafter, tmp_path / "drafter", torch.float32, {})
    loaded = DFlowDrafter.from_pretrained(tmp_path / "drafter").eval()
    assert differing(loaded.state_dict(), drafter.state_dict()) == []
    assert all(weight.isfinite().all() for weight in loaded.state_dict().values())
    foreign = [name for name in loaded.state_dict() if "embed" in name or "head" in name]
    assert foreign == [], "embedding and head are the target's"
    prompt = prompt_of(8)
    outputs = [dflow_greedy(target, one, prompt, max_new_tokens=12) for one in (drafter, loaded)]
    assert outputs[0].statistics == outputs[1].statistics
    assert outputs[0].sequences.equal(plain_greedy(target, prompt, 12))


def test_taps_are_spread_from_the_second_to_the_third_to_last_layer():
    """Catches: taps of the last layers, which say little, or layer ids that a shallow target lacks."""
    assert spread_layers(30) == [1, 7, 14, 21, 27] and spread_layers(36) == [1, 9, 17, 25, 33]
    assert [spread_layers(layers) for layers in (1, 2, 3, 4, 5)] == [[0], [1], [1], [1], [1, 2]]


# -- an adapter on the target


@pytest.fixture
def adapted(target):
    """The target with a LoRA adapter that changes what it says, and touches the head."""
    peft = pytest.importorskip("peft")
    base = tiny_target("llama", dtype=torch.float32)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(base, config).eval().requires_grad_(False)


def test_features_and_head_are_the_adapted_targets(adapted, target, tmp_path):
    """Catches: hidden states, proposals or head rows of the base model under an adapter."""
    rows = tiny_rows(2)
    store, base_store = (LiveFeatures(rows, one, [0, 2]) for one in (adapted, target))
    token_ids = torch.tensor([rows[0].token_ids])
    states = adapted(token_ids, output_hidden_states=True).hidden_states
    assert store[0].equal(torch.cat([states[1], states[3]], dim=-1)[0])
    assert not store[0].allclose(base_store[0], atol=1e-2)
    drafter = new_drafter(adapted, tiny_training(initialise_from_target=False))
    hidden = torch.randn(5, 32)
    rows_of_head = head_rows(drafter, linear_head(drafter, adapted), torch.arange(64))
    logits = hidden @ rows_of_head.weight.T + (0 if rows_of_head.bias is None else rows_of_head.bias)
    torch.testing.assert_close(logits, drafter.compute_logits(hidden, adapted.get_output_embeddings()))
    plain = hidden @ target.get_output_embeddings().weight.T
    assert not logits.allclose(plain, atol=1e-2)
    with adapted.disable_adapter():
        assert store[1].equal(base_store[1])


def test_adapter_never_reaches_the_drafter(adapted, target, tmp_path):
    """Catches: LoRA weights in the drafter's layers or its file, or an adapter that learns along."""
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    trainer = tiny_trainer(
        tmp_path, target=adapted, stages=ONE_UPDATE, initialise_from_target=True, prompts=[[5, 9, 2]], evaluate_every=1
    )
    copied = trainer.drafter.layers[0].self_attn.q_proj.weight
    assert copied.equal(target.model.layers[-1].self_attn.q_proj.weight), "the base weights"
    trainer.run()
    assert differing(before, adapted.state_dict()) == []
    checkpoint.export(trainer.drafter, tmp_path / "drafter", torch.float32, {})
    saved = DFlowDrafter.from_pretrained(tmp_path / "drafter")
    assert not any("lora" in name for name in saved.state_dict())
    prompt = prompt_of(6)
    plain = adapted.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
    output = adapted.generate(
        input_ids=prompt, max_new_tokens=12, do_sample=False, assistant_model=saved, speculation_type="dflow"
    )
    assert output.equal(plain) and not plain.equal(plain_greedy(target, prompt, 12))
    resumed_on_base = tiny_trainer(
        tmp_path, target=target, stages=ONE_UPDATE, initialise_from_target=True, evaluate_every=1
    )
    with pytest.raises(DFlowError, match="target was"):
        resumed_on_base.resume()


def test_training_refuses_what_it_would_train_wrongly(target):
    """Bug: convolutions that run across the many blocks of a training row, and a selector that no loss reaches."""
    folder = layouts.original("dflash2")
    with pytest.raises(TrainingConfigError, match="selector"):
        resolve(TrainingConfig(), target, torch.arange(5), DFlowDrafter.from_pretrained(folder))


# -- rotary settings

HALF_OF_A_HEAD = 4  # heads of the tiny targets have 8 channels
SCALED = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 128},
    "longrope": {"original_max_position_embeddings": 128},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {},
}


def rope_of(kind: str, part: float) -> dict:
    rope = {"rope_type": kind, "rope_theta": 5000.0, **SCALED[kind]}
    rope |= {} if part == 1.0 else {"partial_rotary_factor": part}
    if kind == "longrope":
        frequencies = int(HALF_OF_A_HEAD * part)
        rope |= {"short_factor": [1.0] * frequencies, "long_factor": [2.0] * frequencies}
    return rope


def test_every_rotary_type_is_tried():
    """Catches: a type of a later transformers that no test has tried."""
    assert set(SCALED) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("kind", SCALED)
def test_rotary_settings_are_copied_whole_or_not_at_all(kind, part):
    """N25: factors of a part of each head in a drafter that rotates whole heads, which ends a run after hours of target
    states, or rotates by another law than either."""
    family, options = "llama", {}
    if kind == "longrope":  # Phi-3 keeps the original length outside
        family, options = "phi3", {"original_max_position_embeddings": 128}
    target = tiny_target(family, dtype=torch.float32, rope_parameters=rope_of(kind, part), **options)
    training = resolve(tiny_training(mask_token_id=None, target_layer_ids=None), target, torch.arange(1, MASK_TOKEN_ID))
    drafter = new_drafter(target, training)
    rope = drafter.config.rope_parameters
    is_whole = kind != "default" and (part == 1.0 or kind == "proportional")
    expected = rope_of(kind, part) if is_whole else {"rope_type": "default", "rope_theta": 5000.0}
    assert {key: rope.get(key) for key in expected} == expected and (is_whole or rope.keys() == expected.keys())
    drafter_rows = torch.randn(1, 3, 32)
    for first in (0, 200):  # before and behind the original length
        keys, _ = drafter.context_key_values(drafter_rows, torch.arange(first, first + 3)[None])[0]
        assert keys.shape[-1] == 8 and keys.isfinite().all()


def test_rotary_settings_by_kind_of_layer_and_of_modalities():
    """N25: a set for each kind of layer taken for one set, or axes of images in a drafter of text."""
    target = tiny_target("llama")
    full = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0, "mrope_section": [1, 1, 2]}
    for by_kind in ({"sliding_attention": ROPE, "full_attention": full}, {"main": full, "compress": ROPE}):
        target.config.rope_parameters = by_kind
        rope = drafter_config(target, resolve(tiny_training(), training_target(), torch.arange(1, 60))).rope_parameters
        assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**rope_of("longrope", 1.0), "short_factor": [1.0] * 2}, "cannot be computed for heads of 8"),
        ({**rope_of("longrope", 1.0), "long_factor": [2.0] * 3}, "cannot be computed for heads of 8"),
        (rope_of("longrope", 0.5), "turn 4 channels of heads with 'head_dim' 8"),
        (rope_of("yarn", 0.5), "turn 4 channels"),
        ({"rope_type": "linear", "rope_theta": 5000.0}, "KeyError: 'factor'"),
    ],
)
def test_a_drafter_whose_rotation_cannot_work_is_refused_in_words(target, rope, message):
    """N25: a bare KeyError or a shape error from within a drafter's first forward, for long texts only after hours."""
    with pytest.raises(DrafterConfigError, match=message):
        tiny_drafter(target, rope_parameters=rope)


def test_a_drafter_of_another_targets_width_is_refused_before_any_update(target, tmp_path):
    """N25's kind: a drafter to continue that cannot read this target's states fails in the first update."""
    drafter = tiny_drafter(tiny_target("llama", hidden_size=64, head_dim=16), 4, target_layer_ids=[0, 2])
    with pytest.raises(PairMismatchError, match="hidden size 32"):
        tiny_trainer(tmp_path, target=target, drafter=drafter, num_hidden_layers=2)
