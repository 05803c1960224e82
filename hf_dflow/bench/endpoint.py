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
TEXTS = ("content", "reasoning_content", "reasoning")  # of a piece; servers name a model's thoughts in two ways
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
        key, certificates = os.environ.get(KEY_VARIABLE), self.ca_file or os.environ.get("SSL_CERT_FILE")
        return {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "verify": ssl.create_default_context(cafile=str(certificates)) if certificates else True,
            "trust_env": False,
        }


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
        retries (`Counter`): What earlier tries met, by status or kind.
    """

    prompt: Prompt
    outcome: str = UNREACHABLE
    detail: str = ""
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    tokens: int = 0
    is_counted_by_server: bool = False
    text: str = ""
    retries: Counter = field(default_factory=Counter)


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
    """Send every prompt once, `concurrency` at a time: one result for each, in order, and the seconds of all."""
    start = time.perf_counter()
    results = asyncio.run(_all(settings, prompts, on_done))
    return results, time.perf_counter() - start


async def _all(settings: EndpointSettings, prompts: Sequence[Prompt], on_done: Callable[[], Any]):
    import httpx

    timeout = httpx.Timeout(settings.stall_seconds, connect=settings.connect_seconds, pool=None)
    gate = asyncio.Semaphore(settings.concurrency)
    pool = httpx.Limits(max_connections=settings.concurrency)
    async with httpx.AsyncClient(timeout=timeout, limits=pool, **settings.client_options()) as client:

        async def request(prompt: Prompt) -> RequestResult:
            async with gate:
                result = await _request(client, settings, prompt, random.Random(prompt.digest))
            on_done()
            return result

        return list(await asyncio.gather(*map(request, prompts)))


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
        "stream_options": {"include_usage": True},
    }
    is_over, pieces = False, 0
    try:
        async with client.stream("POST", f"{settings.url.rstrip('/')}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise await _refusal(response)
            async for data in _events(response):
                if data.strip() == "[DONE]":
                    is_over = True
                    break
                piece = _piece(data)
                is_over = is_over or piece.is_last  # not every server ends with [DONE]
                if piece.text:
                    pieces += 1
                    result.text += piece.text
                    result.first_token_seconds = result.first_token_seconds or time.perf_counter() - start
                if piece.count is not None:
                    result.tokens, result.is_counted_by_server = piece.count, True
    except httpx.DecodingError as error:
        raise _Failure(MALFORMED, "bytes that are not in the encoding that the server names") from error
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise _Failure(STALLED, f"nothing for {settings.stall_seconds:g} s") from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise _Failure(UNREACHABLE, "its certificate is not trusted here; name its CA: --ca-file") from error
        raise _Failure(UNREACHABLE, f"no connection ({type(error).__name__})", is_retried=True) from error
    except httpx.TransportError as error:
        raise _Failure(CUT, f"the connection broke ({type(error).__name__})") from error
    if not result.tokens:  # nobody counted, or counted none though there is text
        result.tokens, result.is_counted_by_server = pieces, False
    if not is_over:
        raise _Failure(CUT, "the stream ended without [DONE] or a finish_reason")


async def _events(response: Any) -> AsyncIterator[str]:
    """The data of each event: its `data:` lines up to an empty line, as the HTML standard defines event streams."""
    data: list[str] = []
    async for line in _lines(response):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


async def _lines(response: Any) -> AsyncIterator[str]:
    """Lines of a stream, without a byte-order mark; a server that never ends one is malformed, not a full memory."""
    rest, is_first = "", True
    async for text in response.aiter_text():
        rest += text.removeprefix("\ufeff") if is_first else text
        is_first = False
        *lines, rest = rest.replace("\r\n", "\n").split("\n")
        for line in lines:
            yield line
        if len(rest) > LONGEST_LINE:
            raise _Failure(MALFORMED, f"a line of more than {LONGEST_LINE} characters")
    if rest:
        yield rest


def _piece(data: str) -> Piece:
    """What an event brings; whatever a server leaves out is only missing."""
    try:
        event = json.loads(data)
        if event.get("error") is not None or event.get("object") == "error" or "detail" in event:
            raise _Failure(REFUSED, f"the server reports an error in the stream{_reason(event)}")
        count = (event.get("usage") or {}).get("completion_tokens")
        if count is not None and (isinstance(count, bool) or count != int(count) or not 0 <= count <= LARGEST_COUNT):
            raise TypeError(f"completion_tokens is {count!r}")
        text, is_last = "", False
        for choice in event.get("choices") or []:
            delta, finish = choice.get("delta") or {}, choice.get("finish_reason")
            if finish in ("error", "abort"):
                raise _Failure(REFUSED, f"the server ended the answer: {finish}")
            text += next((delta[key] for key in TEXTS if delta.get(key)), "")
            is_last = is_last or bool(finish)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _Failure(MALFORMED, f"an event that is none ({type(error).__name__})") from error
    return Piece(text, None if count is None else int(count), is_last)


async def _refusal(response: Any) -> _Failure:
    """A status that is no answer, with the server's own reason."""
    status, wait = response.status_code, None
    with suppress(ValueError, TypeError):  # it may be a date, or missing: the usual pause will do
        wait = max(0.0, float(response.headers.get("retry-after")))
    reason = ""
    with suppress(ValueError):
        reason = _reason(json.loads(await response.aread()))
    return _Failure(REFUSED, f"status {status}{reason}", is_retried=status in RETRIED, wait=wait)


def _reason(body: Any) -> str:
    """The server's own words in an error's body, shortened, without what a terminal could take for commands."""
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name):
            body = body[name]
    if not isinstance(body, str):
        return ""
    secret = os.environ.get(KEY_VARIABLE)
    words = body.replace(secret, "…") if secret else body
    words = "".join(letter if letter.isprintable() else " " for letter in words)
    return f": {' '.join(words.split())[:LONGEST_REASON]}"
