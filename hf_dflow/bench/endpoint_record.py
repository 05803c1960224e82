"""The record of a load on an endpoint: outcomes, latencies, and acceptance where the server is a vLLM."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.progress import Progress

from hf_dflow._version import __version__
from hf_dflow.bench.conditions import ENDPOINT, prompts_digest, run_conditions
from hf_dflow.bench.endpoint import OK, REFUSED, UNREACHABLE, EndpointSettings, RequestResult, run_load
from hf_dflow.bench.figures import Timed, latencies
from hf_dflow.bench.workloads import ALL_TASKS, Prompt
from hf_dflow.console import Presentation, Remark, ResultTable, SafeConsole
from hf_dflow.errors import DFlowError
from hf_dflow.generation.statistics import tokens_per_step

PREFIX = "vllm:spec_decode_"
TIMES = ("p50 s", "p95 s", "p99 s", "first token s", "per token ms", "tokens/s")
# What a client cannot see.
UNSEEN = ("quantization", "dtype", "device", "cpu", "threads", "drafter", "block_size", "chat_template", "thinking")


def measure(settings: EndpointSettings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Warm up with one request, put the load on, and summarise: all requests, and by task.

    Raises:
        DFlowError: Not even the first request was let in.
    """
    (first,), _ = run_load(settings, prompts[:1])
    if settings.continuous_usage and first.detail.startswith(("status 400", "status 422")):
        # A strict server does not take the field; without it, the server counts at the end.
        settings = replace(settings, continuous_usage=False)
        (first,), _ = run_load(settings, prompts[:1])
    if first.outcome in (REFUSED, UNREACHABLE):
        raise DFlowError(f"{settings.url}: {first.detail}")
    before = read_spec_metrics(settings)
    with Progress(console=SafeConsole()) as progress:
        bar = progress.add_task("requests", total=len(prompts))
        results, seconds = run_load(settings, prompts, lambda: progress.advance(bar))
    after = read_spec_metrics(settings)
    by_task: dict[str, list[RequestResult]] = {}
    for result in results:
        by_task.setdefault(result.prompt.task, []).append(result)
    whole_load = summarise_load(results, seconds)
    mode = f"T={settings.temperature:g}"
    conditions = {
        **dict.fromkeys(UNSEEN, "the server's own"),
        "versions": {"hf_dflow": __version__},
        "engine": ENDPOINT,
        **({} if settings.server is None else {"server": settings.server}),
        "target": settings.model_name,
        "output_tokens": settings.output_tokens,
        "modes": [mode],
        "decoding": mode,
        "concurrency": settings.concurrency,
        "prompts": len(results),
        "prompts_sha256": prompts_digest([result.prompt for result in results]),
        "measuring": "one request to warm up, then as many at a time as stated",
    }
    return {
        "all": whole_load,
        "by_task": {task: summarise_load(group) for task, group in by_task.items()},
        "acceptance": with_tokens_per_step(acceptance_between(before, after), whole_load),
        "conditions": run_conditions(**conditions),
        "interrupted": len(results) < len(prompts),
    }


def summarise_load(results: Sequence[RequestResult], wall_seconds: float | None = None) -> dict[str, Any]:
    """Latencies of what was answered, and a count of everything that was asked.

    The first-token time ends with the first piece of text, which may hold several tokens. Seconds per output token are
    those between the first piece and the last, over the tokens behind the first piece; an answer of which the server
    does not tell them has no such figure, and without the server's count there are no tokens per second either.

    Args:
        wall_seconds (`float`, *optional*): Of the whole load. A part of a load shares the server with the others, so
            it has no throughput of its own.
    """
    good = [result for result in results if result.outcome == OK]
    tokens = sum(result.tokens for result in good)
    is_counted = all(result.is_counted_by_server for result in good)
    timed = [
        Timed(
            result.prompt.digest,
            result.seconds,
            result.first_token_seconds,
            result.tokens,
            first_tokens=result.tokens_of_first_piece,
            last_token_seconds=result.last_token_seconds,
        )
        for result in good
    ]
    return {
        "requests": len(results),
        "outcomes": dict(Counter(result.outcome for result in results)),
        "failures": dict(Counter(result.detail for result in results if result.outcome != OK)),
        "retries": dict(sum((result.retries for result in results), Counter())),
        "wall_seconds": wall_seconds,
        "output_tokens": tokens,
        "pieces": sum(result.pieces for result in good),
        "tokens_counted_by": "the server" if is_counted else "pieces of text",
        "effective_tps_with_bonus": tokens / wall_seconds if wall_seconds is not None and is_counted else None,
        "latency": latencies(timed) if timed else None,
    }


def read_spec_metrics(settings: EndpointSettings, seconds: float = 10.0) -> dict[str, float]:
    """vLLM's `vllm:spec_decode_*` counters at `/metrics`, summed over engines; empty where there are none."""
    import httpx

    address = re.sub(r"/v1/?$", "", settings.url.rstrip("/")) + "/metrics"
    try:
        answer = httpx.get(address, timeout=seconds, **settings.client_options())
    except httpx.HTTPError:
        return {}
    return parse_spec_metrics(answer.text) if answer.status_code == 200 else {}


