"""Checkpoints in z-lab's DFlash 2 layout: convolutions and candidate selector as PyPI's dflash computes them."""

import time

import dflash_oracle as tiny
import pytest
import torch
from dflash_oracle import BLOCK_SIZE, DFLASH2, MASK_TOKEN_ID, block_ids, edit_config, features_of, make_dflash2_folder
from kit import assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of
from memorize import memorize
from safetensors.torch import load_file
from transformers import GenerationConfig

from hf_dflow import AcceptanceProcessor, DFlowDrafter, DFlowGenerationConfig, DrafterConfigError
from hf_dflow.training.config import TrainingConfig, TrainingConfigError
from hf_dflow.training.start import resolve

TOLERANCE = 1e-5  # float32, other order of the same sums
CONTEXT, NEW_TOKENS, PROMPT_LENGTH = 30, 40, 16
VARIANTS = {
    "full": {},
    "mixed, causal": tiny.MIXED_SLIDING,
    "sliding, not causal": {**tiny.PURE_SLIDING, "is_causal": False},
    "scales": {"draft_config": tiny.SCALES},
    "one tap, one channel": {"draft_config": {"conv_kernel_size": 1, "conv_group_size": 1}},
    "flat": {"nested": False},
}


@pytest.fixture(scope="module")
def target():
    target = tiny.tiny_target(seed=7)
    with torch.no_grad():
        target.lm_head.weight[MASK_TOKEN_ID] *= 0.01  # their loop does not keep the mask from being proposed
    return target


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_states_and_choices_equal_theirs(name, tmp_path, target):
    """Bug: a kernel applied to the wrong side or tap, context sent through it, a selector fed with the wrong token."""
    theirs = make_dflash2_folder(tmp_path, **VARIANTS[name])
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    features, positions = features_of(CONTEXT), torch.arange(CONTEXT + BLOCK_SIZE)[None]
    expected = tiny.oracle_hidden(theirs, target, block_ids(), features, positions)
    embeds = drafter.embed(block_ids(), target.get_input_embeddings())
    hidden = drafter(embeds, features, position_ids=positions).last_hidden_state
    close(hidden, expected)
    logits = drafter.compute_logits(hidden[:, 1:], target.lm_head)
    path, candidate_ids, _ = theirs.propose(expected[:, 1:], block_ids()[:, 0], target.lm_head, 0.0)
    candidates = drafter.candidate_selector.candidates(hidden[:, 1:], logits)
    previous = block_ids()[:, 0]
    for slot in range(BLOCK_SIZE - 1):
        law = candidates.logits(slot, previous, tiny.VOCAB_SIZE)
        assert set(law[0].isfinite().nonzero()[:, 0].tolist()) == set(candidate_ids[0, slot].tolist())
        assert int(law.argmax()) == int(path[0, slot])
        previous = path[:, slot]


def test_the_additions_matter(tmp_path, target):
    """Bug: convolutions or selector that neither side applies, so that the comparison above compares nothing."""
    make_dflash2_folder(tmp_path)
    drafter = DFlowDrafter.from_pretrained(tmp_path)
    drafter.requires_grad_(False)
    embeds = drafter.embed(block_ids(), target.get_input_embeddings())
    before = drafter(embeds, features_of(CONTEXT)).last_hidden_state
    for layer in drafter.layers:
        for convolution in (layer.attention_conv, layer.mlp_conv):
            kept = convolution.base_kernel.clone()
            convolution.base_kernel[1, 2] += 0.3  # the farthest tap, behind the sublayer
            assert (drafter(embeds, features_of(CONTEXT)).last_hidden_state - before).abs().max() > 1e-3
            convolution.base_kernel.copy_(kept)


@pytest.mark.parametrize("name", VARIANTS)
def test_accepted_lengths_equal_dflash_generate(name, tmp_path, monkeypatch, target):
    """Bug: anything that the loop applies otherwise than z-lab's own, the order of the picks above all."""
    dflash = pytest.importorskip("dflash.model")
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)
    theirs, target = make_dflash2_folder(tmp_path, **VARIANTS[name]).double(), target.double()
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook.weight *= 0.4  # it was not trained: let it err now and then
    prompt = prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE + 1)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    theirs.load_state_dict(drafter.state_dict())
    output = dflash.dflash_generate(theirs, target, prompt, NEW_TOKENS, None, return_stats=True)
    ours = dflow_greedy(target, drafter, prompt, max_new_tokens=NEW_TOKENS)
    assert_not_vacuous(ours.statistics)
    assert torch.equal(ours.sequences, output.output_ids)
    assert torch.equal(ours.sequences, text[:, : PROMPT_LENGTH + NEW_TOKENS])
    produced = [length - 1 for length in output.acceptance_lengths][: len(ours.statistics.per_step_accepted) - 1]
    assert ours.statistics.per_step_accepted[: len(produced)] == produced and len(produced) > 5


