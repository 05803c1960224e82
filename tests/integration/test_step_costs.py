"""What a step costs is timed as a step runs: with the target's own kinds of cache, and with its rollback."""

import time

import pytest
import torch
from hybrids import hybrid
from kit import tiny_drafter, tiny_target
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_dflow.generation.measure import measure_step_costs
from hf_dflow.generation.recurrent import MixerCall

PAUSE = 0.03  # seconds


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_the_rollback_of_recurrent_layers_is_part_of_a_forwards_cost(family, monkeypatch):
    """Catches: lengths chosen as if rejected drafts could be taken out of a recurrent state for nothing."""
    target = hybrid(family)
    drafter = tiny_drafter(target, 8, dtype=torch.float32)
    run_again = MixerCall.run_again

    def slowly(*args):
        time.sleep(PAUSE)
        run_again(*args)

    monkeypatch.setattr(MixerCall, "run_again", slowly)
    costs = measure_step_costs(target, drafter, repeats=1)
    assert costs.verify[1] > PAUSE, "a block is rolled back"
    assert costs.verify[0] < costs.verify[1] - PAUSE / 2, "a single token never is"


def test_sliding_layers_are_timed_with_their_window(monkeypatch):
    """Catches: a cache without the target's configuration, in which sliding layers read all of the context."""
    target = tiny_target("mistral_sliding", dtype=torch.float32)
    lengths = []
    update = DynamicSlidingWindowLayer.update

    def noting(layer, keys, values, *args, **kwargs):
        found = update(layer, keys, values, *args, **kwargs)
        lengths.append((keys.shape[2], found[0].shape[2]))
        return found

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", noting)
    measure_step_costs(target, tiny_drafter(target, 8, dtype=torch.float32), repeats=1)
    window = target.config.sliding_window
    blocks = [(new, read) for new, read in lengths if new <= 8]
    assert blocks and all(read == window - 1 + new for new, read in blocks)
