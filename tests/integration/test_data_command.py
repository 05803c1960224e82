"""`hf-dflow data` on a tiny target: its own answers, going on after a kill, and answers that chats already hold."""

import json

import data_kit as kit
import pytest
import torch
from data_kit import STOPS, assistant, chat_target, user
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_dflow.cli import app
from hf_dflow.errors import DFlowError
from hf_dflow.training import collect
from hf_dflow.training.answers import Sampling, answer_batch, plan_batches
from hf_dflow.training.data import is_held_out, read_data

PROMPTS = [f"{'The weather ' * (number % 7)}{number}?" for number in range(30)]
OPTIONS = ("--batch", 4, "--max-new-tokens", 12, "--temperature", 0, "--temperature", 0.8)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refuse(*arguments):
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    return " ".join(result.stderr.split())


def test_rows_are_the_targets_own_answers(target, prompts, tmp_path):
    """Bug: padding, the batch or recommended settings change what the target says; a prompt is lost or asked twice."""
    output = tmp_path / "rows.jsonl"
    result = succeed(target, output, "--prompts", prompts, *OPTIONS)
    found = read_data(output, min_answer_tokens=1)
    assert sorted(row.prompt for row in found.rows) == sorted(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    greedy = [row for row in found.rows if row.temperature == 0]
    assert 10 < len(greedy) < 20 and {row.temperature for row in found.rows} == {0, 0.8}
    finished = 0
    for row in greedy:
        alone = tokenizer.apply_chat_template([user(row.prompt)], add_generation_prompt=True, return_tensors="pt")
        assert row.token_ids[: row.prompt_length] == alone["input_ids"][0].tolist()
        plain = model.generate(**alone, max_new_tokens=12, do_sample=False, repetition_penalty=1.0, top_k=50)
        assert row.token_ids == plain[0].tolist()
        finished += row.token_ids[-1] in STOPS
    assert 0 < finished < len(greedy)
    tokens = sum(row.supervised_tokens for row in found.rows)
    all_finished = sum(row.token_ids[-1] in STOPS for row in found.rows)
    assert f"30 rows with {tokens} supervised tokens, {all_finished} of them finished" in result.stdout


def test_the_header_says_how_the_rows_were_made(target, prompts, tmp_path):
    """Bug: nobody can tell later which target, template or sampling a file is of."""
    output = tmp_path / "rows.jsonl"
    succeed(target, output, "--prompts", prompts, *OPTIONS, "--seed", 3, "--dtype", "bfloat16", "--limit", 5)
    header = read_data(output, min_answer_tokens=1).header
    assert header["target"]["name"] == str(target) and header["target"]["dtype"] == "bfloat16"
    assert len(header["target"]["weights"]) == len(header["template"]["sha256"]) == 64
    assert header["template"]["eos_token_ids"] == STOPS
    assert header["sampling"] == {
        "temperatures": [0.0, 0.8],
        "top_p": 1.0,
        "max_new_tokens": 12,
        "batch_size": 4,
        "seed": 3,
    }
    assert header["prompts"]["count"] == 5 and header["prompts"]["source"] == str(prompts)
    assert header["versions"].keys() == {"transformers", "torch"}


def test_a_run_killed_anywhere_ends_with_the_same_file(target, prompts, tmp_path):
    """Bug: after a kill rows are lost, doubled, or answered with other random numbers than without the kill."""
    output = tmp_path / "rows.jsonl"
    arguments = (target, output, "--prompts", prompts, *OPTIONS, "--limit", 14)
    succeed(*arguments)
    whole = output.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in (7, ends[0] + 5, ends[4], ends[6] + 30, len(whole)):
        output.write_bytes(whole[:size])
        result = succeed(*arguments)
        assert output.read_bytes() == whole, size
        assert "14 rows" in result.stdout
    assert "answers," not in result.stderr  # the whole file was left alone


def test_a_run_that_stops_within_a_batch_keeps_what_it_had(target, prompts, tmp_path, monkeypatch):
    """Bug: answers are written at the end only."""
    output, calls = tmp_path / "rows.jsonl", []

    def stop_at_the_third(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer_batch(*args, **kwargs)

    monkeypatch.setattr(collect, "answer_batch", stop_at_the_third)
    run(target, output, "--prompts", prompts, *OPTIONS)
    assert len(read_data(output, min_answer_tokens=1).rows) == 8


def test_a_file_of_other_settings_or_of_another_target_is_refused(prompts, tmp_path):
    """Bug: a changed option, or a target that was trained further, is mixed into a file that says otherwise."""
    folder, output = chat_target(tmp_path / "target"), tmp_path / "rows.jsonl"
    arguments = (folder, output, "--prompts", prompts, *OPTIONS, "--limit", 8)
    succeed(*arguments)
    before = output.read_bytes()
    changes = (("--seed", 1), ("--max-new-tokens", 11), ("--dtype", "bfloat16"), ("--limit", 20), ("--top-p", 0.9))
    for change in changes:
        assert "other settings" in refuse(*arguments, *change)
    chat_target(folder, seed=1)
    assert "target was" in refuse(*arguments)
    assert output.read_bytes() == before


def test_what_is_left_out_is_counted(target, tmp_path):
    """Bug: rows vanish without a word, or the held-out share is trained on."""
    path, output = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    many = [f"prompt {number}" for number in range(80)]
    lines = [*many, many[0], many[0], "The weather. " * 60]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--max-new-tokens", 2, "--max-length", 100)
    result = succeed(target, output, "--prompts", path, *options, "--part", "train")
    held_out = {prompt for prompt in many if is_held_out(prompt)}
    assert 1 < len(held_out) < 20 and not is_held_out(lines[-1])
    rows = read_data(output, min_answer_tokens=1).rows
    assert {row.prompt for row in rows} == set(many) - held_out
    out = f"83 prompts read; left out: {len(held_out)} of the other part, 2 duplicates, 1 over-long (limit 100 tokens)"
    assert out in result.stdout
    other = tmp_path / "held-out.jsonl"
    succeed(target, other, "--prompts", path, *options, "--part", "held-out")
    assert {row.prompt for row in read_data(other, min_answer_tokens=1).rows} == held_out


def test_prompts_without_a_template_are_continued(tmp_path, prompts):
    """Bug: a base model cannot be asked at all, or gets a chat template that it never saw."""
    folder, output = chat_target(tmp_path / "target", template=None), tmp_path / "rows.jsonl"
    assert "--plain" in refuse(folder, output, "--prompts", prompts)
    succeed(folder, output, "--prompts", prompts, "--plain", "--max-new-tokens", 4, "--limit", 3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in read_data(output, min_answer_tokens=1).rows:
        assert row.token_ids[: row.prompt_length] == tokenizer(row.prompt)["input_ids"]


def test_answers_that_chats_hold_are_taken_as_they_are(target, tmp_path):
    """Bug: the target is asked again, chats without an answer stop everything, or a row is written twice."""
    chat = [user("hello"), assistant("I will tell you."), user("And?"), assistant("Sunny.")]
    chats = [chat, chat, [*chat, user("Thanks")], [user("hello")], [user("x"), assistant("The " * 200)]]
    path, output = tmp_path / "chats.jsonl", tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    arguments = (target, output, "--prompts", path, "--use-answers", "--max-length", 150)
    result = succeed(*arguments)
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = read_data(output)
    (row,) = found.rows
    assert row.token_ids == tokenizer.apply_chat_template(chat)["input_ids"]
    texts = [tokenizer.decode(row.token_ids[start:end]) for start, end in row.spans]
    assert texts == ["I will tell you.<|im_end|>", "Sunny.<|im_end|>"]
    assert row.temperature is None and found.header["sampling"] is None
    assert "1 rows with" in result.stdout and "2 duplicates, 1 over-long (limit 150 tokens)" in result.stdout
    assert "1 that cannot be rendered (the first: the chat has no assistant turn)" in result.stdout
    before = output.read_bytes()
    assert succeed(*arguments).stdout == result.stdout and output.read_bytes() == before
    assert "other settings" in refuse(*arguments[:-1], 151)


def test_nothing_to_supervise_is_an_error_before_anything_is_written(target, prompts, tmp_path):
    """Bug: an empty data set is noticed by the trainer, or not at all."""
    output = tmp_path / "rows.jsonl"
    words = refuse(target, output, "--prompts", prompts, "--use-answers")
    assert "no token would be supervised" in words and "30 that cannot be rendered" in words
    assert "30 over-long (limit 20 tokens)" in refuse(target, output, "--prompts", prompts, "--max-length", 20)
    assert list(tmp_path.iterdir()) == [prompts]


def test_impossible_options_are_refused_before_the_target_is_loaded(tmp_path, prompts):
    """Bug: a typing error costs the minutes in which a large target is loaded."""
    empty, output = tmp_path / "no target in here", tmp_path / "rows.jsonl"
    empty.mkdir()
    for words, arguments in {
        "either --prompts or --dataset": (),
        "must be a .jsonl file": ("--prompts", prompts),
        "none below 0": ("--prompts", prompts, "--temperature", -1),
        "top_p 0.0": ("--prompts", prompts, "--top-p", 0),
        "must be at least 1": ("--prompts", prompts, "--batch", 0),
        "not valid JSON": ("--prompts", prompts, "--template-options", "enable_thinking"),
        "give a JSON object": ("--prompts", prompts, "--template-options", "[]"),
    }.items():
        name = output.with_suffix(".gz") if words == "must be a .jsonl file" else output
        assert words in refuse(empty, name, *arguments)


def test_template_options_reach_the_template(tmp_path, prompts):
    """Bug: answers are asked for with thinking although it was switched off."""
    folder, output = chat_target(tmp_path / "target", kit.THINKING), tmp_path / "rows.jsonl"
    off = ("--template-options", '{"enable_thinking": false}')
    succeed(folder, output, "--prompts", prompts, "--limit", 2, "--max-new-tokens", 4, *off)
    found = read_data(output, min_answer_tokens=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found.header["template"]["options"] == {"enable_thinking": False}
    assert all(
        tokenizer.decode(row.token_ids[: row.prompt_length]).endswith("<think>\n\n</think>\n\n") for row in found.rows
    )


def test_batches_hold_alike_lengths_and_temperatures_get_all_of_them():
    """Bug: half of a batch is padding; or, sorted, one temperature gets the short prompts and the other the long."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 200, (1000,), generator=generator).tolist()
    batches = plan_batches(lengths, 16, seed=0)
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)
    mean = [sum(lengths[i] for batch in batches[k::2] for i in batch) / 500 for k in (0, 1)]
    assert abs(mean[0] - mean[1]) < 20
    assert plan_batches(lengths, 16, seed=0) == batches != plan_batches(lengths, 16, seed=1)


def test_sampled_answers_come_from_the_whole_distribution_at_their_temperature(target):
    """Bug: only the 50 likeliest tokens are drawn, as generate does unless told otherwise; or T or top-p is lost."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()

    def distinct(**options):
        sampling = Sampling(max_new_tokens=1, **options)
        return len({answer.token_ids[0] for answer in answer_batch(model, [[5, 6, 7]] * 300, sampling, 0, {2}, 0)})

    assert distinct(temperatures=(100.0,)) > 170  # of 300 draws from 364 tokens, nearly alike at this temperature
    assert 60 < distinct(temperatures=(1.0,)) < 160
    assert distinct(temperatures=(100.0,), top_p=0.05) < 30


def test_the_model_is_left_as_it_was(target):
    """Bug: asking for training data changes how the same model object answers afterwards."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    usual = model.generation_config
    (answer,) = answer_batch(model, [[5, 6, 7]], Sampling(max_new_tokens=3), 0, set(STOPS), 0)
    assert model.generation_config is usual and model.config._attn_implementation == "sdpa"
    assert len(answer.token_ids) == 3 or answer.is_finished
    with pytest.raises(DFlowError, match="temperatures"):
        Sampling(temperatures=())