def parse_spec_metrics(text: str) -> dict[str, float]:
    """Counters in Prometheus' text format by name; those by position as "name[position]"."""
    from prometheus_client.parser import text_string_to_metric_families

    counters: dict[str, float] = {}
    for line in text.split("\n"):  # not splitlines: a label may hold other line ends
        line = line.rstrip("\r")
        if not line.startswith(PREFIX):
            continue
        with suppress(ValueError):  # a line that is none costs only itself
            (sample,) = next(iter(text_string_to_metric_families(line + "\n"))).samples
            name = sample.name.removesuffix("_total")
            if (position := sample.labels.get("position", "")).isdecimal():
                name += f"[{position}]"
            if math.isfinite(sample.value) and not name.endswith("_created"):
                counters[name] = counters.get(name, 0.0) + sample.value
    return counters


def acceptance_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any] | None:
    """Acceptance of a run from vLLM's counters around it; `None` where there are none, or they were reset.

    As vLLM counts: drafts behind the end of a text are drafts, and each step has a bonus, emitted or not.
    """
    names = [f"{PREFIX}num_drafts", f"{PREFIX}num_draft_tokens", f"{PREFIX}num_accepted_tokens"]
    if any(name not in after for name in names):
        return None
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps, drafted, accepted = (grown[name] for name in names)
    if min(grown.values()) < 0 or not steps or not drafted:
        return None
    by_position = {
        int(name[:-1].rsplit("[", 1)[1]): value / steps
        for name, value in grown.items()
        if name.startswith(f"{PREFIX}num_accepted_tokens_per_pos[")
    }
    return {
        "num_spec_steps": int(steps),
        "num_draft_tokens": int(drafted),
        "num_accepted_draft_tokens": int(accepted),
        "draft_acceptance_rate": accepted / drafted,
        "wasted_ratio": 1.0 - accepted / drafted,
        "mean_accepted_length": accepted / steps,
        "mean_acceptance_length": 1.0 + accepted / steps,
        "acceptance_rate_per_position": [by_position[position] for position in sorted(by_position)],
    }


def with_tokens_per_step(acceptance: Mapping[str, Any] | None, load: Mapping[str, Any]) -> dict[str, Any] | None:
    """Acceptance of [`acceptance_between`] with `tokens_per_step`, from the tokens of the load's answers.

    The first token of an answer comes from its prefill, the others from steps, as long as each step drafts. `None`
    where tokens were not counted by the server, where an answer is not whole, or where the counters are of more than
    this load.
    """
    if acceptance is None:
        return None
    answers, steps = load["outcomes"].get(OK, 0), acceptance["num_spec_steps"]
    accepted, emitted = acceptance["num_accepted_draft_tokens"], load["output_tokens"] - answers
    is_whole = answers == load["requests"] and load["tokens_counted_by"] == "the server"
    rate = None
    if is_whole and emitted >= accepted:
        rate = tokens_per_step(min(emitted, accepted + steps), steps)  # no step emits more than one token of its own
    return {**acceptance, "tokens_per_step": rate}


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
    if record["all"]["latency"] and record["all"]["tokens_counted_by"] != "the server":
        remarks.append(
            Remark(
                "The server does not count tokens, and a piece of text may hold several: no rate is given.", "yellow"
            )
        )
    if record.get("interrupted"):
        remarks.append(Remark("The load was interrupted: unfinished requests are missing.", "yellow"))
    acceptance = record["acceptance"]
    if acceptance is None:
        remarks.append(Remark(f"The server does not report its drafts (no {PREFIX}* at /metrics)."))
    else:
        rate = acceptance["tokens_per_step"]
        remarks.append(
            Remark(
                f"{'unknown' if rate is None else format(rate, '.2f')} tokens per step; mean acceptance length "
                f"{1.0 + acceptance['mean_accepted_length']:.2f} (accepted drafts + 1), "
                f"{acceptance['draft_acceptance_rate']:.1%} of drafts accepted, {acceptance['wasted_ratio']:.1%} "
                "wasted, by the server's own counters"
            )
        )
    table = ResultTable(record["conditions"]["target"], ("task",), ("outcomes", *TIMES), rows)
    return Presentation(f"Endpoint: {record['conditions']['target']}", [table], remarks, record["conditions"])


def _cells(part: Mapping[str, Any]) -> list[str]:
    times, rate = part["latency"], part["effective_tps_with_bonus"]
    if times is None:
        return ["–"] * len(TIMES)
    per_token = times["seconds_per_output_token"]
    return [
        *(f"{times['latency_seconds'][key]:.2f}" for key in ("p50", "p95", "p99")),
        f"{times['first_token_seconds']['p50']:.3f}",
        "–" if per_token is None else f"{1e3 * per_token['p50']:.1f}",
        "–" if rate is None else f"{rate:.1f}",
    ]
