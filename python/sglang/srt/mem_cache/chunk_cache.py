"""The prefix cache that shares nothing (`--disable-radix-cache`).

Requests own all their slots; it only frees them at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheableReq,
    CachedRun,
    MatchResult,
    RadixKey,
)
from sglang.srt.mem_cache.groups.runs import GroupRuns
from sglang.srt.mem_cache.tree_node import TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseAllocator
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class ChunkCache(BasePrefixCache):
    """No sharing: every match is empty, every finished request is freed whole."""

    root = TreeNode()

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseAllocator,
        bigram: bool = False,
    ) -> None:
        super().__init__(
            req_to_token_pool=req_to_token_pool, allocator=allocator, bigram=bigram
        )
        self.groups = tuple(GroupRuns(slots) for slots in allocator.secondary)

    def shared_len(self, common: int) -> int:
        return 0

    def match_prefix(self, key: RadixKey) -> MatchResult:
        empty = torch.empty(0, dtype=torch.int64)
        return MatchResult(slots=empty, last_node=self.root, cached_len=0)

    def match_length(self, key: RadixKey) -> int:
        return 0

    def insert(
        self,
        key: RadixKey,
        slots: torch.Tensor,
        holds: Sequence[GroupHold] | None = None,
    ) -> int:
        raise RuntimeError("ChunkCache keeps no slots: free them instead")

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Nothing to protect."""

    def dec_lock_ref(
        self, node: TreeNode, holds: Sequence[GroupHold] | None = None
    ) -> None:
        """Nothing to release."""

    def evict(self, num_slots: int) -> int:
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is cached."""

    def forget(self) -> None:
        """Nothing is cached."""

    def cache_finished_req(self, req: CacheableReq) -> None:
        self._held_node(req)
        self._free_row(req, 0, req.allocated_len)
        self.mark_released(req)

    def cache_unfinished_req(self, req: CacheableReq) -> None:
        self._held_node(req)

    def cut(self, nodes: Sequence[TreeNode]) -> torch.Tensor:
        """Nothing is cached."""
        return torch.empty(0, dtype=torch.int64)

    def iter_nodes(self) -> Iterator[TreeNode]:
        return iter(())

    def iter_cached_runs(self) -> Iterator[CachedRun]:
        return iter(())

    def check(self) -> None:
        """Nothing can be wrong."""