def test_the_loader_reads_both_names_of_the_codebooks(tmp_path):
    """Bug: only one of the two spellings loads, the published or the one that dflash itself writes."""
    make_dflash2_folder(tmp_path / "published")
    tiny.make_dflash_folder(tmp_path / "saved", draft_class="DFlash2DraftModel", draft_config=DFLASH2)
    names = [set(load_file(tmp_path / one / "model.safetensors")) for one in ("published", "saved")]
    assert names[0] != names[1]
    one, other = (DFlowDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("published", "saved"))
    assert all(torch.equal(one[key], other[key]) for key in one) and one.keys() == other.keys()


@pytest.mark.parametrize("key", DFLASH2)
def test_a_missing_key_is_named(key, tmp_path):
    make_dflash2_folder(tmp_path)
    edit_config(tmp_path, dflash_config={key: None})
    with pytest.raises(DrafterConfigError, match=key):
        DFlowDrafter.from_pretrained(tmp_path)


class LawRecorder(AcceptanceProcessor):
    """Keeps every draft block and what the target said of it."""

    def __init__(self):
        self.blocks = []

    def __deepcopy__(self, memo):
        return self

    def observe(self, draft, verification):
        self.blocks.append(draft)


def test_the_sparse_law_is_the_one_that_is_verified(tmp_path, target):
    """Bug: drafts picked from a few candidates but verified with the law over all tokens: not the target's law."""
    make_dflash2_folder(tmp_path)
    drafter = DFlowDrafter.from_pretrained(tmp_path).double()
    recorder = LawRecorder()
    config = DFlowGenerationConfig(
        do_sample=True, temperature=1.3, top_k=0, acceptance_processors=[recorder], verification="block"
    )
    target.double().generate(prompt_of(9), assistant_model=drafter, generation_config=config, max_new_tokens=24)
    blocks = [block for block in recorder.blocks if block.token_ids.shape[1]]
    assert len(blocks) > 3
    for block in blocks:
        allowed = block.logits.isfinite()
        assert (allowed.sum(-1) <= DFLASH2["selector_top_k"]).all() and (allowed.sum(-1) >= 2).all()
        assert allowed.gather(-1, block.token_ids[..., None]).all()


def test_a_batch_and_a_relay_on_top(tmp_path, target):
    """Bug: rows that pick by each other's tokens; a relay that a selector does not go with."""
    make_dflash2_folder(tmp_path)
    target = target.double()
    drafter = DFlowDrafter.from_pretrained(tmp_path, use_relay=True).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = drafter.relay.down_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    prompt = prompt_of(PROMPT_LENGTH)
    text = plain_greedy(target, prompt, NEW_TOKENS + BLOCK_SIZE + 1)
    memorize(drafter, target, text, prompt_length=PROMPT_LENGTH)
    prompts = torch.cat([prompt, prompt_of(PROMPT_LENGTH, 1), prompt.flip(1)])
    alone = [dflow_greedy(target, drafter, one[None], max_new_tokens=NEW_TOKENS) for one in prompts]
    together = dflow_greedy(target, drafter, prompts, max_new_tokens=NEW_TOKENS)
    assert_not_vacuous(alone[0].statistics)
    for i, one in enumerate(alone):
        assert torch.equal(together.sequences[i], one.sequences[0])
        assert together.statistics.per_row[i].per_step_accepted == one.statistics.per_step_accepted
    off = GenerationConfig.from_dict({})  # a plain config, so that the drafter's defaults hold
    drafter.config.generation_defaults = {"use_relay": False}
    without = target.generate(
        prompt,
        generation_config=off,
        assistant_model=drafter,
        speculation_type="dflow",
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        do_sample=False,
    )
    assert without.statistics.per_step_accepted != alone[0].statistics.per_step_accepted  # the relay does something


def test_training_refuses_what_it_would_train_wrongly(tmp_path, target):
    """Bug: convolutions run across the many blocks of a training row."""
    make_dflash2_folder(tmp_path)
    with pytest.raises(TrainingConfigError, match="selector"):
        resolve(TrainingConfig(), target, torch.arange(5), DFlowDrafter.from_pretrained(tmp_path))
