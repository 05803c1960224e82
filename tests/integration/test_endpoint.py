"""A load on real servers: what they do wrong is counted, retried or reported, nothing is lost, and it ends."""

import json
import shutil
import subprocess
import time

import pytest
from openai_server import WORDS, Handler, serving
from typer.testing import CliRunner

from hf_dflow.bench.endpoint import KEY_VARIABLE, EndpointSettings, run_load
from hf_dflow.bench.endpoint_record import (
    acceptance_between,
    measure,
    parse_spec_metrics,
    summarise_load,
    with_tokens_per_step,
)
from hf_dflow.bench.workloads import Prompt
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError

KEY = "sk-this-must-not-be-seen"
QUICK = {"stall_seconds": 0.5, "request_seconds": 1.5, "backoff_seconds": 0.02, "connect_seconds": 2.0}


@pytest.fixture
def server():
    with serving() as running:
        yield running


def load(server, texts, **options):
    settings = EndpointSettings(server.url, "tiny", **{**QUICK, **options})
    results, seconds = run_load(settings, [Prompt("chat", text) for text in texts])
    assert [result.prompt.text for result in results] == list(texts)
    assert seconds < settings.seconds_at_most(len(texts))
    return results, summarise_load(results, seconds)


def test_a_whole_answer(server, monkeypatch):
    """Bug: text lost between pieces, pieces counted though the server counts tokens, or times of the wrong moment."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (result,), summary = load(
        server, ["ok 1"], output_tokens=9, temperature=0.5, max_tokens_field="max_completion_tokens"
    )
    assert result.outcome == "ok" and result.text == "".join(WORDS)
    assert result.tokens == 7 and result.is_counted_by_server
    assert 0.02 <= result.first_token_seconds < result.seconds - 0.04
    body = server.bodies[0]
    assert (body["max_completion_tokens"], body["temperature"]) == (9, 0.5) and "max_tokens" not in body
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(result) + json.dumps(summary)
    assert summary["output_tokens"] == 7 and summary["tokens_counted_by"] == "the server"
    assert result.pieces == 4 and summary["latency"]["seconds_per_output_token"] is None  # 7 tokens in 4 pieces (N10)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_pieces_of_any_size(server):
    """Bug: an event, or a character, that two network packets cut in half."""
    (result,), summary = load(server, ["torn"])
    assert result.text == "né" and result.tokens == 1 and summary["tokens_counted_by"] == "pieces of text"


def test_a_reason_to_end_is_an_end(server):
    """Bug: whole answers called cut, because not every server says [DONE]."""
    (result,), summary = load(server, ["finished"], retries=0)
    assert result.outcome == "ok" and result.text == "The" and result.tokens == 3
    assert summary["outcomes"] == {"ok": 1} and summary["tokens_counted_by"] == "the server"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("stall", "stalled"),
        ("drip", "stalled"),
        ("mute", "stalled"),
        ("cut", "cut"),
        ("undone", "cut"),
        ("broken", "refused"),
        ("wrong", "refused"),
        ("garbage", "malformed"),
        ("packed", "malformed"),
        ("error", "refused"),
        ("endless", "malformed"),
        ("silent", "empty"),
    ],
)
def test_what_goes_wrong_is_named(server, text, outcome):
    """Bug: half an answer counted as a fast one, an exception that ends the whole run, or a run that never ends."""
    (result,), summary = load(server, [text], retries=0)
    assert result.outcome == outcome and result.detail
    assert summary["outcomes"] == {outcome: 1} and summary["latency"] is None
    assert summary["effective_tps_with_bonus"] == 0.0


def chunk(delta=None, finish=None, **fields):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **fields}


WHOLE = {"content": "text"}
DONE = "[DONE]"
STREAMS = {
    "counts what it does not say": ([{"usage": {"completion_tokens": 64}}, DONE], "empty", 64),
    "counts none": ([chunk(WHOLE), {"usage": {"completion_tokens": 0}}, DONE], "ok", 1),
    "a count that overflows": ([chunk(WHOLE), {"usage": {"completion_tokens": 10**400}}, DONE], "malformed", 0),
    "a count that is none": ([chunk(WHOLE), {"usage": {"completion_tokens": True}}, DONE], "malformed", 0),
    "thoughts": ([chunk({"reasoning": "a thought"}), {"usage": {"completion_tokens": 5}}, DONE], "ok", 5),
    "no delta at the end (N6)": ([chunk(WHOLE), {"choices": [{"finish_reason": "stop"}]}, DONE], "ok", 1),
    "a null delta (N6)": ([chunk(WHOLE), chunk(None, "stop")], "ok", 1),
    "usage of nothing (N6)": ([chunk(WHOLE, usage={}), chunk(WHOLE, usage={"prompt_tokens": 3}), DONE], "ok", 2),
    "a whole number as a fraction (N6)": ([chunk(WHOLE), {"usage": {"completion_tokens": 2.0}}, DONE], "ok", 2),
    "an error object (N8)": ([chunk(WHOLE), {"object": "error", "message": "out of memory"}, DONE], "refused", 1),
    "an error detail (N8)": ([chunk(WHOLE), {"detail": "out of memory"}, DONE], "refused", 1),
    "an aborted answer (N8)": ([chunk(WHOLE), chunk({}, "abort"), DONE], "refused", 1),
    "an event over two lines (N11)": (['{"choices": [{"delta":\ndata: {"content": "text"}}]}', DONE], "ok", 1),
    "nothing in an event (N6)": ([chunk(WHOLE, error={}, detail=None), "null", "", DONE], "ok", 1),
    "text in parts (N6)": ([chunk({"content": [{"type": "text", "text": "a"}, {"type": "image"}]}), DONE], "ok", 1),
    "an error by its type (N8)": ([chunk(WHOLE), {"type": "error", "message": "out of memory"}, DONE], "refused", 1),
    "a message and no choices (N8)": ([chunk(WHOLE), {"code": 500, "message": "out of memory"}, DONE], "refused", 1),
    "an error in a choice (N8)": (
        [chunk(WHOLE), {"choices": [{"error": {"message": "out of memory"}}]}, DONE],
        "refused",
        1,
    ),
    "a cancelled answer (N8)": ([chunk(WHOLE), chunk({}, {"type": "Abort"}), DONE], "refused", 1),
    "an answer filtered by its content (N8)": ([chunk(WHOLE), chunk({}, "content_filter"), DONE], "ok", 1),
    "nothing but brackets": (["[" * 100_000, DONE], "malformed", 0),
    "a byte-order mark (N11)": (["\ufeff", chunk(WHOLE), DONE], "ok", 1),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_other_servers(server, name, monkeypatch):
    """Bug: whole answers called malformed, errors called whole, or a count that is believed whatever it says."""
    events, outcome, tokens = STREAMS[name]

    def answer(self, attempt):
        self._start()
        for event in events:
            if event == "\ufeff":
                self._raw(event)
            else:
                self._raw(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
        self.wfile.write(b"0\r\n\r\n")

    monkeypatch.setattr(Handler, "_other", answer, raising=False)
    (result,), summary = load(server, ["other"], retries=0)
    assert (result.outcome, result.tokens if outcome != "refused" else 1) == (outcome, tokens), result.detail
    assert result.first_token_seconds > 0 or outcome != "ok"
    assert (summary["latency"] is None) == (outcome != "ok")
    assert outcome != "refused" or "out of memory" in result.detail or "abort" in result.detail.lower()


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_every_end_of_a_line(server, end, monkeypatch):
    """N11's kind: lines that end with a return alone, one that two packets cut in half, an event known too late."""

    def answer(self, attempt):
        self._start()
        for _ in range(2):
            self._raw(f"data: {json.dumps(chunk(WHOLE))}{end}")
            self._raw(end[:1])
            time.sleep(0.05)
            if end[1:]:
                self._raw(end[1:])
        self._raw(f"data: [DONE]{end}{end}")
        self.wfile.write(b"0\r\n\r\n")

    monkeypatch.setattr(Handler, "_other", answer, raising=False)
    (result,), _ = load(server, ["other"], retries=0)
    assert (result.outcome, result.text, result.tokens) == ("ok", "texttext", 2), result.detail
    if end == "\r":
        assert result.seconds - result.first_token_seconds > 0.08


