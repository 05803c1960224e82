"""The picture in the README is that of a real call."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from experiments.picture import NEW_TOKENS, PROMPT, Step, StepRecorder, clearest_relay, decode_steps, draw
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET

COMMITTED = Path(__file__).parents[2] / "docs" / "images" / "decode.svg"


@pytest.fixture(scope="module")
def decoded():
    return decode_steps()


def test_the_steps_are_those_of_the_text(decoded):
    """Bug: tokens lost or shown twice between two steps, so that the picture's text is not the target's."""
    first, steps = decoded
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    inputs = pair.encode(PROMPT)
    target: Any = pair.target
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    words = StepRecorder(pair.tokenizer).words(plain[0, inputs["input_ids"].shape[1] :])
    assert [first, *(word for step in steps for word in step.emitted)] == words


def test_the_committed_picture_is_what_the_command_draws(decoded):
    """Bug: a picture of a drafter or a loop that is no longer there."""
    assert draw(*decoded) == COMMITTED.read_text(encoding="utf-8")


def test_every_draft_is_drawn_in_its_colour(decoded):
    """Bug: a rejected draft drawn as accepted, or a relayed slot without its frame."""
    _, steps = decoded
    shapes = [element.get("class") for element in ElementTree.fromstring(draw(*decoded)).iter()]
    closer = clearest_relay(steps)
    drawn = [*steps, steps[closer], steps[closer + 1]]
    assert shapes.count("rejected") == 1 + sum(len(step.drafts) - step.accepted for step in drawn)
    assert shapes.count("accepted") == 1 + sum(step.accepted for step in drawn)
    assert shapes.count("arrow") == steps[closer + 1].num_relayed
    assert shapes.count("relayed") == 1 + sum(step.num_relayed for step in steps) + steps[closer + 1].num_relayed


def test_the_relay_shown_is_one_that_helped():
    """Bug: two steps up close in which the relay changed nothing."""
    steps = [
        Step(["a", "b", "c"], 0, ["x", "y", "z", "w"], 0),  # nothing that follows was already computed
        Step(["p", "q", "r"], 0, ["s", "t", "u", "v"], 3),  # "t" and "u" were, and are accepted next
        Step(["t", "u", "z"], 2, ["t", "u", "n", "m"], 3),
        Step(["1", "2", "3"], 3, ["1", "2", "3", "4"], 1),
    ]
    assert clearest_relay(steps) == 1
