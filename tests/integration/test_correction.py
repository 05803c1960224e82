"""The causal correction: each draft conditions on the previous one. Its law, and its loop: test_reference.py."""

import copy

import pytest
import torch
from kit import assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, shared_target, tiny_drafter, tiny_target
from memorize import memorize
from trainer_kit import STAGES, differing, tiny_trainer, weights_of

from hf_dflow import DFlowDecoder, DFlowGenerationConfig, UnsupportedGenerationError
from hf_dflow.generation.drafting import DraftSession
from hf_dflow.model.heads import head_scores
from hf_dflow.training.config import TrainingConfig, TrainingConfigError
from hf_dflow.training.rounds import draft_round

WIDTH = {"correction_intermediate_size": 16, "correction_top_k": 4}
NEW_TOKENS = 40


def corrected_pair(std: float = 0.1):
    """A drafter that learned the target's text with its correction, so that blocks are accepted in part."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, 5, **WIDTH)
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=std)
    return target, drafter


def test_it_starts_as_the_drafter_without_it():
    """Bug: a drafter to which a correction is added drafts worse before its first update."""
    target, drafter = corrected_pair(std=0.0)
    plain = tiny_drafter(target, 5)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    prompt = prompt_of(9)
    memorize(plain, target, plain_greedy(target, prompt, NEW_TOKENS + 8), prompt_length=9)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    one, other = (dflow_greedy(target, each, prompt, max_new_tokens=NEW_TOKENS) for each in (plain, drafter))
    assert_not_vacuous(one.statistics)
    assert one.statistics.per_step_accepted == other.statistics.per_step_accepted


@torch.no_grad()
def test_candidates_are_scored_by_the_corrected_state():
    """Bug: a correction of another slot or token, scores that leave the head's or the drafter's scaling out."""
    target, drafter = shared_target(), tiny_drafter(shared_target(), 5, **WIDTH, output_multiplier=0.5)
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.1)
    head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    hidden, previous_ids = torch.randn(2, 3, 32, dtype=torch.float64), torch.tensor([5, 9])
    logits = drafter.compute_logits(hidden, head)
    candidates = drafter.candidates(hidden, logits, embedding, head)
    for row, previous in enumerate(previous_ids.tolist()):
        parts = (embedding.weight[previous], hidden[row, 1])
        normed = [part / (part.square().mean() + drafter.config.rms_norm_eps).sqrt() for part in parts]
        correction = drafter.causal_correction
        inner = torch.nn.functional.silu(correction.up_proj(torch.cat(normed)))
        corrected = drafter.compute_logits(hidden[row, 1] + correction.down_proj(inner), head)
        expected = torch.full_like(corrected, -torch.inf)
        for token in logits[row, 1].argsort(descending=True)[:4].tolist():
            expected[token] = corrected[token]
        torch.testing.assert_close(candidates.logits(1, previous_ids, 64)[row], expected)


def test_rows_of_a_batch_are_corrected_by_their_own_drafts():
    """Bug: rows that are corrected by each other's predecessor, or by the one before a ragged block's filling."""
    target, drafter = corrected_pair()
    prompt = prompt_of(9)
    text = plain_greedy(target, prompt, NEW_TOKENS + 8)
    memorize(drafter, target, text, prompt_length=9)
    prompts = torch.cat([prompt, prompt_of(9, 1), prompt.flip(1)])
    together = dflow_greedy(target, drafter, prompts, max_new_tokens=NEW_TOKENS)
    for i, one in enumerate(prompts):
        alone = dflow_greedy(target, drafter, one[None], max_new_tokens=NEW_TOKENS)
        assert torch.equal(together.sequences[i], alone.sequences[0])
        assert together.statistics.per_row[i].per_step_accepted == alone.statistics.per_step_accepted
        if i == 0:
            assert_not_vacuous(alone.statistics)
            assert torch.equal(alone.sequences, text[:, : alone.sequences.shape[1]])
    off = target.generate(
        prompts[:1],
        assistant_model=drafter,
        generation_config=DFlowGenerationConfig(
            use_correction=False, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True
        ),
    )
    drafter.causal_correction = None
    without = dflow_greedy(target, drafter, prompts[:1], max_new_tokens=NEW_TOKENS)
    assert off.statistics.per_step_accepted == without.statistics.per_step_accepted
    with pytest.raises(UnsupportedGenerationError, match="use_correction=True"):
        DFlowDecoder(drafter, use_correction=True)
    assert without.statistics.per_step_accepted != together.statistics.per_row[0].per_step_accepted


def test_states_that_are_not_finite_end_in_plain_decoding_and_not_in_nan(monkeypatch):
    """Bug: NaN that the correction carries into a draft law whose logits had been cleared."""
    target, drafter = corrected_pair()
    honest, blocks = DraftSession.choose, []

    def watching(*arguments, **options):
        blocks.append(honest(*arguments, **options))
        return blocks[-1]

    monkeypatch.setattr(DraftSession, "choose", watching)
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.nan)
    prompt = prompt_of(9)
    output = dflow_greedy(target, drafter, prompt, max_new_tokens=12)
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 12))
    assert blocks and not any(block.is_finite.any() or block.logits.isnan().any() for block in blocks)


def test_a_head_that_is_more_than_its_weight_is_called_as_a_whole():
    """Bug: rows of the base weight under an adapter, which scores candidates as another head would."""

    class Adapted(torch.nn.Linear):
        def forward(self, states):
            return 2.0 * super().forward(states) + 1.0

    torch.manual_seed(0)
    plain, adapted = torch.nn.Linear(8, 12, bias=False), Adapted(8, 12, bias=False)
    adapted.load_state_dict(plain.state_dict())
    states, token_ids = torch.randn(3, 2, 8), torch.randint(0, 14, (3, 5))  # two ids that the head has no row for
    expected = plain(states).gather(-1, token_ids.clamp(max=11)[:, None].expand(-1, 2, -1))
    found = head_scores(plain, states, token_ids)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(head_scores(adapted, states, token_ids), 2 * expected)


def test_only_the_correction_is_trained_where_only_it_should_be(tmp_path):
    """Bug: a published drafter's own weights move, or nothing does."""
    trainer = tiny_trainer(tmp_path, stages=[STAGES[0]], train_only="correction", correction_intermediate_size=8)
    assert trainer.training.correction_top_k == 16
    before = weights_of(trainer)
    trainer.run()
    changed = differing(before, weights_of(trainer))
    assert changed and all(name.startswith("causal_correction.") for name in changed)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_slots_learns_without_it(share, tmp_path):
    """Bug: candidates that only the corrected states learn to rank, or a correction that never learns."""
    trainer = tiny_trainer(tmp_path, correction_intermediate_size=8, base_share=share)
    torch.manual_seed(0)
    torch.nn.init.normal_(trainer.drafter.causal_correction.down_proj.weight, std=0.1)
    trainer.step(STAGES[0], 1e-3)
    gradient = trainer.drafter.causal_correction.up_proj.weight.grad
    assert (gradient.abs().sum() > 0) == (share < 1.0)
    sequences, anchors = trainer.draw(STAGES[0])
    result = draft_round(trainer.drafter, trainer.target, sequences, anchors)
    moved = (
        (trainer._corrected(sequences.anchor_ids(anchors), result) != result.hidden).any(dim=-1).float().mean().item()
    )
    assert moved == pytest.approx(1.0 - share, abs=0.25)