REASON = "no such model"
BODIES = {
    "plain text": (404, REASON, REASON),
    "a page": (502, f"<html><style>p {{}}</style><body><h1>{REASON}</h1></body></html>", REASON),
    "a list of details": (422, json.dumps({"detail": [{"loc": ["body"], "msg": REASON}]}), REASON),
    "a list": (400, json.dumps([{"error": {"code": 1, "message": REASON}}]), REASON),
    "a problem": (400, json.dumps({"error": None, "title": REASON}), REASON),
    "no text": (400, b"\xff", ""),
    "brackets": (400, "[" * 100_000, "[["),
    "status 200": (200, json.dumps({"error": {"message": REASON}}, indent=1), REASON),
    "an answer in one piece": (200, json.dumps({"choices": [{"message": {"content": "x"}}]}), "no stream of events"),
}


@pytest.mark.parametrize("name", BODIES)
def test_reasons_of_other_servers(server, name, monkeypatch):
    """N9's kind: a sentence that is no `error.message` is dropped, and an error of status 200 is "cut"."""
    status, body, reason = BODIES[name]
    body = body if isinstance(body, bytes) else body.encode()

    def deny(self, attempt):
        self._head(status, {"Content-Length": str(len(body)), "Content-Encoding": "identity"})
        self.wfile.write(body)

    monkeypatch.setattr(Handler, "_deny", deny, raising=False)
    (result,), _ = load(server, ["deny"], retries=0)
    assert reason in result.detail and result.outcome in ("refused", "malformed")
    assert status == 200 or result.detail.startswith(f"status {status}")


