"""vLLM drafts the blocks that hf_dflow drafts, and says what vLLM says without a drafter.

The expected blocks come from this process, vLLM's from another; `blocks.py` has the comparison.
"""

import json

import pytest
import torch
from blocks import Comparison, Expected, compare, our_blocks, read_records
from engine_kit import Answers, Pair, requests, run_engine, tiny_pair, tiny_prompts
from filelock import FileLock
from transformers import AutoTokenizer

LONG = 3  # times a prompt of 24 tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The bundled pair as it is."""
    return tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def scenarios(tiny) -> dict[str, dict]:
    prompts = tiny_prompts()
    tokenizer = AutoTokenizer.from_pretrained(tiny.target_folder)
    stops = []
    for prompt in prompts[:3]:
        ids = tiny.target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
        stops.append(tokenizer.decode(ids[20:23]))
    ends = requests(prompts[:1], 1) + requests(prompts[1:2], 2) + requests(prompts[2:3], 60)
    aborted = requests(prompts[:6])
    aborted[1]["abort_after"], aborted[4]["abort_after"] = 9, 21
    long = prompts[8] * LONG
    return {
        "one": {"requests": requests(prompts[:1])},
        "nine": {"requests": requests(prompts)},
        "stop strings": {"requests": requests(prompts[:3], stop=stops)},
        "lengths": {"requests": ends + requests(prompts[3:5], None, ignore_eos=True)},
        "aborts": {"requests": aborted},
        "long prompts": {"requests": requests([long, prompts[0], long[8:]], 30)},
        "shared prompt": {"requests": requests([long + prompts[0], long + prompts[1]], 30)},
        "repeated prompt": {"requests": requests([long + prompts[0], long], 30)},
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny, scenarios) -> Answers:
    """What vLLM says without a drafter, computed once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base
    with FileLock(base / "plain.lock"):
        if (base / "plain" / "answers.json").is_file():
            return Answers(**json.loads((base / "plain" / "answers.json").read_text()))
        return run_engine(base / "plain", tiny, scenarios, is_plain=True)


@pytest.fixture(scope="module")
def expected(tiny) -> Expected:
    return Expected(tiny.target, tiny.drafter)


def check(
    folder, pair: Pair, expected: Expected, plain: Answers, scenarios: dict[str, dict], **options
) -> tuple[Answers, dict[str, list[Comparison]]]:
    """Blocks and texts of all scenarios in one engine; prints the table."""
    answers = run_engine(folder, pair, scenarios, **options)
    records = read_records(folder / "records")
    assert len(records) == options.get("tensor_parallel_size", 1)
    table = {}
    for name, scenario in scenarios.items():
        prompts = [request["prompt"] for request in scenario["requests"]]
        table[name] = [compare(expected, name, prompts, of_rank) for of_rank in records.values()]
        for comparison in table[name]:
            print(comparison.row(name), f"{answers.seconds[name]:.1f} s")
            if not scenario.get("fault"):
                assert not comparison.different, "\n".join(comparison.different[:5])
        for said, wanted in zip(answers.answers[name], plain.answers[scenario.get("as", name)], strict=True):
            if "abort" in (said["finish_reason"], wanted["finish_reason"]):
                length = min(len(said["token_ids"]), len(wanted["token_ids"]))
                assert length and said["token_ids"][:length] == wanted["token_ids"][:length]
            else:
                assert said == wanted, name
    return answers, table


def compared(table: dict[str, list[Comparison]], name: str) -> int:
    return min(comparison.compared for comparison in table[name])


def changed(table: dict[str, list[Comparison]], name: str) -> int:
    return min(comparison.changed for comparison in table[name])


def chosen(scenarios: dict[str, dict], *names: str) -> dict[str, dict]:
    return {name: scenarios[name] for name in names}


def test_relay_and_faults(tmp_path, tiny, expected, plain, scenarios):
    faults = {
        f"{fault} fault": {**scenarios["nine"], "as": "nine", "fault": fault}
        for fault in ("row", "bonus", "never", "neighbour")
    }
    _, table = check(tmp_path, tiny, expected, plain, {**scenarios, **faults})
    assert compared(table, "nine") >= 100 and changed(table, "nine") >= 40
    assert all(changed(table, name) for name in scenarios)
    for name in faults:
        (comparison,) = table[name]
        print(f"{name}: {len(comparison.different)} of {comparison.compared} blocks differ")
        assert len(comparison.different) >= 10

    # The same blocks, in the same steps, as our own loop.
    (records,) = read_records(tmp_path / "records").values()
    count = 0
    for name in ("one", "nine"):
        for index, request in enumerate(scenarios[name]["requests"]):
            ours = our_blocks(tiny.target, tiny.drafter, request["prompt"], request["params"]["max_tokens"])
            theirs = [record["block"] for record in records[f"{name}-{index}"]]
            assert len(theirs) >= len(ours) >= 5
            for own, other in zip(ours, theirs, strict=False):
                assert own == other[: len(own)]  # our loop drafts no further than to the end of the text
                count += 1
    print(f"our loop: {count} blocks compared")
    assert count >= 100


def test_without_relay(tmp_path, plain, scenarios):
    pair = tiny_pair(tmp_path / "pair", relay=False)
    _, table = check(
        tmp_path / "run", pair, Expected(pair.target, pair.drafter), plain, chosen(scenarios, "one", "nine")
    )
    assert compared(table, "nine") >= 100 and changed(table, "nine") == 0
