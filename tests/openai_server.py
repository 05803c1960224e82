"""An OpenAI-compatible server on loopback that streams, and misbehaves where a prompt asks for it."""

import json
import ssl
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["The", " answer", " is", " 42"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        text = self.server.metrics()
        self._head(200, {"Content-Type": "text/plain", "Content-Length": str(len(text))})
        self.wfile.write(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.tries[prompt] += 1
            attempt = self.server.tries[prompt]
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
        try:
            getattr(self, "_" + prompt.split()[0], self._ok)(attempt)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self.server.lock:
                self.server.open -= 1

    def _head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _start(self):
        self._head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})

    def _raw(self, text):
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _event(self, event):
        self._raw(f"data: {json.dumps(event)}\n\n")

    def _say(self, text):
        self._event({"choices": [{"index": 0, "delta": {"content": text}}]})

    def _end(self, usage=True):
        if usage:
            self._event({"choices": [], "usage": {"completion_tokens": 7}})
        self._raw("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _ok(self, attempt):
        self._start()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self._raw(": a comment\n\n")
        for word in WORDS:
            time.sleep(0.02)
            self._say(word)
        self._end()

    def _torn(self, attempt):
        """One event in three pieces, in the middle of a character too."""
        self._start()
        data = 'data: {"choices": [{"index": 0, "delta": {"content": "né"}}]}\r\n\r\n'.encode()
        cut = data.index("é".encode()) + 1
        for piece in (data[:9], data[9:cut], data[cut:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
            time.sleep(0.02)
        self._end(usage=False)

    def _stall(self, attempt):
        self._start()
        self._say("The")
        self.server.released.wait(20)

    def _drip(self, attempt):
        """Never silent, never done."""
        self._start()
        while not self.server.released.wait(0.05):
            self._raw(": keep-alive\n\n")

    def _cut(self, attempt):
        self._start()
        self._say("The")
        self.close_connection = True
        self.connection.close()

    def _undone(self, attempt):
        self._start()
        self._say("The")
        self.wfile.write(b"0\r\n\r\n")

    def _finished(self, attempt):
        """Ends with a reason and the count instead of [DONE], as transformers' server does."""
        self._start()
        self._say("The")
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 3}}
        self._event(end)
        self.wfile.write(b"0\r\n\r\n")

    def _busy(self, attempt):
        if attempt == 1:
            self._head(429, {"Retry-After": "0.05", "Content-Length": "0"})
        else:
            self._ok(attempt)

    def _broken(self, attempt):
        self._head(500, {"Content-Length": "0"})

    def _wrong(self, attempt):
        self._head(400, {"Content-Length": "0"})

    def _garbage(self, attempt):
        self._start()
        self._say("The")
        self._raw('data: {"choices": [{"delta"\n\n')
        self._end()

    def _error(self, attempt):
        self._start()
        self._event({"error": {"message": "out of memory"}})
        self._end()

    def _endless(self, attempt):
        self._start()
        while not self.server.released.is_set():
            self._raw("x" * 65536)

    def _packed(self, attempt):
        """Says gzip, and sends none."""
        text = b"data: none of it is packed\n\n"
        packed = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip", "Content-Length": str(len(text))}
        self._head(200, packed)
        self.wfile.write(text)

    def _mute(self, attempt):
        """Takes the request and says nothing, not even a status."""
        self.server.released.wait(20)

    def _silent(self, attempt):
        self._start()
        self._raw("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def serving(certificate=None, key=None):
    """The server, on a free port; its `url` ends in /v1. With the files of a certificate it speaks TLS."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.released = threading.Lock(), threading.Event()
    server.bodies, server.keys, server.tries, server.open, server.most_open = [], [], Counter(), 0, 0
    server.metrics = lambda: ""
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
