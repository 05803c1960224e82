"""`python -m experiments.tables docs README.md`: the tables of documents, made from the records in docs/results.

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`; the names are those of `TABLES`.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import gain_curve, headline, hybrid_targets, recount
from experiments.common import RESULTS, markdown_table, read_json, with_interval
from experiments.lab import report as lab
from experiments.lab.variants import VARIANTS
from hf_dflow.console import errors_in_words
from hf_dflow.errors import DFlowError

BLOCK = re.compile(
    r"^(?P<begin><!-- table: (?P<name>\S+) -->\n)(?P<table>.*?)^(?P<end><!-- end table -->)$", re.DOTALL | re.MULTILINE
)
MARKER = re.compile(r"^<!-- (?:table: \S+|end table) -->$", re.MULTILINE)
PROMPT_SETS = {
    "eval-chat": ("ShareGPT", "24 held-out ShareGPT prompts"),
    "eval-training-kinds": ("kinds seen", "16 held out, kinds seen in training"),
    "eval-other-kinds": ("other wording", "24 of other wording, six tasks"),
    "eval-human-eval": ("HumanEval", "12 of HumanEval"),
}
EXPECTATIONS_OF_PROMPTS = {  # record -> text, what the record shows
    "eval-chat": ("chat (ShareGPT)", "no gain"),
    "eval-other-kinds": ("six tasks", "no gain"),
    "eval-human-eval": ("code (HumanEval)", "no gain"),
}
EXPECTATIONS_OF_CORPORA = {
    "airports": ("records that it knows and the drafter does not", "the relay, and training over several rounds"),
    "characters": ("tables of Unicode characters", "the relay"),
    "source-code": ("Python source", "training over several rounds"),
    "documentation": ("documentation", "both, a little"),
}
DRAFTER_KINDS = ("dflash", "multi_round", "dflow, relay off", "dflow")
CLASSIC_BASELINE = {  # contestant -> label, forwards of the drafter a step
    "dflash-equal": ("DFlash, as many updates", 1),
    "dflow": ("DFlow, as many updates", 1),
    "autoregressive": ("autoregressive, as many updates", 7),
    "bundled, relay off": ("the bundled drafter (5,400 updates, causal correction), relay off", 1),
    "bundled": ("the bundled drafter", 1),
}
LEARNING_CURVE = (
    "600, block 8 from the start (an earlier run: γ 4, distillation 0.5)",
    "700, block 2",
    "+ 900, block 4",
    "+ 900, block 4 again",
    "+ 300, block 8",
    "+ 600, block 4 a third time",
    "+ 1,500, block 4, with the causal correction",
    "+ 300, block 8",
)
FAMILIES_OF = ("5.24.0", "5.17.0")  # versions of transformers
FAMILY_WAYS = {"block": "block", "batch of three": "batch", "tree": "tree"}
FAMILY_VERDICTS = {
    "exact": "equal to plain decoding",
    "refused": "refused",
    "not built": "not built tiny",
    "FAILS": "plain decoding fails when tiny",
    "DIFFERS": "another text",
}
LAB_CORPORA = ("airports", "characters", "source-code", "documentation")


def record(name: str) -> Any:
    """The committed record `docs/results/NAME.json`."""
    return read_json(RESULTS / f"{name}.json")


def _greedy(name: str) -> dict[str, Any]:
    return record(name)["modes"]["T=0"]["all"]


# -- the real pair


def strategies() -> str:
    """Every strategy of `hf-dflow bench run`."""
    return strategies_of(record("bench"))


def families() -> str:
    """Every causal language model class of the newest and the oldest supported transformers: what was decoded."""
    newest, oldest = (
        {family["name"]: family for family in record(f"families-{version}")["families"]} for version in FAMILIES_OF
    )
    headings = ("model type", *(f"{what}, {version}" for version in FAMILIES_OF for what in FAMILY_WAYS.values()))
    rows = [
        (f"`{name}`", *(_decoded(found.get(name), way) for found in (newest, oldest) for way in FAMILY_WAYS))
        for name in sorted({*newest, *oldest})
        if any(found.get(name, {}).get("decoded") for found in (newest, oldest))
    ]
    return markdown_table(headings, rows)


def family_faults() -> str:
    """Targets of which a part of the self-check did not pass."""
    rows = []
    for version in FAMILIES_OF:
        for family in record(f"families-{version}")["families"]:
            failed = {part: found for part, found in (family["measured"] or {}).items() if not found["passes"]}
            for part, found in failed.items():
                numbers = (
                    [f"{found[name]:.2g}" for name in ("error", "control")] if "error" in found else ["raises", "–"]
                )
                without = (family["decoded"] or {}).get("block, were it not refused", "–")
                rows.append((f"`{family['name']}`", version, part, *numbers, without if part == "block" else "–"))
    return markdown_table(("model type", "transformers", "part", "error", "known fault's", "text if decoded"), rows)


def family_counts() -> str:
    """How many classes came out how."""
    rows = []
    for version in FAMILIES_OF:
        found = [family["verdict"] for family in record(f"families-{version}")["families"]]
        rows.append((version, str(len(found)), *(str(found.count(verdict)) for verdict in FAMILY_VERDICTS)))
    return markdown_table(("transformers", "classes", *FAMILY_VERDICTS.values()), rows)


def _decoded(family: dict[str, Any] | None, way: str) -> str:
    if not family or not family["decoded"]:
        return "–"
    found = family["decoded"].get(way, "refused")
    return f"{found}, row by row" if way == "batch of three" and found == "exact" and not family["together"] else found


def strategies_of(bench: dict[str, Any]) -> str:
    """The record of a `hf-dflow bench run` over all tasks, with its conditions below."""
    figures = ("tokens per step", "accepted", "std", "forwards per token", "p50, s", "p95, s", "tokens/s")
    rows = []
    for mode, group in bench["modes"].items():
        contestants = group["all"]["contestants"]
        rows += [[mode, name, *_strategy(contestants.get(name), times)] for name, times in group["latency"].items()]
        for name, reason in group.get("not_run", {}).items():
            rows.append([mode, name, f"not run: {reason}", *["–"] * (len(figures) - 1)])
    conditions, identity = bench["conditions"], bench["identity"]
    concurrency = conditions["concurrency"]
    at_a_time = "one at a time" if concurrency == 1 else f"batches of {concurrency} at a time"
    texts = ", ".join(f"{name} {count}" for name, count in identity["identical_to_plain"].items())
    return (
        markdown_table(("mode", "strategy", *figures), rows)
        + f"\n\n{conditions['target']}, drafter {conditions['drafter']} with blocks of {conditions['block_size']}; "
        f"{conditions['prompts']} prompts, {conditions['output_tokens']} new tokens at most, {conditions['dtype']}, "
        f"{conditions['threads']} threads, {at_a_time}; {conditions['measuring']}. Greedy texts equal to the target's "
        f"own, of {identity['compared_with_plain']}: {texts}."
    )


def _strategy(counts: dict[str, Any] | None, times: dict[str, Any]) -> list[str]:
    drafted = ["1", "–", "–"]
    if counts is not None:
        drafted = [
            with_interval(counts["tokens_per_step"], ".2f"),
            f"{counts['draft_acceptance_rate']:.1%}",
            f"{counts['accepted_length_std']:.2f}",
        ]
    seconds = times["latency_seconds"]
    return [
        *drafted,
        f"{times['target_forwards_per_token']:.3f}",
        f"{seconds['p50']:.2f}",
        f"{seconds['p95']:.2f}",
        f"{times['effective_tps_with_bonus']:.1f}",
    ]


def expectations() -> str:
    """What to expect on which text: the README's table."""
    real = "SmolLM2-135M"
    rows = [
        [f"{real}, {text}", *_tokens_per_step(_greedy(name)["contestants"]), verdict]
        for name, (text, verdict) in EXPECTATIONS_OF_PROMPTS.items()
    ]
    rows += [
        [f"3.4M target, {text}", *_tokens_per_step(lab_record(corpus)), verdict]
        for corpus, (text, verdict) in EXPECTATIONS_OF_CORPORA.items()
    ]
    return markdown_table(("target and text", "DFlash", "DFlow", "what brings the gain"), rows)