@pytest.mark.parametrize("key", ["sk-\u2026", "sk-a\x1bb"])
def test_a_key_that_no_header_can_hold(server, key, monkeypatch):
    """N9's kind: a key copied with an ellipsis ends in a bare UnicodeEncodeError, which shows it."""
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(DFlowError, match=KEY_VARIABLE) as refusal:
        load(server, ["ok"])
    assert "sk-" not in str(refusal.value)
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\n")  # as a file holds it
    (result,), _ = load(server, ["ok"])
    assert result.outcome == "ok" and server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize(
    ("counts", "total", "tokens_timed"),
    [
        ([None, None, None], 3, 2),  # a piece is a token
        ([3, 5, 8], 8, 5),  # counted on the way: three of eight came with the first piece
        ([None, None, None], 8, None),  # how many came with the first piece, nobody knows
        ([None], 8, None),  # all of it in one piece
        ([8], 8, None),
        ([8, 8, 8], 8, None),  # the total beside each piece
        ([None, None, None], None, None),  # nobody counts: pieces are no tokens
    ],
)
def test_several_tokens_in_one_piece(server, monkeypatch, counts, total, tokens_timed):
    """N10: 0.013 ms a token for an answer of one piece, or the first piece's tokens timed as if they came later."""

    def answer(self, attempt):
        self._start()
        for count in counts:
            time.sleep(0.02)
            self._event(chunk(WHOLE, usage=None if count is None else {"completion_tokens": count}))
        time.sleep(0.1)  # what comes after the last piece of text is no token's time
        if total is not None:
            self._event({"choices": [], "usage": {"completion_tokens": total}})
        self._end(usage=False)

    monkeypatch.setattr(Handler, "_several", answer, raising=False)
    (result,), summary = load(server, ["several"])
    assert result.outcome == "ok" and result.pieces == len(counts) == summary["pieces"]
    times = summary["latency"]["seconds_per_output_token"]
    if tokens_timed is None:
        assert times is None and summary["latency"]["requests_with_time_per_token"] == 0
    else:
        assert times["p50"] * tokens_timed == pytest.approx(result.last_token_seconds - result.first_token_seconds)
        assert result.last_token_seconds < result.seconds - 0.09
    assert (summary["effective_tps_with_bonus"] is None) == (total is None)


