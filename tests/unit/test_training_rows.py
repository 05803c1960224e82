"""Rows, their files, and going on after a kill."""

import gzip
import json

import pytest

from hf_dflow.errors import DFlowError
from hf_dflow.training.data import RowFile, TrainingRow, is_held_out, read_data, read_rows, row_record, split_rows

SETTINGS = {"target": {"name": "tiny"}, "sampling": {"seed": 0}}


def record(number: int, **changes):
    row = row_record(list(range(10 + number)), [(4, 8), (9, 10 + number)], f"prompt {number}", 0.7, True)
    return {**row, **changes}


def test_a_row_of_one_answer_needs_no_spans():
    """Bug: rows as the trainer builds them lose their last token, or supervise the prompt."""
    row = TrainingRow([5, 6, 7, 8, 9], 2, "p", 0.0)
    assert row.spans == ((2, 5),)
    assert row.supervised() == [False, False, True, True, True]
    assert row.anchor_positions() == [2, 3]
    assert row.answer_length == row.supervised_tokens == 3


def test_anchors_of_several_turns_stay_within_their_turn():
    """Bug: a block is anchored at the end of a turn or in the user's words, and learns what nobody drafts."""
    row = TrainingRow(list(range(12)), 2, "p", None, spans=((2, 5), (7, 8), (9, 12)))
    assert row.anchor_positions() == [2, 3, 9, 10]
    flags = row.supervised()
    assert [i for i, flag in enumerate(flags) if flag] == [2, 3, 4, 7, 9, 10, 11]
    assert all(flags[p] and flags[p + 1] for p in row.anchor_positions())
    assert row.supervised_tokens == 7


def test_files_of_both_kinds_are_read(tmp_path):
    """Bug: the older rows or compressed files can no longer be trained on, or a header counts as a row."""
    old = {"prompt": "p", "prompt_ids": [1, 2], "answer_ids": [3, 4, 5], "temperature": 0.7, "finished": True}
    path = tmp_path / "old.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(old) + "\n")
    assert read_rows(path) == [TrainingRow([1, 2, 3, 4, 5], 2, "p", 0.7)]
    assert read_data(path).header is None
    new = RowFile(tmp_path / "new.jsonl", SETTINGS)
    new.append([record(5)])
    found = read_data(new.path)
    assert found.rows == [TrainingRow(list(range(15)), 4, "prompt 5", 0.7, ((4, 8), (9, 15)))]
    assert found.header == {"hf_dflow_data": 1, **SETTINGS}


def test_rows_that_teach_nothing_are_counted_and_a_file_of_them_refused(tmp_path):
    """Bug: training runs for hours on rows without an anchor, or quietly on half of them."""
    short, long = record(5, spans=[[4, 6], [7, 9]]), record(90)
    file = RowFile(tmp_path / "rows.jsonl", SETTINGS)
    file.append([short, long, record(5)])
    found = read_data(file.path, max_length=50)
    assert (len(found.rows), found.too_short, found.too_long) == (1, 1, 1)
    assert "1 rows with 10 supervised tokens" in str(found)
    file.keep(2)
    with pytest.raises(DFlowError, match=r"no row .*1 too short, 1 over-long"):
        read_data(file.path, max_length=50)


