"""One forward as the canary sees it: rows, new tokens, and the slots that are read.

Holds tensors and checks their shapes; launches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kv_canary.records import WriterKind

NO_MANAGER = -1
"""Manager of a launch that is not a step of a forward; it leaves all phases alone."""

ANY_REACH = -1
"""Reach of a view whose rows may begin anywhere."""


def _declared(length: str, *, at_end: bool = False) -> dict[str, Any]:
    """Return a view tensor's metadata: its length in words of the native ops' checks,
    and whether only the launch that ends a forward reads it."""
    return {"length": length, "at_end": at_end}


# Not frozen: they are made for every forward, and frozen fields take twice as long to
# set. Nothing sets them later.
@dataclass(slots=True, kw_only=True)
class KVReadView:
    """The slots that attention is about to read, one view per metadata group.

    Element i of row r holds position `first_position[r] + i` (0 if None). Its slot is
    `page_table[row_index[r], i // page_size] + i % page_size` (the table's entries are
    first slots of pages; without `row_index`, row r itself), or, without a table,
    `slot_indices[indptr[r] + i]`, or, if a backend reads page numbers,
    `page_indices[indptr[r] + i // page_size] * page_size + i % page_size`. Indices
    after the last row's are not read, and elements past the table are unreadable slots.

    Fields:
        read_lens: int64 [R], elements per row.
        page_table: int32 [rows, columns], any strides; row_index: int64 [R] | None.
        indptr: int32 or int64 [R + 1]; slot_indices, page_indices: int32 or int64 [N].
        first_position: int64 [R] | None.
        prev_slots: int64 [R] | None, slot of the token before element 0, or -1; only
            for views outside forwards (a sweep).
        prefix_lens: int64 [R] | None, positions: int64 [T] | None, what attention is
            told about the rows and their new tokens, counted from `first_position`.
            They are compared with the forward's. None skips the comparison.
        takes_new: whether attention also reads K and V of the new tokens from these
            slots; otherwise the elements may end at the prefix.
        reach: tokens before its first new one that a row must read, as far as there are
            any: a window without that token. `ANY_REACH` compares nothing.
        entry_size: elements that one entry of the table covers.
        numbers, tensors: for the native ops, `READ_NUMBERS` and `READ_FIELDS` in order,
            without absent tensors at the end.
    """

    read_lens: Tensor = field(metadata=_declared("rows"))
    page_table: Tensor | None = field(default=None, metadata=_declared("any"))
    row_index: Tensor | None = field(default=None, metadata=_declared("rows"))
    indptr: Tensor | None = field(default=None, metadata=_declared("any"))
    slot_indices: Tensor | None = field(default=None, metadata=_declared("any"))
    page_indices: Tensor | None = field(default=None, metadata=_declared("any"))
    first_position: Tensor | None = field(default=None, metadata=_declared("rows"))
    prev_slots: Tensor | None = field(default=None, metadata=_declared("rows"))
    prefix_lens: Tensor | None = field(default=None, metadata=_declared("rows"))
    positions: Tensor | None = field(default=None, metadata=_declared("tokens"))
    page_size: int = 1
    takes_new: bool = True
    reach: int = ANY_REACH
    entry_size: int = field(init=False)
    numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    tensors: list[Tensor | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_paged = self.page_table is not None
        is_flat = (self.slot_indices is None) != (self.page_indices is None)
        has_indptr = self.indptr is not None
        if is_paged == has_indptr or is_flat != has_indptr:
            raise ValueError(
                "KVReadView: give either page_table, or indptr with slot_indices or "
                "page_indices"
            )
        if self.page_size < 1:
            raise ValueError(f"KVReadView: page_size={self.page_size} is not positive")
        self.entry_size = self.page_size if self.slot_indices is None else 1
        self.numbers = _read_numbers_of(self)
        self.tensors = _without_absent_end(_read_tensors_of(self))

    @property
    def entries(self) -> Tensor:
        """Return the table that is given."""
        for table in (self.page_table, self.slot_indices, self.page_indices):
            if table is not None:
                return table
        raise AssertionError("checked at construction")

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor per row or token is not a contiguous int64 vector.
        """
        for f, tensor in zip(READ_FIELDS, self.tensors, strict=False):
            if f.metadata["length"] != "any":
                require_vector(f"KVReadView: {f.name}", tensor)


