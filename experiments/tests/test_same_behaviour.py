"""What the comparison of two commits notices."""

import copy

import pytest

from experiments.same_behaviour.__main__ import compare


def record(**changes):
    statistics = {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 3, 3], "per_row": []}
    return {"texts": [[5, 6, 7]], "statistics": statistics, "cached": 9, **changes}


CALLS = [
    {"group": "llama", "name": "greedy", "record": record()},
    {"group": "refused", "name": "beams", "record": {"error": "ValueError", "message": "in the old words"}},
]


def change(path, value):
    calls = copy.deepcopy(CALLS)
    *parents, last = path
    place = calls
    for key in parents:
        place = place[key]
    place[last] = value
    return calls


def test_the_same_records_are_identical():
    assert [group.verdict for group in compare(CALLS, copy.deepcopy(CALLS)).values()] == ["identical", "identical"]
    reworded = change([1, "record", "message"], "in new words")
    assert [group.verdict for group in compare(CALLS, reworded).values()] == ["identical", "identical"]


@pytest.mark.parametrize(
    "path, value",
    [
        ([0, "record", "texts", 0, 2], 8),
        ([0, "record", "texts"], [[5, 6]]),
        ([0, "record", "statistics", "per_step_accepted", 0], 1),
        ([0, "record", "statistics", "per_row"], [{}]),
        ([0, "record", "statistics", "another"], 1),
        ([0, "record", "cached"], None),
        ([0, "name"], "renamed"),
        ([1, "record", "error"], "TypeError"),
    ],
)
def test_a_difference_is_found_and_named(path, value):
    """Bug: zip stops at the shorter list, a missing field counts as equal, a call that one side lacks is skipped."""
    groups = compare(CALLS, change(path, value))
    (line, *_), name = groups[CALLS[path[0]]["group"]].differences, CALLS[path[0]]["name"]
    assert name in line


def test_calls_that_show_nothing_are_no_proof():
    """Bug: drafts that are never accepted hide every fault of the cache, an error on both sides counts as equal."""
    hostile = change([0, "record", "statistics", "per_step_accepted"], [0, 0, 0])
    assert compare(hostile, hostile)["llama"].verdict == "VACUOUS"
    broken = change([0, "record"], {"error": "TypeError", "message": "broken"})
    assert compare(broken, broken)["llama"].verdict == "FAILED"
    accepted = change([1, "record"], record())
    assert compare(accepted, accepted)["refused"].verdict == "FAILED"
