"""The KV pool, its requests and its prefix cache at one moment, for the inspector.

Plain data between scheduler and front. Arrays are little-endian int32.
"""

from __future__ import annotations

import msgspec

from sglang.srt.managers.messages.tier_snapshot import TierSnapshot


class PageFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pages that have changed since frame `base`, or all pages in order if it is None.

    `at` holds their numbers minus 1, ascending (empty in a full frame), `cells` their
    cells (`mem_cache.page_map.page_cells`), and `written` the forwards that wrote them
    (empty if no records are kept).
    """

    seq: int
    base: int | None = None
    at: bytes = b""
    cells: bytes = b""
    written: bytes = b""


class RequestView(msgspec.Struct, kw_only=True):
    """An unfinished request.

    `phase` is "waiting", "prefill" or "decode". `node` is the serial of the cached run
    where its shared prefix of `cached_len` tokens ends. Its last committed token is in
    page `tail_page`, which has `tail_fill` slots in use; 0 if it has no page.
    """

    serial: int
    rid: str
    phase: str
    prompt_len: int
    output_len: int
    max_total_len: int
    committed_len: int
    allocated_len: int
    cached_len: int
    node: int
    tail_page: int
    tail_fill: int
    verify_ct: int
    accept_tokens: int
    num_heals: int


class PoolSize(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Number of pages without scratch, of window pages for a model with sliding
    windows, and of slots for recurrent states of requests, if there are checkpoints.
    """

    num_pages: int
    page_size: int
    num_window_pages: int = 0
    num_free_window_pages: int = 0
    num_request_states: int = 0


class PoolSnapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A snapshot of the scheduler.

    `frames` are the changes since the last snapshot, plus all pages if requested.
    `tree` is a `mem_cache.tree_table.tree_table`, cut from `num_nodes` runs in total;
    `requests` are the first of `num_requests`. `states` is a
    `mem_cache.state_map.state_table`. `tiers` is what is outside of the device, if
    there is anything. `clocks` holds the number of the next forward in each pool's
    records; `seconds` is the time the scheduler took.
    """

    seq: int
    pool: PoolSize
    frames: list[PageFrame] = []
    requests: list[RequestView] = []
    num_requests: int = 0
    tree: bytes = b""
    num_nodes: int = 0
    tiers: TierSnapshot | None = None
    states: bytes = b""
    forwards: int = 0
    clocks: list[int] = []
    seconds: float = 0.0