def test_a_server_that_does_not_take_the_continuous_count(server, monkeypatch):
    """Bug: a strict server that refuses every request for a field it does not know."""
    honest = Handler._ok

    def strict(self, attempt):
        if "continuous_usage_stats" in self.server.bodies[-1]["stream_options"]:
            self._wrong(attempt)
        else:
            honest(self, attempt)

    monkeypatch.setattr(Handler, "_ok", strict)
    record = measure(EndpointSettings(server.url, "tiny", **QUICK), [Prompt("chat", "ok 1"), Prompt("chat", "ok 2")])
    assert record["all"]["outcomes"] == {"ok": 2}


def test_an_interrupted_load_keeps_its_finished_requests(server):
    """N18: Ctrl-C during a load, after which nothing is known of the requests that were answered."""
    settings = EndpointSettings(server.url, "tiny", **QUICK)
    done = []

    def interrupt():
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    results, _ = run_load(settings, [Prompt("chat", f"ok {i}") for i in range(4)], interrupt)
    assert [result.prompt.text for result in results] == ["ok 0", "ok 1"]


def test_retries(server):
    """Bug: a refusal for now that counts as a failure, one that is retried for ever, or a retry nobody hears of."""
    results, summary = load(server, ["busy", "broken", "wrong", "cut"], retries=2)
    busy, broken, wrong, cut = results
    assert busy.outcome == "ok" and busy.retries == {"status 429": 1}
    assert broken.outcome == "refused" and broken.retries == {"status 500": 2} and server.tries["broken"] == 3
    assert wrong.outcome == "refused" and server.tries["wrong"] == 1  # asking again changes nothing
    assert cut.outcome == "cut" and server.tries["cut"] == 1
    assert summary["retries"] == {"status 429": 1, "status 500": 2}
    assert summary["failures"] == {"status 500": 1, wrong.detail: 1, cut.detail: 1}
    assert busy.seconds < 1.0  # of the try that worked, not of the waiting before


