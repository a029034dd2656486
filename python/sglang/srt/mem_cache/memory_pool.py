"""Rows of requests (`ReqToTokenPool`) and the KV bytes (`KVCache`, MHA layout).

They only own tensors: the allocator decides who owns a slot, and the attention layer
what is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sglang.srt.mem_cache.groups.kv_group import FULL, KVGroup
from sglang.srt.mem_cache.kv_dtype import ONES, KVScales, to_stored
from sglang.srt.mem_cache.ops.move_kv.op import move_kv_cache
from sglang.srt.mem_cache.page_ledger import IntArray
from sglang.srt.utils.memory import host_zeros
from sglang.srt.utils.vectors import padded_vectors

if TYPE_CHECKING:
    from sglang.srt.mem_cache.draft_region import DraftRegion
    from sglang.srt.mem_cache.groups.slots import PagedSlots

Ints = Sequence[int] | IntArray
KVPlace = tuple[KVGroup, int]
"""Where a layer's KV lies: its group, and its number in the group's tensors."""
OnMove = Callable[[torch.Tensor, torch.Tensor], None]

WRITE_AT_ONCE = 1 << 18
"""Columns of the rows that are written in one pass; bounds the memory this takes."""


class ReqToTokenPool:
    """Rows of requests: the slot and the token at every position.

    Args:
        region: draft region, whose slots follow the columns of every row, or None.

    Fields:
        req_to_token: int32 [size + 1, row_width + columns of the region] on the device;
            the slot at each position, then the region's slots, which never change.
        token_table: int32 [size + 1, max(context_len, row_width)] on the device; the
            token at each position. Written by the prefill from the host and by the
            kernel that publishes sampled tokens. There is no host copy.
        region: as constructed.

    Row 0 is the padding row: it stays zero, so padded rows read and write the scratch
    page. Rows 1..size are allocated to requests. Columns that a row's owner has not
    written hold the values of the previous owner.

    Slots are allocated on the host and mirrored there, so reading a row never waits for
    the device (on the CPU, mirror and table are the same memory). Only the methods here
    may write to `req_to_token`. Writes to a device are enqueued on the current stream;
    the caller orders them after forwards that still read the row.
    """

    def __init__(
        self,
        *,
        size: int,
        row_width: int,
        device: str | torch.device,
        context_len: int,
        region: DraftRegion | None = None,
    ) -> None:
        if size < 1 or row_width < 1:
            raise ValueError(f"size={size}, row_width={row_width}: must be positive")
        self.size = size
        self.row_width = row_width
        self.context_len = context_len
        self.device = torch.device(device)
        self.region = region
        self._stride = row_width + (0 if region is None else region.columns)
        self.req_to_token = self._zeros(self._stride)
        self.token_table = self._zeros(max(context_len, row_width))
        self._mirror: NDArray[np.int32]
        if self.device.type == "cpu":
            self._mirror = self.req_to_token.numpy()
        else:
            self._mirror = np.zeros((size + 1, self._stride), dtype=np.int32)
        if region is not None:
            self._mirror[:, row_width:] = region.table()
            self.req_to_token.copy_(torch.from_numpy(self._mirror))
        self._free: list[int] = []
        self._in_use = bytearray(size + 1)
        self._on_free: list[Callable[[torch.Tensor], None]] = []
        self._on_region_free: list[Callable[[torch.Tensor], None]] = []
        # For each recorded group, its slots in the rows.
        self._recorded: dict[PagedSlots, torch.Tensor] = {}
        self.clear()

    def record_group(self, slots: PagedSlots) -> torch.Tensor:
        """From now on also write a secondary group's slots, from the host's records, so
        that they can be compared with what is read through the mapping. Target and
        draft share rows and slots, and therefore this table.

        Returns:
            int32 like `req_to_token`. Positions that lost their slot keep the last one
            they had.
        """
        table = self._recorded.get(slots)
        if table is None:
            table = self._recorded[slots] = self._zeros(self._stride)
            if self.region is not None:
                of_region = slots.map_slots(self.region.table().astype(np.int64))
                table[:, self.row_width :] = torch.from_numpy(of_region)
        return table

    @property
    def position_slots(self) -> torch.Tensor:
        """`req_to_token` without the region: int32 [size + 1, row_width], a view."""
        return self.req_to_token[:, : self.row_width]

    @staticmethod
    def num_bytes(*, size: int, row_width: int, region_columns: int = 0) -> int:
        """Return the device memory of a pool with `size` rows, in bytes."""
        return (size + 1) * ReqToTokenPool.bytes_per_row(
            row_width=row_width, region_columns=region_columns
        )

    @staticmethod
    def bytes_per_row(*, row_width: int, region_columns: int = 0) -> int:
        """Return the device memory of one row, in bytes."""
        return (2 * row_width + region_columns) * torch.int32.itemsize

    def _zeros(self, width: int) -> torch.Tensor:
        shape = (self.size + 1, width)
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    # -- rows ----------------------------------------------------------------------

    def alloc(self, count: int) -> list[int] | None:
        """Allocate `count` rows, latest freed first. Return None if there are too
        few."""
        if count > len(self._free):
            return None
        rows = [self._free.pop() for _ in range(count)]
        for row in rows:
            self._in_use[row] = 1
        return rows

    def free(self, rows: Sequence[int]) -> None:
        """Free rows; RuntimeError if one is not in use."""
        for row in rows:
            if not 0 < row <= self.size or not self._in_use[row]:
                raise RuntimeError(
                    f"free of request row {row}: it is not in use (rows 1..{self.size})"
                )
            self._in_use[row] = 0
            self._free.append(row)
        for hook in self._on_free:
            hook(torch.tensor(rows, dtype=torch.int64))
        if self.region is not None and self._on_region_free:
            slots = torch.from_numpy(self.region.rows_to_slots(rows))
            for hook in self._on_region_free:
                hook(slots)

    def register_on_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook(rows)`, int64 on the host, at every free, before another request
        can get them."""
        self._on_free.append(hook)

    def register_on_region_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook(slots)` at every free of rows with the slots of their draft region
        (int64, host), before another request can get them."""
        self._on_region_free.append(hook)

    def available_size(self) -> int:
        """Return how many rows can be allocated now."""
        return len(self._free)

    def save_rows(self) -> list[int]:
        """Return the free rows in reverse order of reuse, for `load_rows`."""
        return list(self._free)

    def load_rows(self, free: Sequence[int]) -> None:
        """Make exactly these rows free. Contents stay.

        Raises:
            ValueError: these are not distinct rows of this pool.
        """
        if len(set(free)) != len(free) or not set(free) <= set(range(1, self.size + 1)):
            raise ValueError(f"not distinct rows of a pool of {self.size}")
        self._free = list(free)
        self._in_use = bytearray([0] + [1] * self.size)
        for row in free:
            self._in_use[row] = 0

    def clear(self) -> None:
        """Free every row. Contents stay."""
        self._free = list(range(self.size, 0, -1))
        self._in_use = bytearray(self.size + 1)

    # -- slots ---------------------------------------------------------------------

    def write(self, row: int, start: int, slots: torch.Tensor) -> None:
        """Write req_to_token[row, start : start + n] = slots (int64 [n], host)."""
        self.write_batch([row], [start], [len(slots)], slots)

    def write_batch(
        self, rows: Ints, starts: Ints, lens: Ints, slots: torch.Tensor
    ) -> torch.Tensor:
        """Write one run of slots per row, all in one pass.

        Args:
            rows, starts, lens: one per request; row r gets lens[r] slots from column
                starts[r] on.
            slots: int64 [sum(lens)] on the host, request after request.

        Returns:
            `slots` as int64 on the pool's device: the forward's `out_cache_loc`.

        Raises:
            RuntimeError: a run ends past the row, or the lengths disagree.
        """
        index = self._flat_index(
            rows, starts, lens, width=self.row_width, stride=self._stride
        )
        if len(index) != len(slots):
            raise RuntimeError(f"{len(slots)} slots for {len(index)} columns")
        self._mirror.reshape(-1)[index] = slots.numpy()
        columns = [index, slots.numpy()]
        columns += [group.map_slots(slots.numpy()) for group in self._recorded]
        if self.device.type == "cpu" and not self._recorded:
            return slots
        # One copy for the index and all values.
        stacked = padded_vectors(np.stack(columns))
        moved = _to_device(torch.from_numpy(stacked), self.device)[:, : len(index)]
        values = moved[1:].to(torch.int32)
        if self.device.type != "cpu":
            self.req_to_token.view(-1).index_copy_(0, moved[0], values[0])
        for number, table in enumerate(self._recorded.values(), start=1):
            table.view(-1).index_copy_(0, moved[0], values[number])
        return moved[1]

    def write_rows(self, rows: Sequence[int], slots: Sequence[IntArray]) -> None:
        """Write the beginning of each of these rows: `slots[r]`, int64 on the host."""
        for part in _pieces(slots):
            lens = [len(of_row) for of_row in slots[part]]
            whole = torch.from_numpy(np.concatenate(slots[part]))
            self.write_batch(rows[part], [0] * len(lens), lens, whole)

    def row_slots(self, row: int, start: int, end: int) -> torch.Tensor:
        """Return a copy of row[start:end], int64 on the host, without a sync."""
        if not 0 <= start <= end <= self.row_width:
            raise RuntimeError(
                f"columns [{start}, {end}) of a row of width {self.row_width}"
            )
        return torch.from_numpy(self._mirror[row, start:end].astype(np.int64))

    def last_locs(self, rows: Ints, lens: Ints) -> torch.Tensor:
        """Return the slot of position lens[r] - 1 of each row, int64 [rows], host.

        The value is meaningless if lens[r] is 0.
        """
        columns = np.asarray(lens, dtype=np.int64) - 1
        last = self._mirror[np.asarray(rows, dtype=np.int64), columns]
        return torch.from_numpy(last.astype(np.int64))

    # -- tokens --------------------------------------------------------------------

    def write_tokens(
        self, rows: Ints, starts: Ints, lens: Ints, tokens: torch.Tensor
    ) -> None:
        """Write token_table[rows[r], starts[r] : starts[r] + lens[r]] = tokens of r.

        Args:
            rows, starts, lens: one per request, on the host.
            tokens: int64 or int32 [sum(lens)], on the host or on the pool's device.
        """
        width = self.token_table.shape[1]
        index = self._flat_index(rows, starts, lens, width=width, stride=width)
        if len(index) != len(tokens):
            raise RuntimeError(f"{len(tokens)} tokens for {len(index)} columns")
        where = _to_device(torch.from_numpy(index), self.device)
        values = _to_device(tokens, self.device).to(torch.int32)
        self.token_table.view(-1).index_copy_(0, where, values)

    def write_token_rows(self, rows: Sequence[int], tokens: Sequence[IntArray]) -> None:
        """Write the first tokens of each of these rows: `tokens[r]`, int64 on the
        host."""
        for part in _pieces(tokens):
            lens = [len(of_row) for of_row in tokens[part]]
            whole = torch.from_numpy(np.concatenate(tokens[part]))
            self.write_tokens(rows[part], [0] * len(lens), lens, whole)

    @staticmethod
    def _flat_index(
        rows: Ints, starts: Ints, lens: Ints, *, width: int, stride: int
    ) -> IntArray:
        """Return the flat cells of the runs, int64 [sum(lens)], in rows of `stride`
        cells, `width` of which may be written.

        Checks that no run leaves its row, because it would silently continue in the
        next.
        """
        begin = np.asarray(starts, dtype=np.int64)
        sizes = np.asarray(lens, dtype=np.int64)
        ends = begin + sizes
        if len(ends) == 0:
            return ends
        if int(ends.max()) > width or int(begin.min()) < 0:
            bad = int(((ends > width) | (begin < 0)).argmax())
            raise RuntimeError(
                f"row {int(rows[bad])}: columns [{int(begin[bad])}, {int(ends[bad])}) "
                f"do not fit a row of width {width}"
            )
        flat: IntArray = np.asarray(rows, dtype=np.int64) * stride + begin
        if int(sizes.max()) == 1 == int(sizes.min()):
            return flat
        if len(flat) == 1:
            return np.arange(int(flat[0]), int(flat[0] + sizes[0]), dtype=np.int64)
        index = np.repeat(flat - (np.cumsum(sizes) - sizes), sizes)
        index += np.arange(len(index))
        return index


def _pieces(rows: Sequence[IntArray]) -> Iterator[slice]:
    """Cut rows into runs of at most `WRITE_AT_ONCE` columns, or into single rows."""
    begin = columns = 0
    for end, row in enumerate(rows):
        if columns and columns + len(row) > WRITE_AT_ONCE:
            yield slice(begin, end)
            begin, columns = end, 0
        columns += len(row)
    if columns:
        yield slice(begin, len(rows))


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device asynchronously; returns the tensor itself if it is there."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySource:
    """Bytes of one tensor that the canary may fingerprint.

    Fields:
        name: "k" or "v"; only "k" in a pool of latents.
        buffer: [layers, slots, ...], contiguous in a slot.
        layer_num: size of the first dimension.
        bytes_per_slot: bytes of one slot in one layer.
        layer_stride_bytes, slot_stride_bytes: distances in the buffer.
    """

    name: str
    buffer: torch.Tensor
    layer_num: int
    bytes_per_slot: int
    layer_stride_bytes: int
    slot_stride_bytes: int


class KVCache(ABC):
    """KV bytes of all slots of one model.

    Fields:
        size: usable slots, a draft region's included. Every tensor has
            `size + page_size` rows of slots, the first `page_size` of which are the
            scratch page.
        page_size, dtype, device, layer_num: as constructed.
        kind: name of its group, if that is the model's only one.
        values_in_keys: whether V is the first channels of K.
    """

    kind = FULL
    values_in_keys = False

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str | torch.device,
    ) -> None:
        if page_size < 1 or size < 1 or size % page_size:
            raise ValueError(
                f"size={size}: must be a positive multiple of page_size={page_size}"
            )
        if layer_num < 1:
            raise ValueError(f"layer_num={layer_num}: must be positive")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.layer_num = layer_num
        self.device = torch.device(device)
        self._own_group = KVGroup(
            name=self.kind, layers=tuple(range(layer_num)), slots=None, tensors=self
        )
        self._scales: dict[int, KVScales] = {}
        self._on_move: list[OnMove] = []

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The groups of the model, with the primary one first."""
        return (self._own_group,)

    @property
    def layers(self) -> Sequence[int]:
        """The model's layers that have KV, ascending."""
        return range(self.layer_num)

    def layer_place(self, layer_id: int) -> KVPlace:
        """Return where a layer's KV lies."""
        return self._own_group, layer_id

    @property
    def scales(self) -> Mapping[int, KVScales]:
        """Scales of the layers that have some; never changed in place."""
        return self._scales

    def layer_scales(self, layer_id: int) -> KVScales:
        """Return what K and V of a layer are divided by before they are stored."""
        return self._scales.get(layer_id, ONES)

    def set_scales(self, scales: Mapping[int, KVScales]) -> None:
        """Set the scales of layers; others have 1. Call it before anything is stored,
        and before graphs are captured, which keep them."""
        self._scales = dict(scales)

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's K and V, [slots, kv_heads, head_dim] each; the same
        objects at every call."""

    @abstractmethod
    def set_kv_buffer(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write k, v ([n, kv_heads, head_dim]) to slots (int64 [n], on the device)."""

    @abstractmethod
    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy all layers of slots src to dst, loading everything before storing."""

    @abstractmethod
    def canary_sources(self) -> tuple[CanarySource, ...]:
        """Return the bytes that may be fingerprinted: one source per tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all slots."""
        return sum(source.buffer.nbytes for source in self.canary_sources())

    def move_kv_cache(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy slots src to dst in all layers, then call the `on_move` hooks.

        Args:
            dst, src: int64 [n], on the device. They may overlap: every source is read
                before anything is stored. dst may repeat only with equal sources.
        """
        if dst.shape != src.shape:
            raise RuntimeError(f"move of {src.numel()} slots to {dst.numel()}")
        self._move(dst, src)
        for hook in self._on_move:
            hook(dst, src)

    def register_on_move(self, hook: OnMove) -> None:
        """Call `hook(dst, src)` after each move, on the same stream.

        This way records about slots can move with the bytes.
        """
        self._on_move.append(hook)


class MHATokenToKVPool(KVCache):
    """K and V as one tensor each, [layers, slots, kv_heads, head_dim], zero at start.

    Args:
        head_num: KV heads on this rank.
        head_dim: channels per head.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        head_num: int,
        head_dim: int,
        device: str | torch.device,
    ) -> None:
        super().__init__(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
        )
        self.head_num = head_num
        self.head_dim = head_dim
        shape = (layer_num, size + page_size, head_num, head_dim)
        self.k_buffer = zeros_for_kv(shape, dtype, self.device)
        self.v_buffer = zeros_for_kv(shape, dtype, self.device)
        self._layers = list(
            zip(self.k_buffer.unbind(0), self.v_buffer.unbind(0), strict=True)
        )

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer_id]

    def set_kv_buffer(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        k_layer, v_layer = self._layers[layer_id]
        scales = self.layer_scales(layer_id)
        k_layer[slots] = to_stored(k, self.dtype, scales.k)
        v_layer[slots] = to_stored(v, self.dtype, scales.v)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        move_kv_cache(self.k_buffer, self.v_buffer, dst=dst, src=src)

    def canary_sources(self) -> tuple[CanarySource, ...]:
        named = (("k", self.k_buffer), ("v", self.v_buffer))
        return tuple(
            CanarySource(
                name=name,
                buffer=buffer,
                layer_num=self.layer_num,
                bytes_per_slot=self._bytes_per_slot(),
                layer_stride_bytes=buffer.stride(0) * buffer.element_size(),
                slot_stride_bytes=buffer.stride(1) * buffer.element_size(),
            )
            for name, buffer in named
        )

    def _bytes_per_slot(self) -> int:
        return self.head_num * self.head_dim * self.k_buffer.element_size()


def zeros_for_kv(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a KV tensor of zeros; on the CPU in huge pages if the kernel has
    some."""
    if device.type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def kv_bytes_per_token(
    *, layer_num: int, head_num: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of one slot in all layers of an `MHATokenToKVPool`."""
    return 2 * layer_num * head_num * head_dim * dtype.itemsize
