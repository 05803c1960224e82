"""What a user can get wrong at the command line ends in words, before anything is measured, and loses nothing."""

import json

import pytest
import torch
import typer
from test_compare import RUN, endpoint_record
from typer.testing import CliRunner

from experiments.decisions import plot_calibration
from hf_dflow.bench import run_view, suite, sweep
from hf_dflow.bench.runners import Contestant, Mode, load_pair, usable_device
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.bench.workloads import Prompt, jsonl_prompts, read_prompts
from hf_dflow.cli import app
from hf_dflow.console import writable, writable_folder, write_json
from hf_dflow.errors import DFlowError

PROMPTS = [Prompt("task", "Berlin")]


def said_of(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 2 and (done.exception is None or isinstance(done.exception, SystemExit)), done.exception
    return " ".join(done.output.replace("│", " ").split())  # a frame may break a line anywhere


def test_a_file_that_is_no_text_is_named(tmp_path):
    """Bug: "codec can't decode byte 0xff" and no word on which of five files."""
    path = tmp_path / "prompts.json"
    path.write_bytes(bytes([0xFF, 0xFE]) + b"{}")
    with pytest.raises(DFlowError, match="prompts"):
        read_prompts(path)
    with pytest.raises(DFlowError, match="prompts"):
        jsonl_prompts(path)
    assert "prompts.json" in said_of("bench", "report", path)


def test_no_task_is_called_all(tmp_path):
    """Bug: a task's own figures overwritten by those over all tasks, which are kept under that name."""
    path = tmp_path / "prompts.json"
    path.write_text('{"all": ["one"], "code": ["two"]}')
    with pytest.raises(DFlowError, match="'all'"):
        read_prompts(path)
    path.write_text('{"prompt": "one", "task": "all"}')
    with pytest.raises(DFlowError, match="'all'"):
        jsonl_prompts(path)


def test_every_task_has_a_file_of_its_own():
    """Bug: the settings of one task overwritten by another's whose name has the same Latin letters, or none."""
    condition = {"temperature": 0.0, "output_tokens": 8, "concurrency": 1}
    tasks = ["C++", "C#", "c", "日本", "中文", "a b", "a-b", "a_b", "A b"]
    names = {sweep.file_name({"task": task, **condition}) for task in tasks}
    assert len(names) == len(tasks) and all(name.isascii() and "/" not in name for name in names)


@pytest.mark.parametrize("name", ["nowhere", "meta:x", "cuda:99"])
def test_a_device_that_is_none(name):
    """Bug: torch's traceback, after the target was loaded."""
    with pytest.raises(DFlowError, match="--device"):
        load_pair("no-such-target", "no-such-drafter", device=name)
    assert usable_device("cpu") == torch.device("cpu")


def test_results_that_cannot_be_written_are_found_out_first(tmp_path, monkeypatch, capsys):
    """Bug: an hour of measuring, and then no folder, no right to write, or a full disk: all of it lost."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(typer.BadParameter, match="is no folder"):
        writable_folder(file / "inside")
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b" and not (tmp_path / "a").exists()
    said = said_of("bench", "sweep", "--tiny", "--output", file / "inside")
    assert "is no folder" in said
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *args: False)
        for check, path in ((writable, file), (writable, tmp_path / "new"), (writable_folder, tmp_path)):
            with pytest.raises(typer.BadParameter, match="may not be written"):
                check(path)
    with pytest.raises(DFlowError, match="printed instead"):
        write_json(tmp_path / "gone" / "x.json", {"figure": 3})
    assert json.loads(capsys.readouterr().out) == {"figure": 3}


def test_a_run_of_nothing_is_refused():
    """Bug: a load that no strategy can decode, or a time that is over, found out by a division by 0 at the end."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    lookup = [Contestant("prompt_lookup", lookup_tokens=3)]
    with pytest.raises(DFlowError, match="one sequence at a time"):
        suite.run(pair, lookup, [Mode()], PROMPTS, output_tokens=4, concurrency=2)
    with pytest.raises(DFlowError, match="--minutes"):
        suite.run(pair, lookup, [Mode()], PROMPTS, output_tokens=2, minutes=0.0, with_memory=False)


def test_a_plot_of_nothing_is_refused(tmp_path):
    """Bug: a picture without panels, which matplotlib refuses in words of its own."""
    empty = {"modes": {"T=0": {"all": {"contestants": {}}, "by_task": {}, "calibration": None}}}
    for plot in (run_view.plot, plot_calibration):
        with pytest.raises(DFlowError, match="nothing to plot"):
            plot(empty, tmp_path / "plot.png")


def test_records_that_a_report_cannot_tell_apart(tmp_path):
    """Bug: two files of one name in one row or bar, a record against itself, or a template's traceback."""
    paths = [tmp_path / name / "run.json" for name in ("monday", "tuesday")]
    for path, record in zip(paths, (RUN, endpoint_record()), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(record))
    done = CliRunner().invoke(app, ["bench", "report", "--allow-open", *map(str, paths)])
    assert done.exit_code == 0, done.output
    assert str(paths[0].with_suffix("")) in done.output and str(paths[1].with_suffix("")) in done.output
    assert "twice" in said_of("bench", "report", paths[0], paths[0])
    probe = tmp_path / "probe.json"
    probe.write_text('{"by_task": 3}')
    assert "not of the command" in said_of("bench", "report", "--allow-open", probe)
