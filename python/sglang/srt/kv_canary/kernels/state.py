"""What the canary's launches work on: device state, batch rows, read tables, KV bytes.

Holds tensors and checks their shapes; launches nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum

import torch
from torch import Tensor

from sglang.srt.kv_canary.kernels.records import (
    FIRST_CLOCK,
    NUM_COUNTERS,
    POISON_WORD,
    RECORD_WORDS,
    RING_WORDS,
    WriterKind,
    pack_word3,
)
from sglang.srt.model_executor.forward_batch_info import KVReadView

NO_MANAGER = -1
"""Manager of a launch that is no step of a forward: it leaves all phases alone."""


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
            branches keep histories of their own (`CanaryRows.lineage_rows`).

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


def _require_vectors(owner: str, **fields: Tensor | None) -> None:
    for name, t in fields.items():
        if t is None:
            continue
        if t.dtype is not torch.int64 or t.dim() != 1 or not t.is_contiguous():
            raise ValueError(
                f"{owner}: {name} is {t.dtype} of shape {list(t.shape)} and strides "
                f"{list(t.stride())}; it must be a contiguous int64 vector"
            )


# Not frozen: made for every forward, and frozen fields take twice as long to set.
# Nothing sets them later.
@dataclass(slots=True, kw_only=True)
class CanaryRows:
    """R rows of a forward and their T new tokens; int64, contiguous.

    Fields:
        req_rows: [R], rows of `req_to_token`; 0: padded, skipped everywhere. Trusted
            to lie in the tables, like `lineage_rows`.
        prefix_lens, extend_lens: [R], tokens before this forward and of it.
        qo_indptr: [R + 1], offsets of the rows in [T]; None: one token per row.
        input_ids, positions, out_cache_loc: [T].
        serials, salts: [R].
        parent_index: [T] | None, for trees: place in [T] of a token's parent, -1: the
            row's last prefix token.
        seeds: [R] | None, lineage before position 0; seed_table: [req_rows] | None,
            the same by request row. Neither: 0.
        lineage_rows: [R] | None, rows of `expected_lineage` that these rows go on from;
            None: `req_rows`.
        publish_rows: [R] | None, rows of `expected_lineage` that get the lineages
            behind the new tokens; None: the ones they are computed from.
        stay_lens: [R] | None, new tokens that these go over, the first of
            `extend_lens`; None: all.
        shift_from, column_shift: [R] | None, for draft branches: position p stands in
            column p of `req_to_token` below `shift_from`, else in p + `column_shift`.
        max_depth: ancestors that are walked in a tree, and tokens of it behind the root
            that can be accepted.
        tensors: all of them in this order, for the native ops.
    """

    req_rows: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    serials: Tensor
    salts: Tensor
    qo_indptr: Tensor | None = None
    parent_index: Tensor | None = None
    seeds: Tensor | None = None
    lineage_rows: Tensor | None = None
    shift_from: Tensor | None = None
    column_shift: Tensor | None = None
    publish_rows: Tensor | None = None
    stay_lens: Tensor | None = None
    seed_table: Tensor | None = None
    max_depth: int = 0
    # Made once and not by each launch of a forward.
    tensors: list[Tensor | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.shift_from is None) != (self.column_shift is None):
            raise ValueError("CanaryRows: shift_from and column_shift go together")
        if self.seeds is not None and self.seed_table is not None:
            raise ValueError("CanaryRows: give either seeds or seed_table")
        if self.parent_index is not None and self.max_depth < 1:
            raise ValueError("CanaryRows: a tree without max_depth")
        self.tensors = [
            self.req_rows,
            self.prefix_lens,
            self.extend_lens,
            self.input_ids,
            self.positions,
            self.out_cache_loc,
            self.serials,
            self.salts,
            self.qo_indptr,
            self.parent_index,
            self.seeds,
            self.lineage_rows,
            self.shift_from,
            self.column_shift,
            self.publish_rows,
            self.stay_lens,
            self.seed_table,
        ]

    def check_layout(self) -> None:
        """For kernels that index raw memory, where another layout would be misread.

        Raises:
            ValueError: a tensor is no contiguous int64 vector.
        """
        _require_vectors(
            "CanaryRows",
            req_rows=self.req_rows,
            prefix_lens=self.prefix_lens,
            extend_lens=self.extend_lens,
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            serials=self.serials,
            salts=self.salts,
            qo_indptr=self.qo_indptr,
            parent_index=self.parent_index,
            seeds=self.seeds,
            lineage_rows=self.lineage_rows,
            shift_from=self.shift_from,
            column_shift=self.column_shift,
            publish_rows=self.publish_rows,
            stay_lens=self.stay_lens,
            seed_table=self.seed_table,
        )

    def max_advance(self, extend_lens: Tensor) -> Tensor:
        """By how much the rows' prefixes can grow in this forward, [R]."""
        if self.parent_index is None:
            return extend_lens
        return extend_lens.clamp(max=self.max_depth + 1)

    @property
    def num_rows(self) -> int:
        return self.req_rows.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def check_view_layout(view: KVReadView) -> None:
    """As `CanaryRows.check_layout`."""
    _require_vectors(
        "KVReadView",
        read_lens=view.read_lens,
        row_index=view.row_index,
        first_position=view.first_position,
        prev_slots=view.prev_slots,
    )


