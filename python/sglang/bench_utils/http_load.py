"""A client that sends requests at a given pace and records their answers.

Owns the network side of the serving benchmark; needs aiohttp (extra `bench`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from sglang.bench_utils.datasets import BenchRequest
from sglang.bench_utils.launch import (
    FLUSH_ATTEMPTS,
    FLUSH_PAUSE_SECONDS,
    import_extra,
)
from sglang.bench_utils.metrics import RequestRecord, StreamClock
from sglang.bench_utils.report import Json
from sglang.bench_utils.wire import (
    BACKENDS,
    BodyOptions,
    WireError,
    parse_event,
    sse_events,
)

if TYPE_CHECKING:
    import aiohttp

READY_TIMEOUT_SECONDS = 10.0
REQUEST_TIMEOUT_SECONDS = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPace:
    """Arrival process of the requests.

    Fields:
        request_rate: mean arrivals per second of a Poisson process; infinity: all at
            once.
        max_concurrency: maximum requests in flight, or None for no limit. A request
            that waits for its turn is not sent yet; its times start when it is sent.
        seed: seed of the arrival times.
        times: arrival times in seconds after the start, instead of a rate.
    """

    request_rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 0
    times: Sequence[float] | None = None

    def arrivals(self, count: int) -> list[float]:
        """Return the seconds after the start at which each of `count` arrives."""
        if self.times is not None:
            return list(self.times[:count])
        if self.request_rate == float("inf"):
            return [0.0] * count
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += rng.expovariate(self.request_rate)
        return times


class LoadClient:
    """One HTTP session with one server; an async context manager.

    Args:
        base_url: such as `http://127.0.0.1:30000`.
        backend: a name of `BACKENDS`.
        api_key: sent as a bearer token.

    Raises:
        ValueError: aiohttp is not installed.
    """

    def __init__(
        self, base_url: str, *, backend: str, api_key: str | None = None
    ) -> None:
        self._aiohttp = import_extra("aiohttp")
        self._base_url = base_url.rstrip("/")
        self._backend = BACKENDS[backend]
        self._headers = (
            {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        )
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        self._session = self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=self._aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
            headers=self._headers,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use `async with`"
        return self._session

    async def get_json(self, path: str) -> Json | None:
        """Return the JSON object at `path`, or None if the server has no such path.

        Raises:
            ValueError: there is no server, or its answer is an error.
        """
        try:
            async with self.session.get(
                self._base_url + path,
                timeout=self._aiohttp.ClientTimeout(total=READY_TIMEOUT_SECONDS),
            ) as response:
                data = await response.read()
        except (OSError, asyncio.TimeoutError) as error:
            raise ValueError(
                f"no server answers at {self._base_url} ({error}); start one with "
                "python -m sglang.launch_server, or set --base-url"
            ) from error
        if response.status == 404:
            return None
        try:
            return parse_event(data)
        except WireError as error:
            raise ValueError(
                f"{self._base_url}{path} answered {response.status}: {error}"
            ) from error

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache once it is idle.

        Raises:
            ValueError: it stays busy, or has no such path.
        """
        for _ in range(FLUSH_ATTEMPTS):
            url = self._base_url + "/flush_cache"
            async with self.session.post(url, json={}) as response:
                if response.status == 200:
                    return
                message = await response.text()
            await asyncio.sleep(FLUSH_PAUSE_SECONDS)
        raise ValueError(f"--flush-cache: {self._base_url} refuses: {message}")

    async def send(self, request: BenchRequest, options: BodyOptions) -> RequestRecord:
        """Send one request and await its end; a failure is recorded, not raised."""
        record = RequestRecord()
        url = self._base_url + self._backend.path
        body = self._backend.body(request, options)
        began = time.perf_counter()
        clock = StreamClock(record, began)
        try:
            async with self.session.post(url, json=body) as response:
                if response.status != 200:
                    parse_event(await response.read())
                    raise WireError(f"status {response.status}")
                if options.stream:
                    chunks: AsyncIterator[bytes] = response.content.iter_any()
                    async for event in sse_events(chunks):
                        self._backend.read(event, record, clock, time.perf_counter())
                else:
                    answer = parse_event(await response.read())
                    self._backend.read(answer, record, clock, time.perf_counter())
                    # The tokens of a whole answer have no individual times.
                    record.ttft, record.itl = None, []
        except (OSError, asyncio.TimeoutError, WireError) as error:
            record.error = f"{type(error).__name__}: {error}"
        except self._aiohttp.ClientError as error:
            record.error = f"{type(error).__name__}: {error}"
        record.latency = time.perf_counter() - began
        return record


async def run_load(
    client: LoadClient,
    requests: Sequence[BenchRequest],
    *,
    options: BodyOptions,
    pace: LoadPace,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[list[RequestRecord], float]:
    """Send all requests; return their records in order, and the total seconds."""
    turn = (
        contextlib.nullcontext()
        if pace.max_concurrency is None
        else asyncio.Semaphore(pace.max_concurrency)
    )
    began = time.perf_counter()

    async def one(request: BenchRequest, arrival: float) -> RequestRecord:
        await asyncio.sleep(max(began + arrival - time.perf_counter(), 0.0))
        async with turn:
            record = await client.send(request, options)
        on_done(record)
        return record

    arrivals = pace.arrivals(len(requests))
    tasks = [
        asyncio.create_task(one(request, arrival))
        for request, arrival in zip(requests, arrivals, strict=True)
    ]
    records = list(await asyncio.gather(*tasks))
    return records, time.perf_counter() - began


@contextlib.contextmanager
def progress_bar(total: int, *, is_hidden: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr; call the result once per request."""
    with tqdm(total=total, disable=is_hidden) as bar:
        yield lambda: bar.update(1)