def _tokens_per_step(kinds: dict[str, Any]) -> list[str]:
    return [f"{kinds[kind]['tokens_per_step']['value']:.2f}" for kind in ("dflash", "dflow")]


def prompt_sets() -> str:
    """DFlow beside DFlash on four sets of prompts."""
    rows = []
    for name, (_, label) in PROMPT_SETS.items():
        group, identity = _greedy(name), record(name)["identity"]
        pair = [group["contestants"][kind] for kind in ("dflash", "dflow")]
        rows.append(
            [
                label,
                *(with_interval(figures["tokens_per_step"], ".2f") for figures in pair),
                with_interval(group["differences"]["dflow - dflash"]["gain"], "+.1%"),
                " / ".join(f"{figures['accepted_length_std']:.2f}" for figures in pair),
                " / ".join(f"{figures['draft_acceptance_rate']:.1%}" for figures in pair),
                " / ".join(f"{figures['target_forwards_per_token']:.2f}" for figures in pair),
                f"{min(identity['identical_to_plain'].values())} of {identity['compared_with_plain']}",
            ]
        )
    headings = ("prompts", "DFlash", "DFlow", "gain, paired", "std of accepted length", "drafts accepted")
    return markdown_table((*headings, "target forwards per token", "text = plain, of those compared"), rows)


