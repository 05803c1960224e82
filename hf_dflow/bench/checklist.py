"""The rollout checklist: each item ticked from records, or open with what to do for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dflow.bench.comparison import BASELINE
from hf_dflow.bench.conditions import differences

LONG_OUTPUT = 256  # new tokens from which a load counts as one of long outputs
LARGE_BATCH = 4  # requests at a time from which it counts as one of batches


@dataclass(frozen=True)
class Item:
    """One line of the checklist.

    Args:
        evidence (`str`): The figures that tick it, or what to do.
    """

    text: str
    is_done: bool
    evidence: str


@dataclass(frozen=True)
class Evidence:
    """What was measured or stated; everything is optional.

    Args:
        runs, endpoints, sweeps, plans, costs, probes (`dict[str, dict]`): Records of `hf-dflow bench run`, `bench
            endpoint`, `bench sweep`, `plan`, `cost` and `probe`, by their names.
        monitor (`str`, *optional*): Prometheus text of an [`AcceptanceMonitor`] that served.
        target_licence, drafter_licence (`str`, *optional*).
        canary (`str`, *optional*): What the canary period and its bill showed, in the user's words.
    """

    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    endpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sweeps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    monitor: str | None = None
    target_licence: str | None = None
    drafter_licence: str | None = None
    canary: str | None = None

    @property
    def loads(self) -> dict[str, Mapping[str, Any]]:
        """Runs and endpoints, which can stand side by side."""
        return {**self.runs, **self.endpoints}


def checklist(evidence: Evidence) -> list[Item]:
    """The ten items, in the order of a rollout."""
    return [
        _load(evidence),
        _compared(evidence),
        _conditions(evidence),
        _figures(evidence),
        _memory(evidence),
        _watched(evidence),
        _billing(evidence),
        _licences(evidence),
        _factors(evidence),
        _item("canary period with the real bill", evidence.canary, "run a canary, and state what it cost: --canary"),
    ]


def _item(text: str, evidence: str | None, missing: str) -> Item:
    return Item(text, bool(evidence), evidence or missing)


def _load(evidence: Evidence) -> Item:
    loads = [record["conditions"] for record in evidence.loads.values()]
    loads = [load for load in loads if load["output_tokens"] >= LONG_OUTPUT or load["concurrency"] >= LARGE_BATCH]
    measured = [f"{load['output_tokens']} new tokens, {load['concurrency']} at a time" for load in loads]
    missing = f"measure with --output-tokens {LONG_OUTPUT} or more, or --concurrency {LARGE_BATCH} or more"
    return _item("long-output or batch scenario confirmed", "; ".join(measured), missing)


def _compared(evidence: Evidence) -> Item:
    strategies = ""
    for record in evidence.runs.values():
        names = {name for mode in record["modes"].values() for name in mode["all"]["contestants"]}
        if {"assisted", "dflow"} <= names and names & {BASELINE, "transformers_dflash"}:
            strategies = ", ".join(sorted(names))
    missing = "run assisted (--assistant FOLDER), dflash and dflow in one `hf-dflow bench run`"
    return _item("classic, block diffusion and DFlow compared on one load", strategies, missing)


def _conditions(evidence: Evidence) -> Item:
    loads = [record["conditions"] for record in evidence.loads.values()]
    # A record compared with itself differs in what it does not state.
    unstated = sorted({name for conditions in loads for name in differences(conditions, conditions)})
    missing = f"not stated: {', '.join(unstated)}" if unstated else "give a record of bench run or bench endpoint"
    stated = f"{len(loads)} records state them all" if loads and not unstated else ""
    return _item("conditions fixed", stated, missing)


def _figures(evidence: Evidence) -> Item:
    figures = []
    for record in evidence.runs.values():
        for mode, measured in record["modes"].items():
            for name, counts in measured["all"]["contestants"].items():
                times = measured["latency"][name]
                figures.append(
                    f"{mode}, {name}: {counts['draft_acceptance_rate']:.1%} accepted, {times['effective_tps']:.1f} "
                    f"accepted drafts/s, p95 {times['latency_seconds']['p95']:.2f} s"
                )
    for record in evidence.endpoints.values():
        if record["acceptance"] and record["all"]["latency"]:
            rate = record["all"]["effective_tps_with_bonus"]
            speed = "unknown" if rate is None else format(rate, ".1f")
            figures.append(
                f"{record['conditions']['target']}: {record['acceptance']['draft_acceptance_rate']:.1%} accepted, "
                f"{speed} tokens/s, p95 "
                f"{record['all']['latency']['latency_seconds']['p95']:.2f} s"
            )
    missing = "give a record of bench run, or one of bench endpoint whose server counts its drafts"
    return _item("acceptance rate, effective throughput and p95 recorded", "; ".join(figures), missing)


def _memory(evidence: Evidence) -> Item:
    largest = [record["largest_batch"] for record in evidence.plans.values()]
    fitting = [
        f"at most {batch['drafting']} sequences with the drafter, {batch['plain']} without"
        for batch in largest
        if batch["drafting"]
    ]
    missing = "not one sequence fits with the drafter" if largest else "hf-dflow plan … --json FILE, and give it"
    return _item("memory counted in three blocks and batch limit checked", "; ".join(fitting), missing)


def _watched(evidence: Evidence) -> Item:
    lines = (evidence.monitor or "").splitlines()
    thresholds = [line for line in lines if line.startswith("hf_dflow_low_acceptance_threshold{")]
    missing = "serve with an AcceptanceMonitor that has low_acceptance, and give its prometheus_text(): --monitor"
    return _item("acceptance per task type watched with thresholds", "; ".join(thresholds), missing)


def _billing(evidence: Evidence) -> Item:
    units = [
        f"billed per {record['billing_unit']}: {record['who_keeps_the_gain']['hosted']}"
        for record in evidence.costs.values()
    ]
    missing = "hf-dflow cost with the hosted price, --json FILE, and give it"
    return _item("billing unit of the hosted channel checked", "; ".join(units), missing)


def _licences(evidence: Evidence) -> Item:
    target, drafter = evidence.target_licence, evidence.drafter_licence
    both = f"target: {target}, drafter: {drafter}" if target and drafter else ""
    return _item("licences of target and drafter recorded", both, "--target-licence, --drafter-licence")


def _factors(evidence: Evidence) -> Item:
    factors: dict[str, Any] = {}
    for record in evidence.costs.values():
        own = record.get("inputs", {}).get("own", {})
        factors |= {"routing": own.get("routed_share"), **own.get("factors", {})}
    wanted = {name: factors.get(name) for name in ("routing", "continuous batching", "prefix caching")}
    values = ", ".join(f"{name} {factor:g}" for name, factor in wanted.items()) if all(wanted.values()) else ""
    missing = "measure each, and give hf-dflow cost --routed-share, --batching-factor, --caching-factor"
    return _item("re-measured with routing, batching and caching", values, missing)
