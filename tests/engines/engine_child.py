"""Runs requests in vLLM, in a process of its own: `python engine_child.py plan.json answers.json`.

The plan: arguments of `LLM`, and scenarios `{name: {"requests": [...], "fault": ...}}`. A request has `prompt` (token
ids), `params` (of `SamplingParams`) and, to be aborted, `abort_after`: the number of its tokens to wait for.
"""

import json
import os
import sys
import time
from pathlib import Path


def run(engine, name: str, requests: list[dict], sampling) -> list[dict]:
    """The answers of one scenario, whose requests all arrive at once."""
    ids = [f"{name}-{index}" for index in range(len(requests))]
    for request_id, request in zip(ids, requests, strict=True):
        params = sampling(temperature=0.0, **request["params"])
        engine.add_request(request_id, {"prompt_token_ids": request["prompt"]}, params)
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (text,) = output.outputs
            answers[output.request_id] = {
                "token_ids": list(text.token_ids),
                "text": text.text,
                "finish_reason": text.finish_reason,
            }
            limit = requests[ids.index(output.request_id)].get("abort_after")
            if limit is not None and not output.finished and len(text.token_ids) >= limit:
                engine.abort_request([output.request_id])
                answers[output.request_id]["finish_reason"] = "abort"
    return [answers[request_id] for request_id in ids]


def main() -> None:
    from vllm import LLM, SamplingParams

    plan = json.loads(Path(sys.argv[1]).read_text())
    started = time.time()
    llm = LLM(**plan["engine"])
    seconds = {"start": time.time() - started}
    answers, metrics = {}, {}
    for name, scenario in plan["scenarios"].items():
        os.environ["BLOCK_FAULT"] = scenario.get("fault") or ""
        started = time.time()
        before = _counters(llm)
        answers[name] = run(llm.llm_engine, name, scenario["requests"], SamplingParams)
        metrics[name] = {key: value - before.get(key, 0) for key, value in _counters(llm).items()}
        seconds[name] = time.time() - started
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "metrics": metrics, "seconds": seconds}))


def _counters(llm) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


if __name__ == "__main__":
    main()
