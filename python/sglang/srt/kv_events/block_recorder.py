"""Turns changes of the prefix tree into KV events.

A block is a page of the tree. Its hash depends only on its tokens, the tokens before it
and the namespace, so replicas agree on it and restarts do not change it:

    hash = first 8 bytes of SHA-256(hash of the block before, 8 bytes | its tokens)

with big-endian hashes and 4-byte little-endian tokens. For the first block, the hash of
the block before is replaced by nothing or by the seed of the namespace.
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sglang.srt.kv_events.messages import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    NamespacedBlockStored,
)
from sglang.srt.mem_cache.base_prefix_cache import element_tokens
from sglang.srt.mem_cache.cache_listener import CacheListener
from sglang.srt.utils.salt_chain import SEED_BYTES, Namespace, event_seed

if TYPE_CHECKING:
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import HashArray, TreeNode

KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

HASH_BYTES = SEED_BYTES


def hash_blocks(before: bytes, tokens: IntArray, block_size: int) -> HashArray:
    """Hash whole blocks of `tokens`, int64 [n * block_size]; returns uint64 [n].

    Args:
        before: hash of the previous block, or `event_seed`.
    """
    data = tokens.astype("<u4").tobytes()
    stride = 4 * block_size
    digests = []
    for begin in range(0, len(data), stride):
        before = sha256(before + data[begin : begin + stride]).digest()[:HASH_BYTES]
        digests.append(before)
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def in_namespace(stored: BlockStored, namespace: str) -> NamespacedBlockStored:
    """Return the same event for a sequence that begins in `namespace`."""
    return NamespacedBlockStored(
        **msgspec.structs.asdict(stored),
        lora_name=Namespace.of(namespace).adapter,
        extra_keys=[(namespace,), *[None] * (len(stored.block_hashes) - 1)],
    )


class BlockRecorder(CacheListener):
    """Listens to a prefix cache and keeps the events since `take`.

    With a draft model a page also depends on the token after it, so the tree may hold
    one block several times, as siblings. Readers know prompts but not successors, so
    such a block is reported as stored with its first copy and as removed with its last
    copy.

    Args:
        page_size: tokens per block.
        bigram: whether the tree's elements are pairs of tokens.
    """

    def __init__(self, *, page_size: int, bigram: bool) -> None:
        self._page_size = page_size
        self._bigram = bigram
        # Copies by hash, for bigram trees only.
        self._copies: Counter[int] = Counter()
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def add(self, event: KVEvent) -> None:
        """Add an event of another tier."""
        self._events.append(event)

    # -- of the cache --------------------------------------------------------------

    def on_stored(self, node: TreeNode) -> None:
        assert node.parent is not None
        tokens = element_tokens(node.elements, bigram=self._bigram)
        parent = int(node.parent.block_hashes[-1]) if node.start else None
        if parent is None:
            before = event_seed(node.namespace)
        else:
            before = parent.to_bytes(HASH_BYTES, "big")
        node.block_hashes = hash_blocks(before, tokens, self._page_size)
        hashes: list[int] = node.block_hashes.tolist()
        namespace = node.namespace if parent is None else None
        if self._bigram and self._is_copy(hashes):
            # Blocks after the first one follow a different token than in the other
            # copies.
            parent, tokens = hashes[0], tokens[self._page_size :]
            hashes, namespace = hashes[1:], None
        if hashes:
            stored = self._stored(hashes, parent, tokens.tolist())
            self._events.append(
                stored if namespace is None else in_namespace(stored, namespace)
            )

    def _stored(
        self, hashes: list[int], parent: int | None, token_ids: list[int]
    ) -> BlockStored:
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self._page_size,
            lora_id=None,
            medium=MEDIUM_GPU,
        )

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        pages = len(upper.slots) // self._page_size
        upper.block_hashes = lower.block_hashes[:pages]
        lower.block_hashes = lower.block_hashes[pages:]

    def on_removed(self, node: TreeNode, rest: TreeNode | None) -> None:
        pages = 0
        if rest is not None:
            pages = len(rest.slots) // self._page_size
            rest.block_hashes = node.block_hashes[:pages]
        gone: list[int] = node.block_hashes[pages:].tolist()
        if self._bigram:
            gone = self._without_copies(gone)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == MEDIUM_GPU:
            last.block_hashes += gone
        elif gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_GPU))

    def on_cleared(self) -> None:
        self._copies.clear()
        self._events.append(AllBlocksCleared())

    # -- copies of a block ---------------------------------------------------------

    def _is_copy(self, hashes: list[int]) -> bool:
        """Count the blocks of a new run; returns whether its first one already
        existed.
        """
        self._copies.update(hashes)
        return self._copies[hashes[0]] > 1

    def _without_copies(self, hashes: list[int]) -> list[int]:
        """Uncount the blocks of a removed run; returns the blocks that are gone."""
        self._copies.subtract(hashes)
        gone = [value for value in hashes if not self._copies[value]]
        for value in gone:
            del self._copies[value]
        return gone
