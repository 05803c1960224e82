"""Load on an OpenAI-compatible endpoint: streaming requests, so many at a time, each counted whatever becomes of it.

The key is read from the environment, sent in the header, and appears in no record, message or exception.
"""

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

KEY_VARIABLE = "OPENAI_API_KEY"
RETRIED = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT = 10.0  # seconds that a server's Retry-After may ask for
LONGEST_LINE = 2**20  # characters without an end of line, after which a stream is no stream of events
LONGEST_REASON = 200  # characters of a server's own words
LONGEST_BODY = 2**16  # characters of a body that are read for them
# Where servers put these words, and what they call the end of an answer that they did not finish.
REASONS = ("error", "errors", "message", "detail", "msg", "error_msg", "title", "reason")
BROKEN_OFF = ("error", "abort", "aborted", "cancelled", "canceled", "failed", "timeout")
TEXTS = ("content", "reasoning_content", "reasoning")  # of a piece; servers name a model's thoughts in two ways
ONE_EACH = 0.9  # pieces for each token, from which a piece counts as one token: some tokens are no text
CONTINUOUS = {"continuous_usage_stats": True}  # vLLM's and SGLang's: usage beside each piece of text
LARGEST_COUNT = 10**9  # tokens of an answer, above which a server's count is not believed

OK, STALLED, CUT, MALFORMED, REFUSED, UNREACHABLE, EMPTY = (
    "ok", "stalled", "cut", "malformed", "refused", "unreachable", "empty",
)  # fmt: skip


