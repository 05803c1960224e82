"""Load on an OpenAI-compatible endpoint: streaming requests, so many at a time, each counted whatever becomes of it.

The key is read from the environment, sent in the header, and appears in no record, message or exception.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from hf_dflow.bench.workloads import Prompt
from hf_dflow.errors import DFlowError

KEY_VARIABLE = "OPENAI_API_KEY"
RETRIED = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT = 10.0  # seconds that a server's Retry-After may ask for
LONGEST_LINE = 2**20  # characters without an end of line, after which a stream is no stream of events

TEXTS = ("content", "reasoning_content", "reasoning")  # of a piece; servers call what a model thinks in two ways
LARGEST_COUNT = 10**9  # tokens of an answer, above which a server's count is none

OK, STALLED, CUT, MALFORMED, REFUSED, UNREACHABLE, EMPTY = (
    "ok", "stalled", "cut", "malformed", "refused", "unreachable", "empty",
)  # fmt: skip


@dataclass(frozen=True)
class EndpointSettings:
    """How a load is put on an endpoint."""

    url: Annotated[str, typer.Option("--endpoint", help="Address of an OpenAI-compatible server, up to and with /v1.")]
    model: Annotated[str, typer.Option(help="As the server calls it.")]
    server: Annotated[str | None, typer.Option(help="What serves, and with which drafter: for the record.")] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at any time.")] = 1
    output_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    # An answer that broke off is not asked for again: its failure is a result.
    retries: Annotated[int, typer.Option(min=0, help="Of a request that was refused for now, or lost its way.")] = 2
    connect_seconds: Annotated[float, typer.Option(help="Longest wait for a connection.")] = 10.0
    stall_seconds: Annotated[float, typer.Option(help="Longest silence within an answer.")] = 30.0
    request_seconds: Annotated[float, typer.Option(help="Longest answer.")] = 300.0
    backoff_seconds: Annotated[float, typer.Option(help="First pause before a retry; it doubles each time.")] = 0.5

    def __post_init__(self):
        if not self.url.startswith(("http://", "https://")):
            raise DFlowError(f"--endpoint {self.url}: give an address that starts with http:// or https://")
        if "@" in self.url.split("://", 1)[1].split("/", 1)[0]:
            raise DFlowError("--endpoint holds a user name or password; keys belong into the environment, not into it")
        if _address(self.url) is None:
            raise DFlowError(
                f"--endpoint {self.url}: no server and port can be read from it, as in http://HOST:8000/v1"
            )
        if min(self.concurrency, self.output_tokens) < 1 or self.retries < 0:
            raise DFlowError("concurrency and output tokens must be 1 or more, retries 0 or more")
        limits = (self.connect_seconds, self.stall_seconds, self.request_seconds)
        if not all(0 < limit < math.inf for limit in limits):
            raise DFlowError("time limits must be above 0 seconds, and finite")

    @property
    def root(self) -> str:
        return self.url.rstrip("/")

    @property
    def model_name(self) -> str:
        """The model in records. Some servers call it by its folder, of which only the last part means anything here."""
        is_path = self.model.startswith(("/", "./", "../", "~")) or "\\" in self.model
        return re.split(r"[/\\]", self.model.rstrip("/\\"))[-1] if is_path else self.model

    def seconds_at_most(self, requests: int) -> float:
        """An upper bound of the time that so many requests take, whatever the server does."""
        tries = 1 + self.retries
        waits = self.retries * LONGEST_WAIT
        turns = -(-requests // self.concurrency)
        return turns * (tries * (self.connect_seconds + self.request_seconds) + waits)


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


def _address(url: str) -> tuple[str, int | None] | None:
    """Host and port of an address; `None` where it has none that could be."""
    try:
        parts = urlsplit(url)
        return (parts.hostname, parts.port) if parts.hostname else None
    except ValueError:  # a port beyond 65535, a bracket without its other
        return None


def key_from_environment() -> str | None:
    """`OPENAI_API_KEY`, where it is set."""
    return os.environ.get(KEY_VARIABLE) or None


def run_load(
    settings: EndpointSettings, prompts: Sequence[Prompt], on_done: Callable[[], Any] = lambda: None
) -> tuple[list[RequestResult], float]:
    """Send every prompt once, `concurrency` at a time.

    Returns:
        `tuple[list[RequestResult], float]`: One result for each prompt, in order; and the seconds of the whole load.
    """
    start = time.perf_counter()
    results = asyncio.run(_all(settings, prompts, on_done))
    return results, time.perf_counter() - start


async def _all(settings: EndpointSettings, prompts: Sequence[Prompt], on_done: Callable[[], Any]):
    import httpx

    key = key_from_environment()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Timeout(settings.stall_seconds, connect=settings.connect_seconds, pool=None)
    gate = asyncio.Semaphore(settings.concurrency)
    pool = httpx.Limits(max_connections=settings.concurrency)
    # trust_env off: a proxy or .netrc of this machine would change what is measured, or send a key of its own.
    async with httpx.AsyncClient(headers=headers, timeout=limits, limits=pool, trust_env=False) as client:

        async def one(prompt: Prompt) -> RequestResult:
            async with gate:
                result = await _request(client, settings, prompt, random.Random(prompt.digest))
            on_done()
            return result

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def _request(client: Any, settings: EndpointSettings, prompt: Prompt, dice: random.Random) -> RequestResult:
    result = RequestResult(prompt)
    for attempt in range(1 + settings.retries):
        result.text, result.tokens, result.is_counted_by_server, result.first_token_seconds = "", 0, False, 0.0
        start = time.perf_counter()
        try:
            await asyncio.wait_for(_stream(client, settings, result, start), settings.request_seconds)
            result.outcome, result.detail = OK, ""
            if not result.text:
                result.outcome, result.detail = EMPTY, "the answer holds no text"
            failure = None
        except asyncio.TimeoutError:
            failure = _Failure(STALLED, f"not finished after {settings.request_seconds:g} s")
        except _Failure as error:
            failure = error
        result.seconds = time.perf_counter() - start
        if failure is None:
            return result
        result.outcome, result.detail = failure.outcome, failure.detail
        if not failure.is_retried or attempt == settings.retries:
            return result
        result.retries[failure.detail] += 1
        pause = settings.backoff_seconds * 2**attempt * (0.5 + dice.random())
        await asyncio.sleep(min(LONGEST_WAIT, failure.wait if failure.wait is not None else pause))
    return result


async def _stream(client: Any, settings: EndpointSettings, result: RequestResult, start: float) -> None:
    """One try. Raises [`_Failure`] for everything that is no whole answer."""
    import httpx

    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": result.prompt.text}],
        "max_tokens": settings.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    is_over = False
    try:
        async with client.stream("POST", f"{settings.root}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, response.headers.get("retry-after"))
            pieces = 0
            async for line in _lines(response):
                if not line.startswith("data:"):
                    continue  # comments, event names, empty lines
                data = line[5:].strip()
                if data == "[DONE]":
                    is_over = True
                    break
                text, usage, is_last = _event(data)
                is_over = is_over or is_last  # not every server ends with [DONE]
                if text:
                    pieces += 1
                    result.text += text
                    if not result.first_token_seconds:
                        result.first_token_seconds = time.perf_counter() - start
                if usage is not None:
                    result.tokens, result.is_counted_by_server = usage, True
            if not result.tokens:  # nobody counted, or counted none though there is text
                result.tokens, result.is_counted_by_server = pieces, False
    except httpx.DecodingError as error:
        raise _Failure(MALFORMED, "bytes that are not in the encoding that the server names") from error
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise _Failure(STALLED, f"nothing for {settings.stall_seconds:g} s") from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise _Failure(UNREACHABLE, f"no connection ({type(error).__name__})", is_retried=True) from error
    except httpx.TransportError as error:
        raise _Failure(CUT, f"the connection broke ({type(error).__name__})") from error
    if not is_over:
        raise _Failure(CUT, "the stream ended without [DONE] or a finish_reason")


async def _lines(response: Any):
    """Lines of an answer; a server that never ends one is malformed, not a full memory."""
    held = ""
    async for piece in response.aiter_text():
        held += piece
        *lines, held = held.replace("\r\n", "\n").split("\n")
        for line in lines:
            yield line
        if len(held) > LONGEST_LINE:
            raise _Failure(MALFORMED, f"a line of more than {LONGEST_LINE} characters")
    if held:
        yield held


def _event(data: str) -> tuple[str, int | None, bool]:
    """Text of an event, the token count where it brings one, and whether it says why the answer ends."""
    try:
        event = json.loads(data)
        if event.get("error") is not None:
            raise _Failure(REFUSED, "the server reports an error in the stream")
        usage = event.get("usage")
        count = None if usage is None else usage["completion_tokens"]
        choices = event.get("choices") or []
        text = "".join(
            next((choice["delta"][key] for key in TEXTS if choice["delta"].get(key)), "") for choice in choices
        )
        is_last = any(choice.get("finish_reason") for choice in choices)
        if count is not None and (type(count) is not int or not 0 <= count <= LARGEST_COUNT):
            raise TypeError(f"completion_tokens is {count!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Failure(MALFORMED, f"an event that is none ({type(error).__name__})") from error
    return text, count, is_last


def _refusal(status: int, retry_after: str | None) -> _Failure:
    wait = None
    with contextlib.suppress(ValueError):  # it may be a date: the usual pause will do
        wait = None if retry_after is None else max(0.0, float(retry_after))
    return _Failure(REFUSED, f"status {status}", is_retried=status in RETRIED, wait=wait)
