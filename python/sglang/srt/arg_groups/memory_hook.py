"""Checks and resolves the memory, scheduling and attention flags."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.speculative_hook import default_max_running_requests
from sglang.srt.configs.attention_backends import (
    ATTENTION_BACKENDS,
    DEFAULT_ATTENTION_BACKEND,
    supported_names,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_CHUNKED_PREFILL_SIZE = {"cpu": 512, "cuda": 8192}
_CPU_RUNNING_REQUESTS = 64
_TRACK_INTERVAL = 256


def handle_memory(server_args: ServerArgs) -> None:
    """Resolve the flags for the KV pool and batches."""
    share = server_args.mem_fraction_static
    if share is None:
        share = 0.5 if server_args.device == "cpu" else 0.88
    if not 0.0 < share < 1.0:
        raise ValueError(f"--mem-fraction-static {share} must lie between 0 and 1")
    server_args.mem_fraction_static = share
    server_args.page_size = server_args.page_size or 1
    tokens = server_args.max_total_tokens
    if tokens is not None:
        server_args.max_total_tokens = _whole_pages(tokens, server_args.page_size)
    if server_args.max_running_requests is None:
        _handle_running_requests(server_args)
    ratio = server_args.swa_full_tokens_ratio
    if not 0 < ratio <= 1:
        raise ValueError(
            f"--swa-full-tokens-ratio {ratio}: must be above 0 and at most 1"
        )


def _handle_running_requests(server_args: ServerArgs) -> None:
    """Resolve --max-running-requests, or leave it to the model runner, which knows the
    memory of a GPU."""
    if server_args.speculative_algorithm is not None:
        server_args.max_running_requests = default_max_running_requests(server_args)
    elif server_args.device == "cpu":
        server_args.max_running_requests = _CPU_RUNNING_REQUESTS


def handle_states(server_args: ServerArgs) -> None:
    """Check the flags for recurrent state."""
    ratio = server_args.mamba_full_memory_ratio
    if not ratio > 0:
        raise ValueError(
            f"--mamba-full-memory-ratio {ratio}: must be above 0, because running "
            "requests need states"
        )
    interval, page = server_args.mamba_track_interval, server_args.page_size or 1
    strategy = server_args.mamba_radix_cache_strategy
    asked = {
        "--mamba-radix-cache-strategy": None if strategy == "auto" else strategy,
        "--mamba-track-interval": interval,
    }
    for flag, value in asked.items():
        if server_args.disable_radix_cache and value is not None:
            raise ValueError(
                f"{flag} {value} asks for cached states, which --disable-radix-cache "
                "rules out; remove one of them"
            )
    if strategy == "no_buffer" and interval is not None:
        raise ValueError(
            f"--mamba-track-interval {interval} has no effect with "
            "--mamba-radix-cache-strategy no_buffer, which caches no states while "
            "decoding; remove one of them"
        )
    if server_args.disable_radix_cache or strategy == "no_buffer":
        return
    if interval is None:
        interval = -(-_TRACK_INTERVAL // page) * page
    if interval % page:
        raise ValueError(
            f"--mamba-track-interval {interval} must be a multiple of --page-size "
            f"{page}: a cached state belongs to the end of a page"
        )
    server_args.mamba_track_interval = interval


def handle_scheduling(server_args: ServerArgs) -> None:
    """Resolve the flags for prefills and the waiting queue."""
    size, page = server_args.chunked_prefill_size, server_args.page_size or 1
    if size is None:
        size = -(-_CHUNKED_PREFILL_SIZE[server_args.device] // page) * page
    if size == 0 or size < -1:
        raise ValueError(
            f"--chunked-prefill-size {size} must be positive, or -1 for no chunks"
        )
    if size > 0 and size % page:
        raise ValueError(
            f"--chunked-prefill-size {size} must be a multiple of --page-size {page}"
        )
    server_args.chunked_prefill_size = size
    if (
        server_args.schedule_low_priority_values_first
        and not server_args.enable_priority_scheduling
    ):
        raise ValueError(
            "--schedule-low-priority-values-first has no effect without "
            "--enable-priority-scheduling; add it, or remove the flag"
        )


def handle_attention_backend(server_args: ServerArgs) -> None:
    """Resolve the backend, which must run on the device and support the page size."""
    device, page = server_args.device, server_args.page_size or 1
    name = server_args.attention_backend or DEFAULT_ATTENTION_BACKEND[device]
    if device not in ATTENTION_BACKENDS[name].devices:
        raise ValueError(
            f"--attention-backend {name} does not run on {device}; choose from "
            f"{', '.join(supported_names(device))}"
        )
    if ATTENTION_BACKENDS[name].needs_power_of_two_pages and page & (page - 1):
        raise ValueError(
            f"--page-size {page}: --attention-backend {name} serves powers of two; "
            "choose one, or another backend"
        )
    server_args.attention_backend = name


def _whole_pages(max_total_tokens: int, page_size: int) -> int:
    """Round a pool's tokens down to whole pages, as SGLang does."""
    size = max_total_tokens - max_total_tokens % page_size
    if not size:
        raise ValueError(
            f"--max-total-tokens {max_total_tokens} holds no page of --page-size "
            f"{page_size}; raise it, or lower the page size"
        )
    if size != max_total_tokens:
        logger.warning(
            "--max-total-tokens %d becomes %d: whole pages of --page-size %d",
            max_total_tokens,
            size,
            page_size,
        )
    return size