# Not frozen for the same reason as `KVReadView`.
@dataclass(slots=True, kw_only=True)
class ForwardView:
    """R rows of a forward and their T new tokens; int64, contiguous.

    The tensors are only declared here. The list for the native ops, the layout check,
    the tuples of the Triton kernels and the indices in C++ follow from their order and
    metadata.

    Fields:
        req_rows: [R], rows of the request table; 0 is padding, skipped everywhere.
            Trusted to lie in the tables, like `lineage_rows`.
        prefix_lens, extend_lens: [R], tokens before this forward and in it.
        input_ids, positions: [T].
        out_cache_loc: [T], slots that the new tokens are written to.
        serials: [R], numbers of the requests, never reused; salts: [R], salts of their
            cache namespaces.
        qo_indptr: [R + 1], offsets of the rows in [T]. Defaults to one token per row.
        parent_index: [T] | None, for trees: index in [T] of a token's parent, or -1 for
            the row's last prefix token.
        tree_mask: bool [T, W] | None, with `parent_index`: whether token t attends to
            the j-th new token of its row. None skips the comparison.
        seeds: [R] | None, lineage before position 0; seed_table: [req_rows] | None, the
            same by request row. Without either it is 0.
        lineage_rows: [R] | None, rows of `expected_lineage` that these rows continue.
            Defaults to `req_rows`.
        shift_from: [R], column_shift: [R * n] | None, for draft branches: position p is
            in column p of the request table below `shift_from`, else in p + that of the
            row's n shifts whose number is p - `shift_from`, or the last one.
        publish_rows: [R] | None, rows of `expected_lineage` that receive the lineages
            after the new tokens. Defaults to the rows they are computed from.
        stay_lens: [R] | None, how many of the `extend_lens` new tokens these lineages
            cover. Defaults to all.
        reads: the slots that attention reads; empty if nothing is verified.
        writer_kind: who writes the new tokens.
        manager: number of the forward in its launch, whose phase its launches step.
        oracle: (tokens, positions), [T] each, that the inputs must equal; negative if
            unknown. Given by a host that knows them, or by a test.
        max_depth: ancestors that are walked in a tree, and most tokens after its root
            that can be accepted.
        numbers, tensors: for the native ops, `FORWARD_NUMBERS` and `ROW_FIELDS` in
            order, without absent tensors at the end.
    """

    req_rows: Tensor = field(metadata=_declared("rows"))
    prefix_lens: Tensor = field(metadata=_declared("rows"))
    extend_lens: Tensor = field(metadata=_declared("rows"))
    input_ids: Tensor = field(metadata=_declared("tokens"))
    positions: Tensor = field(metadata=_declared("tokens"))
    out_cache_loc: Tensor = field(metadata=_declared("tokens"))
    serials: Tensor = field(metadata=_declared("rows"))
    salts: Tensor = field(metadata=_declared("rows"))
    qo_indptr: Tensor | None = field(default=None, metadata=_declared("rows + 1"))
    parent_index: Tensor | None = field(default=None, metadata=_declared("tokens"))
    seeds: Tensor | None = field(default=None, metadata=_declared("rows"))
    seed_table: Tensor | None = field(default=None, metadata=_declared("any"))
    lineage_rows: Tensor | None = field(default=None, metadata=_declared("rows"))
    shift_from: Tensor | None = field(default=None, metadata=_declared("rows"))
    column_shift: Tensor | None = field(default=None, metadata=_declared("any"))
    publish_rows: Tensor | None = field(
        default=None, metadata=_declared("rows", at_end=True)
    )
    stay_lens: Tensor | None = field(
        default=None, metadata=_declared("rows", at_end=True)
    )
    reads: Sequence[KVReadView] = ()
    writer_kind: WriterKind = WriterKind.NONE
    manager: int = NO_MANAGER
    oracle: tuple[Tensor, Tensor] | None = None
    tree_mask: Tensor | None = None
    max_depth: int = 0
    # Made once, not by each launch of a forward.
    numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    tensors: list[Tensor | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.shift_from is None) != (self.column_shift is None):
            raise ValueError("ForwardView: shift_from and column_shift go together")
        if self.column_shift is not None and (
            len(self.column_shift) != self.num_shifts * self.num_rows
            or self.num_shifts == 0 < self.num_rows
        ):
            raise ValueError(
                f"ForwardView: {len(self.column_shift)} values of column_shift for "
                f"{self.num_rows} rows"
            )
        if self.seeds is not None and self.seed_table is not None:
            raise ValueError("ForwardView: give either seeds or seed_table")
        if self.parent_index is not None and self.max_depth < 1:
            raise ValueError("ForwardView: a tree needs max_depth")
        if self.tree_mask is not None and self.parent_index is None:
            raise ValueError("ForwardView: tree_mask needs parent_index")
        self.numbers = _forward_numbers_of(self)
        self.tensors = _without_absent_end(_row_tensors_of(self))

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor is not a contiguous int64 vector.
        """
        for f, tensor in zip(ROW_FIELDS, self.tensors, strict=False):
            require_vector(f"ForwardView: {f.name}", tensor)
        mask = self.tree_mask
        if mask is not None and (
            mask.dtype is not torch.bool
            or mask.dim() != 2
            or len(mask) != self.num_tokens
            or not mask.is_contiguous()
        ):
            raise ValueError(
                f"ForwardView: tree_mask is {mask.dtype} of shape {list(mask.shape)}; "
                "it must be contiguous bool [tokens, width]"
            )

    def max_advance(self, extend_lens: Tensor) -> Tensor:
        """Return by how much the rows' prefixes can grow in this forward, [R]."""
        if self.parent_index is None:
            return extend_lens
        return extend_lens.clamp(max=self.max_depth + 1)

    @property
    def num_rows(self) -> int:
        return self.req_rows.shape[0]

    @property
    def num_shifts(self) -> int:
        """Values of `column_shift` that a row has, or 0."""
        if self.column_shift is None or not self.num_rows:
            return 0
        return self.column_shift.shape[0] // self.num_rows

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


