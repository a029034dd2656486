"""Snapshots of a scheduler for the inspector page.

Made only on request: nothing is counted or kept in between. Makes no decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang.srt.kv_canary.runner.record_view import (
    PageClockReader,
    PageClocks,
    slot_records,
)
from sglang.srt.managers.messages.io_struct import (
    GetSlotReq,
    GetSlotRsp,
    GetSnapshotReq,
    GetSnapshotRsp,
    GetTiersReq,
    GetTiersRsp,
    SchedulerStats,
)
from sglang.srt.managers.messages.pool_snapshot import (
    PageFrame,
    PoolSize,
    PoolSnapshot,
    RequestView,
)
from sglang.srt.mem_cache.page_map import SERIAL_MASK, page_cells
from sglang.srt.mem_cache.state_map import state_table
from sglang.srt.mem_cache.tree_table import tree_table
from sglang.srt.utils.quoting import MAX_QUOTED_CHARS, clipped

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import BatchEnvironment
    from sglang.srt.managers.messages.tier_snapshot import TierSnapshot
    from sglang.srt.managers.scheduler.healer import Healer
    from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO
    from sglang.srt.managers.scheduler.tier_loads import TierLoads
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.quarantine import Quarantine

MAX_REQUESTS = 512
MAX_NODES = 2048

Ints = NDArray[np.int32]


class Inspector:
    """Answers the inspector page's questions.

    Every rank must be asked, because the numbers cover all of them. Only rank 0
    answers, from its own records, which are the same except for fingerprints.

    Args:
        requests: all that are not finished.
        stats: returns the scheduler's current numbers.
        managers: canary managers of the checked pools.
        tiers: what is outside of the device, or None.
        healer: owner of the damaged pages, or None if the canary does not heal.
        is_leader: whether this rank answers.
    """

    def __init__(
        self,
        env: BatchEnvironment,
        *,
        io: SchedulerIO,
        requests: Callable[[], Iterable[Req]],
        stats: Callable[[], SchedulerStats],
        managers: list[CanaryManager],
        healer: Healer | None,
        tiers: TierLoads | None,
        is_leader: bool,
    ) -> None:
        self._cache = env.cache
        self._has_drafts = env.decode_reserve > 0
        self._io = io
        self._requests = requests
        self._stats = stats
        self._managers = managers
        self._healer = healer
        self._tiers = tiers
        self._is_leader = is_leader
        self._clocks: PageClockReader | None = None
        self._changes = _Changes()

    def answer(self, message: GetSnapshotReq | GetSlotReq | GetTiersReq) -> None:
        """Send the answer, or do this rank's part of the work."""
        call_id = message.call_id
        if isinstance(message, GetSlotReq):
            if self._is_leader:
                records = slot_records(self._managers, message.slot)
                self._io.send(GetSlotRsp(call_id=call_id, records=records))
            return
        if isinstance(message, GetTiersReq):
            if self._is_leader:
                self._io.send(GetTiersRsp(call_id=call_id, tiers=self._tiers_now()))
            return
        stats = self._stats()
        if self._is_leader:
            began = time.perf_counter()
            snapshot = self._snapshot(is_whole=message.is_whole)
            snapshot.forwards = stats.forward_passes_total
            snapshot.seconds = time.perf_counter() - began
            self._io.send(
                GetSnapshotRsp(call_id=call_id, snapshot=snapshot, stats=stats)
            )

    def _tiers_now(self) -> TierSnapshot | None:
        return None if self._tiers is None else self._tiers.snapshot()

    def _snapshot(self, *, is_whole: bool) -> PoolSnapshot:
        cache, healer = self._cache, self._healer
        reqs = sorted(
            self._requests(), key=lambda req: (not req.req_pool_idx, req.serial)
        )
        clocks = self._read_clocks()
        cells = page_cells(
            cache,
            reqs,
            has_drafts=self._has_drafts,
            set_aside=_pages(None if healer is None else healer.quarantine),
            is_poisoned=None if clocks is None else clocks.is_poisoned,
        )
        written = np.empty(0, np.int32) if clocks is None else clocks.written
        frames = self._changes.frames(cells, written, is_whole=is_whole)
        tree, num_nodes = tree_table(cache, max_rows=MAX_NODES)
        secondary, checkpoints = cache.allocator.secondary, cache.checkpoints
        damaged = _pages(None if healer is None else healer.checkpoint_quarantine)
        return PoolSnapshot(
            seq=frames[0].seq,
            frames=frames,
            pool=PoolSize(
                num_pages=cache.allocator.num_pages,
                page_size=cache.page_size,
                num_window_pages=sum(g.size // g.page_size for g in secondary),
                num_free_window_pages=sum(g.num_free_pages for g in secondary),
                num_request_states=0 if checkpoints is None else checkpoints.slots.rows,
            ),
            requests=[self._view(req) for req in reqs[:MAX_REQUESTS]],
            num_requests=len(reqs),
            tree=tree.tobytes(),
            num_nodes=num_nodes,
            tiers=self._tiers_now(),
            states=state_table(cache, reqs, set_aside=damaged).tobytes(),
            clocks=[manager.clock for manager in self._managers],
        )

    def _read_clocks(self) -> PageClocks | None:
        if not self._managers:
            return None
        if self._clocks is None:
            state = self._managers[0].target.buffers.state
            self._clocks = PageClockReader(state, page_size=self._cache.page_size)
        return self._clocks.read()

    def _view(self, req: Req) -> RequestView:
        node, page_size = req.last_node, self._cache.page_size
        last, tail_page = req.committed_len - 1, 0
        if req.req_pool_idx and last >= 0:
            rows = self._cache.req_to_token_pool
            (slot,) = rows.row_slots(req.req_pool_idx, last, last + 1).tolist()
            tail_page = slot // page_size
        has_output = req.output_len > 0 and not req.is_chunked
        return RequestView(
            serial=req.serial & SERIAL_MASK,
            rid=clipped(req.rid, MAX_QUOTED_CHARS),
            phase=("decode" if has_output else "prefill")
            if req.req_pool_idx
            else "waiting",
            prompt_len=req.prompt_len,
            output_len=req.output_len,
            max_total_len=req.max_total_len,
            committed_len=req.committed_len,
            allocated_len=req.allocated_len,
            cached_len=req.cache_protected_len,
            node=0 if node is None else node.serial & SERIAL_MASK,
            tail_page=tail_page,
            tail_fill=last % page_size + 1 if tail_page else 0,
            verify_ct=req.verifications.count,
            accept_tokens=req.verifications.accepted_tokens,
            num_heals=req.heals.count,
        )


def _pages(quarantine: Quarantine | None) -> IntArray:
    return np.empty(0, np.int64) if quarantine is None else quarantine.pages


class _Changes:
    """Turns the arrays of consecutive snapshots into frames."""

    def __init__(self) -> None:
        self._seq = 0
        self._cells: Ints | None = None
        self._written: Ints | None = None

    def frames(self, cells: Ints, written: Ints, *, is_whole: bool) -> list[PageFrame]:
        """Return the changes since the last call, plus all pages if requested; only all
        pages if that is shorter or there was no last call.
        """
        old_cells, old_written = self._cells, self._written
        self._cells, self._written = cells, written
        self._seq += 1
        if old_cells is None or old_written is None or len(old_written) != len(written):
            return [_whole(self._seq, cells, written)]
        differs = cells != old_cells
        if len(written):
            differs |= written != old_written
        at = np.flatnonzero(differs).astype(np.int32)
        if 2 * len(at) > len(cells):
            return [_whole(self._seq, cells, written)]
        changes = PageFrame(
            seq=self._seq,
            base=self._seq - 1,
            at=at.tobytes(),
            cells=cells[at].tobytes(),
            written=written[at].tobytes() if len(written) else b"",
        )
        return [changes, _whole(self._seq, cells, written)] if is_whole else [changes]


def _whole(seq: int, cells: Ints, written: Ints) -> PageFrame:
    return PageFrame(seq=seq, cells=cells.tobytes(), written=written.tobytes())
