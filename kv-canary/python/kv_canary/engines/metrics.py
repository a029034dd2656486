"""A worker's Prometheus counters, on their own port."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from kv_canary.checks import EVERY_REASON
from kv_canary.engines.hooks import Refusal
from kv_canary.records import Counter

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings
    from kv_canary.reporter import ViolationReporter

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_COUNTERS = (
    ("kv_canary_verified_slots", "Slot reads verified.", Counter.VERIFIED_SLOTS),
    ("kv_canary_recorded_slots", "Slots recorded.", Counter.TAIL_SLOTS),
)


class Counted(Protocol):
    """A worker's canary, for any engine."""

    reporter: ViolationReporter

    @property
    def forwards(self) -> int:
        """Number of forwards that were checked."""

    def counters(self) -> list[int]:
        """Return `records.Counter`. Waits for the device."""

    def requests(self) -> tuple[int, int] | None:
        """Return how many requests there were, and how many of them are verified. None
        if the host does not tell."""

    def healed(self) -> int | None:
        """Return how many requests were computed again; None in other modes."""


class CanaryCollector:
    """Reads a canary when it is scraped."""

    def __init__(self, canary: Counted, *, rank: int, library: Any) -> None:
        self._canary = canary
        self._rank = str(rank)
        self._library = library
        self._since = time.time()

    def collect(self) -> Iterator[Any]:
        canary, counters = self._canary, self._canary.counters()
        for name, text, value in (
            ("kv_canary_attached", "1 where a canary is attached.", 1.0),
            ("kv_canary_attached_since_seconds", "Unix time of that.", self._since),
        ):
            gauge = self._library.GaugeMetricFamily(name, text, labels=["rank"])
            gauge.add_metric([self._rank], value)
            yield gauge
        rows = [(name, text, counters[number]) for name, text, number in _COUNTERS]
        rows.append(("kv_canary_forwards", "Forwards checked.", canary.forwards))
        healed = canary.healed()
        if healed is not None:
            text = "Requests that met damage and were computed again."
            rows.append(("kv_canary_healed_requests", text, healed))
        for name, text, value in rows:
            metric = self._library.CounterMetricFamily(name, text, labels=["rank"])
            metric.add_metric([self._rank], value)
            yield metric
        requests = canary.requests()
        if requests is not None:
            total, verified = requests
            metric = self._library.CounterMetricFamily(
                "kv_canary_requests",
                "Requests that began, again after a preemption; are reads verified?",
                labels=["rank", "verified"],
            )
            metric.add_metric([self._rank, "yes"], verified)
            metric.add_metric([self._rank, "no"], total - verified)
            yield metric
        found = self._library.CounterMetricFamily(
            "kv_canary_violations", "Violations by reason.", labels=["rank", "reason"]
        )
        # Include all of them from the start: `rate()` misses a series' first value.
        for reason in EVERY_REASON:
            found.add_metric([self._rank, reason], canary.reporter.counts[reason])
        yield found


def serve_metrics(canary: Counted, settings: Settings, *, rank: int) -> None:
    """Serve the canary's counters, if a port is set.

    Raises:
        Refusal: `prometheus_client` is not installed, or the port is taken.
    """
    if not settings.metrics_port:
        return
    port = settings.metrics_port + rank
    try:
        library = importlib.import_module("prometheus_client")
        core = importlib.import_module("prometheus_client.core")
        registry = library.CollectorRegistry()
        registry.register(CanaryCollector(canary, rank=rank, library=core))
        library.start_http_server(port, addr=_HOST, registry=registry)
    except ImportError as error:
        raise Refusal(f"KV_CANARY_METRICS_PORT needs prometheus_client: {error}") from (
            error
        )
    except OSError as error:
        raise Refusal(f"KV_CANARY_METRICS_PORT: {_HOST}:{port}: {error}") from error
    logger.warning("kv_canary: metrics at http://%s:%d/metrics", _HOST, port)
