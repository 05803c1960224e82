"""What a load on an endpoint came to: outcomes, latencies, and acceptance where the server is a vLLM that counts it."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.progress import Progress

from hf_dflow._version import __version__
from hf_dflow.bench.conditions import ENDPOINT, prompts_digest, run_conditions
from hf_dflow.bench.endpoint import OK, EndpointSettings, RequestResult, key_from_environment, run_load
from hf_dflow.bench.figures import Timed, latencies
from hf_dflow.bench.workloads import ALL_TASKS, Prompt
from hf_dflow.console import Presentation, Remark, ResultTable

SPEC_METRIC = re.compile(r"^(vllm:spec_decode_\w+?)(?:_total)?(?P<labels>\{[^}]*\})?\s+(?P<value>[-+.eE\d]+)\s*$")
POSITION = re.compile(r'position="(\d+)"')
TIMES = ("p50 s", "p95 s", "p99 s", "first token s", "per token ms", "tokens/s")
SERVERS_OWN = "the server's own"  # what a client cannot see


def measure(settings: EndpointSettings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Warm up with one request, put the load on, and summarise: all requests, and by task."""
    run_load(settings, prompts[:1])
    before = read_spec_metrics(settings.url)
    with Progress() as progress:
        bar = progress.add_task("requests", total=len(prompts))
        results, seconds = run_load(settings, prompts, lambda: progress.advance(bar))
    after = read_spec_metrics(settings.url)
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    by_task = {}
    for task in tasks:
        mine = [one for one in results if one.prompt.task == task]
        by_task[task] = summarise_load(mine, seconds)
    unseen = ("quantization", "dtype", "device", "cpu", "threads", "drafter", "block_size", "chat_template", "thinking")
    mode = f"T={settings.temperature:g}"
    stated = {
        **dict.fromkeys(unseen, SERVERS_OWN),
        "versions": {"hf_dflow": __version__},
        "engine": ENDPOINT,
        **({} if settings.server is None else {"server": settings.server}),
        "target": settings.model_name,
        "output_tokens": settings.output_tokens,
        "modes": [mode],
        "decoding": mode,
        "concurrency": settings.concurrency,
        "prompts": len(prompts),
        "prompts_sha256": prompts_digest(prompts),
        "measuring": "one request to warm up, then all at once in so many lanes",
    }
    return {
        "all": summarise_load(results, seconds),
        "by_task": by_task,
        "acceptance": acceptance_between(before, after),
        "conditions": run_conditions(**stated),
    }


def present(record: Mapping[str, Any]) -> Presentation:
    """Outcomes and latencies by task, failures and retries, and acceptance."""
    rows = []
    for task, part in {**record["by_task"], ALL_TASKS: record["all"]}.items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in part["outcomes"].items())
        rows.append([task, outcomes, *_cells(part)])
    remarks = [
        Remark(f"{kind}: {count} × {detail}", "yellow")
        for kind in ("failures", "retries")
        for detail, count in record["all"][kind].items()
    ]
    acceptance = record["acceptance"]
    if acceptance is None:
        remarks.append(Remark("The server does not report its drafts (no vllm:spec_decode_* at /metrics)."))
    else:
        remarks.append(
            Remark(
                f"{acceptance['tokens_per_step']:.2f} tokens per step ({acceptance['mean_accepted_length']:.2f} "
                f"accepted drafts + 1 bonus), {acceptance['draft_acceptance_rate']:.1%} of drafts accepted, "
                f"{acceptance['wasted_ratio']:.1%} wasted, by the server's own counters"
            )
        )
    table = ResultTable(record["conditions"]["target"], ("task",), ("outcomes", *TIMES), rows)
    return Presentation(f"Endpoint: {record['conditions']['target']}", [table], remarks, record["conditions"])


def _cells(part: Mapping[str, Any]) -> list[str]:
    times = part["latency"]
    if times is None:
        return ["–"] * len(TIMES)
    per_token = times["seconds_per_output_token"]
    return [
        *(f"{times['latency_seconds'][key]:.2f}" for key in ("p50", "p95", "p99")),
        f"{times['first_token_seconds']['p50']:.3f}",
        "–" if per_token is None else f"{1e3 * per_token['p50']:.1f}",
        f"{part['effective_tps_with_bonus']:.1f}",
    ]


def summarise_load(results: Sequence[RequestResult], wall_seconds: float) -> dict[str, Any]:
    """Latencies of what was answered, and a count of everything that was asked."""
    good = [one for one in results if one.outcome == OK]
    timed = [Timed(one.prompt.digest, one.seconds, one.first_token_seconds, one.tokens) for one in good]
    retries = sum((one.retries for one in results), Counter())
    return {
        "requests": len(results),
        "outcomes": dict(Counter(one.outcome for one in results)),
        "failures": dict(Counter(one.detail for one in results if one.outcome != OK)),
        "retries": dict(retries),
        "wall_seconds": wall_seconds,
        "output_tokens": sum(one.tokens for one in good),
        "tokens_counted_by": "the server" if all(one.is_counted_by_server for one in good) else "pieces of text",
        "effective_tps_with_bonus": sum(one.tokens for one in good) / wall_seconds if good else 0.0,
        "latency": latencies(timed) if timed else None,
    }


def read_spec_metrics(url: str, seconds: float = 10.0) -> dict[str, float]:
    """vLLM's `vllm:spec_decode_*` counters at `/metrics`, labels summed but for the position; empty without them."""
    import httpx

    address = re.sub(r"/v1/?$", "", url.rstrip("/")) + "/metrics"
    key = key_from_environment()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(address, timeout=seconds, headers=headers, trust_env=False)
    except httpx.HTTPError:
        return {}
    if answer.status_code != 200:
        return {}
    return parse_spec_metrics(answer.text)


def parse_spec_metrics(text: str) -> dict[str, float]:
    """Counters of a `/metrics` answer; those by position are named `…[position]`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (match := SPEC_METRIC.match(line)) and not match[1].endswith("_created"):
            position = POSITION.search(match["labels"] or "")
            name = match[1] + (f"[{position[1]}]" if position else "")
            with suppress(ValueError):  # a sign or an e alone
                value = float(match["value"])
                found[name] = found.get(name, 0.0) + (value if math.isfinite(value) else 0.0)
    return found


def acceptance_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any] | None:
    """Acceptance of a run from vLLM's counters around it; `None` where there are none, or they were reset.

    vLLM counts as this package does: drafts without the bonus; its mean acceptance length is tokens per step.
    """
    prefix = "vllm:spec_decode_"
    names = [f"{prefix}num_drafts", f"{prefix}num_draft_tokens", f"{prefix}num_accepted_tokens"]
    if any(name not in after for name in names):
        return None
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps, drafted, accepted = (grown[name] for name in names)
    if min(grown.values()) < 0 or not steps or not drafted:
        return None
    by_position = {
        int(name[:-1].rsplit("[", 1)[1]): value / steps
        for name, value in grown.items()
        if name.startswith(f"{prefix}num_accepted_tokens_per_pos[")
    }
    return {
        "num_spec_steps": int(steps),
        "num_draft_tokens": int(drafted),
        "num_accepted_draft_tokens": int(accepted),
        "draft_acceptance_rate": accepted / drafted,
        "wasted_ratio": 1.0 - accepted / drafted,
        "mean_accepted_length": accepted / steps,
        "tokens_per_step": 1.0 + accepted / steps,
        "acceptance_rate_per_position": [by_position[position] for position in sorted(by_position)],
    }
