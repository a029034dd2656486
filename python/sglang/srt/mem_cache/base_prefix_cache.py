"""Interface of the prefix caches, and of a request as they need it.

It defines keys, matches and the token ranges of a request. It knows nothing about
scheduling and reads no device memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from sglang.srt.mem_cache.page_ledger import IntArray
from sglang.srt.utils.salt_chain import TOKEN_MASK

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseAllocator
    from sglang.srt.mem_cache.cache_listener import CacheListener
    from sglang.srt.mem_cache.groups.runs import GroupRuns
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.groups.state_runs import StateRuns
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.saved_tree import SavedTree
    from sglang.srt.mem_cache.tree_node import TreeNode

TokenSeq = Sequence[int] | IntArray


def _int64(tokens: TokenSeq) -> IntArray:
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int64, copy=False)
    # array('q') converts a list twice as fast as numpy does.
    source = tokens if isinstance(tokens, array) else array("q", tokens)
    return np.array(memoryview(source), dtype=np.int64)


def element_tokens(elements: IntArray, *, bigram: bool) -> IntArray:
    """Return the token of each element of a `RadixKey`, as the device has it."""
    return elements >> 32 if bigram else elements & TOKEN_MASK


@dataclass(frozen=True, slots=True)
class RadixKey:
    """A token sequence as a key of the prefix cache.

    Fields:
        tokens: token ids. An int64 array is used as it is; a list is converted at every
            use.
        namespace: keys in different namespaces (`extra_key`, salt) never share.
        bigram: element p is the pair (token p, token p + 1), so that N tokens make
            N - 1 elements. Needed if a slot's bytes also depend on the next token (the
            draft pool of EAGLE).
    """

    tokens: TokenSeq
    namespace: str | None = None
    bigram: bool = False

    def __len__(self) -> int:
        """Number of elements."""
        count = len(self.tokens)
        return max(count - 1, 0) if self.bigram else count

    def elements(self) -> IntArray:
        """Return int64 [len(self)], one value per position; equal means shareable."""
        ids = _int64(self.tokens)
        return (ids[:-1] << 32) | ids[1:] if self.bigram else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """Longest cached prefix of a key.

    Fields:
        slots: int64 [matched], host; length is a multiple of the page size.
        last_node: the node where the match ends. The slots are only safe while it is
            locked; an eviction before that cuts it off and locking it then fails.
        cached_len: positions that are cached in the primary group. More than the match
            if no request can go on from there in another group.
    """

    slots: torch.Tensor
    last_node: TreeNode
    cached_len: int

    def __len__(self) -> int:
        """Matched positions."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """One node of the cache as arrays, for sweeps over cached slots.

    Fields:
        slots: int64 [n], host.
        tokens: int64 [n], the token at each position.
        start: position of slots[0]; the run covers [start, start + n).
        parent_slot: slot of position start - 1, or -1 at position 0.
        namespace: cache namespace of the sequence.
        locked: whether a running request relies on the run.
    """

    slots: IntArray
    tokens: IntArray
    start: int
    parent_slot: int
    namespace: str | None
    locked: bool

    def positions(self) -> IntArray:
        """Return the position of each slot, int64 [n]."""
        return np.arange(self.start, self.start + len(self.slots), dtype=np.int64)

    def previous_slots(self) -> IntArray:
        """Return the slot of each preceding position, int64 [n]; -1 before 0."""
        previous = np.empty_like(self.slots)
        previous[0] = self.parent_slot
        previous[1:] = self.slots[:-1]
        return previous


class CacheableReq(Protocol):
    """Fields of a request that a prefix cache reads and writes.

    Positions of a request's row in `req_to_token`, all intervals half-open:

    ```
    0 ....... protected ....... aligned ...... committed .... allocated .. page end
    | tree's,   |  own, whole    |  own, part    |  own, not    |  own, not
    | locked    |  pages         |  of a page    |  committed   |  in the row
    ```
    protected = cache_protected_len, a page multiple; aligned = the cacheable whole
    pages of the committed part (of committed - 1 elements with a bigram key).

    Finished (`cache_finished_req`), with shared = the length that the tree already has:
    ```
    [0, protected)          stays the tree's, lock released
    [protected, shared)     duplicates of the tree's slots: freed
    [shared, aligned)       given to the tree
    [aligned, allocated)    freed, with the rest of the last page
    ```
    With `no_cache`, [protected, allocated) is freed and nothing is given.

    Unfinished (`cache_unfinished_req`, between the chunks of a prefill):
    ```
    [0, protected)          stays the tree's
    [protected, shared)     own slots freed, the row now points to the tree's
    [shared, aligned)       given to the tree, the row keeps the slots
    [aligned, allocated)    stays the request's own
    ```
    and protected becomes aligned, the lock moves to the node that ends there.

    Attributes:
        req_pool_idx: row in `req_to_token`.
        namespace: cache namespace.
        no_cache: must not be put into the cache (a prefill that was not fully
            written, or KV that is in doubt).
        committed_len: positions whose KV is written, or will be before any later
            reader in stream order, with the tokens of `fill_ids()`.
        unready_len: the last of them whose KV may not be in every pool: not cached at
            the end of the request. May count a step in flight.
        allocated_len: positions of the row that hold slots of this request or the tree.
        cache_protected_len: see above. Set at admission to the length of the match.
        prefix_slots: int64, the tree's slots for its row. Set at admission.
        last_node: locked node where the tree's part ends; None once released.
        branch_len: positions of its prompt that were cached at its admission, usable or
            not. Other requests have them too, so they may be asked for again.
        holds: its hold on each group of the cache, in their order. Empty before
            admission and after release.
    """

    req_pool_idx: int
    namespace: str | None
    no_cache: bool
    committed_len: int
    unready_len: int
    allocated_len: int
    cache_protected_len: int
    prefix_slots: torch.Tensor
    last_node: TreeNode | None
    branch_len: int
    holds: tuple[GroupHold, ...]

    def fill_ids(self) -> TokenSeq:
        """Return the request's token ids so far, at least `committed_len` of them."""


