"""The owner of each KV slot according to the host's records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kv_canary.evidence import Owner
from sglang.srt.mem_cache.allocator import host_array

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode


class SlotOwners:
    """The owner of each slot according to the host's records at the first question."""

    def __init__(
        self, cache: BasePrefixCache, requests: Callable[[], Iterable[Req]]
    ) -> None:
        self._cache = cache
        self._requests = requests

    def owner_of(self, slot: int) -> Owner:
        """Return the owner of `slot`: requests, the cache, or none."""
        allocator = self._cache.allocator
        if slot < 0:
            return Owner("none")
        if slot < allocator.page_size:
            return Owner("scratch page")
        if slot >= len(self._is_cached):
            return self._region_owner(slot)
        is_cached = bool(self._is_cached[slot])
        is_owned = bool(allocator.owns(np.array([slot // allocator.page_size]))[0])
        claims = self._find_claims(slot)
        holders = [f"request {json.dumps(req.rid)}" for req in dict.fromkeys(claims)]
        if is_cached:
            holders.append("prefix cache")
        nobody = "owned, holder unknown" if is_owned else "free"
        return Owner(
            ", ".join(holders) or nobody,
            is_shared=is_cached,
            is_allocated=is_owned,
            claims=tuple(req.serial for req in claims),
            prefix_of=frozenset(self._find_readers(slot)),
        )

    def _region_owner(self, slot: int) -> Owner:
        """Return the owner of a slot beyond the allocator's last slot: a request
        row.
        """
        region = self._cache.req_to_token_pool.region
        row = 0 if region is None else region.slot_to_row(slot)
        if not row:
            return Owner("outside the pool")
        for req in self._running:
            if req.req_pool_idx == row:
                text = f"request {json.dumps(req.rid)} (draft region)"
                return Owner(text, is_allocated=True, claims=(req.serial,))
        return Owner("free (draft region)")

    def _find_claims(self, slot: int) -> list[Req]:
        """Return the running requests that hold a slot outside the prefix cache, each
        as often as its row contains the slot.
        """
        slots, holders = self._claims
        found: list[int] = holders[slots == slot].tolist()
        return [self._running[i] for i in found]

    def _find_readers(self, slot: int) -> list[int]:
        """Return serials of running requests whose prefix contains a cached slot,
        according to the cache's records rather than the requests' rows.
        """
        return [
            serial
            for node, serials in self._paths
            if (node.slots == slot).any()
            for serial in serials
        ]

    @cached_property
    def _running(self) -> list[Req]:
        return [req for req in self._requests() if req.req_pool_idx]

    @cached_property
    def _claims(self) -> tuple[IntArray, IntArray]:
        """(slots that running requests hold outside the prefix cache, indices of the
        requests), row after row.
        """
        rows = [self._own_slots(req) for req in self._running]
        slots = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        counts = [len(row) for row in rows]
        return slots, np.repeat(np.arange(len(rows)), counts)

    @cached_property
    def _paths(self) -> list[tuple[TreeNode, list[int]]]:
        """Cached runs that running requests rely on, with the requests' serials."""
        found: dict[int, tuple[TreeNode, list[int]]] = {}
        for req in self._running:
            node = req.last_node
            while node is not None:
                found.setdefault(id(node), (node, []))[1].append(req.serial)
                node = node.parent
        return list(found.values())

    def _own_slots(self, req: Req) -> IntArray:
        return host_array(
            self._cache.req_to_token_pool.row_slots(
                req.req_pool_idx, req.cache_protected_len, req.allocated_len
            )
        )

    @cached_property
    def _is_cached(self) -> NDArray[np.bool_]:
        """[slots of the pool], True if the prefix cache holds the slot."""
        allocator = self._cache.allocator
        mask = np.zeros(allocator.size + allocator.page_size, dtype=np.bool_)
        mask[host_array(self._cache.cached_slots())] = True
        return mask
