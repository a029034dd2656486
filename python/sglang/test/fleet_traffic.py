"""Requests with shared prefixes for a fleet of replicas, and a client that retries.

A fleet must answer like one server: greedy answers do not depend on the replica or on
its other requests.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import httpx

# Their sources are the prefixes: text that the demo model has learned.
MODULES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "codecs", "configparser"),
    *("contextlib", "copy", "csv", "datetime", "difflib", "enum", "fnmatch"),
    *("fractions", "functools", "getopt", "glob", "gzip", "heapq", "hmac", "inspect"),
    *("ipaddress", "keyword", "locale", "mailbox", "mimetypes", "netrc", "numbers"),
    *("optparse", "pathlib", "pickle", "pprint", "queue", "random", "sched"),
    *("selectors", "shelve", "shlex", "shutil", "statistics", "string", "tarfile"),
    *("tempfile", "textwrap", "threading", "tokenize", "trace", "uuid", "zipfile"),
)
CONCURRENCY = 16
# Environment for a replica in which, some steps after its start, the next read goes to
# another request's page.
PLANTED = {
    "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB": "1",
    "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "40",
}
ATTEMPTS = 20
RETRY_SECONDS = 0.25
TRY_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
TIMEOUT_SECONDS = 120.0
SHOWN_BYTES = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A greedy request with the `body` for `path`."""

    path: str
    body: Mapping[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body["stream"])


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer, or the part that arrived before it broke off.

    Fields:
        has_begun: whether status 200 arrived.
    """

    has_begun: bool = False
    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Report:
    """Answers and failures of a fleet, as a client saw them.

    Fields:
        answers: answers in request order, or None for requests that got no answer in
            any attempt.
        wrong: differences from the expected answers, including partial answers.
        refused: answers that say that a retry would not help.
        cut: attempts that broke off after status 200, by what the client saw; no router
            can hide those.
        retries: all other attempts that failed.
        failed_at: times of both, by `time.monotonic`.
        sent: number of answered requests, including repetitions of the list.
        seconds: duration of the whole run.
    """

    answers: list[Answer | None]
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cut: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    failed_at: list[float] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from a prefix cache."""
        whole = [answer for answer in self.answers if answer is not None]
        prompts = sum(answer.prompt_tokens for answer in whole)
        return sum(answer.cached_tokens for answer in whole) / max(prompts, 1)

    def check(self) -> None:
        """Check that every request was answered and nothing wrong was sent."""
        assert not self.wrong, self.wrong[:3]
        assert not self.refused, self.refused[:3]
        missing = [i for i, answer in enumerate(self.answers) if answer is None]
        assert not missing, (missing, self.retries, self.cut)

    def as_row(self) -> dict[str, object]:
        return {
            "requests": self.sent,
            "seconds": round(self.seconds, 1),
            "hit_rate": round(self.hit_rate, 3),
            "cut": dict(self.cut),
            "retries": dict(self.retries),
        }


class _Broken(Exception):
    """An attempt that failed in a way that a retry may fix."""


def shared_prefix_asks(
    count: int, *, groups: int, seed: int = 0, prefix_chars: int = 1500
) -> list[Ask]:
    """Return requests in random order; each group of `count / groups` shares a prefix.

    They go to `/generate`, `/v1/completions` and `/v1/chat/completions`, every other
    one as a stream.
    """
    rng = random.Random(seed)
    asks = []
    for i in range(count):
        source = inspect.getsource(import_module(MODULES[i % groups]))
        prompt = f"{source[:prefix_chars]}\n\ndef case_{i}("
        asks.append(_ask(i, prompt, length=rng.randrange(4, 20)))
    rng.shuffle(asks)
    return asks