class BasePrefixCache(ABC):
    """Interface of `RadixCache` and `ChunkCache`.

    Args:
        req_to_token_pool: rows to read a finished request's slots from and to remap.
        allocator: takes the slots that the cache frees.
        bigram: key element p is the token pair (p, p + 1); see `RadixKey`.

    Attributes:
        root: node of the empty prefix.
        groups: the cache's part of each secondary group of the allocator, and of the
            checkpoints.
        checkpoints: checkpoints of recurrent state, or None if there are none.
        listeners: hear of all changes from now on. Add them while the cache is empty.
    """

    root: TreeNode
    groups: tuple[GroupRuns, ...]
    checkpoints: StateRuns | None = None

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseAllocator,
        bigram: bool = False,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.bigram = bigram
        self.listeners: list[CacheListener] = []

    def key(self, tokens: TokenSeq, *, namespace: str | None = None) -> RadixKey:
        """Return a key of the kind this cache uses."""
        return RadixKey(tokens, namespace, self.bigram)

    def shared_len(self, common: int) -> int:
        """Return how many positions requests with `common` leading tokens can share."""
        pairs = max(common - self.bigram, 0)
        return pairs - pairs % self.page_size

    def tokens_to_share(self, count: int) -> int:
        """Return the least number of common leading tokens with which requests can
        share `count` positions, at least one (`shared_len` is its inverse)."""
        return -(-count // self.page_size) * self.page_size + self.bigram

    # -- lookup --------------------------------------------------------------------

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Find the longest cached prefix in whole pages; counts as an access."""

    def cached_end(self, key: RadixKey) -> TreeNode:
        """Return the node where the longest cached prefix ends, whether or not a
        request could continue from there. Splits and marks nodes like
        `match_prefix`."""
        return self.match_prefix(key).last_node

    @abstractmethod
    def match_length(self, key: RadixKey) -> int:
        """Return the length that `match_prefix` would find, without an access."""

    @abstractmethod
    def insert(
        self,
        key: RadixKey,
        slots: torch.Tensor,
        holds: Sequence[GroupHold] | None = None,
    ) -> int:
        """Give the tree the slots of the whole pages of `key` that it lacks, with their
        slots in the secondary groups.

        Args:
            holds: the caller's hold on each group. Defaults to all slots and no
                checkpoints.

        Returns:
            The length, in positions, that the tree already had. The caller keeps its
            own slots below that length, and everything past the last page.
        """

    # -- locks and eviction --------------------------------------------------------

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode) -> None:
        """Protect the path to `node` from eviction; RuntimeError if it was evicted."""

    @abstractmethod
    def dec_lock_ref(
        self, node: TreeNode, holds: Sequence[GroupHold] | None = None
    ) -> None:
        """Undo one `inc_lock_ref`; RuntimeError without one.

        Args:
            holds: holds of the request that locked, which may have given up its lock in
                some groups. Defaults to none given up.
        """

    @abstractmethod
    def evict(self, num_slots: int) -> int:
        """Free at least `num_slots` unlocked slots, least recently used first.

        Returns:
            How many were freed; fewer if there are not enough.
        """

    @abstractmethod
    def evictable_size(self) -> int:
        """Return the number of cached slots that `evict` could free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return the number of cached slots that running requests rely on."""

    def total_size(self) -> int:
        """Return the number of cached slots."""
        return self.evictable_size() + self.protected_size()

    @abstractmethod
    def reset(self) -> None:
        """Free everything cached; RuntimeError while a request holds a lock."""

    @abstractmethod
    def forget(self) -> None:
        """Drop every run and lock without freeing slots, for a caller that frees all
        slots."""

    # -- requests ------------------------------------------------------------------

    @abstractmethod
    def cache_finished_req(self, req: CacheableReq) -> None:
        """Take over or free every slot of `req` (see `CacheableReq`).

        Afterwards the request owns nothing: last_node is None, the lengths are 0.
        The caller frees its row.

        Raises:
            RuntimeError: the request was released before, or its lengths disagree.
        """

    @abstractmethod
    def cache_unfinished_req(self, req: CacheableReq) -> None:
        """Share what `req`, which continues, has computed (see `CacheableReq`)."""

    # -- damage --------------------------------------------------------------------

    def let_go(self, req: CacheableReq) -> torch.Tensor:
        """Take everything from `req`, its row and its lock, and give it to no one.

        Returns:
            The slots that were its own, int64 on the host. The caller frees them.

        Raises:
            RuntimeError: the request holds nothing.
        """
        node = req.last_node
        if node is None:
            raise RuntimeError(
                f"request of row {req.req_pool_idx} holds no cache node: released "
                "twice or never admitted"
            )
        slots = self.req_to_token_pool.row_slots(
            req.req_pool_idx, req.cache_protected_len, req.allocated_len
        )
        self.dec_lock_ref(node, req.holds)
        self.mark_released(req)
        self.req_to_token_pool.free([req.req_pool_idx])
        req.req_pool_idx = 0
        return slots

    @abstractmethod
    def cut(self, nodes: Sequence[TreeNode]) -> torch.Tensor:
        """Take nodes, and everything below them, out of the cache.

        Returns:
            Their slots, int64 on the host. The caller frees them.

        Raises:
            RuntimeError: a request holds a lock on one of them; nothing was cut.
        """

    # -- checkpoints ---------------------------------------------------------------

    def save(self) -> tuple[SavedTree | None, dict[int, int]]:
        """Return the tree as plain data, in O(nodes), and the index of each run by the
        serial of its node. A cache without a tree returns None and nothing."""
        return None, {}

    def load(self, saved: SavedTree | None) -> list[TreeNode]:
        """Replace an empty tree by a saved one and return its nodes in order.

        Raises:
            ValueError: `saved` is not a tree.
        """
        return []

    # -- inspection ----------------------------------------------------------------

    @abstractmethod
    def iter_nodes(self) -> Iterator[TreeNode]:
        """Yield every node but the root, parents before children."""

    @abstractmethod
    def iter_cached_runs(self) -> Iterator[CachedRun]:
        """Yield every node, parents before children."""

    def cached_slots(self) -> torch.Tensor:
        """Return all cached slots, int64 on the host, in no particular order."""
        runs = [run.slots for run in self.iter_cached_runs()]
        if not runs:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate(runs))

    @abstractmethod
    def check(self) -> None:
        """Verify the whole structure, O(cached slots); RuntimeError if it is broken."""

    # -- shared by implementations -------------------------------------------------

    def _held_node(self, req: CacheableReq) -> TreeNode:
        """Return the locked node of a live request after checking its lengths."""
        node = req.last_node
        if node is None:
            raise RuntimeError(
                f"request of row {req.req_pool_idx} holds no cache node: released "
                "twice or never admitted"
            )
        protected, allocated = req.cache_protected_len, req.allocated_len
        committed = allocated if req.no_cache else req.committed_len
        if not 0 <= protected <= committed <= allocated:
            raise RuntimeError(
                f"request of row {req.req_pool_idx}: need protected <= committed <= "
                f"allocated, have {req.cache_protected_len}, {req.committed_len}, "
                f"{req.allocated_len}"
            )
        return node

    def _free_row(self, req: CacheableReq, start: int, end: int) -> None:
        if end > start:
            self.allocator.free(
                self.req_to_token_pool.row_slots(req.req_pool_idx, start, end)
            )

    def mark_admitted(self, req: CacheableReq, match: MatchResult) -> None:
        """Record a match that was locked for `req`."""
        self.mark_held(req, match.last_node, len(match))
        req.prefix_slots = match.slots
        req.branch_len = match.cached_len

    def mark_held(self, req: CacheableReq, node: TreeNode, length: int) -> None:
        """Record that `node`, where `length` positions end, was locked for `req`."""
        req.last_node = node
        req.cache_protected_len = length
        every = [group.slots for group in self.groups]
        if req.holds:
            pairs = zip(every, req.holds, strict=True)
            req.holds = tuple(slots.renew(hold, length) for slots, hold in pairs)
        else:
            req.holds = tuple(slots.hold(length) for slots in every)

    def mark_released(self, req: CacheableReq) -> None:
        """Record that `req` holds nothing any more."""
        if req.holds:
            for group, hold in zip(self.groups, req.holds, strict=True):
                group.slots.release(hold)
        req.last_node = None
        req.holds = ()
        req.prefix_slots = torch.empty(0, dtype=torch.int64)
        req.cache_protected_len = 0
        req.committed_len = req.allocated_len = req.branch_len = 0
