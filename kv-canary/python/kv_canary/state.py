"""The canary's state on the device: records, lineages, verdicts, ring, counters.

Holds tensors; launches nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from kv_canary.records import (
    FIRST_CLOCK,
    NUM_COUNTERS,
    POISON_WORD,
    RECORD_WORDS,
    RING_WORDS,
    WriterKind,
    pack_word3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryState:
    """The canary of one KV pool; every tensor a part of one allocation on the pool's
    device.

    Fields:
        arena: int64, all others behind a header that says how large they are
            (`_Layout`); what the CPU's native ops take.
        head, tail: int64 [num_slots, 4], records (`records.py`).
        expected_lineage: int64 [lineage_rows], lineage of the last KV token of a row,
            known without the records.
        verdict: int32 [req_rows], reasons per request row since the last gather. Row 0
            (padding) collects PHASE, which belongs to no request.
        ring: int64 [capacity, RING_WORDS]; ring_count: int64 [1], counts on when the
            ring is full; entries past the capacity are dropped.
        counters: int64 [NUM_COUNTERS].
        clock: int64 [1], number of the forward now running; the tail launch advances
            it when its last program is done.
        phase: int32 [managers].
        ticket: int32 [1]; next_lineage: int64 [max(req_rows, lineage_rows)]: scratch of
            the tail launch.
        pool: tag of this pool in ring entries.
    """

    arena: Tensor
    head: Tensor
    tail: Tensor
    expected_lineage: Tensor
    verdict: Tensor
    ring: Tensor
    ring_count: Tensor
    counters: Tensor
    clock: Tensor
    phase: Tensor
    ticket: Tensor
    next_lineage: Tensor
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
        """A copy in an allocation of its own."""
        sizes = self.arena[: len(fields(_Layout))].tolist()
        layout = _Layout(
            **{f.name: n for f, n in zip(fields(_Layout), sizes, strict=True)}
        )
        return layout.state_in(self.arena.clone())


# It holds the fields of `_Layout` in their order; `canary.cpp` reads them.
_HEADER_WORDS = 8
# Parts begin at multiples of so many words: a cache line, and what wide loads need.
_ALIGN_WORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the parts of a state lie in its arena: in the order of `_parts`, each from
    the next multiple of `_ALIGN_WORDS`."""

    num_slots: int
    lineage_rows: int
    req_rows: int
    ring_capacity: int
    num_managers: int
    pool: int

    def _parts(self) -> dict[str, int]:
        """Words of each part."""
        return {
            "header": _HEADER_WORDS,
            "head": self.num_slots * RECORD_WORDS,
            "tail": self.num_slots * RECORD_WORDS,
            "expected_lineage": self.lineage_rows,
            "ring": self.ring_capacity * RING_WORDS,
            "ring_count": 1,
            "counters": NUM_COUNTERS,
            "clock": 1,
            "verdict": (self.req_rows + 1) // 2,
            "phase": (self.num_managers + 1) // 2,
            "ticket": 1,
            "next_lineage": max(self.req_rows, self.lineage_rows),
        }

    @property
    def words(self) -> int:
        return sum(map(_aligned, self._parts().values()))

    def state_in(self, arena: Tensor) -> CanaryState:
        """The views of an arena [words] int64."""
        parts, begin = {}, 0
        for name, words in self._parts().items():
            parts[name] = arena[begin : begin + words]
            begin += _aligned(words)
        return CanaryState(
            arena=arena,
            head=parts["head"].view(-1, RECORD_WORDS),
            tail=parts["tail"].view(-1, RECORD_WORDS),
            expected_lineage=parts["expected_lineage"],
            verdict=parts["verdict"].view(torch.int32)[: self.req_rows],
            ring=parts["ring"].view(-1, RING_WORDS),
            ring_count=parts["ring_count"],
            counters=parts["counters"],
            clock=parts["clock"],
            phase=parts["phase"].view(torch.int32)[: self.num_managers],
            ticket=parts["ticket"].view(torch.int32)[:1],
            next_lineage=parts["next_lineage"],
            pool=self.pool,
        )


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS


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
    """A canary that has seen nothing: every slot poisoned.

    Args:
        req_rows: rows of `req_to_token`, row 0 (padding) included.
        lineage_rows: rows of `expected_lineage`; None: `req_rows`. More where draft
            branches keep histories of their own (`ForwardView.lineage_rows`).

    Raises:
        ValueError: a size is not positive, or more managers than a tag can name.
    """
    sizes = {
        "num_slots": num_slots,
        "req_rows": req_rows,
        "ring_capacity": ring_capacity,
        "num_managers": num_managers,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"create_state: {name}={size} must be positive")
    if num_managers > 254:
        raise ValueError(f"create_state: num_managers={num_managers}, at most 254")

    layout = _Layout(
        num_slots=num_slots,
        lineage_rows=lineage_rows or req_rows,
        req_rows=req_rows,
        ring_capacity=ring_capacity,
        num_managers=num_managers,
        pool=pool,
    )
    arena = torch.zeros(layout.words, dtype=torch.int64, device=device)
    header = list(asdict(layout).values())
    arena[: len(header)] = torch.tensor(header)
    state = layout.state_in(arena)
    for records in (state.head, state.tail):
        records[:, 0] = POISON_WORD
        records[:, 3] = pack_word3(0, WriterKind.POISON, 0)
    state.clock.fill_(FIRST_CLOCK)
    return state
