"""The KV pool, its requests and its prefix cache at one moment, for the inspector.

Plain data between scheduler and front. Arrays are little-endian int32.
"""

from __future__ import annotations

import msgspec


class PageFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pages that have changed since frame `base`; None: all pages, in order.

    `at` are their numbers less 1, ascending (empty in a frame of all), `cells` their
    cells (`mem_cache.page_map.page_cells`), `written` the forwards that wrote them,
    empty where no records are kept.
    """

    seq: int
    base: int | None = None
    at: bytes = b""
    cells: bytes = b""
    written: bytes = b""


class RequestView(msgspec.Struct, kw_only=True):
    """A request that has not ended.

    `phase` is "waiting", "prefill" or "decode". `node` is the serial of the cached run
    where its shared prefix of `cached_len` tokens ends. Its last committed token is in
    page `tail_page`, of which `tail_fill` slots are in use; 0: it has none.
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
    """Pages without scratch; of window pages those of a model with sliding windows."""

    num_pages: int
    page_size: int
    num_window_pages: int = 0
    num_free_window_pages: int = 0


class PoolSnapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One look at the scheduler.

    `frames` are the changes since the last snapshot, and all pages where they were
    asked for. `tree` is `mem_cache.tree_table.tree_table`, of `num_nodes` runs in all;
    `requests` the first of `num_requests`. `clocks` are the numbers of the next forward
    in the records of each pool; `seconds` is the time that the scheduler needed.
    """

    seq: int
    pool: PoolSize
    frames: list[PageFrame] = []
    requests: list[RequestView] = []
    num_requests: int = 0
    tree: bytes = b""
    num_nodes: int = 0
    forwards: int = 0
    clocks: list[int] = []
    seconds: float = 0.0
