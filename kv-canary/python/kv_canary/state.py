"""The canary's state on the device: records, lineages, verdicts, ring, counters.

Holds tensors; launches nothing.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from kv_canary.records import (
    FIRST_CLOCK,
    NUM_COUNTERS,
    POISON_WORD,
    TAG_MANAGER_MASK,
    UNKNOWN,
    Record,
    Request,
    Ring,
    WriterKind,
    pack_word3,
)

HEADER_WORDS = 8
"""Words before the parts of an arena: the fields of `ArenaSizes`."""

ALIGN_WORDS = 8
"""Parts begin at multiples of this many words: a cache line, which wide loads need."""

_WORD_BYTES = torch.int64.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSizes:
    """The header of an arena."""

    num_slots: int
    req_rows: int
    lineage_rows: int
    ring_capacity: int
    num_managers: int
    pool: int


@dataclass(frozen=True, slots=True)
class ArenaPart:
    """A tensor of `CanaryState` in its arena.

    Fields:
        rows: its rows, a number or a field of `ArenaSizes`; the largest if several.
        words: words of a row, by name, or None for a vector.
    """

    rows: tuple[int | str, ...]
    words: type[IntEnum] | None
    dtype: torch.dtype

    def shape(self, sizes: ArenaSizes) -> list[int]:
        named = asdict(sizes)
        rows = max(n if isinstance(n, int) else named[n] for n in self.rows)
        return [rows] if self.words is None else [rows, len(self.words)]


def _part(
    *rows: int | str,
    words: type[IntEnum] | None = None,
    dtype: torch.dtype = torch.int64,
) -> dict[str, Any]:
    """Metadata of a tensor of `CanaryState`."""
    return {"part": ArenaPart(rows, words, dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """The canary of one KV pool. Every tensor is a part of one allocation on the pool's
    device.

    The tensors are only declared here. Their places in the arena, the tuple of the
    Triton kernels and the pointers of the native ops follow from their order and
    metadata.

    Fields:
        arena: int64, the header (`ArenaSizes`), then all others in order, each from the
            next multiple of `ALIGN_WORDS`. The only argument of the CPU's native ops.
        head, tail: int64 [num_slots, RECORD_WORDS], records (`records.py`).
        expected_lineage: int64 [lineage_rows], lineage of a row's last KV token, known
            without the records.
        requests: int64 [req_rows, len(Request)], each row's request and its next input.
        verdict: int32 [req_rows], reasons per request row since the last gather. Row 0
            (padding) collects PHASE, which belongs to no request.
        ring: int64 [capacity, RING_WORDS]; ring_count: int64 [1], keeps counting when
            the ring is full; entries past the capacity are dropped.
        counters: int64 [NUM_COUNTERS].
        clock: int64 [1], number of the current forward; the tail launch advances it
            when its last program is done.
        phase: int32 [managers].
        ticket: int32 [1]; next_lineage: int64 [max(req_rows, lineage_rows)]: scratch of
            the tail launch.
        pool: tag of this pool in ring entries.
    """

    arena: Tensor
    head: Tensor = field(metadata=_part("num_slots", words=Record))
    tail: Tensor = field(metadata=_part("num_slots", words=Record))
    expected_lineage: Tensor = field(metadata=_part("lineage_rows"))
    requests: Tensor = field(metadata=_part("req_rows", words=Request))
    verdict: Tensor = field(metadata=_part("req_rows", dtype=torch.int32))
    ring: Tensor = field(metadata=_part("ring_capacity", words=Ring))
    ring_count: Tensor = field(metadata=_part(1))
    counters: Tensor = field(metadata=_part(NUM_COUNTERS))
    clock: Tensor = field(metadata=_part(1))
    phase: Tensor = field(metadata=_part("num_managers", dtype=torch.int32))
    ticket: Tensor = field(metadata=_part(1, dtype=torch.int32))
    next_lineage: Tensor = field(metadata=_part("req_rows", "lineage_rows"))
    pool: int

    @property
    def num_slots(self) -> int:
        return self.head.shape[0]

    @property
    def is_cpu(self) -> bool:
        return self.arena.is_cpu

    @property
    def is_cuda(self) -> bool:
        return self.arena.is_cuda

    def clone(self) -> CanaryState:
        """Return a copy in its own allocation."""
        arena = self.arena.clone()
        header = arena[: len(fields(ArenaSizes))].tolist()
        names = (f.name for f in fields(ArenaSizes))
        return _state_in(arena, ArenaSizes(**dict(zip(names, header, strict=True))))


ARENA_PARTS: dict[str, ArenaPart] = {
    f.name: f.metadata["part"] for f in fields(CanaryState) if f.metadata
}
"""The parts of an arena by name, in order."""


def _lay_out(sizes: ArenaSizes) -> tuple[dict[str, slice], int]:
    """Return (the words of each part, the words of the arena)."""
    places, begin = {}, HEADER_WORDS
    for name, part in ARENA_PARTS.items():
        elements = torch.Size(part.shape(sizes)).numel()
        words = -(-elements * part.dtype.itemsize // _WORD_BYTES)
        places[name] = slice(begin, begin + words)
        begin += -(-words // ALIGN_WORDS) * ALIGN_WORDS
    return places, begin


def _state_in(arena: Tensor, sizes: ArenaSizes) -> CanaryState:
    """Return the views of an arena."""
    tensors = {}
    for name, place in _lay_out(sizes)[0].items():
        part = ARENA_PARTS[name]
        shape = part.shape(sizes)
        elements = arena[place].view(part.dtype)[: torch.Size(shape).numel()]
        tensors[name] = elements.view(shape)
    return CanaryState(arena=arena, pool=sizes.pool, **tensors)


def create_state(
    *,
    num_slots: int,
    req_rows: int,
    ring_capacity: int,
    num_managers: int,
    device: torch.device | str,
    lineage_rows: int | None = None,
    pool: int = 0,
) -> CanaryState:
    """Create a canary that has seen nothing: every slot is poisoned.

    Args:
        req_rows: rows of `req_to_token`, including row 0 (padding).
        lineage_rows: rows of `expected_lineage`. Defaults to `req_rows`; draft branches
            with their own histories need more (`ForwardView.lineage_rows`).

    Raises:
        ValueError: a size is not positive, or more managers than a tag can name.
    """
    sizes = ArenaSizes(
        num_slots=num_slots,
        req_rows=req_rows,
        lineage_rows=lineage_rows or req_rows,
        ring_capacity=ring_capacity,
        num_managers=num_managers,
        pool=pool,
    )
    for name, size in asdict(sizes).items():
        if size < 1 and name != "pool":
            raise ValueError(f"create_state: {name}={size} must be positive")
    if num_managers >= TAG_MANAGER_MASK:
        raise ValueError(
            f"create_state: num_managers={num_managers}, at most {TAG_MANAGER_MASK - 1}"
        )
    arena = torch.zeros(_lay_out(sizes)[1], dtype=torch.int64, device=device)
    header = torch.tensor(astuple(sizes))
    arena[: len(header)] = header
    state = _state_in(arena, sizes)
    for records in (state.head, state.tail):
        records[:, Record.WORD0] = POISON_WORD
        records[:, Record.WORD3] = pack_word3(0, WriterKind.POISON, 0)
    state.requests.fill_(UNKNOWN)
    state.clock.fill_(FIRST_CLOCK)
    return state
