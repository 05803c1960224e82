"""A reduced draft vocabulary (G7): exact decoding, absolute ids, a map that travels with the weights."""

import json

import pytest
import torch
from kit import MASK_TOKEN_ID, assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from law import Loop, law_error, three_token_drafter, three_token_target
from memorize import memorize
from safetensors.torch import load_file, save_file
from trainer_kit import differing, tiny_rows, tiny_trainer, tiny_training, weights_of

from hf_dflow import DFlowDrafter, DFlowError, DrafterConfigError, DrafterWeightsError
from hf_dflow.training.loss import (
    CandidateVocabulary,
    decayed_cross_entropy,
    draftable_ids,
    frequent_tokens,
    head_rows,
    slot_targets,
)
from hf_dflow.training.packing import IGNORED
from hf_dflow.training.start import new_drafter

EXACT = 1e-9  # float64 enumeration rounds at 1e-15


def reduced(target, token_ids: list[int], **overrides) -> DFlowDrafter:
    drafter = tiny_drafter(target, 4, output_head="own", draft_vocab_size=len(token_ids), **overrides)
    drafter.set_draft_vocabulary(torch.tensor(token_ids), target.get_output_embeddings().weight)
    return drafter


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture
def drafter(target):
    return reduced(target, [2, 5, 11, 40, 41, 62])


def test_logits_stand_at_the_targets_ids(target, drafter):
    """Catches: offsets taken for ids, a soft-cap that turns the missing tokens' -inf into a finite logit."""
    drafter.config.final_logit_softcapping = 4.0
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    logits = drafter.compute_logits(hidden, target.get_output_embeddings())
    everything = drafter.shape_logits(target.get_output_embeddings()(hidden))
    known = drafter.draft_token_ids
    assert logits.shape == everything.shape
    torch.testing.assert_close(logits[..., known], everything[..., known])
    assert logits.isfinite().sum(-1).unique().tolist() == [6]


def test_greedy_text_is_the_targets_and_drafts_are_accepted():
    """Catches: drafted row numbers in place of token ids, and -inf of missing tokens taken for a broken drafter."""
    target, prompt = tiny_target("llama"), prompt_of(9)
    expected = plain_greedy(target, prompt, 40)
    said = sorted(set(expected[0, 9:].tolist()))
    drafter = reduced(target, said[1:])  # one token of the text cannot be drafted
    memorize(drafter, target, expected, prompt_length=9)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=40)
    assert torch.equal(output.sequences, expected)
    assert_not_vacuous(output.statistics)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("token_ids", [[0, 2, 3], [1]])
def test_the_output_law_is_the_targets(monkeypatch, rule, token_ids):
    """Catches: weight of the target on tokens that are never drafted, lost or drawn from a residual without them."""
    target = three_token_target()
    drafter = three_token_drafter(target, draft_vocab_size=len(token_ids))
    head = torch.randn(4, drafter.config.hidden_size, dtype=torch.float64)
    drafter.set_draft_vocabulary(torch.tensor(token_ids), head)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 1) < EXACT


def test_a_broken_drafter_is_still_noticed(target, drafter, caplog):
    """Catches: a test for NaN and inf that a reduced vocabulary switches off."""
    with torch.no_grad():
        drafter.lm_head.weight[2] = torch.nan
    prompt = prompt_of(9)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert "non-finite" in caplog.text
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 12))


# -- files


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_map_travels_with_the_weights(tmp_path, target, drafter, dtype):
    """Catches: a map that is not saved, or is cast with the weights."""
    drafter.to(dtype).save_pretrained(tmp_path)
    loaded = DFlowDrafter.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.draft_token_ids.dtype == torch.int64
    assert loaded.draft_token_ids.tolist() == [2, 5, 11, 40, 41, 62]
    hidden = torch.randn(2, 3, 32).to(dtype)
    head = target.get_output_embeddings()
    assert torch.equal(loaded.compute_logits(hidden, head), drafter.compute_logits(hidden, head))


def spoil(folder, **changes) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (None, "missing: draft_token_ids"),
        ([2, 5, 11, 40, 41], r"draft_token_ids is \(5,\), needs \(6,\)"),
        ([2, 5, 11, 40, 41, 64], r"must hold 6 different tokens in \[0, 63\]"),
        ([2, 5, 5, 40, 41, 62], "different tokens"),
        ([-1] * 6, "different tokens"),
    ],
)
def test_a_drafter_without_a_sound_map_is_refused(tmp_path, drafter, token_ids, message):
    """Catches: a map that is missing or off, with which acceptance collapses and nothing says why."""
    drafter.save_pretrained(tmp_path)
    spoil(tmp_path, draft_token_ids=None if token_ids is None else torch.tensor(token_ids))
    with pytest.raises(DrafterWeightsError, match=message):
        DFlowDrafter.from_pretrained(tmp_path)


