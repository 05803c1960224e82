"""Figures of the lab's runs: each kind pooled over seeds, and its gain over equally trained DFlash."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import markdown_table, with_interval
from experiments.lab.variants import VARIANTS
from hf_dflow.bench.intervals import bootstrap_interval
from hf_dflow.generation.statistics import tokens_per_step

BASELINE = "dflash"
OFF = ", relay off"
# What the relay adds; what training with it does to the drafter without it; what a relay added that also read the
# verifier's logits (runs of version 0.1, whose `relay_top_k` was removed since).
PAIRS = [("dflow", "multi_round"), (f"dflow{OFF}", "multi_round"), ("dflow_logits", "dflow")]
# And both again for relays that are trained otherwise.
PAIRS += [pair for kind in VARIANTS for pair in ((kind, "dflow"), (f"{kind}{OFF}", "multi_round"))]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The lines of FOLDER/results.jsonl; the later one of a run that was repeated."""
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    newest = {}
    for record in map(json.loads, lines):
        newest[json.dumps([record["kind"], record["recipe"]])] = record
    return list(newest.values())


def counts_by_kind(results: list[dict[str, Any]]) -> dict[str, dict[int, np.ndarray]]:
    """`{kind: {seed: [2, prompts] tokens and steps}}`; DFlow with its relay switched off is a kind of its own."""
    counts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for record in results:
        for key, kind in (("counts", record["kind"]), ("counts_relay_off", f"{record['kind']}{OFF}")):
            if key in record:
                counts[kind][record["recipe"]["seed"]] = np.array([record[key]["tokens"], record[key]["steps"]])
    return counts


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per step of each kind, pooled over seeds, and the gain over DFlash of the same seeds.

    Intervals are 95% bootstraps over prompts; all seeds answer the same prompts and are resampled together.
    """
    by_kind = counts_by_kind(results)
    losses = {(run["kind"], run["recipe"]["seed"]): run["last_losses"][0] for run in results if run.get("last_losses")}
    record: dict[str, Any] = {}
    for kind, by_seed in by_kind.items():
        seeds = sorted(by_seed)
        pooled = np.sum([by_seed[seed] for seed in seeds], axis=0)
        entry = {
            "seeds": seeds,
            "tokens_per_step": _figure(pooled, tokens_per_step),
            "tokens_per_step_by_seed": [tokens_per_step(*by_seed[seed].sum(axis=1)) for seed in seeds],
        }
        if all((kind, seed) in losses for seed in seeds):
            entry["mask_round_loss_by_seed"] = [losses[kind, seed] for seed in seeds]
        baseline = by_kind.get(BASELINE, {})
        if kind != BASELINE and set(seeds) <= set(baseline):
            both = np.concatenate([pooled, np.sum([baseline[seed] for seed in seeds], axis=0)])
            entry["gain_over_dflash"] = _figure(both, lambda t, s, base_t, base_s: (t / s) / (base_t / base_s) - 1)
        record[kind] = entry
    pairs = {
        f"{kind} over {base}": _paired(by_kind[kind], by_kind[base])
        for kind, base in PAIRS
        if {kind, base} <= by_kind.keys()
    }
    record["pairs"] = {name: pair for name, pair in pairs.items() if pair is not None}
    probes = [run["probe"] for run in results if "probe" in run]
    if probes:
        names = probes[0].keys()
        record["probe"] = {name: float(np.mean([probe[name]["value"] for probe in probes])) for name in names}
    identical = [count for run in results for count in run["counts"]["identical"]]
    record["texts_identical"] = f"{sum(identical)} of {len(identical)}"
    return record


def _paired(ours: dict[int, np.ndarray], theirs: dict[int, np.ndarray]) -> dict[str, Any] | None:
    """The gain of one kind over another, over the seeds that both have and with each of these."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None

    def gain(tokens, steps, base_tokens, base_steps):
        return (tokens / steps) / (base_tokens / base_steps) - 1

    both = [np.concatenate([ours[seed], theirs[seed]]) for seed in seeds]
    return {
        "seeds": seeds,
        "gain": _figure(np.sum(both, axis=0), gain),
        "gain_by_seed": [float(gain(*counts.sum(axis=1))) for counts in both],
    }


