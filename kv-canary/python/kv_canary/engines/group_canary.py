"""A KV group whose slots lie in blocks, and its page map: the blocks of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kv_canary.engines.block_table import BlockTable
from kv_canary.engines.page_probe import page_axis
from kv_canary.engines.step import GroupReads
from kv_canary.layout import NO_FINGERPRINT, Fingerprint, FingerprintMode
from kv_canary.op import triton_available
from kv_canary.pool_checks import PoolChecks
from kv_canary.runtime.group import CanaryGroup
from kv_canary.runtime.uploads import upload
from kv_canary.slot_bytes import ByteFindings, SlotBytes
from kv_canary.slot_places import paged_fingerprint
from kv_canary.state import create_state
from kv_canary.view import ForwardView, KVReadView
from kv_canary.violation import POOLS

if TYPE_CHECKING:
    from kv_canary.slot_places import PageLayout

RING_CAPACITY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose KV lies in the same blocks.

    Fields:
        name: name for reports. number: of the group in the host's tables.
        layers: one tensor per layer, all of one dtype, beginning with block 0.
        pages: where their values lie; its page size is the block size.
        num_blocks: number of blocks, including block 0, which has no owner.
        window: tokens that a query sees, or None for all.
    """

    name: str
    layers: Sequence[Tensor]
    pages: PageLayout
    num_blocks: int
    window: int | None = None
    number: int = 0

    @property
    def page_size(self) -> int:
        return self.pages.page_size


class BlockReads(NamedTuple):
    """What attention reads of a group, and how many elements of each row are prefix."""

    table: KVReadView
    num_read: Sequence[int]


