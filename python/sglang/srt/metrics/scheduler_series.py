"""The scheduler's statistics as Prometheus series: names, labels, zeros from the start.

Names and labels are SGLang's where it has the metric. Needs neither torch nor a web
framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import HistogramStats, SchedulerStats

MODEL_NAME = "model_name"
# Labels of rank 0, which answers for all ranks.
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0"}

# Field of SchedulerStats -> (metric, help).
GAUGES: dict[str, tuple[str, str]] = {
    "num_running_reqs": ("sglang:num_running_reqs", "Requests in the running batch."),
    "num_queue_reqs": ("sglang:num_queue_reqs", "Waiting requests."),
    "num_grammar_queue_reqs": (
        "sglang:num_grammar_queue_reqs",
        "Requests waiting for their grammar.",
    ),
    "num_used_tokens": ("sglang:num_used_tokens", "KV slots held by requests."),
    "max_total_num_tokens": ("sglang:max_total_num_tokens", "KV slots in the pool."),
    "token_usage": ("sglang:token_usage", "Share of KV slots held by requests."),
    "mamba_usage": (
        "sglang:mamba_usage",
        "Share of the slots for cached recurrent states in use.",
    ),
    "gen_throughput": ("sglang:gen_throughput", "Output tokens per second."),
    "cache_hit_rate": ("sglang:cache_hit_rate", "Share of prompt tokens in the cache."),
    "kv_events_connections": (
        "sglang:kv_events_connections",
        "Open connections to the sockets of KV events.",
    ),
    "num_prefill_inflight_queue_reqs": (
        "sglang:num_prefill_inflight_queue_reqs",
        "Transfers of KV to decode engines that have not ended.",
    ),
    "num_decode_transfer_queue_reqs": (
        "sglang:num_decode_transfer_queue_reqs",
        "Requests that wait for KV of a prefill engine.",
    ),
    "hicache_host_used_tokens": (
        "sglang:hicache_host_used_tokens",
        "Tokens whose KV is in host memory.",
    ),
    "hicache_host_total_tokens": (
        "sglang:hicache_host_total_tokens",
        "Tokens whose KV fits host memory.",
    ),
    "hicache_storage_tokens": (
        "sglang:hicache_storage_tokens",
        "Tokens whose KV is in files.",
    ),
    "hicache_storage_bytes": (
        "sglang:hicache_storage_bytes",
        "Bytes of the files with KV.",
    ),
    "num_retracted_reqs": (
        "sglang:num_retracted_reqs",
        "Requests that lost their KV slots and are run again.",
    ),
    "spec_accept_length": (
        "sglang:spec_accept_length",
        "Tokens per verification step of speculative decoding.",
    ),
    "kv_canary_quarantined_pages": (
        "sglang:kv_canary_quarantined_pages",
        "KV pages out of use: damaged ones that are watched or kept out.",
    ),
    "kv_canary_quarantined_share": (
        "sglang:kv_canary_quarantined_share",
        "These pages as a share of the pool.",
    ),
    "kv_canary_is_degraded": (
        "sglang:kv_canary_degraded",
        "1 if something was healed in the last minute or KV pages stay out of use.",
    ),
}
# The exposition format appends `_total` to these names.
COUNTERS: dict[str, tuple[str, str]] = {
    "prompt_tokens_total": ("sglang:prompt_tokens", "Prompt tokens of requests."),
    "generation_tokens_total": ("sglang:generation_tokens", "Tokens generated."),
    "cached_tokens_total": ("sglang:cached_tokens", "Prompt tokens from the cache."),
    "num_requests_total": (
        "sglang:num_requests",
        "Requests that the scheduler accepted.",
    ),
    "num_aborted_requests_total": (
        "sglang:num_aborted_requests",
        "Requests that ended with an abort.",
    ),
    "draft_never_accepted_total": (
        "sglang:draft_never_accepted",
        "Times that 1,000 drafts in a row had no token accepted.",
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
    "kernel_loads_after_ready_total": (
        "sglang:kernel_loads_after_ready",
        "Kernels that were compiled or loaded while requests waited.",
    ),
    "kv_canary_protected_tokens_total": (
        "sglang:kv_canary_protected_tokens",
        "KV slots verified before they were read.",
    ),
    "kv_canary_swept_tokens_total": (
        "sglang:kv_canary_swept_tokens",
        "Cached KV slots verified by sweeps.",
    ),
    "kv_canary_sweep_passes_total": (
        "sglang:kv_canary_sweep_passes",
        "Sweep passes over the prefix cache.",
    ),
    "kv_canary_healed_tokens_total": (
        "sglang:kv_canary_healed_tokens",
        "Tokens of requests that were recomputed after their KV was damaged.",
    ),
    "num_transfer_failed_reqs_total": (
        "sglang:num_transfer_failed_reqs",
        "Requests that did not get all KV that they asked a prefill engine for.",
    ),
    "kv_transfer_sent_bytes_total": (
        "sglang:kv_transfer_sent_bytes",
        "Bytes of KV that were sent to decode engines.",
    ),
    "kv_transfer_received_bytes_total": (
        "sglang:kv_transfer_received_bytes",
        "Bytes of KV that have come from prefill engines.",
    ),
    "hicache_stored_tokens_total": (
        "sglang:hicache_stored_tokens",
        "Tokens whose KV was copied to host memory.",
    ),
    "hicache_loaded_tokens_total": (
        "sglang:load_back_tokens",
        "Tokens whose KV was copied back to the device.",
    ),
    "hicache_skipped_tokens_total": (
        "sglang:hicache_skipped_tokens",
        "Tokens whose KV found no place in host memory, because all were in use.",
    ),
    "hicache_damaged_units_total": (
        "sglang:hicache_damaged_units",
        "Units of KV that were dropped because they did not arrive intact.",
    ),
    "hicache_written_tokens_total": (
        "sglang:backuped_tokens",
        "Tokens whose KV was written to files.",
    ),
    "hicache_read_tokens_total": (
        "sglang:prefetched_tokens",
        "Tokens whose KV was read from files.",
    ),
    "hicache_unwritten_tokens_total": (
        "sglang:hicache_unwritten_tokens",
        "Tokens whose KV was not written to files, which were too slow or failed.",
    ),
    "kv_events_published_total": (
        "sglang:kv_events_published",
        "KV events published.",
    ),
    "kv_events_dropped_total": (
        "sglang:kv_events_dropped",
        "KV events not published because the publisher was late.",
    ),
    "kv_events_replayed_total": (
        "sglang:kv_events_replayed",
        "KV events sent again on request.",
    ),
}

# Field -> (metric, label, help).
LABELLED_COUNTERS: dict[str, tuple[str, str, str]] = {
    "prefill_cuda_graph_fallbacks_total": (
        "sglang:prefill_cuda_graph_fallbacks",
        "reason",
        "Prefill forwards that ran eagerly although graphs exist.",
    ),
    "kv_canary_violations_total": (
        "sglang:kv_canary_violations",
        "reason",
        "Violations found by the KV canary, counting each damage once.",
    ),
    "kv_canary_heals_total": (
        "sglang:kv_canary_heals",
        "diagnosis",
        "Healings, by diagnosis of the damage.",
    ),
}
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "queue_time_seconds": (
        "sglang:queue_time_seconds",
        "From a request's arrival at the scheduler to its first batch.",
    ),
    "kv_canary_recovery_seconds": (
        "sglang:kv_canary_recovery_seconds",
        "Time from damage to the next token of recomputed requests.",
    ),
}


class SchedulerSeries:
    """A collector of the most recently fetched `SchedulerStats`.

    Args:
        labels: labels of every series, in addition to `RANK_LABELS`.

    Attributes:
        current: the latest statistics; initially the zeros of a loading scheduler.
    """

    def __init__(self, first: SchedulerStats, *, labels: Mapping[str, str]) -> None:
        self.current = first
        both = {**labels, **RANK_LABELS}
        self._names, self._values = list(both), list(both.values())

    def describe(self) -> list[Metric]:
        """Return no names, because the registry would collect to check them."""
        return []

    def collect(self) -> Iterator[Metric]:
        values = msgspec.structs.asdict(self.current)
        yield from self._plain(values)
        for field, (name, label, text) in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[*self._names, label])
            for value, count in values[field].items():
                counter.add_metric([*self._values, value], count)
            yield counter
        for field, (name, text) in HISTOGRAMS.items():
            if values[field] is not None:
                yield self._histogram(name, text, values[field])

    def _plain(self, values: Mapping[str, Any]) -> Iterator[Metric]:
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            gauge.add_metric(self._values, values[field])
            yield gauge
        for field, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, values[field])
            yield counter

    def _histogram(
        self, name: str, text: str, stats: HistogramStats
    ) -> HistogramMetricFamily:
        """Return a histogram in exposition form: cumulative counts, with an infinite
        last bound.
        """
        bounds = [*map(str, stats.bounds), "+Inf"]
        sums = itertools.accumulate(stats.counts)
        family = HistogramMetricFamily(name, text, labels=self._names)
        family.add_metric(
            self._values, list(zip(bounds, sums, strict=True)), sum_value=stats.sum
        )
        return family
