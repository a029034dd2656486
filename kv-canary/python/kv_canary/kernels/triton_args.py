"""Arguments of the canary's Triton kernels, in groups: a named tuple is one argument.

Triton compiles a kernel anew for each pattern of None in a tuple, and leaves out what
belongs to an absent tensor; it does the same for numbers that are 1 or multiples of 16.
So tuples hold numbers that stay what they are while a server runs. Those that change
from launch to launch are arguments of their own. Triton 3.6 cannot compare a tuple with
None that has a None in it: where kernels need to know, a constexpr says so.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kv_canary.checks import PoolChecks
from kv_canary.layout import Fingerprint
from kv_canary.state import CanaryState
from kv_canary.view import ForwardView, KVReadView


class State(NamedTuple):
    """`CanaryState`, as it lies in memory."""

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
    num_slots: int
    capacity: int


class Rows(NamedTuple):
    """`ForwardView` without what concerns the end of a forward."""

    req_rows: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    serials: Tensor
    salts: Tensor
    qo_indptr: Tensor | None
    parent_index: Tensor | None
    seeds: Tensor | None
    seed_table: Tensor | None
    lineage_rows: Tensor | None
    shift_from: Tensor | None
    column_shift: Tensor | None


class Ends(NamedTuple):
    """Where lineages go, over which new tokens, and where findings go."""

    publish_rows: Tensor | None
    stay_lens: Tensor | None
    findings: Tensor | None


class Table(NamedTuple):
    """int32 [req_rows, width] in rows of `stride`: `req_to_token`, or tokens; the slot
    of position p holds token p + `offset`."""

    at: Tensor
    stride: int
    width: int
    offset: int


class Reads(NamedTuple):
    """`KVReadView`: pages of a table, or, with `indptr`, a list of entries."""

    read_lens: Tensor
    entries: Tensor
    row_stride: int
    column_stride: int
    row_index: Tensor | None
    indptr: Tensor | None
    first_position: Tensor | None
    prev_slots: Tensor | None


class Bytes(NamedTuple):
    """K and V of the pool as int64 words, each [layers, slots, words]."""

    k_words: Tensor
    v_words: Tensor
    k_layer_stride: int
    k_slot_stride: int
    v_layer_stride: int
    v_slot_stride: int
    period: int


class Oracle(NamedTuple):
    """Tokens and positions that the new tokens must have; negative: not known."""

    tokens: Tensor
    positions: Tensor


class Checks(NamedTuple):
    """The tables that a forward is compared with; None: the check is left out.

    Fields:
        columns: `req_to_token`; tokens: of the prefixes.
        published, oracle: what the inputs must be.
    """

    columns: Table | None = None
    tokens: Table | None = None
    published: Table | None = None
    oracle: Oracle | None = None


NO_CHECKS = Checks()


class Pages(NamedTuple):
    """Slots of a page, and elements that an entry of a read view covers, known when a
    kernel is compiled."""

    page_size: int
    entry_size: int


class Hashing(NamedTuple):
    """How bytes become a fingerprint, known when a kernel is compiled.

    Fields:
        mode: of `FingerprintMode`.
        layers: of the pool; k_words, v_words: of a slot in a layer.
        chunk: words of a slot that are hashed at a time.
    """

    mode: int
    layers: int
    k_words: int
    v_words: int
    chunk: int


def state_args(state: CanaryState) -> State:
    return State(
        head=state.head,
        tail=state.tail,
        expected_lineage=state.expected_lineage,
        verdict=state.verdict,
        ring=state.ring,
        ring_count=state.ring_count,
        counters=state.counters,
        clock=state.clock,
        phase=state.phase,
        ticket=state.ticket,
        next_lineage=state.next_lineage,
        num_slots=state.num_slots,
        capacity=state.ring.shape[0],
    )


def row_args(rows: ForwardView) -> Rows:
    rows.check_layout()
    # A launch without rows runs one program, which loads shifts of row 0 unmasked.
    has_shift = rows.num_rows > 0
    return Rows(
        req_rows=rows.req_rows,
        prefix_lens=rows.prefix_lens,
        extend_lens=rows.extend_lens,
        input_ids=rows.input_ids,
        positions=rows.positions,
        out_cache_loc=rows.out_cache_loc,
        serials=rows.serials,
        salts=rows.salts,
        qo_indptr=rows.qo_indptr,
        parent_index=rows.parent_index,
        seeds=rows.seeds,
        seed_table=rows.seed_table,
        lineage_rows=rows.lineage_rows,
        shift_from=rows.shift_from if has_shift else None,
        column_shift=rows.column_shift if has_shift else None,
    )


def end_args(rows: ForwardView, findings: Tensor | None) -> Ends:
    return Ends(
        publish_rows=rows.publish_rows, stay_lens=rows.stay_lens, findings=findings
    )


def table_args(table: Tensor | None, *, offset: int = 0) -> Table | None:
    if table is None:
        return None
    return Table(at=table, stride=table.stride(0), width=table.shape[1], offset=offset)


def read_args(view: KVReadView) -> Reads:
    view.check_layout()
    entries = view.entries
    return Reads(
        read_lens=view.read_lens,
        entries=entries,
        row_stride=entries.stride(0) if view.indptr is None else 0,
        column_stride=entries.stride(-1),
        row_index=view.row_index,
        indptr=view.indptr,
        first_position=view.first_position,
        prev_slots=view.prev_slots,
    )


def byte_args(source: Fingerprint) -> Bytes | None:
    k, v = source.k_words, source.v_words
    if k is None or v is None:
        return None
    return Bytes(
        k_words=k,
        v_words=v,
        k_layer_stride=k.stride(0),
        k_slot_stride=k.stride(1),
        v_layer_stride=v.stride(0),
        v_slot_stride=v.stride(1),
        period=source.rotation_period,
    )


def hashing_args(source: Fingerprint, *, chunk: int) -> Hashing:
    k, v = source.k_words, source.v_words
    if k is None or v is None:
        return Hashing(mode=int(source.mode), layers=1, k_words=2, v_words=2, chunk=1)
    return Hashing(
        mode=int(source.mode),
        layers=k.shape[0],
        k_words=k.shape[2],
        v_words=v.shape[2],
        chunk=chunk,
    )


def check_args(
    checks: PoolChecks, *, reads: bool = False, writes: ForwardView | None = None
) -> Checks:
    """Those of the slots that attention reads, of the new tokens of `writes`, or of
    both."""
    oracle = None if writes is None else writes.oracle
    return Checks(
        columns=table_args(checks.req_to_token),
        tokens=table_args(checks.tokens, offset=checks.token_offset) if reads else None,
        published=None if writes is None else table_args(checks.published),
        oracle=None if oracle is None else Oracle(*oracle),
    )


def page_args(view: KVReadView) -> Pages:
    return Pages(page_size=view.page_size, entry_size=view.entry_size)
