"""KV events as they travel: which blocks of tokens this engine holds in its KV cache.

A message has three frames: topic, sequence number, batch. The batch is msgpack, its
structs are arrays; `docs/kv_events.md` has the table. Hashes are opaque to readers, but
equal for equal prefixes.
"""

from __future__ import annotations

import msgspec

# The tier that attention reads from, whatever the device: routers know this name.
MEDIUM_GPU = "GPU"

# Of the frame with the sequence number.
SEQ_BYTES = 8
# In place of a sequence number: the end of a replay, -1 if it is read as signed.
END_OF_REPLAY = b"\xff" * SEQ_BYTES


class KVCacheEvent(msgspec.Struct, array_like=True, tag=True):
    """One change, as `[class name, fields ...]`."""


class BlockStored(KVCacheEvent):
    """Successive blocks of one sequence are in the cache now.

    Fields:
        block_hashes: [n], unsigned 64 bits.
        parent_block_hash: of the block before the first one; None: there is none.
        token_ids: [n * block_size].
        block_size: tokens of a block, the page size.
        lora_id: always None.
        medium: the tier.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class NamespacedBlockStored(BlockStored, tag="BlockStored"):
    """The first blocks of a sequence in a namespace (`cache_salt`, `extra_key`).

    Decoded as a `BlockStored`, which leaves out the last fields.

    Fields:
        lora_name: always None.
        extra_keys: [n], the first one has the name of the namespace.
    """

    lora_name: str | None
    extra_keys: list[tuple[str] | None]


class BlockRemoved(KVCacheEvent):
    """Blocks are in the cache no more, in any order.

    Fields:
        block_hashes: [n].
        medium: the tier.
    """

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """The events of one step of the scheduler, in their order.

    Fields:
        ts: seconds since 1970.
        events: at least one.
        attn_dp_rank: of the data parallel rank, vLLM's `data_parallel_rank`.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int = 0


def seq_frame(seq: int) -> bytes:
    """The frame of a sequence number."""
    return seq.to_bytes(SEQ_BYTES, "big")
