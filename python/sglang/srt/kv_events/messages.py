"""Wire format of KV events, which say which token blocks are in this engine's KV cache.

A message has three frames: topic, sequence number, batch. The batch is msgpack with
structs as arrays; see `docs/kv_events.md`. Hashes are opaque to readers, but equal for
equal prefixes.
"""

from __future__ import annotations

import msgspec

# Routers' name for the tier that attention reads from, whatever the device.
MEDIUM_GPU = "GPU"
# Their name for host memory.
MEDIUM_CPU = "CPU_PINNED"

# Format of the frame with the sequence number.
SEQ_BYTES = 8
# Replaces a sequence number to mark the end of a replay; -1 if read as signed.
END_OF_REPLAY = b"\xff" * SEQ_BYTES


class KVCacheEvent(msgspec.Struct, array_like=True, tag=True):
    """One change, as `[class name, fields ...]`."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one sequence were added to the cache.

    Fields:
        block_hashes: [n], unsigned 64-bit integers.
        parent_block_hash: hash of the block before the first one, or None.
        token_ids: [n * block_size].
        block_size: tokens per block, the page size.
        lora_id: always None.
        medium: the cache tier.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class NamespacedBlockStored(BlockStored, tag="BlockStored"):
    """The first blocks of a sequence in a namespace (`salt_chain`).

    Decodes as a `BlockStored` without the last fields.

    Fields:
        lora_name: name of the adapter, or None.
        extra_keys: [n]; the first one contains the name of the namespace.
    """

    lora_name: str | None
    extra_keys: list[tuple[str] | None]


class BlockRemoved(KVCacheEvent):
    """Blocks were removed from the cache, in any order.

    Fields:
        block_hashes: [n].
        medium: the cache tier.
    """

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(KVCacheEvent):
    """The cache was emptied."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """The events of one scheduler step, in order.

    Fields:
        ts: seconds since 1970.
        events: at least one.
        attn_dp_rank: data parallel rank, vLLM's `data_parallel_rank`.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int = 0


def seq_frame(seq: int) -> bytes:
    """Return the frame of a sequence number."""
    return seq.to_bytes(SEQ_BYTES, "big")
