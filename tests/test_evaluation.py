"""Evaluation by real decoding: wrong figures look as plausible as right ones."""

import json

import pytest
import torch
import typer
from kit import PatternDrafter, plain_greedy, prompt_of, tiny_drafter, tiny_target
from typer.testing import CliRunner

from experiments import eval_drafter
from hf_dflow import AcceptanceStatistics
from hf_dflow.bench import evaluation, workloads
from hf_dflow.bench.runners import Contestant, Mode, Pair, Run, classic_contestant, decode
from hf_dflow.bench.workloads import Prompt, chosen_prompts, read_prompts, tasks_in_turn
from hf_dflow.errors import DFlowError
from hf_dflow.training import prompts as sharegpt
from hf_dflow.training.data import is_held_out

GREEDY, BLOCK, TOKEN = Mode(), Mode(1.0, "block"), Mode(1.0, "token")


def statistics(accepted, drafted=7):
    record = AcceptanceStatistics()
    record.record(drafted=0, accepted=0, emitted=1)
    for count in accepted:
        record.record(drafted=drafted, accepted=count, emitted=count + 1)
    return record


def answer(task, dflash, dflow, text="text", plain_seconds=None, seed=0, mode=GREEDY):
    runs = {}
    for name, accepted in (("dflow", dflow), ("dflash", dflash)):
        record = statistics(accepted)
        runs[name] = Run(list(range(record.num_output_tokens)), 1 + len(accepted), 1.0, record)
    if plain_seconds is not None:
        longest = list(max((run.new_tokens for run in runs.values()), key=len))
        runs["plain"] = Run(longest, len(longest), plain_seconds)
    return evaluation.Answer(Prompt(task, text), mode, seed, runs)