def drafter_kinds() -> str:
    """Tokens per step of equally trained kinds of drafters on four sets of prompts."""
    rows = []
    for kind in DRAFTER_KINDS:
        contestants = [_greedy(name)["contestants"][kind] for name in PROMPT_SETS]
        rows.append([kind, *(with_interval(figures["tokens_per_step"], ".2f") for figures in contestants)])
    return markdown_table(("drafter", *(short for short, _ in PROMPT_SETS.values())), rows)


def sampled() -> str:
    """DFlow beside DFlash at temperature 1."""
    rows = []
    for mode, groups in record("eval-sampled")["modes"].items():
        pair = [groups["all"]["contestants"][kind]["tokens_per_step"] for kind in ("dflash", "dflow")]
        gain = groups["all"]["differences"]["dflow - dflash"]["gain"]
        rows.append([mode, *(with_interval(figure, ".2f") for figure in pair), with_interval(gain, "+.1%")])
    return markdown_table(("sampling", "DFlash", "DFlow", "gain, paired"), rows)


def classic_baseline() -> str:
    """The classic draft model beside block drafters."""
    contestants = _greedy("eval-autoregressive")["contestants"]
    rows = [
        [
            label,
            with_interval(contestants[name]["tokens_per_step"], ".2f"),
            str(forwards),
            with_interval(contestants[name]["speed_up"], ".2f"),
        ]
        for name, (label, forwards) in CLASSIC_BASELINE.items()
    ]
    headings = ("drafter", "tokens per step", "forwards of the drafter a step", "times as fast as plain decoding")
    return markdown_table(headings, rows)


def learning_curve() -> str:
    """The bundled drafter after each stage of its training."""
    rows = []
    for label, figures in zip(LEARNING_CURVE, _greedy("eval-curve")["contestants"].values(), strict=True):
        first, second = [*figures["acceptance_rate_per_position"], 0][:2]
        rows.append([label, with_interval(figures["tokens_per_step"], ".2f"), f"{first:.1%}", f"{second:.1%}"])
    return markdown_table(("updates", "tokens per step", "first draft accepted", "two accepted"), rows)


def servers() -> str:
    """What `hf-dflow bench endpoint` measured."""
    rows = []
    for endpoint in record("endpoints"):
        load, times, drafts = endpoint["all"], endpoint["all"]["latency"], endpoint["acceptance"]
        accepted = ["–", "–"]
        if drafts is not None:
            accepted = [f"{drafts['tokens_per_step']:.2f}", f"{drafts['draft_acceptance_rate']:.1%}"]
        rows.append(
            [
                endpoint["conditions"]["server"].split(",")[0],
                str(endpoint["conditions"]["concurrency"]),
                f"{load['outcomes'].get('ok', 0)} of {load['requests']}",
                *(f"{times['latency_seconds'][key]:.1f}" for key in ("p50", "p95")),
                f"{times['first_token_seconds']['p50']:.1f}",
                f"{load['effective_tps_with_bonus']:.1f}",
                *accepted,
            ]
        )
    headings = ("server", "requests at a time", "whole answers", "p50 s", "p95 s", "first token s", "tokens/s")
    return markdown_table((*headings, "tokens per step", "drafts accepted"), rows)


# -- the feedback's decisions


