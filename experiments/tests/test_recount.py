"""N24: committed figures are those of their rows, by what steps emitted; nothing is recounted that rows do not give."""

import copy
import json

import pytest

from experiments import recount
from experiments.common import RESULTS, read_json, write_record
from hf_dflow.bench import figures
from hf_dflow.bench.answers import Answer
from hf_dflow.bench.strategies import Mode, Run
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError
from hf_dflow.generation.statistics import AcceptanceStatistics

RECORDS = sorted(
    path.stem for path in RESULTS.glob("*.json") if "rows" in read_json(path) and path.stem != "bench-loop"
)


@pytest.mark.parametrize("name", RECORDS)
def test_committed_figures_are_those_of_their_rows(name):
    """N24: a figure by the old definition left in a record, or one that its own rows do not give."""
    record = read_json(RESULTS / f"{name}.json")
    assert not recount.is_old(record)
    for group, rows in recount._groups(record):
        held = {contestant: counts["tokens_per_step"] for contestant, counts in group["contestants"].items()}
        made = recount.group_figures(rows, group, recount._new)
        assert recount._is_close(made, {"contestants": held, "differences": group["differences"]})


def measured(cut):
    """A record as `as_record` makes it: two answers of each contestant, the last step of some of them cut."""
    answers = []
    for number, task in enumerate(("chat", "code")):
        runs = {}
        for name, accepted in (("dflash", [1, 2]), ("dflow", [3, 2 + number])):
            counts = AcceptanceStatistics()
            counts.record(drafted=0, accepted=0, emitted=1)
            for step, length in enumerate(accepted):
                is_cut = cut and step == 1 and name == "dflow"
                counts.record(drafted=7, accepted=length, emitted=length + (not is_cut))
            runs[name] = Run(list(range(counts.num_output_tokens)), 3, 1.0, counts)
        answers.append(Answer(Prompt(task, task), Mode(), 0, runs))
    return figures.as_record(answers, "dflash")


def as_it_was(record):
    """The record as an older version wrote it."""
    old = copy.deepcopy(record)
    for group, rows in recount._groups(old):
        made = recount.group_figures(rows, group, recount._old)
        group["differences"] = made["differences"]
        for name, figure in made["contestants"].items():
            group["contestants"][name]["tokens_per_step"] = figure
    for row in old["rows"]:
        for run in row["runs"].values():
            for key in ("emitted", "drafted", "offered"):
                del run[key]
    return old


def without_intervals(figures):
    """Two prompts have none today, as old records had."""
    if not isinstance(figures, dict):
        return figures
    return {key: without_intervals(value) for key, value in figures.items() if key not in ("interval_95", "n")}


@pytest.mark.parametrize("cut", [False, True])
def test_an_old_record_becomes_what_a_new_one_is(cut, tmp_path):
    """N24: figures that the rows of an old record give otherwise than a measurement today would."""
    new = measured(cut)
    old = as_it_was(new)
    rate = old["modes"]["T=0"]["all"]["contestants"]["dflow"]["tokens_per_step"]["value"]
    assert rate == 1 + 11 / 4 and recount.is_old(old)
    write_record(tmp_path / "some.json", old)
    recount.main(tmp_path)
    found = read_json(tmp_path / "some.json")
    assert found.pop(recount.BEFORE) == {"T=0": {"dflash": 2.5, "dflow": 3.75}}
    assert without_intervals(found["modes"]) == without_intervals(json.loads(json.dumps(new["modes"])))
    assert found["modes"]["T=0"]["all"]["contestants"]["dflow"]["tokens_per_step"]["value"] == (3.25 if cut else 3.75)
    before = (tmp_path / "some.json").read_bytes()
    recount.main(tmp_path)
    assert (tmp_path / "some.json").read_bytes() == before, "done once"
    table = recount.changes_table(tmp_path)
    assert ("| 2 of 4 | dflow | 3.750 → 3.250 | -13.3% |" if cut else "| 0 of 4 | – | none | – |") in table


def test_totals_of_a_batch():
    """N24: a number of steps that the totals do not settle taken for the one that was run."""
    record = {"batch_size": 8, "new_tokens": 339, "target_forwards": {"alone": 214}, "tokens_per_step": 1 + 128 / 206}
    recount.recount_batch(record)
    assert record["tokens_per_step"] == 331 / 206 and record[recount.BEFORE] == 1 + 128 / 206
    for rate in (1 + 100 / 206, 2.0):
        with pytest.raises(DFlowError, match="measure anew"):
            recount.recount_batch({**record, "tokens_per_step": rate})


def test_what_rows_do_not_give_is_refused(tmp_path):
    """N24: a record made right from rows that are not its own, or that no run can have."""
    old = as_it_was(measured(True))
    foreign = copy.deepcopy(old)
    foreign["rows"][0]["runs"]["dflow"]["accepted"] -= 1
    foreign["rows"][0]["runs"]["dflow"]["new_tokens"] -= 1
    impossible = copy.deepcopy(old)
    impossible["rows"][0]["runs"]["dflow"]["new_tokens"] += 2
    for record, words in ((foreign, "measure anew"), (impossible, "cannot be recounted")):
        write_record(tmp_path / "some.json", record)
        with pytest.raises(DFlowError, match=words):
            recount.main(tmp_path)
        assert read_json(tmp_path / "some.json") == record
