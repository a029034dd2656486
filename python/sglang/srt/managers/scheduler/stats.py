"""Counters of a scheduler, and the numbers it logs and reports."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kv_canary.checks import EVERY_REASON
from sglang.srt.managers.messages.io_struct import HistogramStats, SchedulerStats
from sglang.srt.managers.scheduler.draft_alarm import DraftAlarm
from sglang.srt.managers.scheduler.heal_stats import EVERY_DIAGNOSIS, RECOVERY_BUCKETS
from sglang.srt.model_executor.breakable_cuda_graph_runner import FALLBACK_REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.batch.req import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Throughput is measured over windows of at least this many seconds.
WINDOW_SECONDS = 1.0
QUEUE_TIME_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


def empty_stats(*, max_total_num_tokens: int) -> SchedulerStats:
    """Return the numbers of an unused scheduler, with every label at 0, because a
    missing series cannot be monitored.
    """
    return SchedulerStats(
        max_total_num_tokens=max_total_num_tokens,
        prefill_cuda_graph_fallbacks_total=dict.fromkeys(FALLBACK_REASONS, 0),
        kv_canary_violations_total=dict.fromkeys(EVERY_REASON, 0),
        kv_canary_heals_total=dict.fromkeys(EVERY_DIAGNOSIS, 0),
        kv_canary_recovery_seconds=HistogramStats.empty(RECOVERY_BUCKETS),
    )


def add_runner_stats(stats: SchedulerStats, runner: ModelRunner) -> None:
    """Fill in how many forwards of `runner` replayed a graph, how many could not, and
    the kernels that were compiled late.
    """
    stats.kernel_loads_after_ready_total = runner.late_kernels.total
    prefill = runner.prefill_graph_runner
    stats.prefill_cuda_graph_passes_total = prefill.num_replays if prefill else 0
    stats.cuda_graph_passes_total = stats.prefill_cuda_graph_passes_total
    for decode in runner.decode_graph_runners():
        stats.cuda_graph_passes_total += decode.num_replays
    if prefill is not None:
        stats.prefill_cuda_graph_fallbacks_total.update(prefill.fallbacks)


class StatsTracker:
    """Owns the counters; gauges are read on demand."""

    def __init__(self, cache: BasePrefixCache, server_args: ServerArgs) -> None:
        self._cache = cache
        self._decode_log_interval = server_args.decode_log_interval
        self._draft_alarm = DraftAlarm(server_args)
        self._totals = empty_stats(max_total_num_tokens=cache.allocator.size)
        self._queue_time = HistogramStats.empty(QUEUE_TIME_BUCKETS)
        self._totals.queue_time_seconds = self._queue_time
        self._decode_steps = 0
        self._window_start = time.monotonic()
        self._window_tokens = 0
        self._throughput = 0.0
        # Verifications and their output tokens in the current window; mean of the last
        # one.
        self._verified = [0, 0]
        self._accept_length = 0.0

    @property
    def num_forwards(self) -> int:
        """Number of batches launched so far."""
        return self._totals.forward_passes_total

    def on_verified(self, tokens: int, accepted: int) -> None:
        """Count a verified draft that yielded `tokens` output tokens. A stop condition
        may have cut them, so `accepted` may be more.
        """
        self._verified[0] += 1
        self._verified[1] += tokens
        self._draft_alarm.on_verified(accepted)

    def on_prefill(self, reqs: list[Req], new_tokens: int, *, waiting: int) -> None:
        """Count a launched prefill of `new_tokens` prompt tokens over `reqs`."""
        self._totals.forward_passes_total += 1
        logger.debug(
            "Prefill: %d requests, %d new tokens, %d waiting",
            len(reqs),
            new_tokens,
            waiting,
        )

    def on_admitted(self, req: Req) -> None:
        """Count the first admission of `req`, whose cached prefix is known."""
        self._queue_time.observe(time.monotonic() - req.arrived)
        self._totals.prompt_tokens_total += req.prompt_len
        self._totals.cached_tokens_total += min(req.cached_tokens, req.prompt_len)

    def on_decode(self, running: int, waiting: int) -> None:
        self._totals.forward_passes_total += 1
        self._decode_steps += 1
        if self._decode_steps % self._decode_log_interval == 0:
            logger.info(
                "Decode: %d running, %d waiting, token usage %.2f, %.1f tok/s",
                running,
                waiting,
                self._used() / self._cache.allocator.size,
                self._throughput,
            )

    def on_tokens(self, count: int) -> None:
        """Count `count` generated tokens."""
        self._totals.generation_tokens_total += count
        self._window_tokens += count
        now = time.monotonic()
        if now - self._window_start >= WINDOW_SECONDS:
            self._close_window(now)

    def on_idle(self) -> None:
        self._close_window(time.monotonic())

    def on_finish(self, req: Req) -> None:
        self._totals.num_requests_total += 1
        if req.finish_reason is not None and req.finish_reason.type == "abort":
            self._totals.num_aborted_requests_total += 1

    def on_revived(self, req: Req) -> None:
        """Undo `on_finish` for a request whose end was an error of the host."""
        self._totals.num_requests_total -= 1
        if req.finish_reason is not None and req.finish_reason.type == "abort":
            self._totals.num_aborted_requests_total -= 1

    def on_retract(self, count: int) -> None:
        self._totals.num_retracted_reqs += count

    def snapshot(
        self, *, running: int, waiting: Sequence[Req], compiling: int
    ) -> SchedulerStats:
        """Return all current numbers.

        Args:
            running: number of requests in the batch that decodes.
            compiling: number of requests whose grammar is not ready.
        """
        totals = self._totals
        if time.monotonic() - self._window_start > 2 * WINDOW_SECONDS:
            self.on_idle()
        totals.num_running_reqs = running
        totals.num_queue_reqs = len(waiting)
        totals.num_grammar_queue_reqs = compiling
        totals.num_queue_tokens = sum(len(req.tokens) for req in waiting)
        totals.num_used_tokens = self._used()
        totals.token_usage = self._used() / self._cache.allocator.size
        checkpoints = self._cache.checkpoints
        if checkpoints is not None:
            slots = checkpoints.slots
            totals.mamba_usage = 1 - slots.available_size() / slots.size
        totals.gen_throughput = self._throughput
        totals.spec_accept_length = self._accept_length
        totals.draft_never_accepted_total = self._draft_alarm.total
        prompt = totals.prompt_tokens_total
        totals.cache_hit_rate = totals.cached_tokens_total / prompt if prompt else 0.0
        return totals

    def _used(self) -> int:
        """Number of slots that requests hold, without unused cached ones."""
        allocator = self._cache.allocator
        return (
            allocator.size - allocator.available_size() - self._cache.evictable_size()
        )

    def _close_window(self, now: float) -> None:
        seconds = now - self._window_start
        self._throughput = self._window_tokens / seconds if seconds > 0 else 0.0
        self._window_start, self._window_tokens = now, 0
        verified, tokens = self._verified
        if verified:
            self._accept_length = tokens / verified
            self._verified = [0, 0]