def _ask(number: int, prompt: str, *, length: int) -> Ask:
    form = number // 7
    stream = form % 2 == 1
    if form % 3 == 0:
        params = {"temperature": 0, "max_new_tokens": length}
        body = {"text": prompt, "sampling_params": params, "stream": stream}
        return Ask(path="/generate", body=body)
    body = {"model": "demo", "temperature": 0, "max_tokens": length, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if form % 3 == 1:
        return Ask(path="/v1/completions", body={**body, "prompt": prompt})
    messages = [{"role": "user", "content": prompt}]
    return Ask(path="/v1/chat/completions", body={**body, "messages": messages})


def run_asks(
    url: str,
    asks: Sequence[Ask],
    *,
    expected: Sequence[Answer | None] | None = None,
    during: Callable[[], None] | None = None,
    concurrency: int = CONCURRENCY,
) -> Report:
    """Send `asks` to `url`, each until it is answered, `concurrency` at once.

    Args:
        expected: expected answers.
        during: runs in a thread while the requests are sent repeatedly until it
            returns; its exception is raised.
    """
    client = _Client(url, asks, expected=expected)
    return asyncio.run(client.run(concurrency, during))


class _Client:
    def __init__(
        self,
        url: str,
        asks: Sequence[Ask],
        *,
        expected: Sequence[Answer | None] | None,
    ) -> None:
        self._url = url
        self._asks = asks
        self._expected = expected
        self._report = Report(answers=[None] * len(asks))

    async def run(self, concurrency: int, during: Callable[[], None] | None) -> Report:
        began = time.monotonic()
        beside = asyncio.create_task(asyncio.to_thread(during or _nothing))
        numbers = self._numbers(beside)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT_SECONDS, trust_env=False, verify=False
        ) as http:
            workers = (self._work(http, numbers) for _ in range(concurrency))
            await asyncio.gather(*workers)
        await beside
        self._report.seconds = time.monotonic() - began
        return self._report

    def _numbers(self, beside: asyncio.Task[None]) -> Iterator[int]:
        yield from range(len(self._asks))
        while not beside.done():
            yield self._report.sent % len(self._asks)

    async def _work(self, http: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for i in numbers:
            await self._answer(http, i)
            self._report.sent += 1

    async def _answer(self, http: httpx.AsyncClient, i: int) -> None:
        ask = self._asks[i]
        for _ in range(ATTEMPTS):
            answer = Answer()
            try:
                await _attempt(http, ask, answer)
            except (_Broken, httpx.TransportError) as error:
                report = self._report
                failed = report.cut if answer.has_begun else report.retries
                failed[_cause(error)] += 1
                report.failed_at.append(time.monotonic())
                self._compare(i, answer, is_whole=False)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except httpx.HTTPStatusError as error:
                self._report.refused.append(f"{i}: {error} {error.response.text}")
                return
            self._compare(i, answer, is_whole=True)
            self._report.answers[i] = self._report.answers[i] or answer
            return

    def _compare(self, i: int, answer: Answer, *, is_whole: bool) -> None:
        wanted = None if self._expected is None else self._expected[i]
        if wanted is None:
            return
        same = (
            (answer.text, answer.finish) == (wanted.text, wanted.finish)
            if is_whole
            else wanted.text.startswith(answer.text)
        )
        if not same:
            self._report.wrong.append(
                f"{i} {self._asks[i].path}: {answer} instead of {wanted}"
            )


def _nothing() -> None:
    pass


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, _Broken) else type(error).__name__


async def _attempt(http: httpx.AsyncClient, ask: Ask, answer: Answer) -> None:
    """Fill `answer`.

    Raises:
        _Broken, httpx.TransportError: a repetition may help.
        httpx.HTTPStatusError: it would not.
    """
    async with http.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code in TRY_AGAIN:
            said = (await response.aread())[:SHOWN_BYTES].decode(errors="replace")
            raise _Broken(f"status {response.status_code}: {said}")
        if response.status_code != 200:
            await response.aread()
            response.raise_for_status()
        answer.has_begun = True
        if not ask.is_stream:
            _READERS[ask.path](answer, json.loads(await response.aread()))
            return
        async for content in _events(response):
            if "error" in content:
                raise _Broken("error within a stream")
            _READERS[ask.path](answer, content)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise _Broken("cut stream")


def _read_generate(answer: Answer, content: dict[str, Any]) -> None:
    meta = content["meta_info"]
    answer.text = content["text"]
    answer.prompt_tokens = meta["prompt_tokens"]
    answer.cached_tokens = meta["cached_tokens"]
    if meta["finish_reason"] is not None:
        answer.finish = meta["finish_reason"]["type"]


def _read_openai(answer: Answer, content: dict[str, Any]) -> None:
    for choice in content["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        answer.text += choice.get("text") or message.get("content") or ""
        answer.finish = choice["finish_reason"] or answer.finish
    usage = content.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", 0)


_READERS: dict[str, Callable[[Answer, dict[str, Any]], None]] = {
    "/generate": _read_generate,
    "/v1/completions": _read_openai,
    "/v1/chat/completions": _read_openai,
}
