"""The exact law of sampling on targets with recurrent layers: every branch of two steps of two drafts."""

import pytest
from hybrids import hybrid
from internals import RecurrentStates
from law import VOCAB, Loop, law_error, three_token_drafter

LAW = 1e-5  # largest error of a law whose target computes in float32


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_law_of_two_steps(monkeypatch, family, rule):
    """A rejected draft that shifts the law of what follows, with partial acceptances and the relay between them."""
    target = hybrid(family, vocab_size=VOCAB)
    drafter = three_token_drafter(target)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 2) < LAW

    def nothing(self, *_):
        self._calls, self.length = [], 0

    monkeypatch.setattr(RecurrentStates, "advance", nothing)
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 2) > 100 * LAW
