"""Device memory that kernels of all ranks on a host write to, for sums over the ranks.

An NCCL all-reduce of the few rows of a decode step takes longer to begin than to move
them. Here one kernel writes its rows to the other ranks' memory, waits for theirs and
goes on with whatever uses the sum (`peer_triton`). Only ranks whose GPUs reach each
other's memory have it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

PROGRAMS = 256
"""Programs of a launch at most. All must be resident, because each waits for its
counterpart on every other rank."""
REGION_BYTES = 32 << 10
"""Bytes that a program sends to a rank at most."""
ROWS_OF_PROGRAM = 4
"""Rows that a program sends at most. Where more bytes move, NCCL's ring is as fast."""
SENT_BYTES = 8 << 20
"""Bytes that a rank sends in one launch at most, to all others together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """Where the ranks write to.

    Every rank has a region for each program of each sender, twice, and programs take
    the two in turns. So a region is written again only after its reader, who has
    meanwhile taken part in the other turn, is done with it.

    Fields:
        rank, size: as in `TensorParallelGroup`.
        addresses: [2, size] int64 on the device. Row 0: where each rank's regions
            begin, [2, size (senders), PROGRAMS, REGION_BYTES]. Row 1: where its flags
            begin, [PROGRAMS, size (senders)] int64: the last launch whose rows have
            arrived.
        counts: [PROGRAMS] int64 on the device: the launches each program of this rank
            took part in.
        held: whatever must live as long as this.
    """

    rank: int
    size: int
    addresses: Tensor
    counts: Tensor
    held: tuple[object, ...] = field(default=(), repr=False)

    def can_send(self, rows: int, width: int, itemsize: int) -> bool:
        """Whether a sum of [rows, width] goes through here."""
        per_program = -(-rows // PROGRAMS)
        row = width * itemsize
        return (
            0 < per_program <= ROWS_OF_PROGRAM
            and per_program * row <= REGION_BYTES
            and rows * row * (self.size - 1) <= SENT_BYTES
        )


def region_bytes(size: int) -> int:
    """Return the bytes of the regions that each of `size` ranks has."""
    return 2 * size * PROGRAMS * REGION_BYTES


def open_peer_memory(*, rank: int, size: int) -> PeerMemory | None:
    """Allocate this rank's part on the current CUDA device and map the others'.

    All ranks must call it together. Returns None, after a warning, if GPUs do not reach
    each other's memory; whether that holds is the same on all ranks.
    """
    reason = _obstacle(rank, size)
    if _any_rank(reason is not None):
        _warn(reason or "another rank has none")
        return None
    try:
        found = _map(rank, size)
        reason = None
    except RuntimeError as error:
        found, reason = None, str(error).splitlines()[0]
    if _any_rank(reason is not None):
        _warn(reason or "another rank has none")
        return None
    return found


def _obstacle(rank: int, size: int) -> str | None:
    for other in range(size):
        if other != rank and not torch.cuda.can_device_access_peer(rank, other):
            return f"GPU {rank} does not reach the memory of GPU {other}"
    return None


def _warn(reason: str) -> None:
    logger.warning(
        "Sums over the ranks go through NCCL alone: no memory is shared between the "
        "GPUs (%s). --disable-custom-all-reduce asks for that without this warning.",
        reason,
    )


def _any_rank(value: bool) -> bool:
    found = torch.tensor([int(value)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _map(rank: int, size: int) -> PeerMemory:
    """Raises RuntimeError: the driver does not share memory between processes here."""
    from torch.distributed import _symmetric_memory

    flags = PROGRAMS * size
    words = flags + region_bytes(size) // torch.int64.itemsize
    device = torch.device("cuda", rank)
    own = _symmetric_memory.empty(words, dtype=torch.int64, device=device)
    own[:flags].zero_()
    torch.cuda.synchronize()
    # Returns once all ranks are here, with their flags at 0.
    world = dist.group.WORLD
    assert world is not None
    mapped = _symmetric_memory.rendezvous(own, world)
    begin = torch.tensor(mapped.buffer_ptrs, dtype=torch.int64)
    return PeerMemory(
        rank=rank,
        size=size,
        addresses=torch.stack((begin + flags * own.itemsize, begin)).cuda(),
        counts=torch.zeros(PROGRAMS, dtype=torch.int64, device="cuda"),
        held=(own, mapped),
    )
