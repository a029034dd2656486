"""The tensor parallel group of this process: its rank, and the exchange of data.

A module global holds the group, because layers ask for it when they are built; the
scheduler process installs it before it builds a model. Without a group there is a
single rank. Knows nothing about layers or requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sglang.srt.distributed.peer_memory import PeerMemory, open_peer_memory
from sglang.srt.distributed.peer_ops import sum_rows

# Ranks load checkpoints at different speeds; the watchdog handles a hanging forward.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# A message up to this size is sent with its length in one broadcast; the rest of a
# longer one follows.
MESSAGE_BYTES = 8192
LENGTH_BYTES = 8

# torch 2.13 renamed it and deprecated the 2.11 name.
_all_gather = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Unsummed(NamedTuple):
    """A sum over the ranks that the kernel which uses it makes, to save a launch.

    Fields:
        part: [..., W] of this rank, contiguous. Becomes the sum, or what is made of it.
        memory: what it goes through.
    """

    part: Tensor
    memory: PeerMemory


Addend: TypeAlias = Tensor | Unsummed
"""Something to be added to the residual stream."""


def summed(x: Addend) -> Tensor:
    """Return `x`, once it is summed over the ranks."""
    if isinstance(x, Tensor):
        return x
    sum_rows(x.part, x.memory)
    return x.part


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelGroup:
    """Collectives over the ranks; all ranks must call the same ones in the same order.

    Tensors on a CUDA device go through NCCL (and may be captured into graphs), those on
    the host through gloo. With `size` 1 every method returns its argument.

    Fields:
        rank: rank of this process, in [0, size).
        size: number of ranks.
        peers: memory that the GPUs of all ranks write to, for sums of few rows; None
            on the CPU and where GPUs do not reach each other.
    """

    rank: int = 0
    size: int = 1
    peers: PeerMemory | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which schedules and communicates with the front."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place; `x` is contiguous."""
        if self.size == 1:
            return x
        memory = self._memory_for(x)
        if memory is None:
            dist.all_reduce(x)
        else:
            sum_rows(x, memory)
        return x

    def sum_later(self, x: Tensor) -> Addend:
        """Return the sum of `x` over the ranks, or what a kernel that uses it needs to
        make it. `x` is contiguous and may be overwritten."""
        memory = self._memory_for(x) if self.size > 1 else None
        return self.all_reduce(x) if memory is None else Unsummed(x, memory)

    def _memory_for(self, x: Tensor) -> PeerMemory | None:
        """Return the memory through which `x` [..., W] is summed, or None if NCCL or
        gloo does it."""
        peers = self.peers
        if peers is None or not x.is_cuda or not x.is_floating_point():
            return None
        width = x.shape[-1]
        return peers if peers.can_send(x.numel() // width, width, x.itemsize) else None

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Concatenate x [R, n] of all ranks, in rank order: [R, size * n]."""
        if self.size == 1:
            return x
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        _all_gather(parts, x.contiguous())
        by_row = parts.view(self.size, rows, width).transpose(0, 1)
        return by_row.reshape(rows, self.size * width)

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's `x` to all ranks, in place; `x` is contiguous."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's `data`; the other ranks pass None. Waits on the host."""
        if self.size == 1:
            assert data is not None
            return data
        head = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        if data is not None:
            length = len(data)
            framed = length.to_bytes(LENGTH_BYTES, "little") + data
            begin = bytearray(framed[:MESSAGE_BYTES])
            head[: len(begin)] = torch.frombuffer(begin, dtype=torch.uint8)
        dist.broadcast(head, src=0)
        received = head.numpy().tobytes()
        length = int.from_bytes(received[:LENGTH_BYTES], "little")
        rest = LENGTH_BYTES + length - MESSAGE_BYTES
        if rest <= 0:
            return received[LENGTH_BYTES : LENGTH_BYTES + length]
        tail = torch.empty(rest, dtype=torch.uint8)
        if data is not None:
            tail[:] = torch.frombuffer(bytearray(data[-rest:]), dtype=torch.uint8)
        dist.broadcast(tail, src=0)
        return received[LENGTH_BYTES:] + tail.numpy().tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks, in rank order. Waits on the host."""
        if self.size == 1:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths)
        padded = bytearray(max(int(lengths.max()), 1))
        padded[: len(data)] = data
        parts = torch.empty(self.size, len(padded), dtype=torch.uint8)
        _all_gather(parts.view(-1), torch.frombuffer(padded, dtype=torch.uint8))
        return [
            part[:length].tobytes()
            for part, length in zip(parts.numpy(), lengths.tolist(), strict=True)
        ]

    def min_int(self, value: int) -> int:
        """Return the smallest `value` of all ranks. Waits on the host."""
        if self.size == 1:
            return value
        smallest = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def bitwise_or(self, words: list[int]) -> list[int]:
        """Return the bitwise or of all ranks' `words`, signed 64-bit integers and as
        many on each rank. Waits on the host."""
        if self.size == 1:
            return words
        united = torch.tensor(words, dtype=torch.int64)
        dist.all_reduce(united, op=dist.ReduceOp.BOR)
        found: list[int] = united.tolist()
        return found

    def meet(self, timeout: timedelta) -> None:
        """Wait on the host until every rank has called this.

        Raises:
            RuntimeError: a rank did not call it in time or has exited.
        """
        if self.size > 1:
            arrival = dist.all_reduce(torch.zeros(1), async_op=True)
            assert arrival is not None
            arrival.wait(timeout)


_SINGLE = TensorParallelGroup()
_current = _SINGLE


def get_tp_group() -> TensorParallelGroup:
    """Return the installed group, or one of a single rank."""
    return _current


@contextlib.contextmanager
def tensor_parallel_group(group: TensorParallelGroup) -> Iterator[TensorParallelGroup]:
    """Make `group` current within the context.

    Use a group without peers to build one rank's part of a model; its collectives must
    not be called.
    """
    global _current
    before, _current = _current, group
    try:
        yield group
    finally:
        _current = before


def init_tensor_parallel(
    *, rank: int, size: int, device: str, store: Path, shares_memory: bool = True
) -> TensorParallelGroup:
    """Connect to the other ranks and install the group for the life of this process.

    The ranks connect through a file, so that no port is opened for it. On CUDA the
    current device becomes `rank`, and NCCL is initialised when this returns: its first
    call must not happen inside a graph capture.

    Args:
        device: "cpu" or "cuda".
        store: a file that does not exist yet, the same for all ranks, in a folder that
            no other user can write to.
        shares_memory: whether the GPUs may write to each other's memory.
    """
    global _current
    if size == 1:
        return _current
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        _BACKENDS[device],
        store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    _current = TensorParallelGroup(rank=rank, size=size)
    for kind in dict.fromkeys(("cpu", device)):
        _current.all_reduce(torch.ones(1, device=kind))
    if device == "cuda":
        torch.cuda.synchronize()
        if shares_memory:
            peers = open_peer_memory(rank=rank, size=size)
            _current = replace(_current, peers=peers)
    return _current
