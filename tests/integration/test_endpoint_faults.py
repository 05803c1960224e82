"""Faults below the stream of events: bytes that do not decode, and a server that never begins to answer."""

import time

import pytest
from openai_server import Handler, serving

from hf_dflow.bench.endpoint import EndpointSettings, run_load
from hf_dflow.bench.endpoint_record import acceptance_between, parse_spec_metrics, summarise_load
from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

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


def lying(count, text="", key="content"):
    """A whole answer with `text` under `key`, of which the server says that it is `count` tokens."""

    def answer(self, attempt):
        self._start()
        if text:
            self._event({"choices": [{"index": 0, "delta": {key: text}}]})
        self._event({"choices": [], "usage": {"completion_tokens": count}})
        self._end(usage=False)

    return answer


@pytest.mark.parametrize(
    ("answer", "outcome", "tokens"),
    [
        (lying(64), "empty", 64),
        (lying(0, "text"), "ok", 1),
        (lying(10**400, "text"), "malformed", 0),
        (lying(True, "text"), "malformed", 0),
        (lying(5, "a thought", "reasoning"), "ok", 5),
    ],
)
def test_a_server_that_counts_what_it_does_not_say(monkeypatch, answer, outcome, tokens):
    """Bug: a first token after 0 seconds where none came, text that is called none, or a count that overflows."""
    monkeypatch.setattr(Handler, "_lie", answer, raising=False)
    with serving() as server:
        results, seconds = run_load(EndpointSettings(server.url, "tiny", **QUICK), [Prompt("chat", "lie")])
    (one,) = results
    assert (one.outcome, one.tokens) == (outcome, tokens)
    assert one.first_token_seconds > 0 or outcome != "ok"
    assert (summarise_load(results, seconds)["latency"] is None) == (outcome != "ok")


def test_counters_that_are_no_numbers_cost_no_figure():
    """Bug: a word in a server's /metrics, read when all is measured, that loses everything."""
    name = "vllm:spec_decode_num_drafts_total"
    assert parse_spec_metrics(f"{name} e\n{name} --\n{name} 1e999\n{name} 3\n") == {"vllm:spec_decode_num_drafts": 3.0}
    assert acceptance_between({}, parse_spec_metrics(f"{name} 1e999")) is None


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://host:99999/v1", {}),
        ("http://[host/v1", {}),
        ("http:///v1", {}),
        ("http://host:port/v1", {}),
        ("http://host/v1", {"stall_seconds": float("nan")}),
        ("http://host/v1", {"request_seconds": float("inf")}),
    ],
)
def test_an_address_or_a_limit_that_is_none(url, options):
    """Bug: the HTTP library's own exception, or a wait without an end."""
    with pytest.raises(DFlowError):
        EndpointSettings(url, "tiny", **options)