@dataclass(frozen=True)
class EndpointSettings:
    """How a load is put on an endpoint. An answer that broke off is not asked for again: its failure is a result."""

    url: Annotated[str, typer.Option("--endpoint", help="Address of an OpenAI-compatible server, up to and with /v1.")]
    model: Annotated[str, typer.Option(help="As the server calls it.")]
    server: Annotated[str | None, typer.Option(help="What serves, and with which drafter: for the record.")] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at any time.")] = 1
    output_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    retries: Annotated[int, typer.Option(min=0, help="Of a request that was refused for now.")] = 2
    connect_seconds: Annotated[float, typer.Option(help="Longest wait for a connection.")] = 10.0
    stall_seconds: Annotated[float, typer.Option(help="Longest silence within an answer.")] = 30.0
    request_seconds: Annotated[float, typer.Option(help="Longest answer.")] = 300.0
    backoff_seconds: Annotated[float, typer.Option(help="First pause before a retry; it doubles each time.")] = 0.5
    max_tokens_field: Annotated[
        str, typer.Option(help="How the server calls the longest answer: max_tokens or max_completion_tokens.")
    ] = "max_tokens"
    continuous_usage: Annotated[
        bool, typer.Option(help="Ask for the count of tokens beside each piece of text, where the server takes it.")
    ] = True
    ca_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Certificates to trust; SSL_CERT_FILE by default.")
    ] = None

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise DFlowError(f"--endpoint {self.url}: give an address that starts with http:// or https://")
        if "@" in self.url.split("://", 1)[1].split("/", 1)[0]:
            raise DFlowError("--endpoint holds a user name or password; keys belong into the environment, not into it")
        if not _has_host(self.url):
            raise DFlowError(f"--endpoint {self.url}: give its server and port, as in http://HOST:8000/v1")
        if min(self.concurrency, self.output_tokens) < 1 or self.retries < 0:
            raise DFlowError("concurrency and output tokens must be 1 or more, retries 0 or more")
        limits = (self.connect_seconds, self.stall_seconds, self.request_seconds)
        if not all(0 < limit < math.inf for limit in limits):
            raise DFlowError("time limits must be above 0 seconds, and finite")

    @property
    def model_name(self) -> str:
        """The model in records. Some servers call it by its folder, of which only the last part is kept."""
        is_path = self.model.startswith(("/", "./", "../", "~")) or "\\" in self.model
        return re.split(r"[/\\]", self.model.rstrip("/\\"))[-1] if is_path else self.model

    def seconds_at_most(self, requests: int) -> float:
        """An upper bound of the time that so many requests take, whatever the server does."""
        a_try = self.connect_seconds + self.request_seconds
        return -(-requests // self.concurrency) * ((1 + self.retries) * a_try + self.retries * LONGEST_WAIT)

    def client_options(self) -> dict[str, Any]:
        """Options of httpx's clients. A proxy or .netrc of this machine would change what is measured."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise DFlowError(f"{KEY_VARIABLE} holds characters that no header can hold; set it to the key itself")
        return {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "verify": self._certificates(),
            "trust_env": False,
        }

    def _certificates(self) -> Any:
        file = self.ca_file or os.environ.get("SSL_CERT_FILE")
        if not file:
            return True
        try:
            return ssl.create_default_context(cafile=str(file))
        except OSError as error:  # an SSLError is one
            source = "--ca-file" if self.ca_file else "SSL_CERT_FILE"
            raise DFlowError(
                f"{source} {file}: no certificates to trust ({error.strerror or error}); give a PEM file of them"
            ) from error


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, an unmatched bracket
        return False


@dataclass
class RequestResult:
    """What became of one request.

    Args:
        outcome (`str`): "ok", or how it failed.
        seconds, first_token_seconds (`float`): Of the last try.
        tokens (`int`): As the server counted them; else its pieces of text, see `is_counted_by_server`.
        first_tokens (`int`, *optional*): Tokens of the first piece as the server counted them, with speculation often
            several; `None` where it counts at the end only.
        pieces (`int`): Events that brought text.
        last_token_seconds (`float`): Of the last piece of text.
        retries (`Counter`): What earlier tries met, by status or kind.
    """

    prompt: Prompt
    outcome: str = UNREACHABLE
    detail: str = ""
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    tokens: int = 0
    first_tokens: int | None = None
    pieces: int = 0
    last_token_seconds: float = 0.0
    is_counted_by_server: bool = False
    text: str = ""
    retries: Counter = field(default_factory=Counter)

    @property
    def tokens_of_first_piece(self) -> int | None:
        """Tokens that the first piece brought; `None` if that cannot be told.

        Without the server's count on the way it is 1 only where pieces are tokens, up to a few without text.
        """
        if not self.is_counted_by_server:
            return None
        if self.first_tokens is not None:
            return self.first_tokens
        return 1 if self.pieces >= ONE_EACH * self.tokens else None


class _Failure(Exception):
    def __init__(self, outcome: str, detail: str, *, is_retried: bool = False, wait: float | None = None):
        super().__init__(detail)
        self.outcome, self.detail, self.is_retried, self.wait = outcome, detail, is_retried, wait


@dataclass(frozen=True)
class Piece:
    """What one event of a stream brings: text, the server's count of tokens so far, and whether the answer ends."""

    text: str = ""
    count: int | None = None
    is_last: bool = False


def run_load(
    settings: EndpointSettings, prompts: Sequence[Prompt], on_done: Callable[[], Any] = lambda: None
) -> tuple[list[RequestResult], float]:
    """Send every prompt once, `concurrency` at a time: one result for each, in order, and the seconds of all.

    A `KeyboardInterrupt` ends the load: there are results of the requests that were finished, if any were.
    """
    start = time.perf_counter()
    finished: dict[int, RequestResult] = {}
    try:
        asyncio.run(_all(settings, prompts, finished, on_done))
    except KeyboardInterrupt:
        if not finished:
            raise
    return [finished[number] for number in sorted(finished)], time.perf_counter() - start


async def _all(
    settings: EndpointSettings,
    prompts: Sequence[Prompt],
    finished: dict[int, RequestResult],
    on_done: Callable[[], Any],
) -> None:
    import httpx

    timeout = httpx.Timeout(settings.stall_seconds, connect=settings.connect_seconds, pool=None)
    gate = asyncio.Semaphore(settings.concurrency)
    pool = httpx.Limits(max_connections=settings.concurrency)
    async with httpx.AsyncClient(timeout=timeout, limits=pool, **settings.client_options()) as client:

        async def request(number: int, prompt: Prompt) -> None:
            async with gate:
                finished[number] = await _request(client, settings, prompt, random.Random(prompt.digest))
            on_done()

        await asyncio.gather(*(request(number, prompt) for number, prompt in enumerate(prompts)))


async def _request(client: Any, settings: EndpointSettings, prompt: Prompt, dice: random.Random) -> RequestResult:
    retries: Counter = Counter()
    for attempt in range(1 + settings.retries):
        result = RequestResult(prompt, retries=retries)
        start = time.perf_counter()
        try:
            await asyncio.wait_for(_stream(client, settings, result, start), settings.request_seconds)
            result.outcome, result.detail = (OK, "") if result.text else (EMPTY, "the answer holds no text")
            failure = None
        except asyncio.TimeoutError:
            failure = _Failure(STALLED, f"not finished after {settings.request_seconds:g} s")
        except _Failure as error:
            failure = error
        result.seconds = time.perf_counter() - start
        if failure is not None:
            result.outcome, result.detail = failure.outcome, failure.detail
        if failure is None or not failure.is_retried or attempt == settings.retries:
            break
        retries[failure.detail] += 1
        pause = settings.backoff_seconds * 2**attempt * (0.5 + dice.random())
        await asyncio.sleep(min(LONGEST_WAIT, pause if failure.wait is None else failure.wait))
    return result


async def _stream(client: Any, settings: EndpointSettings, result: RequestResult, start: float) -> None:
    """One try. Raises [`_Failure`] for everything that is no whole answer."""
    import httpx

    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": result.prompt.text}],
        settings.max_tokens_field: settings.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True, **CONTINUOUS}
        if settings.continuous_usage
        else {"include_usage": True},
    }
    is_over = False
    other_lines: list[str] = []
    try:
        async with client.stream("POST", f"{settings.url.rstrip('/')}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise await _refusal(response)
            async for data in _events(response, other_lines):
                if data.strip() == "[DONE]":
                    is_over = True
                    break
                piece = _piece(data)
                is_over = is_over or piece.is_last  # not every server ends with [DONE]
                if piece.text:
                    result.pieces += 1
                    result.text += piece.text
                    result.last_token_seconds = time.perf_counter() - start
                    if result.pieces == 1:
                        result.first_token_seconds = result.last_token_seconds
                        result.first_tokens = piece.count or None
                if piece.count is not None:
                    result.tokens, result.is_counted_by_server = piece.count, True
    except httpx.DecodingError as error:
        raise _Failure(MALFORMED, "bytes that are not in the encoding that the server names") from error
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise _Failure(STALLED, f"nothing for {settings.stall_seconds:g} s") from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise _no_connection(error) from error
    except httpx.TransportError as error:
        raise _Failure(CUT, f"the connection broke ({type(error).__name__})") from error
    if not result.tokens:  # nobody counted, or counted none though there is text
        result.tokens, result.is_counted_by_server = result.pieces, False
    if not is_over and other_lines and not result.pieces:
        raise _no_stream("\n".join(other_lines))
    if not is_over:
        raise _Failure(CUT, "the stream ended without [DONE] or a finish_reason")


def _no_connection(error: Exception) -> _Failure:
    """Why there is none; another try helps unless it is about certificates or protocols."""
    words = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in words:
        reason = words.rsplit("verify failed: ", 1)[-1].split(" (_ssl")[0]
        is_unknown = "self-signed" in reason or "self signed" in reason or "issuer" in reason
        advice = "; name its CA: --ca-file" if is_unknown else ""
        return _Failure(UNREACHABLE, f"its certificate is not trusted here ({reason}){advice}")
    return _Failure(UNREACHABLE, f"no connection ({_reason(words)[2:]})", is_retried="[SSL" not in words)


def _no_stream(body: str) -> _Failure:
    """An answer with status 200 that holds no event: often an error, else one that was not streamed."""
    with suppress(ValueError, RecursionError):
        reason = _reason(json.loads(body))
        if reason:
            return _Failure(REFUSED, f"the server reports an error{reason}")
    return _Failure(MALFORMED, f"no stream of events{_reason(_plain(body))}")


async def _events(response: Any, other_lines: list[str]) -> AsyncIterator[str]:
    """The data of each event: its `data:` lines up to an empty line, as the HTML standard defines event streams.

    Args:
        other_lines (`list[str]`): Gets what is no line of a stream.
    """
    data: list[str] = []
    num_others = 0
    async for line in _lines(response):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
        elif line and not line.startswith((":", "event:", "id:", "retry:")) and num_others < LONGEST_BODY:
            num_others += len(line)
            other_lines.append(line)
    if data:
        yield "\n".join(data)


async def _lines(response: Any) -> AsyncIterator[str]:
    """Lines of a stream, without a byte-order mark; a server that never ends one is malformed, not a full memory."""
    rest, is_first, ended_in_return = "", True, False
    async for text in response.aiter_text():
        text = text.removeprefix("\ufeff") if is_first else text
        rest += text.removeprefix("\n") if ended_in_return else text
        is_first, ended_in_return = False, text.endswith("\r")  # a line may end with \r\n, \n or \r
        *lines, rest = rest.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            yield line
        if len(rest) > LONGEST_LINE:
            raise _Failure(MALFORMED, f"a line of more than {LONGEST_LINE} characters")
    if rest:
        yield rest


def _piece(data: str) -> Piece:
    """What an event brings; whatever a server leaves out is only missing."""
    try:
        event = (json.loads(data) if data.strip() else None) or {}
        if _is_error(event):
            raise _Failure(REFUSED, f"the server reports an error in the stream{_reason(event)}")
        count = (event.get("usage") or {}).get("completion_tokens")
        if count is not None and (isinstance(count, bool) or count != int(count) or not 0 <= count <= LARGEST_COUNT):
            raise TypeError(f"completion_tokens is {count!r}")
        text, is_last = "", False
        for choice in event.get("choices") or []:
            delta, finish = choice.get("delta") or {}, choice.get("finish_reason")
            kind = finish.get("type") if isinstance(finish, dict) else finish
            if choice.get("error") or (isinstance(kind, str) and kind.lower() in BROKEN_OFF):
                raise _Failure(REFUSED, f"the server ended the answer{_reason(choice) or f': {kind}'}")
            text += next((_text(delta[key]) for key in TEXTS if delta.get(key)), "")
            is_last = is_last or bool(finish)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _Failure(MALFORMED, f"an event that is none ({type(error).__name__})") from error
    return Piece(text, None if count is None else int(count), is_last)


def _is_error(event: dict[str, Any]) -> bool:
    says_so = event.get("object") == "error" or event.get("type") == "error"
    without_choices = () if event.get("choices") else ("message",)
    return says_so or any(event.get(name) for name in ("error", "errors", "detail", *without_choices))


def _text(content: Any) -> str:
    """The text of a piece; some servers send a list of parts."""
    return "".join(part.get("text") or "" for part in content) if isinstance(content, list) else content


async def _refusal(response: Any) -> _Failure:
    """A status that is no answer, with the server's own reason."""
    import httpx

    status, wait = response.status_code, None
    with suppress(ValueError, TypeError):  # it may be a date, or missing: the usual pause will do
        wait = max(0.0, float(response.headers.get("retry-after")))
    body = ""
    with suppress(httpx.HTTPError):  # what cannot be read takes nothing from the status
        async for text in response.aiter_text():
            body += text
            if len(body) > LONGEST_BODY:
                break
    try:
        reason = _reason(json.loads(body))
    except (ValueError, RecursionError):
        reason = _reason(_plain(body))
    if response.has_redirect_location:
        reason = _reason(f"redirects to {response.headers['location']}")
    return _Failure(REFUSED, f"status {status}{reason}", is_retried=status in RETRIED, wait=wait)


def _reason(body: Any) -> str:
    """The server's own words in an error's body, shortened, without what a terminal could take for commands."""
    words = _words(body)
    secret = os.environ.get(KEY_VARIABLE, "").strip()
    words = words.replace(secret, "…") if secret else words
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())
    return f": {words[:LONGEST_REASON]}" if words else ""


def _words(body: Any) -> str:
    """The first words of an error in JSON: servers nest them in objects and lists of many shapes."""
    if isinstance(body, str):
        return body
    if isinstance(body, list):
        return "; ".join(filter(None, map(_words, body[:3])))
    if not isinstance(body, dict):
        return ""
    return next(filter(None, (_words(body.get(name)) for name in REASONS)), "")


def _plain(body: str) -> str:
    """The text of a page, without its tags."""
    return re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", body, flags=re.DOTALL | re.IGNORECASE)