def test_each_slot_learns_behind_the_token_before_it(tmp_path):
    """Bug: a slot corrected by its own label, or by its neighbour's: the loss looks splendid, and no draft is right."""
    trainer = tiny_trainer(tmp_path, correction_intermediate_size=8, base_share=0.0)
    torch.nn.init.normal_(trainer.drafter.causal_correction.down_proj.weight, std=0.1)
    sequences, anchors = trainer.draw(STAGES[0])
    result = draft_round(trainer.drafter, trainer.target, sequences, anchors)
    found = trainer._corrected(sequences.anchor_ids(anchors), result)
    embedding, checked = trainer.target.get_input_embeddings(), 0
    for place, (row, position) in enumerate(zip(anchors.row.tolist(), anchors.position.tolist(), strict=True)):
        for slot in range(found.shape[1]):
            if result.labels[place, slot] < 0:
                continue
            previous = embedding(sequences.token_ids[row, position + slot])
            expected = trainer.drafter.causal_correction(result.hidden[place, slot], previous)
            torch.testing.assert_close(found[place, slot], expected)
            checked += slot > 0
    assert checked > 5


def test_a_resumed_run_is_the_straight_one(tmp_path):
    """Bug: which slots learn without the correction is drawn anew after a resume."""
    fields = {"correction_intermediate_size": 8, "save_every": 3}
    straight = tiny_trainer(tmp_path / "straight", **fields)
    straight.run()
    broken = tiny_trainer(tmp_path / "broken", **fields)
    honest = broken.step

    def dying(*arguments):
        if broken.update == 5:
            raise KeyboardInterrupt
        return honest(*arguments)

    broken.step = dying
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    again = tiny_trainer(tmp_path / "broken", **fields)
    assert again.resume() and again.update == 3
    again.run()
    assert differing(weights_of(straight), weights_of(again)) == []


def test_a_run_from_another_drafter_adds_it_or_keeps_it(tmp_path):
    """Bug: a correction lost by continuing, or one of another width loaded into it."""
    target = tiny_target("llama", dtype=torch.float32)
    plain = tiny_drafter(target, 4, dtype=torch.float32)
    fields = {"target": target, "num_hidden_layers": None, "block_size": None, "target_layer_ids": None}
    added = tiny_trainer(tmp_path / "1", drafter=plain, correction_intermediate_size=8, **fields)
    assert not added.drafter.causal_correction.down_proj.weight.any()
    assert plain.causal_correction is None
    torch.manual_seed(0)
    torch.nn.init.normal_(added.drafter.causal_correction.down_proj.weight)
    kept = tiny_trainer(tmp_path / "2", drafter=copy.deepcopy(added.drafter), **fields)
    assert torch.equal(
        kept.drafter.causal_correction.down_proj.weight, added.drafter.causal_correction.down_proj.weight
    )
    with pytest.raises(TrainingConfigError, match='"correction_intermediate_size" is 9, the drafter to continue has 8'):
        tiny_trainer(tmp_path / "3", drafter=added.drafter, correction_intermediate_size=9, **fields)
    with pytest.raises(TrainingConfigError, match="neither a drafter to continue nor the configuration has one"):
        tiny_trainer(tmp_path / "4", drafter=plain, train_only="correction", **fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction_top_k": 4}, '"correction_top_k" is 4; give null without a correction'),
        ({"correction_intermediate_size": 0}, '"correction_intermediate_size" is 0; give a whole number from 1'),
        ({"correction_intermediate_size": 8, "draft_vocab_size": 20}, '"draft_vocab_size" is 20; give null'),
        ({"base_share": 1.5}, '"base_share" is 1.5; give a number from 0 to 1'),
    ],
)
def test_training_configurations_that_cannot_be_are_refused(changes, message):
    """Bug: a run that ends in a drafter without what its configuration asked for."""
    with pytest.raises(TrainingConfigError, match=message):
        TrainingConfig.from_dict({"stages": [{"updates": 1}], **changes})
