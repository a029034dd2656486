"""Latencies and throughput of a set of requests, from the client's records.

Pure arithmetic: knows neither clocks nor protocols.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.bench_utils.report import Json, rate

PERCENTILES = (90, 95, 99)


@dataclass(kw_only=True)
class RequestRecord:
    """One request as its client measured it; times in seconds.

    Fields:
        prompt_tokens, output_tokens: counted by the server where it reports them.
        latency: from sending to the last byte.
        ttft: from sending to the first token, or None if the answer was not streamed.
        cached_tokens: number of cached prompt tokens, or None if the server does not
            report it.
        itl: one entry per token after the first; tokens that arrived together share
            their gap.
        error: reason of a failure; the times of a failed request do not count.
        verifications, verified_tokens: of drafts, and the output tokens they yielded; 0
            if the server does not report them.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    latency: float = 0.0
    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None
    verifications: int = 0
    verified_tokens: float = 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class StreamClock:
    """Fills a record's times while its answer streams in.

    Args:
        began: when the request was sent; the same clock as `on_tokens`.
    """

    def __init__(self, record: RequestRecord, began: float) -> None:
        self._record = record
        self._began = began
        self._last = began

    def on_tokens(self, count: int, now: float) -> None:
        """Record `count` new tokens at `now`; zero or fewer are ignored."""
        if count <= 0:
            return
        record = self._record
        if record.ttft is None:
            record.ttft = now - self._began
            # Further tokens of the first chunk arrived without a gap.
            count -= 1
            record.itl += [0.0] * count
        else:
            record.itl += [(now - self._last) / count] * count
        self._last = now
        record.latency = now - self._began


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the closest ranks; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(name: str, values: Sequence[float]) -> Json:
    """Return `{mean,median,std,p90,p95,p99,max}_<name>_ms` of values in seconds.

    All of them are None if there are no values.
    """
    if not values:
        names = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max")
        return {f"{statistic}_{name}_ms": None for statistic in names}
    ms = [value * 1e3 for value in values]
    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": percentile(ms, 50),
        f"std_{name}_ms": statistics.pstdev(ms),
        **{f"p{p}_{name}_ms": percentile(ms, p) for p in PERCENTILES},
        f"max_{name}_ms": max(ms),
    }


def summarize(records: Sequence[RequestRecord], *, duration: float) -> Json:
    """Return the figures of a run of `duration` seconds; failed requests only count.

    `concurrency` is the mean number of requests in flight, `cache_hit_rate` the share
    of prompt tokens that the server had cached (None where it does not report it).
    """
    done = [record for record in records if record.error is None]
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    latencies = [record.latency for record in done]
    reported = [r.cached_tokens for r in done if r.cached_tokens is not None]
    cached = sum(reported) if reported else None
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "cache_hit_rate": None if cached is None else rate(cached, inputs),
        "request_throughput": rate(len(done), duration),
        "input_throughput": rate(inputs, duration),
        "output_throughput": rate(outputs, duration),
        "total_throughput": rate(inputs + outputs, duration),
        "concurrency": rate(sum(latencies), duration),
        **spread_ms("e2e_latency", latencies),
        **spread_ms("ttft", [r.ttft for r in done if r.ttft is not None]),
        **spread_ms("tpot", [r.tpot for r in done if r.tpot is not None]),
        **spread_ms("itl", [gap for record in done for gap in record.itl]),
    }
