"""A load on transformers' own server, which streams and counts in its own way."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from hf_dflow.bench.endpoint import EndpointSettings, run_load
from hf_dflow.bench.endpoint_record import measure, summarise_load
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.strategies import Contestant, Mode, decode
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import read_prompts

NEW_TOKENS = 12
missing = [name for name in ("fastapi", "uvicorn", "openai", "pydantic") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"transformers serve needs {', '.join(missing)}")


@contextmanager
def transformers_serve(folder, log):
    """`transformers serve` of a model in `folder`, on a free port; its address up to /v1."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as said:
        server = subprocess.Popen(command, cwd=folder.parent, env=environment, stdout=said, stderr=said)
    try:
        give_up = time.monotonic() + 180
        while True:
            assert server.poll() is None and time.monotonic() < give_up, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_a_real_server_answers_with_the_targets_own_text(tmp_path):
    """Bug: whole answers counted as cut, tokens counted by pieces, another prompt than the target's template makes."""
    prompts, pair = read_prompts(TINY_PROMPTS)[:3], load_pair(TINY_TARGET, TINY_DRAFTER)
    runs = [decode(pair.target, pair.encode(one.text), Contestant("plain"), Mode(), NEW_TOKENS) for one in prompts]
    texts = [pair.tokenizer.decode(run.new_tokens, skip_special_tokens=True) for run in runs]
    with transformers_serve(TINY_TARGET, tmp_path / "log") as address:
        settings = EndpointSettings(address, TINY_TARGET.name, output_tokens=NEW_TOKENS, concurrency=2)
        results, seconds = run_load(settings, prompts)
        record = measure(settings, prompts[:1])
        refused, _ = run_load(EndpointSettings(address, "no-such-model", retries=0), prompts[:1])
    assert [one.outcome for one in results] == ["ok"] * 3, [one.detail for one in results]
    assert [one.text.split() for one in results] == [text.split() for text in texts]
    summary = summarise_load(results, seconds)
    assert summary["output_tokens"] == sum(len(run.new_tokens) for run in runs)
    assert summary["tokens_counted_by"] == "the server" and summary["latency"]["requests"] == 3
    assert record["all"]["outcomes"] == {"ok": 1} and record["acceptance"] is None
    assert refused[0].outcome == "refused" and "status 4" in refused[0].detail
