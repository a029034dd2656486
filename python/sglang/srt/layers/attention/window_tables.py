"""Page tables of window slots, rebuilt for every forward.

A row's table begins with the first page that its first new token reads, so it is no
longer than the window and the new tokens:

```
positions       0 ........ first_position ........ prefix ........ end
page_table      | not read | window before the new tokens | new    |
window table               | entry 0, 1, 2, ...                    |
```
Attention counts a row's elements from `first_position` on. Lengths and queries shift by
the same amount, so its windows do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardMode
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from kv_canary.view import KVReadView
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.mem_cache.groups.kv_group import KVGroup
    from sglang.srt.mem_cache.memory_pool import KVCache


# What is made for each forward.
_PARTS = ("rows", "cache_loc", "positions")

ROW_ALIGNMENT = 16
"""A table row has a multiple of this many columns."""


class WindowRows(NamedTuple):
    """The rows of a forward as `window_table` writes them.

    Fields:
        page_table: int32 [R, columns], first window slots of pages; 0 past the end.
        first_position: int64 [R], position of a row's element 0.
        prefix_lens, read_lens: int64 [R], counted from `first_position`.
    """

    page_table: Tensor
    first_position: Tensor
    prefix_lens: Tensor
    read_lens: Tensor


def window_table_ref(
    page_table: Tensor,
    row_index: Tensor | None,
    *,
    prefix_lens: Tensor,
    read_lens: Tensor,
    mapping: Tensor,
    window: int,
    page_size: int,
    out: WindowRows,
) -> None:
    """Make the window tables of all rows.

    Args:
        page_table: int32 [rows, columns], first slots of pages of the full group.
        row_index: int64 [R], rows of `page_table`. Defaults to row r for row r.
        prefix_lens: int64 [R], position of a row's first new token.
        read_lens: int64 [R], elements that each row may read.
        mapping: int64 [slots of the full group], window slots; 0 for none.
        window: positions that a token reads, its own included.
        page_size: elements of an entry.
        out: receives the result; wide enough for `window_columns` entries.
    """
    first = (prefix_lens - window + 1).clamp(min=0) // page_size
    column = first[:, None] + torch.arange(out.page_table.shape[1], device=first.device)
    row = torch.arange(len(first), device=first.device)
    row = row if row_index is None else row_index
    slots = page_table[row[:, None], column.clamp(max=page_table.shape[1] - 1)]
    is_read = column * page_size < read_lens[:, None]
    out.page_table.copy_(mapping[slots.long()].where(is_read, 0))
    torch.mul(first, page_size, out=out.first_position)
    torch.sub(prefix_lens, out.first_position, out=out.prefix_lens)
    torch.sub(read_lens, out.first_position, out=out.read_lens)


window_table = Op(
    reference=window_table_ref,
    triton="sglang.srt.layers.ops.attention.tables.window_table:window_table",
    place="mapping",
)


def window_columns(*, window: int, new_tokens: int, page_size: int) -> int:
    """Return the entries that `new_tokens` new tokens need, wherever pages begin."""
    return (window - 1 + new_tokens + page_size - 2) // page_size + 1


def new_window_rows(rows: int, columns: int, *, device: torch.device) -> WindowRows:
    """Allocate tensors for `window_table`, with at least `columns` columns.

    Every vector and every row of the table begins at a multiple of 16 bytes; otherwise
    Triton would compile another variant of the kernel.
    """
    lens = torch.zeros(3, rows + rows % 2, dtype=torch.int64, device=device)
    width = -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    table = torch.zeros(rows, width, dtype=torch.int32, device=device)
    return WindowRows(table, *lens[:, :rows].unbind())


class WindowForward(NamedTuple):
    """Window slots of a forward.

    Fields:
        rows: rows that attention of sliding layers reads.
        cache_loc: int64 [T], where sliding layers store the new tokens.
        positions: int64 [T], positions of the new tokens of trees, counted like the
            elements of their rows. None without trees.
    """

    rows: WindowRows
    cache_loc: Tensor
    positions: Tensor | None = None


class WindowTables:
    """Window tables and window slots of the forwards of one backend.

    They are made before the first layer of the group, or earlier on request; the other
    layers read them. A graph captures the making as well, so each replay repeats it.

    Args:
        group: the group whose layers read them.
    """

    def __init__(self, group: KVGroup, slots: WindowSlots, *, max_rows: int) -> None:
        self._first_layer = group.layers[0]
        self._group = group
        self._slots = slots
        self._max_rows = max_rows
        self._static: dict[int, WindowRows] = {}
        self._rows: WindowRows | None = None
        self._cache_loc: Tensor | None = None
        self._positions: Tensor | None = None
        # Made for a forward in which no sliding layer has attended, or stored, yet.
        self._is_ahead = dict.fromkeys(_PARTS, False)

    def for_table(self, max_rows: int) -> WindowTables:
        """Return the same tables for forwards over another page table."""
        return WindowTables(self._group, self._slots, max_rows=max_rows)

    def make(self, view: KVReadView, forward_batch: ForwardBatch) -> WindowForward:
        """Make the window slots of a forward, before its first layer."""
        rows = self._make_rows(view, forward_batch)
        cache_loc = self._make_cache_loc(forward_batch)
        positions = None
        if forward_batch.tree_mask is not None:
            positions = self._make_tree_positions(forward_batch)
        self._is_ahead = dict.fromkeys(_PARTS, True)
        return WindowForward(rows, cache_loc, positions)

    def cache_loc(self, layer_id: int, forward_batch: ForwardBatch) -> Tensor:
        """Return the window slots of the new tokens, int64 [T]."""
        if self._is_due("cache_loc", layer_id):
            self._make_cache_loc(forward_batch)
        assert self._cache_loc is not None
        return self._cache_loc

    def rows(
        self, layer_id: int, view: KVReadView, forward_batch: ForwardBatch
    ) -> WindowRows:
        """Return the rows that attention of a sliding layer reads instead of `view`."""
        if self._is_due("rows", layer_id):
            self._make_rows(view, forward_batch)
        assert self._rows is not None
        return self._rows

    def _is_due(self, what: str, layer_id: int) -> bool:
        """Whether this is the first sliding layer of a forward, and `make` was not
        called."""
        if layer_id != self._first_layer:
            return False
        is_ahead, self._is_ahead[what] = self._is_ahead[what], False
        return not is_ahead

    def _make_cache_loc(self, forward_batch: ForwardBatch) -> Tensor:
        self._cache_loc = self._slots.mapping[forward_batch.out_cache_loc]
        return self._cache_loc

    def _make_rows(self, view: KVReadView, forward_batch: ForwardBatch) -> WindowRows:
        assert view.page_table is not None
        self._rows = self._tensors(forward_batch, view.page_size)
        window_table(
            view.page_table,
            view.row_index,
            prefix_lens=forward_batch.prefix_lens,
            read_lens=view.read_lens,
            mapping=self._slots.mapping,
            window=self._slots.window,
            page_size=view.page_size,
            out=self._rows,
        )
        return self._rows

    def tree_positions(self, layer_id: int, forward_batch: ForwardBatch) -> Tensor:
        """Return positions of the new tokens of trees, int64 [T], counted like the
        elements of their rows. Call it after `rows`."""
        if self._is_due("positions", layer_id):
            self._make_tree_positions(forward_batch)
        assert self._positions is not None
        return self._positions

    def _make_tree_positions(self, forward_batch: ForwardBatch) -> Tensor:
        assert self._rows is not None
        first = self._rows.first_position[:, None]
        whole = forward_batch.positions.view(len(first), -1)
        self._positions = (whole - first).view(-1)
        return self._positions

    def _tensors(self, batch: ForwardBatch, page_size: int) -> WindowRows:
        """Return tensors with one row per row of the batch. If each row has a fixed
        number of new tokens, as in graphs, they are always the same tensors."""
        rows, device = batch.batch_size, batch.prefix_lens.device
        columns = window_columns(
            window=self._slots.window,
            new_tokens=_new_tokens(batch),
            page_size=page_size,
        )
        if batch.forward_mode is ForwardMode.EXTEND or rows > self._max_rows:
            return new_window_rows(rows, columns, device=device)
        if columns not in self._static:
            self._static[columns] = new_window_rows(
                self._max_rows, columns, device=device
            )
        whole = self._static[columns]
        return WindowRows(*(tensor[:rows] for tensor in whole))


def make_window_tables(kv_pool: KVCache, *, max_rows: int) -> dict[str, WindowTables]:
    """Return the tables of a pool's window groups, by group name."""
    return {
        group.name: WindowTables(group, group.slots, max_rows=max_rows)
        for group in kv_pool.groups
        if isinstance(group.slots, WindowSlots)
    }


def _new_tokens(batch: ForwardBatch) -> int:
    """Return at least the number of new tokens of every row; exact if that is free."""
    if batch.forward_mode is not ForwardMode.EXTEND:
        return batch.num_tokens // batch.batch_size
    if batch.extend_lens.is_cpu:
        return int(batch.extend_lens.max())
    return batch.num_tokens