def decisions(name: str, mode: str = "T=0") -> str:
    """Ways to decode, each against the first."""
    group = record(f"decisions-{name}")["modes"][mode]["all"]
    first, *_ = group["contestants"]
    rows = []
    for way, figures in group["contestants"].items():
        gain = "" if way == first else with_interval(group["differences"][f"{way} - {first}"]["gain"], "+.1%")
        steps = with_interval(figures["tokens_per_step"], ".2f")
        rows.append([way, steps, f"{figures['target_forwards_per_token']:.2f}", gain])
    return markdown_table(("way", "tokens per step", "target forwards per token", "gain over the first"), rows)


def lengths() -> str:
    """Milliseconds a token, by the cost of forwards, of fixed lengths and of the adaptive one."""
    costs = record("decisions-length")["modes"]["T=0"]["modelled_seconds_per_token"]
    rows, names = [], []
    for task, seconds in costs["by_task"].items():
        fixed = {name: value for name, value in seconds.items() if name.endswith("drafts")}
        names = [name.replace("1 drafts", "1 draft") for name in fixed]
        cells = [f"{1e3 * value:.0f}" for value in (costs["plain"], *fixed.values(), seconds["adaptive"])]
        rows.append([task, *cells, f"{min(fixed.values()) / seconds['adaptive'] - 1:+.1%}"])
    return markdown_table(("task", "plain", *names, "adaptive", "over the best fixed"), rows)


def switches(name: str, mode: str = "T=0") -> str:
    """Switches alone and together: steps, speed, and milliseconds a token by the cost of forwards."""
    groups = record(f"decisions-{name}")["modes"][mode]
    by_task = groups["modelled_seconds_per_token"]["by_task"]
    tasks = ["all", *(task for task in by_task if task != "all")]
    rows = []
    for chosen, figures in groups["all"]["contestants"].items():
        steps, speed_up = (with_interval(figures[key], ".2f") for key in ("tokens_per_step", "speed_up"))
        forwards = f"{1 / figures['target_forwards_per_token']:.2f}"
        rows.append([chosen, steps, forwards, speed_up, *(f"{1e3 * by_task[task][chosen]:.0f}" for task in tasks)])
    headings = (
        "switches",
        "tokens per step",
        "per target forward",
        "times as fast as plain",
        "ms a token by cost: all",
    )
    return markdown_table((*headings, *tasks[1:]), rows)


# -- the lab


def lab_record(corpus: str) -> dict[str, Any]:
    """The runs of one lab corpus, summarised."""
    return record(f"lab-{corpus}")["corpora"][f"{corpus}-b8"]


def is_variant(name: str) -> bool:
    """Whether a kind, or a pair of kinds, is of a relay that was trained otherwise."""
    return name.startswith(tuple(VARIANTS))


def lab_kinds(corpus: str, *, variants: bool = False) -> str:
    """Kinds of drafters of one corpus."""
    return lab.kinds_table(lab_record(corpus), lambda kind: is_variant(kind) == variants)


def lab_pairs(corpus: str, *, variants: bool = False) -> str:
    """Pairs of kinds of one corpus."""
    return lab.pairs_table(lab_record(corpus), lambda pair: is_variant(pair) == variants)


def lab_corpora() -> str:
    """What the probe says of each corpus."""
    rows = []
    for corpus in LAB_CORPORA:
        summary = lab_record(corpus)
        names = ("re_convergence", "rescue_rate", "rescue_rate_top5", "largest_gain")
        shares = (summary["probe"][name] for name in names)
        steps = summary["dflash"]["tokens_per_step"]["value"]
        rows.append([corpus, *(f"{share:.1%}" for share in shares), f"{steps:.2f}"])
    headings = ("corpus", "re-convergence", "rescue rate", "by its top-5", "largest gain", "DFlash")
    return markdown_table(headings, rows)


def gain_points() -> list[gain_curve.Point]:
    """The points of the committed gain curve."""
    return [gain_curve.Point(**point) for point in record("gain-curve")["points"]]


def gain_correlations() -> str:
    """Pearson's r of the gains with what the probe says."""
    points = gain_points()
    gains, relay_gains = (gain_curve.correlations(points, name) for name in ("gain", "relay_gain"))
    labels = ("re-convergence", "rescue rate", "largest gain", "DFlash's tokens per step")
    rows = [
        [label, f"{gains[axis]:.2f}", f"{relay_gains[axis]:.2f}"]
        for axis, label in zip(gain_curve.AXES, labels, strict=True)
    ]
    return markdown_table((f"Pearson's r over these {len(points)} points", "gain", "over multi_round"), rows)


