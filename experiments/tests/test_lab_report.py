"""The lab's figures: pooled over seeds, gains against the same seeds, nothing counted twice."""

import json

import pytest

from experiments.lab.report import as_markdown, read_results, summarise, summarise_tasks


def line(kind, seed, tokens, steps, **more):
    counts = {"tokens": tokens, "steps": steps, "identical": [1] * len(tokens)}
    return {"kind": kind, "recipe": {"seed": seed, "updates": 5}, "counts": counts, **more}


def test_gain_is_the_ratio_of_pooled_tokens_per_step(tmp_path):
    """Catches: a mean of ratios for the pooled ratio, a gain against other seeds, a repeated run counted twice."""
    off = {"tokens": [40, 40], "steps": [10, 30], "identical": [1, 1]}
    lines = [
        line("dflash", 0, [40, 40], [40, 40]),  # made again below
        line("dflash", 0, [40, 40], [20, 20], last_losses=[1.0]),
        line("dflash", 1, [40, 40], [10, 30], probe={"rescue_rate": {"value": 0.25}}),
        line("dflow", 0, [40, 40], [10, 20], counts_relay_off=off, last_losses=[0.5, 9.0]),
        line("dflow", 1, [40, 40], [10, 24], counts_relay_off=off, last_losses=[0.25, 9.0]),
        line("multi_round", 2, [40, 40], [10, 24]),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record = summarise(read_results(tmp_path))
    assert record["dflash"]["tokens_per_step"]["value"] == pytest.approx(160 / 80)
    assert record["dflow"]["tokens_per_step_by_seed"] == pytest.approx([80 / 30, 80 / 34])
    assert record["dflow"]["gain_over_dflash"]["value"] == pytest.approx((160 / 64) / (160 / 80) - 1)
    low, high = record["dflow"]["gain_over_dflash"]["interval_95"]
    assert low <= 0.25 <= high and low < high
    assert record["dflow, relay off"]["gain_over_dflash"]["value"] == pytest.approx(0.0)
    assert "gain_over_dflash" not in record["multi_round"], "no DFlash of that seed"
    assert record["pairs"] == {}, "no seed in common"
    assert record["dflow"]["mask_round_loss_by_seed"] == [0.5, 0.25]
    assert "mask_round_loss_by_seed" not in record["dflash"], "one of its runs has none"
    assert record["probe"] == {"rescue_rate": 0.25}
    assert record["texts_identical"] == "10 of 10"


def test_pairs_share_their_seeds(tmp_path):
    """Bug: a seed of one kind alone that shifts the pair's gain."""
    lines = [
        line("dflow", 0, [40, 40], [10, 10]),
        line("dflow", 1, [40, 40], [5, 5]),
        line("multi_round", 0, [40, 40], [20, 10]),
        line("multi_round", 7, [40, 40], [40, 40]),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = summarise(read_results(tmp_path))["pairs"]
    assert found.keys() == {"dflow over multi_round"}
    assert found["dflow over multi_round"]["seeds"] == [0]
    assert found["dflow over multi_round"]["gain"]["value"] == pytest.approx(0.5)
    assert found["dflow over multi_round"]["gain_by_seed"] == pytest.approx([0.5])


def test_a_drafter_without_its_relay_is_compared_by_task(tmp_path):
    """Bug: the relay's own drafts in the place of those without it, or a task whose pair was not measured."""
    off = {"tokens": [40], "steps": [20], "identical": [1]}
    lines = [line("dflash", 0, [40], [40]), line("multi_round", 0, [40], [25])]
    lines.append(line("dflow", 0, [40], [10], counts_relay_off=off))
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    probed = {"probe": {name: {"value": 0.5} for name in ("re_convergence", "rescue_rate", "largest_gain")}}
    of_tasks = [{**one, "seed": 0, "task": task} for one in lines for task in ("easy", "hard")]
    of_tasks = [one | probed if one["kind"] == "dflash" else one for one in of_tasks]
    of_tasks = [one for one in of_tasks if one["kind"] != "multi_round" or one["task"] == "easy"]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, of_tasks)))
    record = {**summarise(read_results(tmp_path)), "tasks": summarise_tasks(tmp_path / "tasks.jsonl"), "sampled": {}}
    table = as_markdown(record).split("| task | multi_round |")[1]
    assert "| easy | 1.60 [1.60, 1.60] | 2.00 [2.00, 2.00] | +25.0% [+25.0%, +25.0%] | +25.0% |" in table
    assert "hard" not in table