def test_a_refusal_says_why(server, monkeypatch):
    """N9: 401 for a missing and for a wrong key alike, the server's sentence dropped, or what it sends as commands."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    body = json.dumps({"error": {"message": f"no\x1b[31m such key {KEY}: " + "x" * 1000}})

    def deny(self, attempt):
        self._head(401, {"Content-Length": str(len(body))})
        self.wfile.write(body.encode())

    monkeypatch.setattr(Handler, "_deny", deny, raising=False)
    (result,), _ = load(server, ["deny"])
    assert result.detail.startswith("status 401: no [31m such key …: xxx") and len(result.detail) < 300
    with pytest.raises(DFlowError, match=r"127\.0\.0\.1.*status 401: no"):
        measure(EndpointSettings(server.url, "tiny", **QUICK), [Prompt("chat", "deny"), Prompt("chat", "ok")])
    assert server.tries["ok"] == 0


def test_a_mixed_load_loses_nothing(server):
    """Bug: a failure that takes its neighbours down, or that is forgotten."""
    texts = [f"{kind} {i}" for i in range(3) for kind in ("ok", "cut", "busy", "garbage", "stall", "packed")]
    began = time.monotonic()
    _, summary = load(server, texts, concurrency=6)
    assert time.monotonic() - began < 20
    assert summary["requests"] == 18 and sum(summary["outcomes"].values()) == 18
    assert summary["outcomes"] == {"ok": 6, "cut": 3, "malformed": 6, "stalled": 3}
    assert summary["latency"]["requests"] == 6 and summary["output_tokens"] == 6 * 7


def test_so_many_at_a_time(server):
    """Bug: one request after the other under the name of eight at once, or all of them together."""
    load(server, [f"ok {i}" for i in range(12)], concurrency=4)
    assert server.most_open == 4


def test_nobody_there():
    """Bug: an unreachable server that ends in a traceback, or a whole run of failures against a dead port (N9)."""
    settings = EndpointSettings("http://127.0.0.1:9/v1", "tiny", retries=1, **QUICK)
    (result,), _ = run_load(settings, [Prompt("chat", "ok")])
    assert result.outcome == "unreachable" and sum(result.retries.values()) == 1
    with pytest.raises(DFlowError, match="no connection"):
        measure(settings, [Prompt("chat", "ok")])


def test_a_private_certificate(tmp_path, monkeypatch):
    """N7: a self-signed certificate that can never be trusted, is retried, and is called "ConnectError"."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with serving(certificate, key) as server:
        (result,), _ = load(server, ["ok"])
        assert result.outcome == "unreachable" and "--ca-file" in result.detail and not result.retries
        (named,), _ = load(server, ["ok"], ca_file=certificate)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        (from_environment,), _ = load(server, ["ok"])
        server.url = server.url.replace("127.0.0.1", "localhost")
        (of_another,), _ = load(server, ["ok"])
        for missing, reason in ((tmp_path / "none.pem", "No such file"), (key, "certificate")):
            with pytest.raises(DFlowError, match=f"{missing.name}.*{reason}"):
                load(server, ["ok"], ca_file=missing)
    with serving() as server:
        server.url = server.url.replace("http:", "https:")
        (plain,), _ = load(server, ["ok"])
    assert "WRONG_VERSION_NUMBER" in plain.detail and not plain.retries
    assert "localhost" in of_another.detail and "--ca-file" not in of_another.detail
    assert named.outcome == from_environment.outcome == "ok"


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a {b}, c"} %d.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} %d.0
vllm:num_requests_running{engine="0"} 3.0
"""


def test_acceptance_is_the_difference():
    """Bug: what the server did before the run counted as the run's, the bonus as a draft; N13: a brace in a label."""
    before = parse_spec_metrics(METRICS % (100, 200, 20, 15, 5))
    after = parse_spec_metrics(METRICS % (110, 220, 35, 24, 11))
    found = acceptance_between(before, after)
    assert found["num_spec_steps"] == 10 and found["num_draft_tokens"] == 20
    assert found["draft_acceptance_rate"] == 0.75 and found["mean_acceptance_length"] == 2.5
    assert found["acceptance_rate_per_position"] == [0.9, 0.6]
    load = {"outcomes": {"ok": 2}, "requests": 2, "output_tokens": 24, "tokens_counted_by": "the server"}
    assert with_tokens_per_step(found, load)["tokens_per_step"] == 2.2  # 10 steps, of which the ends cut 3 tokens
    for change in ({"requests": 3}, {"tokens_counted_by": "pieces of text"}, {"output_tokens": 12}):
        assert with_tokens_per_step(found, {**load, **change})["tokens_per_step"] is None, "unknown here"
    assert with_tokens_per_step(None, load) is None
    assert acceptance_between({}, parse_spec_metrics("vllm:num_requests_running 1.0\n")) is None
    assert acceptance_between(after, before) is None  # restarted in between
    two = parse_spec_metrics((METRICS % (1, 2, 1, 1, 0)).replace('"0",m', '"1",m') + METRICS % (1, 2, 1, 1, 0))
    assert two["vllm:spec_decode_num_drafts"] == 2.0  # engines add up
    name = "vllm:spec_decode_num_drafts_total"  # lines that are none cost no figure
    odd = f'{name}{{model_name="a\u2028b\x85c"}} 2\r\n'
    assert parse_spec_metrics(odd) == {name.removesuffix("_total"): 2.0}
    assert parse_spec_metrics(f"{name} e\n{name} --\n{name} 1e999\n{name} 3\n") == {name.removesuffix("_total"): 3.0}
    assert acceptance_between({}, parse_spec_metrics(f"{name} 1e999")) is None