class GroupCanary(CanaryGroup):
    """Checks the slots of a group's blocks.

    Args:
        number: number of the group in reports.
        num_rows: requests that may hold blocks at once.
        max_len: most tokens of a request.
        mode: which bytes are fingerprinted.
        stamps_first: see `HostCapabilities.shares_new_slots`.

    Attributes:
        blocks: the page map; table: its entries, which are slots.
    """

    def __init__(
        self,
        group: Group,
        *,
        number: int,
        num_rows: int,
        max_len: int,
        mode: FingerprintMode,
        stamps_first: bool,
    ) -> None:
        device = group.layers[0].device
        self.group = group
        self.blocks = BlockTable(
            num_rows + 1,
            -(-max_len // group.page_size),
            size=group.page_size,
            empty=0,
            device=device,
        )
        self.table = self.blocks.entries
        num_slots = group.num_blocks * group.page_size
        in_kernels = _bytes_in_kernels(group, mode)
        slot_bytes = None
        if mode is not FingerprintMode.NONE and in_kernels is None:
            slot_bytes = SlotBytes(group.layers, group.pages, mode, num_slots=num_slots)
        super().__init__(
            state=create_state(
                num_slots=num_slots,
                req_rows=num_rows + 1,
                ring_capacity=RING_CAPACITY,
                num_managers=1,
                device=device,
                pool=len(POOLS) * number,
            ),
            checks=PoolChecks(
                page_size=group.page_size,
                req_to_token=self.table,
                fingerprint=in_kernels or NO_FINGERPRINT,
                skips_new=stamps_first,
            ),
            slot_bytes=slot_bytes,
            stamps_first=stamps_first,
        )
        self._starts: dict[int, Tensor] = {}
        self._offsets = np.arange(group.page_size, dtype=np.int64)
        self._swept = group.page_size

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Call `free` for the slots of blocks."""
        if blocks:
            self.free(self._host_slots(blocks))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Fill the bytes of blocks with zeros."""
        if not blocks:
            return
        where = upload(torch.tensor(blocks), self.table.device)
        for layer in self.group.layers:
            # As numbers, because not every 8-bit float can be filled.
            plain = layer if layer.element_size() > 1 else layer.view(torch.uint8)
            axis = page_axis(plain, self.group.num_blocks, self.group.name)
            plain.index_fill_(axis, where, 0)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the records of (source, destination) blocks, after their bytes."""
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self.move(dst=self.slots_of(destinations), src=self.slots_of(sources))

    def sweep(self, budget: int, held: set[int]) -> ByteFindings | None:
        """Check `budget` slots of blocks that no request holds, in rotation."""
        if self.bytes is None:
            return None
        end = min(self._swept + budget, self.state.num_slots)
        slots = torch.arange(self._swept, end, device=self.table.device)
        self._swept = end if end < self.state.num_slots else self.group.page_size
        if held:
            taken = upload(torch.tensor(sorted(held)), slots.device)
            slots = slots[~torch.isin(slots // self.group.page_size, taken)]
        return self.bytes.check_slots(self.state, slots) if len(slots) else None

    def reads(
        self, reads: GroupReads, seq_lens: Tensor, prefix: Sequence[int]
    ) -> BlockReads:
        """Return what attention reads of this group in a forward.

        Args:
            seq_lens: int64 [R], tokens that attention reads.
            prefix: tokens before the forward, by row.
        """
        size, columns = self.group.page_size, reads.block_table.stride(0)
        indptr = self._row_starts(len(prefix), columns)
        first_position, num_read = None, prefix
        before_first = None
        if self.group.window is not None:
            # Blocks that left the window may have new owners; whole pages are read.
            firsts = [max(n - self.group.window + 1, 0) // size * size for n in prefix]
            first_position = upload(torch.tensor(firsts), seq_lens.device)
            indptr = indptr.clone()
            indptr[:-1] += first_position // size
            # The slot before the first page may also have a new owner.
            before_first = torch.full_like(first_position, -1)
            seq_lens = (seq_lens - first_position).clamp(min=0)
            num_read = [n - first for n, first in zip(prefix, firsts, strict=True)]
        table = KVReadView(
            read_lens=seq_lens,
            page_indices=_flat(reads.block_table),
            indptr=indptr,
            first_position=first_position,
            prev_slots=before_first,
            page_size=size,
        )
        return BlockReads(table, num_read)

    def padded(self, oracle: tuple[Tensor, Tensor] | None) -> ForwardView:
        """Return a forward of one row and token that are padding."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.table.device)
        table = torch.zeros_like(self.table[:1, :1])
        reads = GroupReads(block_table=table, slot_mapping=zero)
        return ForwardView(
            req_rows=zero,
            prefix_lens=zero,
            extend_lens=zero,
            serials=zero,
            salts=zero,
            qo_indptr=zero.new_tensor([0, 0]),
            input_ids=zero,
            positions=zero,
            out_cache_loc=zero,
            reads=(self.reads(reads, zero, [0]).table,),
            oracle=oracle,
        )

    def _row_starts(self, rows: int, columns: int) -> Tensor:
        """Return where the rows of a table begin, int64 [rows + 1]. A view, of which
        the engine's tables of one width share the memory."""
        starts = self._starts.get(columns)
        if starts is None or len(starts) <= rows:
            count = max(rows + 1, len(self.table))
            starts = torch.arange(count, device=self.table.device) * columns
            self._starts[columns] = starts
        return starts[: rows + 1]

    def slots_of(self, blocks: Sequence[int]) -> Tensor:
        """Return the slots of blocks, int64 on the device."""
        return upload(self._host_slots(blocks), self.table.device)

    def _host_slots(self, blocks: Sequence[int]) -> Tensor:
        size = self.group.page_size
        slots = np.asarray(blocks, dtype=np.int64)[:, None] * size + self._offsets
        return torch.from_numpy(slots.reshape(-1))


def _bytes_in_kernels(group: Group, mode: FingerprintMode) -> Fingerprint | None:
    """Return the bytes that the canary's own kernels sample as they verify, on a GPU
    where slots are runs of bytes. Otherwise launches of `SlotBytes` compare them."""
    if mode is not FingerprintMode.PARTIAL or not group.layers[0].is_cuda:
        return None
    if not triton_available(warn=True):
        return None
    return paged_fingerprint(mode, group.layers, group.pages)


def _flat(table: Tensor) -> Tensor:
    """View the entries of a table as one run of memory, including gaps between rows."""
    if table.shape[0] == 0:
        return table.reshape(-1)
    length = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    return table.as_strided((length,), (1,))