READ_FIELDS = tuple(f for f in fields(KVReadView) if f.metadata)
"""The tensors of a `KVReadView`, in order, with their metadata."""

ROW_FIELDS = tuple(f for f in fields(ForwardView) if f.metadata)
"""The tensors of a `ForwardView`, in order, with their metadata."""

READ_NUMBERS = ("page_size", "entry_size", "takes_new", "reach")
"""The numbers of a `KVReadView` that the native ops take."""

FORWARD_NUMBERS = ("max_depth", "manager", "writer_kind")
"""The numbers of a `ForwardView` that the native ops take."""

_read_numbers_of = attrgetter(*READ_NUMBERS)
_forward_numbers_of = attrgetter(*FORWARD_NUMBERS)
_read_tensors_of = attrgetter(*(f.name for f in READ_FIELDS))
_row_tensors_of = attrgetter(*(f.name for f in ROW_FIELDS))


def _without_absent_end(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Drop absent tensors at the end, because torch takes about 40 ns to pass each."""
    end = len(tensors)
    while tensors[end - 1] is None:
        end -= 1
    return list(tensors[:end])


def require_vector(name: str, t: Tensor | None) -> None:
    """Check a tensor that may be absent.

    Raises:
        ValueError: it is not a contiguous int64 vector. The message names it.
    """
    if t is None:
        return
    if t.dtype is not torch.int64 or t.dim() != 1 or not t.is_contiguous():
        raise ValueError(
            f"{name} is {t.dtype} of shape {list(t.shape)} and strides "
            f"{list(t.stride())}; it must be a contiguous int64 vector"
        )
