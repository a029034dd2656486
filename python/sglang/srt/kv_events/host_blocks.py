"""Blocks in host memory as KV events.

The second tier keeps units of several blocks. Their hashes are those of the prefix
tree, so a router sees one block in two places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.kv_events.block_recorder import in_namespace
from sglang.srt.kv_events.messages import MEDIUM_CPU, BlockRemoved, BlockStored
from sglang.srt.mem_cache.cache_listener import CacheListener

if TYPE_CHECKING:
    from sglang.srt.kv_events.block_recorder import KVEvent
    from sglang.srt.mem_cache.page_ledger import IntArray


class HostBlocks(CacheListener):
    """Reports the blocks of units that enter and leave host memory.

    With a draft model several units may hold one block. It is reported with its first
    copy and as removed with its last.

    Args:
        add: takes an event.
        page_size: tokens per block.
        bigram: whether elements are pairs of tokens.
    """

    def __init__(
        self, add: Callable[[KVEvent], None], *, page_size: int, bigram: bool
    ) -> None:
        self._add = add
        self._page_size = page_size
        self._bigram = bigram
        self._units: dict[bytes, list[int]] = {}
        self._copies: Counter[int] = Counter()

    def unit_stored(
        self,
        key: bytes,
        *,
        before: int | None,
        hashes: list[int],
        elements: IntArray,
        namespace: str | None,
    ) -> None:
        """Note a unit.

        Args:
            key: names the unit in `unit_dropped`.
            before: hash of the block before it, or None at the start of a sequence.
            hashes: hashes of its blocks. elements: those of its tokens, int64.
            namespace: namespace of the sequence.
        """
        self._units[key] = hashes
        self._copies.update(hashes)
        new = [value for value in hashes if self._copies[value] == 1]
        if not new:
            return
        # Only the first blocks of a unit can have been there before.
        first = len(hashes) - len(new)
        tokens = elements >> 32 if self._bigram else elements
        stored = BlockStored(
            block_hashes=new,
            parent_block_hash=hashes[first - 1] if first else before,
            token_ids=tokens[first * self._page_size :].tolist(),
            block_size=self._page_size,
            lora_id=None,
            medium=MEDIUM_CPU,
        )
        if stored.parent_block_hash is None and namespace is not None:
            stored = in_namespace(stored, namespace)
        self._add(stored)

    def unit_dropped(self, key: bytes) -> None:
        """Note that a unit left."""
        hashes = self._units.pop(key, [])
        self._copies.subtract(hashes)
        gone = [value for value in hashes if not self._copies[value]]
        for value in gone:
            del self._copies[value]
        if gone:
            self._add(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))

    def on_cleared(self) -> None:
        # Readers then forget the blocks of every tier.
        self._units.clear()
        self._copies.clear()
