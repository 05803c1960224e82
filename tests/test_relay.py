"""A relay that also reads what the verifier's distribution was."""

import math

import pytest
import torch
from kit import tiny_drafter, tiny_target
from trainer_kit import tiny_trainer

from hf_dflow import DFlowDrafter, DrafterConfigError
from hf_dflow.model.relay import summarise_logits
from hf_dflow.training.config import TrainingConfigError


def test_the_summary_by_hand():
    """Bug: probabilities made to sum to one among the likeliest, an entropy without the rest, embeddings of ranks."""
    probs = torch.tensor([0.1, 0.5, 0.05, 0.25, 0.1])
    table = torch.arange(15.0).reshape(5, 3)
    found = summarise_logits(probs.log()[None], 2, lambda token_ids: table[token_ids])
    expected = 0.5 * table[1] + 0.25 * table[3]
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)) / math.log(3)
    torch.testing.assert_close(found, torch.cat([expected, torch.tensor([entropy])])[None])


def test_certainty_and_impossible_tokens_give_numbers():
    """Bug: 0 * log 0 is NaN where the target rules tokens out."""
    logits = torch.full((1, 4), -torch.inf)
    logits[0, 2] = 0.0
    found = summarise_logits(logits, 3, lambda token_ids: torch.ones(*token_ids.shape, 2))
    assert found.tolist() == [[1.0, 1.0, 0.0]]


def test_a_drafter_with_a_relay_learns_to_read(tmp_path):
    """Bug: new weights that change drafts before the first update, or that no gradient reaches, or are not saved."""
    target = tiny_target()
    drafter = tiny_drafter(target, 8)
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.3)
    open_fields = dict.fromkeys(("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids"))
    trainer = tiny_trainer(tmp_path / "run", target=target, drafter=drafter, relay_top_k=4, **open_fields)
    relay = trainer.drafter.relay
    assert not relay.summary_proj.weight.any()
    torch.testing.assert_close(relay.down_proj.weight, drafter.relay.down_proj.weight.float())
    trainer.run()
    assert relay.summary_proj.weight.any()
    trainer.drafter.save_pretrained(tmp_path / "drafter")
    again = DFlowDrafter.from_pretrained(tmp_path / "drafter")
    assert again.config.relay_top_k == 4
    assert torch.equal(again.relay.summary_proj.weight, relay.summary_proj.weight)
    with pytest.raises(TrainingConfigError, match="relay_top_k"):
        tiny_trainer(tmp_path / "other", target=target, drafter=again, relay_top_k=5, **open_fields)


def test_what_cannot_be_is_refused(tmp_path):
    """Bug: a relay that is asked to read nothing, or that learns from other logits than decoding will show it."""
    target = tiny_target()
    with pytest.raises(DrafterConfigError, match="relay_top_k"):
        tiny_drafter(target, 8, relay_top_k=0)
    honest = target.forward
    target.forward = lambda *args, **kwargs: capped(honest(*args, **kwargs))
    with pytest.raises(TrainingConfigError, match="caps or scales"):
        tiny_trainer(tmp_path / "run", target=target, relay_top_k=4)
    open_fields = dict.fromkeys(("num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids"))
    reads = tiny_drafter(target, 8, relay_top_k=4)
    with pytest.raises(TrainingConfigError, match="caps or scales"):  # though the run itself does not name it
        tiny_trainer(tmp_path / "again", target=target, drafter=reads, **open_fields)


def capped(output):
    output.logits = 0.01 * torch.tanh(output.logits / 0.01)
    return output