def rollback_ways() -> str:
    """Time of a step for each way of rolling back recurrent layers."""
    record = read_json(RESULTS / "rollback.json")
    rows = [
        [way, with_interval(times, ".1f"), with_interval(record["ratio_to_state_advance"][way], ".2f")]
        for way, times in record["milliseconds_per_step"].items()
    ]
    return markdown_table(["way", "ms a step (95% interval)", "over state advance"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "strategies": strategies,
    "expectations": expectations,
    "prompt-sets": prompt_sets,
    "drafter-kinds": drafter_kinds,
    "sampled": sampled,
    "classic-baseline": classic_baseline,
    "learning-curve": learning_curve,
    "hybrid-targets": lambda: hybrid_targets.table_of(record("hybrid-targets")),
    "servers": servers,
    "recounted": recount.changes_table,
    "decisions-tree": partial(decisions, "tree"),
    "decisions-mixture": partial(decisions, "mixture"),
    "decisions-mixture-lab": partial(decisions, "mixture-lab"),
    "decisions-mixture-lab-sampled": partial(decisions, "mixture-lab", "T=1, block verification"),
    "decisions-length": lengths,
    "decisions-together": partial(switches, "together"),
    "decisions-together-sampled": partial(switches, "together", "T=1, block verification"),
    "decisions-together-dflash": partial(switches, "together-dflash"),
    "decisions-together-dflash-sampled": partial(switches, "together-dflash-sampled", "T=1, block verification"),
    **{f"lab-{corpus}-kinds": partial(lab_kinds, corpus) for corpus in LAB_CORPORA},
    **{f"lab-{corpus}-pairs": partial(lab_pairs, corpus) for corpus in LAB_CORPORA},
    "lab-variants-kinds": partial(lab_kinds, "airports", variants=True),
    "lab-variants-pairs": partial(lab_pairs, "airports", variants=True),
    "lab-airports-tasks": lambda: lab.tasks_table(lab_record("airports")),
    "lab-airports-tasks-relay-off": lambda: lab.tasks_without_relay_table(lab_record("airports")),
    "lab-airports-sampled": lambda: lab.sampled_table(lab_record("airports")),
    "lab-corpora": lab_corpora,
    "gain-curve": lambda: gain_curve.as_markdown(gain_points()),
    "gain-curve-correlations": gain_correlations,
    "rollback": rollback_ways,
    "headline": lambda: headline.as_markdown(headline.summarise(headline.read_record(headline.RECORD))),
    "families": families,
    "family-counts": family_counts,
    "family-faults": family_faults,
}


def render(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """`text` with every marked table made anew.

    Raises:
        DFlowError: A table of an unknown name, or a marker without its other half.
    """

    def fill(block: re.Match) -> str:
        if block["name"] not in tables:
            raise DFlowError(f"table {block['name']!r} is unknown; use one of {', '.join(tables)}")
        return f"{block['begin']}\n{tables[block['name']]()}\n\n{block['end']}"

    if 2 * len(BLOCK.findall(text)) != len(MARKER.findall(text)):
        raise DFlowError("a table lacks its begin or end: <!-- table: NAME -->, then <!-- end table -->")
    return BLOCK.sub(fill, text)


def documents(paths: list[Path]) -> list[Path]:
    """The Markdown files among `paths` and below them.

    Raises:
        DFlowError: One of the paths does not exist.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise DFlowError(f"{', '.join(missing)}: no such file or folder; name Markdown files, or folders of them")
    return [file for path in paths for file in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]


def main(
    paths: Annotated[list[Path], typer.Argument(help="Markdown files, or folders of them.")],
) -> None:
    """Make the marked tables of documents anew from the committed records."""
    for document in documents(paths):
        before = document.read_text(encoding="utf-8")
        try:
            after = render(before)
        except DFlowError as error:
            raise DFlowError(f"{document}: {error}") from error
        if after != before:
            document.write_text(after, encoding="utf-8")
            typer.echo(f"{document}: made anew")


if __name__ == "__main__":
    typer.run(errors_in_words()(main))