@pytest.mark.parametrize("spans", [[], [[4, 4]], [[8, 4]], [[4, 8], [7, 9]], [[4, 16]], [[-1, 3]]])
def test_impossible_spans_are_refused_with_their_line(tmp_path, spans):
    """Bug: a span outside the row, empty, or over another one is trained on."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record(5)) + "\n" + json.dumps(record(5, spans=spans)) + "\n")
    with pytest.raises(DFlowError, match="line 2"):
        read_rows(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": "abc", "answer_ids": [3, 4, 5]},
        {"prompt_ids": [1, 2], "answer_ids": [8, -1, 3]},
        {"prompt_ids": [1, 2], "answer_ids": [8.5, 9, 3]},
        {"prompt_ids": [[1], [2]], "answer_ids": [8, 9, 3]},
        {"prompt_ids": [1, 2], "answer_ids": [8, 9, 3], "prompt": 5},
        {"prompt_ids": [1, 2], "answer_ids": [8, 9, 3], "temperature": "hot"},
        {"token_ids": [1, 2, 3, 4, 5, 6], "spans": [[1.0, 5.0]]},
    ],
)
def test_values_of_another_kind_are_refused_with_their_line(tmp_path, wrong):
    """Bug: text in a list's place counts as supervised tokens, and the run fails after the target was loaded."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record(5)) + "\n" + json.dumps(wrong) + "\n")
    with pytest.raises(DFlowError, match="line 2"):
        read_rows(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_that_is_no_text_is_named(tmp_path, name):
    """Bug: words of a codec without the file that they are about."""
    (tmp_path / name).write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(DFlowError, match=name):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(("left", "missing"), [("answer_ids", "prompt_ids"), ("token_ids", "spans")])
def test_a_missing_key_is_named(tmp_path, left, missing):
    """Bug: the message ends in a bare quoted word, which does not say what about it."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({left: [1, 2, 3]}))
    with pytest.raises(DFlowError, match=f"line 1: expected .*'{missing}' is missing"):
        read_rows(path)


def test_a_line_that_is_being_written_is_not_an_error(tmp_path):
    """Bug: one cannot train on what is there while answers are still being added; or damage goes unseen."""
    file = RowFile(tmp_path / "rows.jsonl", SETTINGS)
    file.append([record(5), record(6)])
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-20])
    assert len(read_rows(file.path)) == 1
    file.path.write_bytes(whole[:-20] + b"\n")
    with pytest.raises(DFlowError, match="line 3"):
        read_rows(file.path)


def test_a_file_cut_anywhere_is_continued_without_loss_or_duplicate(tmp_path):
    """Bug: a torn line stays in the middle of the file, or whole rows before it are thrown away."""
    records = [record(number) for number in range(2, 5)]
    path = tmp_path / "rows.jsonl"
    RowFile(path, SETTINGS).append(records)
    whole = path.read_bytes()
    edges = {i + shift for i, byte in enumerate(whole) if byte == ord("\n") for shift in (-1, 0, 1)}
    for size in sorted({0, *edges, *range(1, len(whole), 29)}):
        path.write_bytes(whole[:size])
        file = RowFile(path, SETTINGS)
        assert file.rows == max(0, whole[:size].count(b"\n") - 1)
        file.append(records[file.rows :])
        assert path.read_bytes() == whole
        assert (file.rows, file.supervised_tokens, file.finished) == (
            3,
            sum(r.supervised_tokens for r in rows(path)),
            3,
        )


def rows(path):
    return read_rows(path, min_answer_tokens=1)


def test_rows_behind_a_half_written_batch_are_dropped(tmp_path):
    """Bug: bytes of dropped rows stay behind a shorter new row."""
    file = RowFile(tmp_path / "rows.jsonl", SETTINGS)
    file.append([record(5), record(50), record(50)])
    file.keep(1)
    file.append([record(6)])
    assert [row.prompt for row in read_rows(file.path)] == ["prompt 5", "prompt 6"]
    assert file.supervised_tokens == 4 + 6 + 4 + 7


def test_another_run_is_not_continued(tmp_path):
    """Bug: rows of two targets, templates or temperatures end in one file under one header."""
    path = tmp_path / "rows.jsonl"
    RowFile(path, SETTINGS).append([record(5)])
    with pytest.raises(DFlowError, match=r"sampling was \{'seed': 0\} and is \{'seed': 1\}"):
        RowFile(path, {**SETTINGS, "sampling": {"seed": 1}})
    with pytest.raises(DFlowError, match="template was None"):
        RowFile(path, {**SETTINGS, "template": "x"})
    assert RowFile(path, SETTINGS).rows == 1


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"prompt": "p"}\n', "[1]\n", '{"hf_dflow_data"}\n'])
def test_a_file_of_somebody_else_is_left_alone(tmp_path, content):
    """Bug: a mistyped output overwrites another file."""
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DFlowError, match="not a data file of hf-dflow"):
        RowFile(path, SETTINGS)
    assert path.read_text() == content


def test_damage_in_the_middle_is_named(tmp_path):
    """Bug: rows behind a damaged one are lost without a word."""
    file = RowFile(tmp_path / "rows.jsonl", SETTINGS)
    file.append([record(5), record(6)])
    lines = file.path.read_text().splitlines()
    file.path.write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n")
    with pytest.raises(DFlowError, match="line 2: damaged"):
        RowFile(file.path, SETTINGS)


def test_two_writers_are_noticed(tmp_path):
    """Bug: a run that was thought dead goes on beside its successor, and every answer is there twice."""
    first = RowFile(tmp_path / "rows.jsonl", SETTINGS)
    RowFile(first.path, SETTINGS).append([record(5)])
    with pytest.raises(DFlowError, match="another hf-dflow data"):
        first.append([record(5)])


def test_the_split_is_by_prompt_alone():
    """Bug: a prompt is trained on in one file and held out in another."""
    made = [TrainingRow([1, 2, 3], 1, f"prompt {number}", 0.0) for number in range(300)]
    train, held_out = split_rows(made)
    assert 5 < len(held_out) < 40 and len(train) + len(held_out) == 300
    assert [row.prompt for row in held_out] == [row.prompt for row in made if is_held_out(row.prompt)]


def test_rows_whose_prompt_has_no_text_are_split_by_its_tokens():
    """Bug: all rows of a file without texts are held out, or none; or one prompt's answers are on both sides."""
    made = [TrainingRow([number % 300, 2, 3 + number], 1, "", 0.0) for number in range(600)]
    train, held_out = split_rows(made)
    assert 10 < len(held_out) < 80 and len(train) + len(held_out) == 600
    assert not {row.token_ids[0] for row in train} & {row.token_ids[0] for row in held_out}