def test_a_map_that_the_configuration_does_not_know_is_refused(tmp_path, drafter):
    """Catches: a reduced head read as a whole vocabulary's."""
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["draft_vocab_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(DrafterWeightsError, match="unexpected: draft_token_ids"):
        DFlowDrafter.from_pretrained(tmp_path)


def test_impossible_vocabularies_are_refused_in_words(target):
    """Catches: a shape error in place of a reason, and a drafter whose vocabulary was never set."""
    with pytest.raises(DrafterConfigError, match=r"'draft_vocab_size' is 6 while 'output_head' is 'target'"):
        tiny_drafter(target, 4, draft_vocab_size=6)
    for size in (0, 65, True, 2.5):
        with pytest.raises(Exception, match="draft_vocab_size"):
            tiny_drafter(target, 4, output_head="own", draft_vocab_size=size)
    unset = tiny_drafter(target, 4, output_head="own", draft_vocab_size=6)
    with pytest.raises(DrafterWeightsError, match="set_draft_vocabulary was never called"):
        dflow_greedy(target, unset, prompt_of(5), max_new_tokens=4)
    weight = target.get_output_embeddings().weight
    with pytest.raises(DrafterWeightsError, match="3 draft tokens were given for draft_vocab_size 6"):
        unset.set_draft_vocabulary(torch.tensor([1, 2, 3]), weight)
    with pytest.raises(DrafterWeightsError, match="not the mask token alone"):
        reduced(target, [MASK_TOKEN_ID])


# -- training


def test_the_most_frequent_tokens_are_chosen():
    """Catches: a corpus that does not fill the vocabulary, a mask that takes a row, a stop that cannot be said."""
    text = [7] * 5 + [3] * 4 + [9] * 3 + [1]
    assert frequent_tokens(text, 3, 12).tolist() == [3, 7, 9]
    assert frequent_tokens(text, 3, 12, never=[7]).tolist() == [1, 3, 9]
    assert frequent_tokens(text, 3, 12, always=[11]).tolist() == [3, 7, 11]
    assert frequent_tokens(text, 7, 12, never=[0, 2]).tolist() == [1, 3, 4, 5, 6, 7, 9]
    assert frequent_tokens([], 2, 12).tolist() == [0, 1]
    assert frequent_tokens(text, 11, 12, never=[0]).tolist() == list(range(1, 12))
    for size in (0, 12):
        with pytest.raises(DFlowError, match=f"draft vocabulary of {size} tokens cannot be chosen from 11"):
            frequent_tokens(text, size, 12, never=[0])


def test_the_loss_runs_over_what_can_be_said(target, drafter):
    """Catches: rows and labels of two numberings, a label that no row can say, random others without a row."""
    ids = draftable_ids(drafter, 64)
    assert ids.tolist() == [2, 5, 11, 40, 41, 62]
    assert draftable_ids(tiny_drafter(target, 4), 50).tolist() == list(range(50))
    candidates = CandidateVocabulary(torch.tensor([5, 7, 41]), 64, 100, ids)  # 7 is in the data and cannot be said
    sampled = candidates.sample(torch.Generator().manual_seed(0))
    assert sampled[:2].tolist() == [5, 41] and sorted(sampled.tolist()) == ids.tolist()
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    labels = torch.tensor([[5, 7, 41], [41, IGNORED, 5]])
    head = head_rows(drafter, drafter.requires_grad_(True).lm_head, sampled)
    found = decayed_cross_entropy(hidden, candidates.relabel(slot_targets(labels)), head, 1e9)
    served = drafter.compute_logits(hidden, target.get_output_embeddings()).log_softmax(-1)
    can_be_said = labels.masked_fill(labels == 7, IGNORED)
    expected = torch.nn.functional.nll_loss(served.flatten(0, 1), can_be_said.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.backward()
    assert drafter.lm_head.weight.grad.abs().sum(-1).min() > 0


@pytest.mark.parametrize("size", [12, 60])
def test_a_run_trains_and_saves_a_reduced_head(tmp_path, size):
    """Catches: a run whose head never learns, whose checkpoint or folder loses the map, or that fails on a corpus of
    fewer tokens than the vocabulary has."""
    target = tiny_target("llama", dtype=torch.float32)
    target.generation_config.eos_token_id = 62
    rows = tiny_rows(3)
    trainer = tiny_trainer(tmp_path, rows=rows, target=target, draft_vocab_size=size)
    ids = trainer.drafter.draft_token_ids.clone()
    head = target.get_output_embeddings().weight
    assert torch.equal(trainer.drafter.lm_head.weight, head[ids]), "starts as the target's rows"
    written = {i for row in rows for i in row.token_ids[row.prompt_length :]}
    assert len(ids) == size and 62 in ids.tolist() and MASK_TOKEN_ID not in ids.tolist()
    assert {*ids.tolist()} < {*written, 62} if size == 12 else {*ids.tolist()} > written
    trainer.run()
    assert trainer.skipped == 0 and not torch.equal(trainer.drafter.lm_head.weight, head[ids])
    resumed = tiny_trainer(tmp_path, rows=rows, target=target, draft_vocab_size=size)
    assert resumed.resume() and differing(weights_of(resumed), weights_of(trainer)) == []
    with pytest.raises(DFlowError, match="draft_vocab_size"):
        tiny_trainer(tmp_path / "b", rows=rows, target=target, drafter=trainer.drafter, draft_vocab_size=size - 1)
    continued = tiny_trainer(tmp_path / "c", rows=rows, target=target, drafter=trainer.drafter)
    assert torch.equal(continued.drafter.draft_token_ids, ids)
    trainer.drafter.save_pretrained(tmp_path / "drafter")
    loaded = DFlowDrafter.from_pretrained(tmp_path / "drafter")
    prompt = prompt_of(9)
    output = dflow_greedy(target, loaded, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 12))
    assert output.statistics.num_draft_tokens > 0


def test_a_head_that_has_no_plain_rows_is_refused():
    """Catches: a bias of the target's head silently left out of the copied rows."""
    target = tiny_target("llama", dtype=torch.float32)
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(DFlowError, match=r"without a bias; leave .draft_vocab_size. out"):
        new_drafter(target, tiny_training(draft_vocab_size=8), rows=tiny_rows(2))