def value(figures, contestant):
    return figures["contestants"][contestant]["tokens_per_step"]["value"]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def inputs_of(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_pooled_tokens_per_step_weigh_steps_not_prompts():
    """Bug: a mean of means, which lets a two-step answer count as much as a long one."""
    found = evaluation.figures([answer("chat", [0] * 9, [0] * 9, "a"), answer("chat", [3], [3], "b")], "dflash")
    assert found["prompts"] == 2
    assert value(found, "dflash") == pytest.approx(1.3)


def test_differences_are_paired_and_to_the_baseline():
    """Bug: contestants are resampled apart, so that the spread between prompts hides a constant gain."""
    answers = [answer("chat", [count] * 10, [count + 1] * 10, str(count)) for count in (0, 1, 2, 3, 4, 5)]
    found = evaluation.figures(answers, "dflash")
    assert list(found["contestants"]) == ["dflash", "dflow"]
    difference = found["differences"]["dflow - dflash"]
    assert difference["difference"]["value"] == pytest.approx(1.0)
    assert difference["difference"]["interval_95"] == pytest.approx([1.0, 1.0])
    assert difference["gain"]["value"] == pytest.approx(4.5 / 3.5 - 1)
    low, high = found["contestants"]["dflow"]["tokens_per_step"]["interval_95"]
    assert low < 4.0 < 5.0 < high


def test_seeds_of_a_prompt_are_one_item_of_the_bootstrap():
    """Bug: every seed counts as a prompt, and seeds that show nothing new narrow the interval; or one seed wins."""
    once = [answer("chat", [i] * 4, [i] * 4, str(i), mode=BLOCK) for i in range(4)]
    thrice = [answer("chat", [i] * 4, [i] * 4, str(i), seed=s, mode=BLOCK) for i in range(4) for s in range(3)]
    narrow, wide = (evaluation.figures(some, "dflash") for some in (thrice, once))
    assert narrow["prompts"] == 4
    for key in ("tokens_per_step", "accepted_length_std"):
        assert narrow["contestants"]["dflow"][key] == wide["contestants"]["dflow"][key]
    varied = [answer("chat", [s], [5 * s], seed=s, mode=BLOCK) for s in range(2)]
    assert value(evaluation.figures(varied, "dflash"), "dflow") == 3.5


def test_every_mode_and_task_has_its_own_figures():
    """Bug: tasks or modes are mixed up, or the spread is that of prompts."""
    answers = [answer("chat", [1], [2]), answer("code", [3], [5]), answer("chat", [0], [7], mode=BLOCK)]
    record = evaluation.as_record(answers, "dflash")
    assert list(record["modes"]) == ["T=0", "T=1, block verification"]
    greedy = record["modes"]["T=0"]
    assert [value(greedy["by_task"][task], "dflow") for task in ("chat", "code")] == [3.0, 6.0]
    assert value(greedy["all"], "dflow") == 4.5
    assert greedy["tokens_per_step_std_over_tasks"] == {"dflash": 1.0, "dflow": 1.5}
    found = greedy["all"]["contestants"]["dflow"]
    assert found["acceptance_rate_per_position"] == [1, 1, 0.5, 0.5, 0.5, 0, 0]
    assert found["draft_acceptance_rate"] == 0.5
    assert found["accepted_length_std"] == 1.5
    assert found["target_forwards_per_token"] == pytest.approx(4 / 11)
    assert record["rows"][1]["runs"]["dflow"] == {
        "new_tokens": 7,
        "accepted": 5,
        "steps": 1,
        "target_forwards": 2,
        "seconds": 1.0,
    }


def test_speed_is_compared_by_token_and_on_the_same_prompts():
    """Bug: sampled answers of different lengths are compared by the second, or the ratio is turned over."""
    found = evaluation.figures([answer("chat", [1, 1], [4, 5], plain_seconds=6.0)], "dflash")
    assert found["plain_seconds_per_token"] == pytest.approx(0.5)  # 12 tokens
    assert found["contestants"]["dflow"]["speed_up"]["value"] == pytest.approx(6.0)
    assert found["contestants"]["dflash"]["speed_up"]["value"] == pytest.approx(0.5 / (1 / 5))


def test_any_difference_of_greedy_text_is_seen():
    """Bug: one changed text among many goes unnoticed, or texts that nobody compared count as identical."""
    same = [answer("chat", [2], [2], "a", plain_seconds=1.0), answer("chat", [2], [2], "b")]
    record = evaluation.as_record(same, "dflash")
    assert record["identity"] == {
        "compared_with_plain": 1,
        "identical_to_plain": {"dflow": 1, "dflash": 1},
        "compared_with_each_other": 2,
        "identical_to_each_other": 2,
    }
    assert evaluation.is_identical(record)
    same[0].runs["plain"].new_tokens[-1] += 1
    assert not evaluation.is_identical(evaluation.as_record(same, "dflash"))
    same[0].runs.pop("plain")
    assert evaluation.is_identical(evaluation.as_record(same, "dflash"))
    same[1].runs["dflow"].new_tokens[-1] += 1
    assert not evaluation.is_identical(evaluation.as_record(same, "dflash"))


@pytest.mark.parametrize("mode", [GREEDY, TOKEN])
def test_steps_of_assisted_generation_are_counted(target, mode):
    """Bug: the prompt counts as drafts, the first step is lost, or the target's own token counts as a draft."""
    prompt = prompt_of(9)
    twin = classic_contestant("twin", tiny_target("llama"), 7)
    run = decode(target, inputs_of(prompt), twin, mode, 20)
    if not mode.temperature:
        assert run.new_tokens == plain_greedy(target, prompt, 20)[0, 9:].tolist()
    # A draft model that is the target itself: all drafts are right, and the last step has room for fewer.
    assert run.statistics.per_step_drafted == [7, 7, 3]
    assert run.statistics.per_step_accepted == [7, 7, 3]
    assert run.statistics.num_output_tokens == len(run.new_tokens) == 20
    assert run.statistics.num_target_forwards == run.target_forwards == 3
    assert run.statistics.num_draft_forwards == 17
    stranger = classic_contestant("stranger", tiny_target("llama", seed=5), 7)
    other = decode(target, inputs_of(prompt), stranger, mode, 20)
    # The last token may have no room for a draft: a forward, but no step.
    assert other.target_forwards - len(other.statistics.per_step_drafted) in (0, 1)
    assert other.target_forwards == other.statistics.num_target_forwards > 3
    assert set(other.statistics.per_step_drafted[:4]) == {7}
    assert sum(other.statistics.per_step_accepted) + other.target_forwards == 20


def test_options_reach_the_loop(target):
    """Bug: T = 1 decodes greedily or with the target's own top-k, or both rules are one."""
    target.generation_config.top_k = 1
    drafter = tiny_drafter(target, 8)
    contestant = Contestant("dflow", drafter, use_relay=True)
    runs = [decode(target, inputs_of(prompt_of(6)), contestant, mode, 24, seed=3) for mode in (GREEDY, BLOCK, TOKEN)]
    target.generation_config.top_k = 50
    assert [run.statistics.verification for run in runs] == ["greedy", "block", "token"]
    assert runs[1].new_tokens != runs[0].new_tokens != runs[2].new_tokens
    again, other = (decode(target, inputs_of(prompt_of(6)), contestant, BLOCK, 24, seed=s).new_tokens for s in (3, 4))
    assert again == runs[1].new_tokens != other


def test_plan_runs_what_it_says(target):
    """Bug: plain decoding, which costs most, runs on every prompt; a classic model is asked for block verification."""
    drafter = tiny_drafter(target, 8, drafter_class=PatternDrafter)
    drafter.pattern = [3, 0, 2]
    drafter.follow(plain_greedy(target, prompt_of(6), 40), 6)
    contestants = [Contestant("dflash", drafter, False), classic_contestant("classic", tiny_target("llama", seed=5), 7)]
    plan = evaluation.Plan(contestants, [GREEDY, BLOCK, TOKEN], 12, seeds=[0, 1], check_identity=1)
    prompts = [Prompt("chat", "one"), Prompt("chat", "two"), Prompt("chat", "three")]
    asked = []
    answers = evaluation.answer_all(
        target, lambda _: inputs_of(prompt_of(6)), enumerate(prompts), plan, lambda: asked.append(1) or len(asked) == 2
    )
    assert [(one.prompt.text, one.mode.name, one.seed, sorted(one.runs)) for one in answers[:6]] == [
        ("one", "T=0", 0, ["classic", "dflash", "plain"]),
        ("one", "T=1, block verification", 0, ["dflash"]),
        ("one", "T=1, block verification", 1, ["dflash"]),
        ("one", "T=1, token verification", 0, ["classic", "dflash"]),
        ("one", "T=1, token verification", 1, ["classic", "dflash"]),
        ("two", "T=0", 0, ["classic", "dflash"]),
    ]
    assert {one.prompt.text for one in answers} == {"one", "two"}, "whole prompts until it is over"
    assert [next(iter(answers[i].runs)) for i in (0, 5)] == ["dflash", "classic"], "who begins changes"
    texts = [one.runs["dflash"].new_tokens for one in answers if one.mode == BLOCK]
    assert len(set(map(tuple, texts))) == 4, "prompts and seeds draw numbers of their own"
    record = evaluation.as_record(answers, "dflash")
    assert evaluation.is_identical(record)
    assert 1.5 < value(record["modes"]["T=0"]["all"], "dflash") < 3.0


@pytest.fixture
def conversations(monkeypatch):
    texts = [f"a question of somebody, number {i}" for i in range(200)]
    monkeypatch.setattr(sharegpt, "sharegpt_prompts", lambda: texts)
    return texts


def test_workloads_add_up_and_people_s_own_texts_stay_out_of_records(tmp_path, conversations):
    """Bug: one switch silences another, a prompt of the training share is measured on, or its text is published."""
    (tmp_path / "own.json").write_text('{"chat": ["mine", "mine"], "code": ["yours"]}')
    assert chosen_prompts() == read_prompts(workloads.HELD_OUT)
    both = chosen_prompts(files=[tmp_path / "own.json"], sharegpt=3)
    assert [prompt.task for prompt in both] == ["chat", "code", "sharegpt", "sharegpt", "sharegpt"]
    assert [prompt.text for prompt in both[2:]] == [text for text in conversations if is_held_out(text)][:3]
    records = json.dumps([prompt.as_record() for prompt in both])
    assert "mine" in records and "question" not in records
    assert len({prompt.as_record()["prompt_sha256"] for prompt in both}) == 5
    assert len(chosen_prompts(is_bundled=True, files=[tmp_path / "own.json"])) == 26
    assert [prompt.task for prompt in tasks_in_turn(both)] == ["chat", "code", "sharegpt", "sharegpt", "sharegpt"]
    assert [prompt.task for prompt in tasks_in_turn(both[::-1])][:3] == ["sharegpt", "code", "chat"]
    with pytest.raises(DFlowError, match="it holds"):
        chosen_prompts(sharegpt=100)


class TinyTokenizer:
    """Ids of a prompt's length."""

    chat_template = None

    def apply_chat_template(self, messages, **kwargs):
        return inputs_of(prompt_of(4 + len(messages[0]["content"])))


def test_command_writes_what_it_prints(target, tmp_path, monkeypatch, conversations):
    """Bug: an option never reaches the plan, or the JSON lacks its conditions or holds a private text."""
    pair = Pair(target, tiny_drafter(target, 8), TinyTokenizer(), "tiny")
    monkeypatch.setattr(eval_drafter, "load_pair", lambda *args: pair)
    app = typer.Typer()
    app.command()(eval_drafter.main)
    (tmp_path / "own.json").write_text('{"chat": ["one", "three"]}')
    path = tmp_path / "out.json"
    options = f"--prompts {tmp_path}/own.json --sharegpt 1 --max-new-tokens 8 --json {path} --plain"
    options += " --temperature 0 --temperature 1 --verification token --seed 0 --seed 1"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert list(record["modes"]) == ["T=0", "T=1, token verification"]
    assert list(record["modes"]["T=0"]["by_task"]) == ["chat", "sharegpt"]
    assert len(record["rows"]) == 3 * (1 + 2)
    assert record["identity"]["identical_to_plain"] == {"dflash": 3, "dflow": 3}
    conditions = record["conditions"]
    assert (conditions["prompts"], conditions["seeds"], conditions["dtype"]) == (3, [0, 1], "float32")
    assert "question" not in path.read_text()
    words = " ".join(result.output.split())
    for part in ("dflow - dflash", "times as fast", "ms per token", "standard deviation", "3 of 3 the same by all"):
        assert part in words
    with pytest.raises(DFlowError, match="use one or more of token, block"):
        evaluation.modes_of([1.0], ["tokens"])


def test_other_drafters_are_compared_side_by_side(target, tmp_path):
    """Bug: another folder is never decoded, its relay counts as off, or two contestants share a name."""
    drafter = tiny_drafter(target, 8)
    drafter.save_pretrained(tmp_path / "mine")
    pair = Pair(target, tiny_drafter(target, 8, relay=None), TinyTokenizer(), "tiny")
    found = eval_drafter.contestants_of(pair, None, 7, [f"mine={tmp_path}/mine"])
    assert [(one.name, one.use_relay) for one in found] == [
        ("dflash", False),
        ("mine", True),
        ("mine, relay off", False),
    ]
    assert found[1].model is found[2].model and found[1].model.fc.weight.equal(drafter.fc.weight)
    with pytest.raises(DFlowError, match="is not one of"):  # both would be called "x, relay off"
        eval_drafter.contestants_of(pair, None, 7, [f"x, relay off={tmp_path}/mine", f"x={tmp_path}/mine"])
    for temperature in (float("nan"), float("inf"), -1.0):
        with pytest.raises(DFlowError, match="--temperature"):
            evaluation.modes_of([temperature], ["token"])
    for wrong in ("mine", f"={tmp_path}/mine", f"dflash={tmp_path}/mine", f"plain={tmp_path}/mine", "mine="):
        with pytest.raises(DFlowError, match="give NAME=FOLDER with a name that is not one of"):
            eval_drafter.contestants_of(pair, None, 7, [wrong])
