"""Arguments of the canary's Triton kernels, grouped: each named tuple is one argument.

Triton compiles a kernel anew for each pattern of None in a tuple, leaving out whatever
belongs to an absent tensor, and for numbers that are 1 or multiples of 16. So tuples
hold numbers that stay constant while a server runs; numbers that change between
launches are separate arguments. Triton 3.6 cannot compare a tuple with None if there is
a None in it, so a constexpr tells kernels that need to know.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, uint8
from triton import next_power_of_2

from kv_canary.accepted import AcceptedPath
from kv_canary.state import ARENA_PARTS, CanaryState
from kv_canary.view import ROW_FIELDS, ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.layout import Fingerprint
    from kv_canary.pool_checks import PoolChecks


def _tuple_type(name: str, names: Iterable[str]) -> Any:
    """Make a named tuple from fields that are declared elsewhere."""
    return namedtuple(name, tuple(names))


State = _tuple_type("State", (*ARENA_PARTS, "num_slots", "capacity"))
"""The tensors of a `CanaryState`, its slots and the ring's capacity."""

Rows = _tuple_type(
    "Rows",
    (*(f.name for f in ROW_FIELDS if not f.metadata["at_end"]), "num_shifts"),
)
"""The tensors of a `ForwardView` except those in `Ends`, and a row's column shifts."""

Path = _tuple_type("Path", (*(f.name for f in fields(AcceptedPath)), "nodes", "width"))
"""The tensors of an `AcceptedPath`, and its numbers of nodes and places."""

Ends = _tuple_type(
    "Ends", (*(f.name for f in ROW_FIELDS if f.metadata["at_end"]), "findings")
)
"""The tensors of a `ForwardView` for the end of a forward, and the findings."""

_parts_of = attrgetter(*ARENA_PARTS)
_rows_of = attrgetter(*Rows._fields)
_ends_of = attrgetter(*Ends._fields[:-1])


class Table(NamedTuple):
    """`req_to_token` or tokens, int32 [req_rows, width] in rows of `stride`. The slot
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
    prefix_lens: Tensor | None
    positions: Tensor | None


class Bytes(NamedTuple):
    """K and V of the pool as int64 words, each [layers, slots, words].

    `k_layers` is the number of words between layers, or int64 [layers], the distance
    from the first layer to each. `page_gap`, `run_gap`,
    `sums`: from `Fingerprint`.
    """

    k_words: Tensor
    v_words: Tensor
    k_layers: int | Tensor
    k_slot_stride: int
    v_layers: int | Tensor
    v_slot_stride: int
    page_gap: int
    run_gap: int
    period: int
    sums: Tensor | None


class Oracle(NamedTuple):
    """Due tokens and positions of the new tokens; negative if unknown."""

    tokens: Tensor
    positions: Tensor


class Mask(NamedTuple):
    """bool [tokens, width]: whether a token attends to a new token of its row."""

    at: Tensor
    width: int


class Checks(NamedTuple):
    """The tables that a forward is compared with; None leaves a check out.

    Fields:
        columns: `req_to_token`; tokens: tokens of the prefixes.
        published, oracle: what the inputs must be.
        mask: what the nodes of trees must see.
    """

    columns: Table | None = None
    tokens: Table | None = None
    published: Table | None = None
    oracle: Oracle | None = None
    mask: Mask | None = None


NO_CHECKS = Checks()

# 64-bit words of a tile whose heads are added up.
_SUM_TILE = 1024


class ViewPages(NamedTuple):
    """Compile-time facts of a read view: slots of a page, elements per entry, whether
    it takes new tokens, and its reach."""

    page_size: int
    entry_size: int
    takes_new: bool
    reach: int


class Hashing(NamedTuple):
    """How bytes become a fingerprint; compile-time constants.

    Fields:
        mode: a `FingerprintMode`.
        layers: layers of the pool; k_words, v_words: words of a slot in a layer.
        layer_block: `layers` rounded up to a power of 2.
        chunk: words of a slot that are hashed at a time.
        scattered: whether the places of layers come from a table.
        page: slots of a page, if pages are further apart than their slots fill, or 0;
            run: words of a slot that lie together, if not all do.
        compares: whether verify compares bytes; skips_new: not those of slots that
            this forward writes.
        heads: KV heads with checksums, 0 if there are none; head_block: words of a tile
            that holds one head; cells: heads of a slot in a tile.
    """

    mode: int
    layers: int
    k_words: int
    v_words: int
    chunk: int
    scattered: bool
    layer_block: int
    page: int = 0
    run: int = 0
    compares: bool = True
    skips_new: bool = False
    heads: int = 0
    head_block: int = 1
    cells: int = 1


def state_args(state: CanaryState) -> Any:
    """Return the `State` of a canary's state."""
    return State(*_parts_of(state), state.num_slots, state.ring.shape[0])


