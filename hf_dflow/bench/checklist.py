"""The rollout checklist: each item ticked from records, or open with what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dflow.bench.conditions import differences
from hf_dflow.bench.suite import BASELINE

LONG_OUTPUT = 256  # new tokens from which a load counts as one of long outputs
LARGE_BATCH = 4  # requests at a time from which it counts as one of batches
BLOCK_DIFFUSION = (BASELINE, "transformers_dflash")


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
    """What was measured or stated; everything may be missing.

    Args:
        runs, endpoints, plans (`list[dict]`): Records of `hf-dflow bench run`, `bench endpoint` and `plan`.
        cost, probe (`dict`, *optional*): Of `hf-dflow cost` and `probe`.
        monitor (`str`, *optional*): Prometheus text of an [`AcceptanceMonitor`] that served.
        licences (`dict[str, str]`, *optional*): Of "target" and "drafter".
        canary (`str`, *optional*): What the canary period and its bill showed, in the user's words.
        side_by_side (`list[tuple[dict, str]]`): Runs and endpoints in the order of a comparison, with their names.
    """

    runs: Sequence[Mapping[str, Any]] = ()
    endpoints: Sequence[Mapping[str, Any]] = ()
    plans: Sequence[Mapping[str, Any]] = ()
    cost: Mapping[str, Any] | None = None
    probe: Mapping[str, Any] | None = None
    monitor: str | None = None
    licences: Mapping[str, str] | None = None
    canary: str | None = None
    side_by_side: Sequence[tuple[Mapping[str, Any], str]] = ()


def checklist(given: Evidence) -> list[Item]:
    """The ten items, in the order of a rollout."""
    return [
        _load(given),
        _compared(given),
        _conditions(given),
        _figures(given),
        _memory(given),
        _watched(given),
        _billing(given),
        _licences(given),
        _factors(given),
        _item("canary period with the real bill", given.canary, "run a canary, and state what its bill was: --canary"),
    ]


def _item(text: str, evidence: str | None, missing: str) -> Item:
    return Item(text, bool(evidence), evidence or missing)


def _load(given: Evidence) -> Item:
    loads = [one["conditions"] for one in (*given.runs, *given.endpoints)]
    fits = [one for one in loads if one["output_tokens"] >= LONG_OUTPUT or one["concurrency"] >= LARGE_BATCH]
    told = [f"{one['output_tokens']} new tokens, {one['concurrency']} at a time" for one in fits]
    missing = f"measure with --output-tokens {LONG_OUTPUT} or more, or --concurrency {LARGE_BATCH} or more"
    return _item("long-output or batch scenario confirmed", "; ".join(told), missing)


def _compared(given: Evidence) -> Item:
    missing = "run assisted (--assistant FOLDER), dflash and dflow in one `hf-dflow bench run`"
    told = ""
    for one in given.runs:
        names = {name for mode in one["modes"].values() for name in mode["all"]["contestants"]}
        if "assisted" in names and "dflow" in names and names & set(BLOCK_DIFFUSION):
            told = ", ".join(sorted(names))
    return _item("classic, block diffusion and DFlow compared on one load", told, missing)


def _conditions(given: Evidence) -> Item:
    loads = [*given.runs, *given.endpoints]
    # A record compared with itself differs in what it does not state.
    unstated = sorted({key for one in loads for key in differences(one["conditions"], one["conditions"])})
    told = f"{len(loads)} records state them all" if loads and not unstated else ""
    missing = f"not stated: {', '.join(unstated)}" if unstated else "give a record of bench run or bench endpoint"
    return _item("conditions fixed", told, missing)


def _figures(given: Evidence) -> Item:
    told = []
    for one in given.runs:
        for mode, found in one["modes"].items():
            for name, counts in found["all"]["contestants"].items():
                times = found["latency"][name]
                told.append(
                    f"{mode}, {name}: {counts['draft_acceptance_rate']:.1%} accepted, {times['effective_tps']:.1f} "
                    f"accepted drafts/s, p95 {times['latency_seconds']['p95']:.2f} s"
                )
    for one in given.endpoints:
        if one["acceptance"] and one["all"]["latency"]:
            told.append(
                f"{one['conditions']['target']}: {one['acceptance']['draft_acceptance_rate']:.1%} accepted, "
                f"{one['all']['effective_tps_with_bonus']:.1f} tokens/s, p95 "
                f"{one['all']['latency']['latency_seconds']['p95']:.2f} s"
            )
    missing = "give a record of bench run; one of bench endpoint counts where the server tells its acceptance"
    return _item("acceptance rate, effective throughput and p95 recorded", "; ".join(told), missing)


def _memory(given: Evidence) -> Item:
    told = [
        f"at most {largest['drafting']} sequences with the drafter, {largest['plain']} without"
        for largest in (one["largest_batch"] for one in given.plans)
        if largest["drafting"]
    ]
    missing = "not one sequence fits with the drafter" if given.plans else "hf-dflow plan … --json FILE, and give it"
    return _item("memory counted in three blocks and batch limit checked", "; ".join(told), missing)


def _watched(given: Evidence) -> Item:
    lines = (given.monitor or "").splitlines()
    told = [line for line in lines if line.startswith("hf_dflow_low_acceptance_threshold{")]
    missing = "serve with an AcceptanceMonitor that has low_acceptance, and give its prometheus_text(): --monitor"
    return _item("acceptance per task type watched with thresholds", "; ".join(told), missing)


def _billing(given: Evidence) -> Item:
    told = (
        f"billed per {given.cost['billing_unit']}: {given.cost['who_keeps_the_gain']['hosted']}" if given.cost else ""
    )
    missing = "hf-dflow cost with the hosted price, --json FILE, and give it"
    return _item("billing unit of the hosted channel checked", told, missing)


def _licences(given: Evidence) -> Item:
    named = given.licences or {}
    told = ", ".join(f"{part}: {named[part]}" for part in ("target", "drafter") if named.get(part))
    is_whole = all(named.get(part) for part in ("target", "drafter"))
    return _item(
        "licences of target and drafter recorded", told if is_whole else "", "--target-licence, --drafter-licence"
    )


def _factors(given: Evidence) -> Item:
    own = given.cost["inputs"]["own"] if given.cost and "inputs" in given.cost else {}
    factors = dict(own.get("factors", {}))
    if own.get("routed_share"):
        factors["routing"] = own["routed_share"]
    wanted = ("routing", "continuous batching", "prefix caching")
    told = ", ".join(f"{name} {factors[name]:g}" for name in wanted if name in factors)
    is_whole = all(name in factors for name in wanted)
    missing = "measure each, and give hf-dflow cost --routed-share, --batching-factor, --caching-factor"
    return _item("re-measured with routing, batching and caching", told if is_whole else "", missing)
