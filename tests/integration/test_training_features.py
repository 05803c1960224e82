"""Cached features are the online ones, of this very target, and whole."""

import json

import pytest
import torch
from kit import FAMILIES, MASK_TOKEN_ID, tiny_target
from safetensors import safe_open

from hf_dflow import DFlowError
from hf_dflow.training import features
from hf_dflow.training.data import TrainingRow
from hf_dflow.training.features import FeatureStore

LENGTHS = (9, 14, 3, 11, 6)
STORED = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative rounding of one number
TEACHER = 2.0**-10  # probabilities are stored in float16


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(features, "ROWS_PER_SHARD", 2)
    monkeypatch.setattr(features, "OPEN_SHARDS", 2)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, MASK_TOKEN_ID, (length,), generator=generator).tolist() for length in LENGTHS]
    return [TrainingRow(token_ids, 1, str(i), 0.0) for i, token_ids in enumerate(ids)]


def filled(folder, rows, target, layer_ids=(0, 2), **options) -> FeatureStore:
    store = FeatureStore(folder, rows, target, list(layer_ids), **options)
    store.fill()
    return store


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_documented_states(tmp_path, rows, family):
    """Catches (G6): a layer count used as an index, the last layer stripped, or taken without the final norm."""
    target = tiny_target(family, dtype=torch.float32)
    last = target.config.num_hidden_layers - 1
    stored = {ids: filled(tmp_path / str(ids), rows, target, ids) for ids in ((0, 1), (0, last), (last,))}
    for ids, store in stored.items():
        for index, row in enumerate(rows):
            states = target(torch.tensor([row.token_ids]), output_hidden_states=True).hidden_states
            assert len(states) == last + 2
            expected = torch.cat([states[i + 1][0] for i in ids], dim=-1)
            assert store[index].shape == (len(row.token_ids), store.width)
            torch.testing.assert_close(store[index], expected, rtol=1e-5, atol=1e-5)
    final = target.base_model(torch.tensor([rows[0].token_ids])).last_hidden_state[0]
    torch.testing.assert_close(stored[last,][0], final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_the_targets_own_logits(tmp_path, rows, family):
    """Catches (G6): the head on states before the final norm, a soft-cap or scale left out, rows off by one."""
    target = tiny_target(family, dtype=torch.float32)
    store = filled(tmp_path, rows, target, teacher_top_k=64)
    for index, row in enumerate(rows):
        teacher = store.teacher(index)
        expected = target(torch.tensor([row.token_ids])).logits[0].softmax(-1)
        found = torch.zeros_like(expected).scatter(-1, teacher.ids, teacher.probs)
        torch.testing.assert_close(found, expected, rtol=TEACHER, atol=1e-6)
        assert torch.equal(teacher.ids[:, 0], expected.argmax(-1))


def test_the_teacher_keeps_the_likeliest(tmp_path, rows):
    """Catches: arbitrary tokens kept, or probabilities renormalised where the reader expects what is missing to 1."""
    target = tiny_target("llama", dtype=torch.float32)
    store = filled(tmp_path, rows, target, teacher_top_k=3)
    top = target(torch.tensor([rows[1].token_ids])).logits[0].softmax(-1).topk(3)
    assert torch.equal(store.teacher(1).ids, top.indices)
    torch.testing.assert_close(store.teacher(1).probs, top.values, rtol=TEACHER, atol=1e-6)
    assert filled(tmp_path / "none", rows, target).teacher(0) is None


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_cached_features_are_the_online_ones(tmp_path, rows, dtype, target_dtype):
    """Catches: rows mixed up between shards, and a dtype other than the stated one."""
    target = tiny_target("llama", dtype=target_dtype)
    store = filled(tmp_path, rows, target, dtype=dtype)
    for index in (4, 0, 2, 3, 1, 0):  # in no order, over more shards than stay open
        online = store._compute(rows[index])["features"]
        assert store[index].dtype == features.DTYPES[dtype]
        assert torch.equal(store[index], online)
        states = target(torch.tensor([rows[index].token_ids]), output_hidden_states=True).hidden_states
        exact = torch.cat([states[1][0], states[3][0]], dim=-1).float()
        torch.testing.assert_close(store[index].float(), exact, rtol=STORED[dtype], atol=1e-5)
        assert len(store._shards) <= 2
    with pytest.raises(DFlowError, match="int8; use one of float32, bfloat16, float16"):
        FeatureStore(tmp_path, rows, target, [0], dtype="int8")


def changed_config():
    target = tiny_target("llama", dtype=torch.float32)
    target.config.rms_norm_eps = 1e-3
    return target


def changed_norm():
    target = tiny_target("llama", dtype=torch.float32)
    target.model.norm.weight[3] *= 1.5
    return target


OTHERS = {
    "another model": (lambda: tiny_target("llama", dtype=torch.float32, seed=1), {}, "target: .*with other weights"),
    "another revision": (changed_norm, {}, "target"),
    "another configuration": (changed_config, {}, "target"),
    "another dtype": (lambda: tiny_target("llama", dtype=torch.bfloat16), {}, "target.*float32.*bfloat16"),
    "other layers": (None, {"layer_ids": [0, 1]}, "layer_ids"),
    "a teacher": (None, {"teacher_top_k": 2}, "teacher_top_k"),
    "another storage": (None, {"dtype": "bfloat16"}, "dtype"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_features_of_something_else_are_refused(tmp_path, rows, other):
    """Catches (G6): training on states that this target does not compute."""
    make, options, message = OTHERS[other]
    target = tiny_target("llama", dtype=torch.float32)
    filled(tmp_path, rows, target)
    filled(tmp_path, rows, tiny_target("llama", dtype=torch.float32))  # the same weights, loaded again
    options = {"layer_ids": [0, 2], **options}
    with pytest.raises(DFlowError, match=f"holds features of other .*{message}"):
        FeatureStore(tmp_path, rows, make() if make else target, **options)


def test_features_of_other_rows_and_of_nobody_are_refused(tmp_path, rows):
    """Catches: shards read with another data set's lengths, or with a description that is no longer readable."""
    target = tiny_target("llama", dtype=torch.float32)
    filled(tmp_path, rows, target)
    with pytest.raises(DFlowError, match="other rows"):
        FeatureStore(tmp_path, rows[::-1], target, [0, 2])
    for text in ("", "[]", json.dumps({"target": "0f3a"})):
        (tmp_path / "features.json").write_text(text)
        with pytest.raises(DFlowError, match=r"does not say what the features belong to; use an empty folder"):
            FeatureStore(tmp_path, rows, target, [0, 2])


def test_a_killed_fill_goes_on_where_it_was(tmp_path, rows, monkeypatch):
    """Catches: a half-written shard taken for a whole one, and whole ones computed twice."""
    target = tiny_target("llama", dtype=torch.float32)
    store = FeatureStore(tmp_path, rows, target, [0, 2])
    save, saved = features.save_file, []

    def killed(tensors, path):
        save(tensors, path)
        if len(saved) == 1:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt
        saved.append(path)

    monkeypatch.setattr(features, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        store.fill()
    monkeypatch.setattr(features, "save_file", save)
    again = FeatureStore(tmp_path, rows, target, [0, 2])
    with pytest.raises(DFlowError, match=r"shard-00001.*missing or damaged.*fill"):
        again[2]
    computed = []
    monkeypatch.setattr(again, "_compute", lambda row: computed.append(row) or FeatureStore._compute(again, row))
    again.fill()
    assert computed == rows[2:]
    assert torch.equal(again[2], FeatureStore._compute(again, rows[2])["features"])


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "other rows"])
def test_a_torn_shard_is_computed_again(tmp_path, rows, damage):
    """Catches: a shard that a full disk or a broken copy left behind, read as features for ever after."""
    target = tiny_target("llama", dtype=torch.float32)
    store = filled(tmp_path, rows, target)
    expected = [store[index].clone() for index in range(len(rows))]
    path = tmp_path / "shard-00001.safetensors"
    whole = path.read_bytes()
    torn = {"cut": whole[:-7], "empty": b"", "noise": b"\xff" * len(whole)}
    torn["other rows"] = (tmp_path / "shard-00000.safetensors").read_bytes()
    path.unlink()
    path.write_bytes(torn[damage])
    untouched = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    again = filled(tmp_path, rows, target)
    assert all(torch.equal(again[index], row) for index, row in enumerate(expected))
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == untouched
    with safe_open(path, framework="pt") as shard:
        assert shard.get_slice("features").get_shape() == [sum(LENGTHS[2:4]), store.width]