def test_command(server, tmp_path, monkeypatch):
    """Bug: a key in the record or on the screen, failures that end with 0, or metrics that are not read; N12: rates of
    tasks that are a share of the whole load's."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    counts = iter([(100, 200, 20, 15, 5), (110, 220, 35, 24, 11)])
    server.metrics = lambda: METRICS % next(counts)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "ok 1", "task": "chat"}\n{"prompt": "busy", "task": "code"}\n')
    options = ["--endpoint", server.url, "--model", "tiny", "--jsonl", str(prompts), "--json", str(out)]
    options += ["--server", "stand-in 1"]
    result = CliRunner().invoke(app, ["bench", "endpoint", *options, "--concurrency", "2"])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert KEY not in result.output + out.read_text()
    assert record["all"]["outcomes"] == {"ok": 2} and set(record["by_task"]) == {"chat", "code"}
    assert record["all"]["effective_tps_with_bonus"] > 0
    assert all(task["effective_tps_with_bonus"] is None for task in record["by_task"].values())
    assert record["acceptance"]["draft_acceptance_rate"] == 0.75
    conditions = record["conditions"]
    assert conditions["concurrency"] == 2 and conditions["target"] == "tiny" and conditions["server"] == "stand-in 1"
    assert "torch" not in conditions["versions"]  # of a client it says nothing
    prompts.write_text('{"prompt": "cut"}\n')
    failed = CliRunner().invoke(app, ["bench", "endpoint", *options])
    assert failed.exit_code == 1 and "cut" in failed.output


@pytest.mark.parametrize(
    ("model", "recorded"),
    [
        ("/home/somebody/models/tiny/", "tiny"),
        ("./models/tiny", "tiny"),
        ("C:\\models\\tiny", "tiny"),
        ("org/tiny", "org/tiny"),
        ("tiny", "tiny"),
    ],
)
def test_a_record_holds_no_path_of_the_server(model, recorded):
    """Bug: a folder of somebody's machine in a record that is published, or a repository without its owner."""
    assert EndpointSettings("http://host/v1", model).model_name == recorded


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("localhost:8000", {}),
        ("http://name:secret@host/v1", {}),
        ("http://host:99999/v1", {}),
        ("http://[host/v1", {}),
        ("http:///v1", {}),
        ("http://host:port/v1", {}),
        ("http://host/v1", {"concurrency": 0}),
        ("http://host/v1", {"request_seconds": 0}),
        ("http://host/v1", {"stall_seconds": float("nan")}),
        ("http://host/v1", {"request_seconds": float("inf")}),
    ],
)
def test_impossible_loads_are_refused(url, options):
    """Bug: a password in the address, which every record would repeat; an exception of httpx; a wait without an end."""
    with pytest.raises(DFlowError) as caught:
        EndpointSettings(url, "tiny", **options)
    assert "secret" not in str(caught.value)


def test_a_run_and_a_load_that_were_really_measured(server, tmp_path):
    """Bug: two commands that call the same condition by different names, so that their records never meet."""
    prompts, here, there = (tmp_path / name for name in ("own.jsonl", "here.json", "there.json"))
    prompts.write_text('{"prompt": "ok 1", "task": "chat"}\n{"prompt": "ok 2", "task": "chat"}\n')
    load = ["--jsonl", str(prompts), "--output-tokens", "4", "--concurrency", "2"]
    run = ["run", "--tiny", "--strategy", "dflash", *load, "--json", str(here), "--dtype", "float64"]
    endpoint = ["endpoint", "--endpoint", server.url, "--model", "tiny", *load, "--json", str(there)]
    for options in (run, endpoint, ["report", str(here), str(there), "--allow-open"]):
        result = CliRunner().invoke(app, ["bench", *options])
        assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("T=0 ") or " all " in line]
    assert {"here", "there"} <= {word for row in rows for word in row}
    for record in (here, there):
        assert json.loads(record.read_text())["conditions"]["workload"] == "own.jsonl"
