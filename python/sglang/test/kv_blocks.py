"""A strict reader of KV events, and the actual blocks of a prefix tree."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.tree_node import TreeNode


class Block(NamedTuple):
    """Everything that events say about a block."""

    parent: int | None
    tokens: tuple[int, ...]
    namespace: str | None


class StrictReader:
    """Applies decoded events and rejects inconsistent ones."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.blocks: dict[int, Block] = {}

    def apply(self, events: list[list[Any]]) -> None:
        """Apply events in wire form, as untyped arrays."""
        appliers: dict[str, Callable[..., None]] = {
            "BlockStored": self._store,
            "BlockRemoved": self._remove,
            "AllBlocksCleared": self._clear,
        }
        for name, *fields in events:
            appliers[name](*fields)

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None = None,
        extra_keys: list[list[str] | None] | None = None,
    ) -> None:
        assert block_size == self._page_size and medium == "GPU"
        assert lora_id is None and lora_name is None
        assert hashes and len(tokens) == len(hashes) * block_size
        assert parent is None or parent in self.blocks, "stored below nothing"
        keys = extra_keys or [None] * len(hashes)
        assert len(keys) == len(hashes) and not any(keys[1:])
        namespace = keys[0][0] if keys[0] else None
        if parent is not None:
            assert namespace is None
            namespace = self.blocks[parent].namespace
        for i, value in enumerate(hashes):
            assert value not in self.blocks, "stored twice"
            own = tuple(tokens[i * block_size : (i + 1) * block_size])
            self.blocks[value] = Block(parent, own, namespace)
            parent = value

    def _remove(self, hashes: list[int], medium: str) -> None:
        assert hashes and medium == "GPU"
        for value in hashes:
            assert value in self.blocks, "removed, but not there"
            del self.blocks[value]

    def _clear(self) -> None:
        self.blocks.clear()


def block_hash(before: int | None, tokens: list[int], namespace: str | None) -> int:
    """Return the hash as defined in `docs/kv_events.md`, one block at a time."""
    if before is not None:
        start = before.to_bytes(8, "big")
    elif namespace is not None:
        start = sha256(b"kv-events namespace\0" + namespace.encode()).digest()[:8]
    else:
        start = b""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return int.from_bytes(sha256(start + data).digest()[:8], "big")


def tree_blocks(cache: BasePrefixCache) -> dict[int, Block]:
    """Return the blocks of a tree by hash, computed from its tokens."""
    blocks: dict[int, Block] = {}
    last: dict[int, int] = {}
    for node in cache.iter_nodes():
        parent: TreeNode | None = node.parent
        before = last[id(parent)] if node.start else None
        tokens = (node.elements >> 32 if cache.bigram else node.elements).tolist()
        for begin in range(0, len(tokens), cache.page_size):
            own = tokens[begin : begin + cache.page_size]
            value = block_hash(before, own, node.namespace)
            blocks[value] = Block(before, tuple(own), node.namespace)
            before = value
        assert before is not None
        last[id(node)] = before
    return blocks