class FingerprintMode(IntEnum):
    """Which bytes of a slot its fingerprint covers, and when they are hashed again.

    PARTIAL: 16 bytes of K and of V in one layer, on every read. ROTATE: all bytes, on
    read those of slots whose turn it is. ALL: all bytes on every read.
    """

    NONE = 0
    PARTIAL = 1
    ROTATE = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The pool's bytes as int64 words [layers, slots, words], any strides of the first
    two dimensions.

    In ROTATE a row of prefix length L that can grow by n tokens rehashes the slots for
    which (slot + L + i) % period is 0 for some i < n: while the row grows by `period`
    tokens, whatever its steps, each slot's turn comes.
    """

    mode: FingerprintMode = FingerprintMode.NONE
    k_words: Tensor | None = None
    v_words: Tensor | None = None
    rotation_period: int = 1


NO_FINGERPRINT = Fingerprint()


def create_fingerprint(
    mode: FingerprintMode,
    *,
    k_buffer: Tensor,
    v_buffer: Tensor,
    rotation_period: int = 1024,
) -> Fingerprint:
    """Fingerprints of K and V, viewed without a copy.

    Args:
        k_buffer, v_buffer: [layers, slots, ...], alike in layers and slots.

    Raises:
        ValueError: a slot's bytes of one layer are not one run of 16-byte chunks, the
            buffers differ, or the period is not positive.
    """
    if mode is FingerprintMode.NONE:
        return NO_FINGERPRINT
    if k_buffer.shape[:2] != v_buffer.shape[:2]:
        raise ValueError("create_fingerprint: K and V differ in layers or slots")
    if rotation_period < 1:
        raise ValueError(f"rotation_period={rotation_period} must be positive")
    return Fingerprint(
        mode=mode,
        k_words=_words_of("k_buffer", k_buffer),
        v_words=_words_of("v_buffer", v_buffer),
        rotation_period=rotation_period,
    )


def _words_of(name: str, buffer: Tensor) -> Tensor:
    slot = buffer[0, 0]
    strides = [s * buffer.element_size() for s in (buffer.stride(0), buffer.stride(1))]
    if not slot.is_contiguous() or slot.nbytes % 16 or any(s % 16 for s in strides):
        raise ValueError(
            f"{name}: a slot has {slot.nbytes} bytes per layer at strides {strides}; "
            "the canary fingerprints runs of 16 bytes. Use --kv-canary-real-data none"
        )
    return buffer.flatten(2).view(torch.int64)
