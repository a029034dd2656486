"""Prometheus metrics of one server: latencies recorded by the front, its view of the
scheduler, and the scheduler's own statistics.

Needs neither torch nor a web framework.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from sglang.srt.arg_groups.canary_hook import KV_CANARY_MODES
from sglang.srt.metrics.scheduler_series import MODEL_NAME, SchedulerSeries

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import RequestOutput, SchedulerStats
    from sglang.srt.server_args import ServerArgs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


class TimedRequest(Protocol):
    """A request whose latencies are measured, in seconds of the monotonic clock."""

    arrived: float
    first_output: float | None
    last_output: float | None

    @property
    def is_stream(self) -> bool: ...


class FrontMetrics:
    """All metrics of one server, labeled with the model's name.

    Args:
        first: statistics of a scheduler that has not answered yet.
        engine_type: `unified`, `prefill` or `decode`, a label of the scheduler's
            series.
        canary_mode: a value of --kv-canary.
    """

    def __init__(
        self,
        model_name: str,
        *,
        first: SchedulerStats,
        engine_type: str,
        canary_mode: str,
    ) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._scheduler = SchedulerSeries(
            first,
            labels={MODEL_NAME: model_name, "engine_type": engine_type},
        )
        self._registry.register(self._scheduler)
        self._first_token = self._histogram(
            "sglang:time_to_first_token_seconds",
            "From arrival to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = self._histogram(
            "sglang:inter_token_latency_seconds",
            "Time between two tokens of streaming requests.",
            INTER_TOKEN_BUCKETS,
        )
        self._per_token = self._histogram(
            "sglang:time_per_output_token_seconds",
            "Mean time between the tokens of one request.",
            INTER_TOKEN_BUCKETS,
        )
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds",
            "From arrival to the end.",
            E2E_BUCKETS,
        )
        silence = self._gauge(
            "sglang:scheduler_silence_seconds",
            "Time for which the scheduler has owed the front an answer; its other "
            "series keep their values meanwhile.",
        )
        self._silence = silence.labels(model_name)
        modes = self._gauge(
            "sglang:kv_canary_mode", "1 for the mode of the KV canary.", "mode"
        )
        for mode in KV_CANARY_MODES:
            modes.labels(model_name, mode).set(mode == canary_mode)

    @classmethod
    def of(cls, server_args: ServerArgs, *, first: SchedulerStats) -> FrontMetrics:
        """Create the metrics of a server with these arguments."""
        role = server_args.disaggregation_mode
        return cls(
            server_args.served_model_name or "",
            first=first,
            engine_type="unified" if role == "null" else role,
            canary_mode=server_args.kv_canary,
        )

    def on_output(self, request: TimedRequest, output: RequestOutput) -> None:
        """Record the latencies of a request's new output."""
        now = time.monotonic()
        new_tokens = len(output.output_ids)
        if request.is_stream and new_tokens:
            if request.first_output is None or request.last_output is None:
                request.first_output = now
                self._first_token.observe(now - request.arrived)
            else:
                gap = (now - request.last_output) / new_tokens
                for _ in range(new_tokens):
                    self._inter_token.observe(gap)
        if output.first_token_at is not None:
            # By the scheduler's clock, because nothing came before the whole answer.
            request.first_output = max(output.first_token_at, request.arrived)
            self._first_token.observe(request.first_output - request.arrived)
        request.last_output = now
        if output.finish_reason is None or output.finish_reason.type == "abort":
            return
        self._e2e.observe(now - request.arrived)
        later_tokens = output.completion_tokens - 1
        if request.first_output is not None and later_tokens > 0:
            self._per_token.observe((now - request.first_output) / later_tokens)

    def render(self, stats: SchedulerStats | None, *, silence: float = 0.0) -> bytes:
        """Return the exposition text.

        Args:
            stats: the scheduler's statistics, or None if it did not answer, to show the
                last ones.
            silence: seconds for which it has owed an answer.
        """
        if stats is not None:
            self._scheduler.current = stats
        self._silence.set(silence)
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(
            name,
            text,
            labelnames=(MODEL_NAME,),
            buckets=buckets,
            registry=self._registry,
        )
        return family.labels(self._model_name)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(
            name, text, labelnames=(MODEL_NAME, *labels), registry=self._registry
        )