def summarise_tasks(path: Path) -> dict[str, Any]:
    """Each task in `path` with its own figures, seeds pooled."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        tasks[line["task"]].append({**line, "recipe": {"seed": line["seed"]}})
    return {task: summarise(results) for task, results in tasks.items()}


def _figure(rows: np.ndarray, ratio) -> dict[str, Any]:
    """`ratio` of the row sums of `[k, prompts]`, with its interval over prompts."""
    return {
        "value": float(ratio(*rows.sum(axis=1))),
        "interval_95": bootstrap_interval(rows.shape[1], lambda chosen: float(ratio(*rows[:, chosen].sum(axis=1)))),
    }


def as_markdown(record: dict[str, Any]) -> str:
    """All tables of one corpus, as `lab report` prints them."""
    tables = [kinds_table(record)]
    tables += [pairs_table(record)] if record["pairs"] else []
    tables += [tasks_table(record)] if record["tasks"] else []
    tables += [tasks_without_relay_table(record)] if _tasks_without_relay(record) else []
    tables += [sampled_table(record)] if record["sampled"] else []
    return "\n\n".join(tables)


def kinds_table(record: dict[str, Any], is_shown: Callable[[str], bool] = lambda kind: True) -> str:
    """The kinds of drafters, seeds pooled."""
    rows = []
    for kind, entry in record.items():
        if isinstance(entry, dict) and "seeds" in entry and is_shown(kind):
            by_seed = ", ".join(f"{value:.2f}" for value in entry["tokens_per_step_by_seed"])
            losses = ", ".join(f"{value:.2f}" for value in entry.get("mask_round_loss_by_seed", []))
            rows.append([kind, by_seed, with_interval(entry["tokens_per_step"], ".2f"), _gain(entry), losses])
    headings = ("drafter", "seeds", "tokens per step", "over DFlash of the same seeds", "loss of the mask round")
    return markdown_table(headings, rows)


def pairs_table(record: dict[str, Any], is_shown: Callable[[str], bool] = lambda pair: True) -> str:
    """One kind against another, with the seeds that both have."""
    rows = [
        [pair, with_interval(entry["gain"], "+.1%"), _by_seed(entry)]
        for pair, entry in record["pairs"].items()
        if is_shown(pair)
    ]
    return markdown_table(("pair", "longer by", "with each seed"), rows)


def tasks_table(record: dict[str, Any]) -> str:
    """Each task: what the probe says of DFlash, and what DFlow gains."""
    rows = []
    for task, entry in record["tasks"].items():
        probe = [f"{entry['probe'][name]:.1%}" for name in ("re_convergence", "rescue_rate", "largest_gain")]
        rows.append([task, *probe, *_steps(entry, "dflash", "dflow"), _gain(entry["dflow"])])
    headings = ("task", "re-convergence", "rescue rate", "largest gain", "DFlash", "DFlow", "gain")
    return markdown_table(headings, rows)


def tasks_without_relay_table(record: dict[str, Any]) -> str:
    """A drafter that was trained with the relay and drafts without it, beside one trained without, by task."""
    kinds = ("multi_round", f"dflow{OFF}")
    rows = [
        [task, *_steps(record["tasks"][task], *kinds), with_interval(pair["gain"], "+.1%"), _by_seed(pair)]
        for task, pair in _tasks_without_relay(record).items()
    ]
    return markdown_table(("task", "multi_round", "dflow, relay off", "longer by", "with each seed"), rows)


def _tasks_without_relay(record: dict[str, Any]) -> dict[str, Any]:
    pair = f"dflow{OFF} over multi_round"
    return {task: entry["pairs"][pair] for task, entry in record["tasks"].items() if pair in entry.get("pairs", {})}


def sampled_table(record: dict[str, Any]) -> str:
    """Temperature 1, with each verification rule."""
    rows = [
        [mode, *_steps(entry, "dflash", "dflow"), _gain(entry["dflow"])]
        for mode, entry in record["sampled"].items()
        if {"dflash", "dflow"} <= entry.keys()
    ]
    return markdown_table(("sampling", "DFlash", "DFlow", "gain"), rows)


def _steps(entry: dict[str, Any], *kinds: str) -> list[str]:
    return [with_interval(entry[kind]["tokens_per_step"], ".2f") for kind in kinds]


def _by_seed(pair: dict[str, Any]) -> str:
    return ", ".join(f"{value:+.1%}" for value in pair["gain_by_seed"])


def _gain(entry: dict[str, Any]) -> str:
    return with_interval(entry["gain_over_dflash"], "+.1%") if "gain_over_dflash" in entry else "–"
