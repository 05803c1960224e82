"""The classic baseline: what it is made of, what it learns from, and that transformers takes it."""

import json
from dataclasses import replace

import pytest
import torch
from kit import plain_greedy, tiny_drafter, tiny_target
from trainer_kit import tiny_rows, tiny_training
from transformers import AutoModelForCausalLM

from experiments import autoregressive
from experiments.autoregressive import train_draft_model
from experiments.draft_model import drafter_size, matching_layers, new_draft_model, save_draft_model
from hf_dflow.bench.assistant import load_draft_model
from hf_dflow.errors import DFlowError
from hf_dflow.training.config import Stage
from hf_dflow.training.data import TrainingRow, is_held_out
from hf_dflow.training.features import Teacher
from hf_dflow.training.loss import CandidateVocabulary
from hf_dflow.training.packing import RowOrder

FAMILIES = ["llama", "qwen3", "gpt2", "gemma_sliding"]  # untied, tied, other names of everything, kinds of layers


def target_of(family="llama", **options):
    return tiny_target(family, dtype=torch.float32, **options)


def trained(model):
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_the_target_s_layers_are_the_target(family):
    """Bug: embedding, head or norm stay random, layers land in the wrong place, or keep another layer's kind."""
    target = target_of(family)
    layers = target.config.num_hidden_layers
    whole = new_draft_model(target, layers, initialise_from_target=True).eval()
    tokens = torch.arange(1, 25)[None]
    assert torch.equal(whole(tokens).logits, target(tokens).logits)
    part = new_draft_model(target, 3, initialise_from_target=True)
    kinds = getattr(target.config, "layer_types", None)
    if kinds:
        assert part.config.layer_types == [kinds[i] for i in (0, 2, 3)]
    ours, theirs = (model.transformer.h if family == "gpt2" else model.model.layers for model in (part, target))
    for i, j in zip((0, 1, 2), (0, 1, 2) if family == "gpt2" else (0, 2, 3), strict=True):
        states = (ours[i].state_dict().values(), theirs[j].state_dict().values())
        assert all(a.equal(b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_size_is_that_of_its_layers(family):
    """Bug: a trained copy of the embedding, several times the drafter's size, wins the comparison."""
    target = target_of(family)
    model = new_draft_model(target, 2)
    assert not any("embed" in name or "lm_head" in name for name in trained(model))
    assert model.get_input_embeddings().weight.equal(target.get_input_embeddings().weight)
    assert model.get_output_embeddings().weight.equal(target.get_output_embeddings().weight)
    layer = sum(one.numel() for one in target.model.layers[0].parameters())
    assert [matching_layers(target, n) for n in (0, int(1.4 * layer), int(2.6 * layer), 99 * layer)] == [1, 1, 3, 4]
    drafter = tiny_drafter(target)
    assert drafter_size(drafter) == sum(one.numel() for one in drafter.parameters())
    with pytest.raises(DFlowError, match="so use 1 … 4"):
        new_draft_model(target, 5)


def loss_of(row, teachers=(), distillation=0.0, rows=None):
    model = new_draft_model(target_of(), 1).eval()
    return autoregressive._loss(model, rows or [row], list(teachers), distillation).item(), model


def test_only_supervised_tokens_count_and_each_is_predicted_from_those_before():
    """Bug: the prompt or padding is learned, or labels are off by one."""
    row = TrainingRow(list(range(1, 13)), 4, "", 0.0, ((4, 7), (9, 11)))
    loss, model = loss_of(row)
    logs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
    labels = [4, 5, 6, 9, 10]
    expected = -torch.stack([logs[i - 1, row.token_ids[i]] for i in labels]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    longer = TrainingRow(list(range(20, 45)), 24, "", 0.0, ((24, 25),))
    both, _ = loss_of(row, rows=[longer, row])
    alone, _ = loss_of(longer)
    assert both == pytest.approx((5 * loss + alone) / 6, rel=1e-5)


def test_distillation_takes_the_distribution_of_the_same_place():
    """Bug: the teacher of the token itself, or of the next one, is learned."""
    row = TrainingRow(list(range(1, 13)), 4, "", 0.0)
    sure = Teacher(torch.tensor([[i + 2, 0] for i in range(12)]), torch.tensor([[0.8, 0.0]] * 12))
    hard, _ = loss_of(row)
    soft, _ = loss_of(row, [sure], 1.0)
    assert soft == pytest.approx(hard, rel=1e-5)  # it is sure of the token that follows
    flat = Teacher(torch.tensor([[i + 2, 5] for i in range(12)]), torch.tensor([[0.4, 0.4]] * 12))
    half, model = loss_of(row, [flat], 0.5)
    logs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
    fives = -logs[3:11, 5].mean().item()
    assert half == pytest.approx(0.75 * hard + 0.25 * fives, rel=1e-4)


def test_a_softmax_over_all_candidates_is_the_softmax():
    """Bug: states, labels or teachers of other places where the softmax runs over candidates, as training's does."""
    row = TrainingRow(list(range(1, 13)), 4, "", 0.0, ((4, 7), (9, 11)))
    flat = Teacher(torch.tensor([[i + 2, 5] for i in range(12)]), torch.tensor([[0.4, 0.4]] * 12))
    target = target_of()
    model = new_draft_model(target, 1).eval()
    assert autoregressive._has_plain_head(model, row)
    vocab_size = target.get_input_embeddings().weight.shape[0]
    candidates = CandidateVocabulary(torch.arange(1, 13), vocab_size, vocab_size)
    candidate_ids = candidates.sample(torch.Generator().manual_seed(0))
    assert len(candidate_ids) == vocab_size
    for teachers, share in (([], 0.0), ([flat], 0.5)):
        plain = autoregressive._loss(model, [row], teachers, share)
        found = autoregressive._loss(model, [row], teachers, share, candidates, candidate_ids)
        assert found.item() == pytest.approx(plain.item(), rel=1e-4)


def training_of(**changes):
    return tiny_training(**{"stages": [Stage(6, 0, 2, 4), Stage(4, 2, 3, 4)], "save_every": 5, **changes})


def test_it_sees_the_rows_of_the_drafters_and_learns(tmp_path, monkeypatch):
    """Bug: other rows, another order or fewer updates than the drafters, or an optimiser that trains nothing."""
    target, rows, seen = target_of(), tiny_rows(), []
    honest = autoregressive._loss

    def watched(model, chosen, *rest):
        seen.extend(row.prompt for row in chosen)
        return honest(model, chosen, *rest)

    monkeypatch.setattr(autoregressive, "_loss", watched)
    training = training_of(stages=[Stage(60, 0, 2, 4, learning_rate=1e-2)])
    report = train_draft_model(training, target, rows, tmp_path, num_layers=2)
    assert (report.updates, report.skipped, report.num_hidden_layers) == (60, 0, 2)
    order = RowOrder(len(rows), training.seed)
    assert seen == [rows[order[i]].prompt for i in range(120)]
    losses = [json.loads(line)["losses"][0] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.5 * losses[0]
    model = load_draft_model(report.folder, target)
    assert report.trained_parameters == sum(one.numel() for one in trained(model).values())


def test_a_resumed_run_is_the_straight_one(tmp_path, monkeypatch):
    """Bug: optimiser, schedule or row order start anew, or another run's state is taken."""
    target, rows = target_of("qwen3"), tiny_rows()
    straight = train_draft_model(training_of(), target, rows, tmp_path / "straight", num_layers=1)
    losses, honest = iter(range(100)), autoregressive._loss

    def dying(*arguments):
        if next(losses) == 7:
            raise KeyboardInterrupt
        return honest(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(autoregressive, "_loss", dying)
        train_draft_model(training_of(), target, rows, tmp_path / "killed", num_layers=1)
    resumed = train_draft_model(training_of(), target, rows, tmp_path / "killed", num_layers=1)
    ours, theirs = (load_draft_model(report.folder, target).state_dict() for report in (straight, resumed))
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []
    with pytest.raises(DFlowError, match="other training"):
        train_draft_model(training_of(seed=4), target, rows, tmp_path / "killed", num_layers=1)
    with pytest.raises(DFlowError, match="other data"):
        train_draft_model(training_of(), target, rows[1:], tmp_path / "killed", num_layers=1)


def test_what_is_not_finite_changes_nothing(tmp_path, monkeypatch):
    """Bug: one bad batch makes every weight NaN; or the run goes on for ever without learning."""
    honest, calls = autoregressive._loss, []

    def sometimes(*arguments):
        calls.append(1)
        return honest(*arguments) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(autoregressive, "_loss", sometimes)
    report = train_draft_model(training_of(), target_of(), tiny_rows(), tmp_path / "one", num_layers=1)
    assert report.skipped == 1
    assert all(bool(one.isfinite().all()) for one in load_draft_model(report.folder, target_of()).parameters())
    monkeypatch.setattr(autoregressive, "_loss", lambda *rest: honest(*rest) * float("nan"))
    with pytest.raises(DFlowError, match="3 updates in a row"):
        train_draft_model(
            replace(training_of(), max_skips_in_row=3), target_of(), tiny_rows(), tmp_path / "all", num_layers=1
        )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma"])  # 5.17 crops small windows too short
def test_both_kinds_of_folder_give_the_model_back(family, tmp_path):
    """Bug: a shard is forgotten, a random embedding is loaded, or transformers refuses the folder."""
    target = target_of(family)
    model = new_draft_model(target, 2, seed=3)
    save_draft_model(model, tmp_path / "whole", torch.float32)
    save_draft_model(model, tmp_path / "small", torch.float32, with_embedding=False, max_shard_size="10KB")
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    for folder in ("whole", "small"):
        loaded = load_draft_model(tmp_path / folder, target).state_dict()
        assert [name for name, value in model.state_dict().items() if not loaded[name].equal(value)] == []
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    prompt = torch.arange(1, 9)[None]
    output = target.generate(prompt, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert output.equal(plain_greedy(target, prompt, 12))
    next((tmp_path / "small").glob("*.safetensors")).unlink()
    with pytest.raises(DFlowError, match="do not fit"):
        load_draft_model(tmp_path / "small", target)


@pytest.mark.parametrize("features", [None, "features"])
def test_command_leaves_out_what_is_held_out(tmp_path, monkeypatch, features):
    """Bug: the baseline is trained on held-out prompts, has another size, or learns without its teacher."""
    target = target_of()
    target.save_pretrained(tmp_path / "target")
    drafter = tiny_drafter(target, dtype=torch.float32)
    drafter.save_pretrained(tmp_path / "drafter")
    training = replace(training_of(), distillation=0.5, teacher_top_k=3)
    (tmp_path / "config.json").write_text(json.dumps(training.to_dict()))
    lines = [{"prompt_ids": [1, 2, i], "answer_ids": [3, 4, 5, 6], "prompt": f"prompt {i}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    calls = []

    def train(training, target, rows, output, *, num_layers, initialise_from_target, store):
        calls.append((len(rows), num_layers, store.teacher(0).ids.shape))
        return autoregressive.DraftModelReport(output, 1, 0, 1, 1)

    monkeypatch.setattr(autoregressive.AutoTokenizer, "from_pretrained", lambda _: target.config)
    monkeypatch.setattr(autoregressive, "train_draft_model", train)
    autoregressive.main(
        str(tmp_path / "target"),
        [tmp_path / "rows.jsonl"],
        output=tmp_path / "output",
        config=tmp_path / "config.json",
        like=str(tmp_path / "drafter"),
        features=features and tmp_path / features,
        max_length=64,
    )
    held_out = sum(is_held_out(f"prompt {i}") for i in range(40))
    assert held_out > 0
    assert calls == [(40 - held_out, matching_layers(target, drafter_size(drafter)), (7, 3))]
    assert (tmp_path / "features").exists() == (features is not None)
