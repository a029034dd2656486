"""Prometheus metrics: latencies recorded by the front, statistics of the scheduler.

Owns the registry and every metric name. Needs neither torch nor a web framework.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        HistogramStats,
        RequestOutput,
        SchedulerStats,
    )

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABEL = "model_name"
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.5, 1.0, 2.0),
)
E2E_BUCKETS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
    *(120.0, 300.0, 600.0),
)

# Field of SchedulerStats -> (metric, help).
GAUGES: dict[str, tuple[str, str]] = {
    "num_running_reqs": ("sglang:num_running_reqs", "Requests in the running batch."),
    "num_queue_reqs": ("sglang:num_queue_reqs", "Requests that wait."),
    "num_used_tokens": ("sglang:num_used_tokens", "KV slots held by requests."),
    "max_total_num_tokens": ("sglang:max_total_num_tokens", "KV slots of the pool."),
    "token_usage": ("sglang:token_usage", "Share of KV slots held by requests."),
    "gen_throughput": ("sglang:gen_throughput", "Output tokens per second."),
    "cache_hit_rate": ("sglang:cache_hit_rate", "Share of prompt tokens in the cache."),
    "num_retracted_reqs": (
        "sglang:num_retracted_reqs",
        "Requests that lost their KV slots and run again.",
    ),
    "spec_accept_length": (
        "sglang:spec_accept_length",
        "Tokens per verification step of speculative decoding.",
    ),
    "kv_canary_quarantined_pages": (
        "sglang:kv_canary_quarantined_pages",
        "KV pages out of use: damaged ones that are watched, or that stay.",
    ),
    "kv_canary_is_degraded": (
        "sglang:kv_canary_degraded",
        "1: something was healed in the last minute, or KV pages stay out of use.",
    ),
}
# The exposition format appends `_total` to these names.
COUNTERS: dict[str, tuple[str, str]] = {
    "prompt_tokens_total": ("sglang:prompt_tokens", "Prompt tokens of requests."),
    "generation_tokens_total": ("sglang:generation_tokens", "Tokens generated."),
    "cached_tokens_total": ("sglang:cached_tokens", "Prompt tokens from the cache."),
    "num_requests_total": ("sglang:num_requests", "Requests that the scheduler took."),
    "num_aborted_requests_total": (
        "sglang:num_aborted_requests",
        "Requests that ended with an abort.",
    ),
    "forward_passes_total": ("sglang:forward_passes", "Forwards of the model."),
    "cuda_graph_passes_total": (
        "sglang:cuda_graph_passes",
        "Forwards that replayed a CUDA graph.",
    ),
    "prefill_cuda_graph_passes_total": (
        "sglang:prefill_cuda_graph_passes",
        "Prefill forwards that replayed a CUDA graph.",
    ),
    "kv_canary_protected_tokens_total": (
        "sglang:kv_canary_protected_tokens",
        "KV slots that were verified before they were read.",
    ),
    "kv_canary_swept_tokens_total": (
        "sglang:kv_canary_swept_tokens",
        "Cached KV slots that sweeps verified.",
    ),
    "kv_canary_sweep_passes_total": (
        "sglang:kv_canary_sweep_passes",
        "Sweep passes over the prefix cache.",
    ),
    "kv_canary_healed_tokens_total": (
        "sglang:kv_canary_healed_tokens",
        "Tokens of requests that were recomputed after their KV was damaged.",
    ),
}

# Field -> (metric, label, help).
LABELLED_COUNTERS: dict[str, tuple[str, str, str]] = {
    "prefill_cuda_graph_fallbacks_total": (
        "sglang:prefill_cuda_graph_fallbacks",
        "reason",
        "Prefill forwards that ran eagerly although there are graphs.",
    ),
    "kv_canary_violations_total": (
        "sglang:kv_canary_violations",
        "reason",
        "Violations that the KV canary found, each damage once.",
    ),
    "kv_canary_heals_total": (
        "sglang:kv_canary_heals",
        "diagnosis",
        "Times that a damage was healed, by what it looked like.",
    ),
}
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "kv_canary_recovery_seconds": (
        "sglang:kv_canary_recovery_seconds",
        "From a damage to the next token, of requests that were recomputed.",
    ),
}


class TimedRequest(Protocol):
    """A request whose latencies are measured, in seconds of the monotonic clock."""

    arrived: float
    last_output: float | None

    @property
    def is_stream(self) -> bool: ...


class FrontMetrics:
    """All metrics of one server, labelled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._stats = _StatsCollector(model_name)
        self._registry.register(self._stats)
        self._first_token = self._histogram(
            "sglang:time_to_first_token_seconds",
            "From arrival to the first token, of requests that stream.",
            FIRST_TOKEN_BUCKETS,
            model_name,
        )
        self._inter_token = self._histogram(
            "sglang:inter_token_latency_seconds",
            "Between two tokens, of requests that stream.",
            INTER_TOKEN_BUCKETS,
            model_name,
        )
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds",
            "From arrival to the end.",
            E2E_BUCKETS,
            model_name,
        )

    def on_output(self, request: TimedRequest, output: RequestOutput) -> None:
        """Record the latencies of a request's new output."""
        now = time.monotonic()
        new_tokens = len(output.output_ids)
        if request.is_stream and new_tokens:
            if request.last_output is None:
                self._first_token.observe(now - request.arrived)
            else:
                gap = (now - request.last_output) / new_tokens
                for _ in range(new_tokens):
                    self._inter_token.observe(gap)
        request.last_output = now
        if output.finish_reason is not None and output.finish_reason.type != "abort":
            self._e2e.observe(now - request.arrived)

    def render(self, stats: SchedulerStats | None) -> bytes:
        """Return the exposition text; without `stats`, only the front's metrics."""
        self._stats.current = stats
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], model_name: str
    ) -> Histogram:
        family = Histogram(
            name, text, labelnames=(LABEL,), buckets=buckets, registry=self._registry
        )
        return family.labels(model_name)


class _StatsCollector:
    """Shows the `SchedulerStats` that were fetched for this scrape."""

    def __init__(self, model_name: str) -> None:
        self.current: SchedulerStats | None = None
        self._labels = [model_name]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self.current
        if stats is None:
            return
        values = msgspec.structs.asdict(stats)
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=[LABEL])
            gauge.add_metric(self._labels, values[field])
            yield gauge
        for field, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[LABEL])
            counter.add_metric(self._labels, values[field])
            yield counter
        for field, (name, label, text) in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[LABEL, label])
            for value, count in values[field].items():
                counter.add_metric([*self._labels, value], count)
            yield counter
        for field, (name, text) in HISTOGRAMS.items():
            if values[field] is not None:
                yield self._histogram(name, text, values[field])

    def _histogram(
        self, name: str, text: str, stats: HistogramStats
    ) -> HistogramMetricFamily:
        """The exposition's form: counts add up, the last bound is infinite."""
        bounds = [*map(str, stats.bounds), "+Inf"]
        sums = itertools.accumulate(stats.counts)
        family = HistogramMetricFamily(name, text, labels=[LABEL])
        family.add_metric(
            self._labels, list(zip(bounds, sums, strict=True)), sum_value=stats.sum
        )
        return family
