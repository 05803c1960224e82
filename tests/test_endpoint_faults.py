"""Faults below the stream of events: bytes that do not decode, and a server that never begins to answer."""

import time

from openai_server import Handler, serving

from hf_dflow.bench.endpoint import EndpointSettings, run_load
from hf_dflow.bench.workloads import Prompt

QUICK = {"stall_seconds": 0.5, "request_seconds": 1.5, "backoff_seconds": 0.02, "connect_seconds": 2.0}


def packed(self, attempt):
    """Says gzip, and sends none."""
    text = b"data: none of it is packed\n\n"
    self._head(200, {"Content-Type": "text/event-stream", "Content-Encoding": "gzip", "Content-Length": str(len(text))})
    self.wfile.write(text)


def mute(self, attempt):
    """Takes the request and says nothing, not even a status."""
    self.server.released.wait(20)


def test_one_broken_answer_takes_no_other_with_it(monkeypatch):
    """Bug: an exception of the HTTP library that nobody thought of ends the whole load, and all results are lost."""
    monkeypatch.setattr(Handler, "_packed", packed, raising=False)
    monkeypatch.setattr(Handler, "_mute", mute, raising=False)
    began = time.monotonic()
    with serving() as server:
        settings = EndpointSettings(server.url, "tiny", concurrency=4, **QUICK)
        results, _ = run_load(settings, [Prompt("chat", text) for text in ("ok 1", "packed", "mute", "ok 2")])
    assert [one.outcome for one in results] == ["ok", "malformed", "stalled", "ok"]
    assert "encoding" in results[1].detail and time.monotonic() - began < 15