def row_args(view: ForwardView) -> Any:
    """Return the `Rows` of a forward."""
    view.check_layout()
    rows = Rows(*_rows_of(view))
    # A launch without rows runs one program, which loads shifts of row 0 unmasked.
    has_rows = view.num_rows > 0
    return rows if has_rows else rows._replace(shift_from=None, column_shift=None)


def end_args(view: ForwardView, findings: Tensor | None) -> Any:
    """Return the `Ends` of a forward."""
    return Ends(*_ends_of(view), findings)


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
        prefix_lens=view.prefix_lens,
        positions=view.positions,
    )


def byte_args(source: Fingerprint) -> Bytes | None:
    k, v = source.k_words, source.v_words
    if k is None or v is None:
        return None
    return Bytes(
        k_words=k,
        v_words=v,
        k_layers=k.stride(0) if source.k_places is None else source.k_places,
        k_slot_stride=k.stride(1),
        v_layers=v.stride(0) if source.v_places is None else source.v_places,
        v_slot_stride=v.stride(1),
        page_gap=source.page_gap,
        run_gap=source.run_gap,
        period=source.rotation_period,
        sums=source.sums,
    )


def hashing_args(source: Fingerprint, *, chunk: int, slots: int = 1) -> Hashing:
    """Describe the hashing; `slots`: slots of a tile whose heads are added up."""
    k, v = source.k_words, source.v_words
    if k is None or v is None:
        return Hashing(
            mode=int(source.mode),
            layers=1,
            k_words=2,
            v_words=2,
            chunk=1,
            scattered=False,
            layer_block=1,
        )
    heads = 0 if source.sums is None else source.sums.shape[2]
    head_block = next_power_of_2(max(k.shape[2], v.shape[2]) // max(heads, 1))
    most = next_power_of_2(k.shape[0] * max(heads, 1))
    return Hashing(
        mode=int(source.mode),
        layers=k.shape[0],
        k_words=k.shape[2],
        v_words=v.shape[2],
        chunk=chunk,
        scattered=source.k_places is not None,
        layer_block=next_power_of_2(k.shape[0]),
        page=source.page_size,
        run=source.run_words,
        heads=heads,
        head_block=head_block,
        cells=max(min(_SUM_TILE // (slots * head_block), most), 1),
    )


def check_args(
    checks: PoolChecks, *, reads: bool = False, writes: ForwardView | None = None
) -> Checks:
    """Return the checks for slots that attention reads, for the new tokens of `writes`,
    or for both."""
    oracle = None if writes is None else writes.oracle
    mask = None if writes is None else writes.tree_mask
    return Checks(
        columns=table_args(checks.req_to_token),
        tokens=table_args(checks.tokens, offset=checks.token_offset) if reads else None,
        published=None
        if writes is None
        else table_args(checks.published, offset=checks.token_offset),
        oracle=None if oracle is None else Oracle(*oracle),
        mask=None if mask is None else Mask(at=mask.view(uint8), width=mask.shape[1]),
    )


def page_args(view: KVReadView) -> ViewPages:
    return ViewPages(
        page_size=view.page_size,
        entry_size=view.entry_size,
        takes_new=view.takes_new,
        reach=view.reach,
    )


def path_args(path: AcceptedPath) -> Any:
    """Return the `Path` of accepted tokens."""
    return Path(*path.tensors, path.nodes, path.width)
