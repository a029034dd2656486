"""Re-verifies slots that only the prefix cache holds, a few per pass, in rotation."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.kv_canary.kernels.launches import verify
from sglang.srt.kv_canary.kernels.records import draft_seed
from sglang.srt.kv_canary.kernels.state import CanaryRows, FingerprintMode
from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
from sglang.srt.mem_cache.page_ledger import IntArray
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree_node import TreeNode
from sglang.srt.model_executor.forward_batch_info import KVReadView
from sglang.srt.utils.hashing import hash_string

# Any row but 0: a sweep's rows belong to no request.
_SWEEP_ROW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """Consecutive cached positions [start, start + len(slots)).

    Fields:
        prev_slot: slot of position start - 1; -1: none.
        salt: of the namespace.
        seed: lineage before position 0.
    """

    slots: IntArray
    start: int
    prev_slot: int
    salt: int
    seed: int = 0


class Sweeper:
    """Args:
    cache: whose unlocked nodes are swept.
    budget: slots of one pass at most.
    is_draft: whether it is a draft's pool, whose lineages begin with a seed.

    A rotation visits every node that was in the tree when it began; the next one takes
    what came since. So a cached slot is reached within two rotations, and within
    `ceil(cached / budget)` passes while the tree does not change.
    """

    def __init__(
        self,
        cache: RadixCache,
        buffers: CanaryBuffers,
        *,
        budget: int,
        is_draft: bool = False,
    ) -> None:
        self._is_draft = is_draft
        self._cache = cache
        self._buffers = buffers
        # A pass has no turns: what it reaches it hashes whole, as its writer did.
        self._fingerprint = buffers.fingerprint
        if self._fingerprint.mode is FingerprintMode.ROTATE:
            self._fingerprint = dataclasses.replace(
                self._fingerprint, mode=FingerprintMode.ALL
            )
        self._budget = budget
        self._pending: deque[tuple[TreeNode, int]] = deque()
        self.passes = 0

    def run(self) -> int:
        """Launch one pass on the current stream; the number of slots it verifies."""
        runs = self.next_runs()
        if not runs:
            return 0
        self._launch(runs)
        self.passes += 1
        return sum(len(run.slots) for run in runs)

    def next_runs(self) -> list[SweepRun]:
        """What the next pass verifies; advances the rotation."""
        runs: list[SweepRun] = []
        left = self._budget
        if not self._pending:
            self._pending.extend((node, 0) for node in self._cache.iter_nodes())
        while left > 0 and self._pending:
            node, offset = self._pending.popleft()
            if node.parent is None or node.lock_ref > 0:
                continue  # evicted, or checked by the forwards of those who hold it
            slots = node.slots[offset : offset + left]
            if len(slots) == 0:
                continue  # split since, and shorter now
            runs.append(_run(node, offset, slots, is_draft=self._is_draft))
            left -= len(slots)
            if offset + len(slots) < len(node.slots):
                self._pending.appendleft((node, offset + len(slots)))
        return runs

    def _launch(self, runs: list[SweepRun]) -> None:
        lens = [len(run.slots) for run in runs]
        starts = np.array([run.start for run in runs], dtype=np.int64)
        indptr = np.zeros(len(runs) + 1, dtype=np.int64)
        np.cumsum(lens, out=indptr[1:])
        device = self._buffers.state.head.device
        # One upload: [per-row fields | indptr | slots].
        fields = np.concatenate(
            [
                starts,
                starts + np.array(lens, dtype=np.int64),
                np.array(lens, dtype=np.int64),
                np.array([run.prev_slot for run in runs], dtype=np.int64),
                np.array([run.salt for run in runs], dtype=np.int64),
                np.full(len(runs), _SWEEP_ROW, dtype=np.int64),
                np.zeros(len(runs), dtype=np.int64),
                np.array([run.seed for run in runs], dtype=np.int64),
                indptr,
                *(run.slots for run in runs),
            ]
        )
        host = torch.from_numpy(fields)
        if device.type != "cpu":
            host = host.pin_memory()
        uploaded = host.to(device, non_blocking=True)
        n = len(runs)
        first, ends, read_lens, prev_slots, salts, rows, zeros, seeds = (
            uploaded[: 8 * n].view(8, n).unbind()
        )
        empty = uploaded[:0]
        verify(
            self._buffers.state,
            CanaryRows(
                req_rows=rows,
                prefix_lens=ends,
                extend_lens=zeros,
                qo_indptr=zeros.new_zeros(n + 1),
                input_ids=empty,
                positions=empty,
                out_cache_loc=empty,
                serials=zeros,
                salts=salts,
                seeds=seeds,
            ),
            KVReadView(
                read_lens=read_lens,
                indptr=uploaded[8 * n : 9 * n + 1],
                slot_indices=uploaded[9 * n + 1 :],
                first_position=first,
                prev_slots=prev_slots,
            ),
            fingerprint=self._fingerprint,
            req_to_token=None,
        )


def _run(node: TreeNode, offset: int, slots: IntArray, *, is_draft: bool) -> SweepRun:
    if offset:
        prev_slot = int(node.slots[offset - 1])
    else:
        assert node.parent is not None
        prev_slot = int(node.parent.slots[-1]) if node.start else -1
    salt = 0 if not node.namespace else hash_string(node.namespace)
    start, seed = node.start + offset, 0
    if is_draft and start == 0:
        # An element is the pair of a token and the next one.
        seed = draft_seed(int(node.elements[0]) >> 32, salt)
    return SweepRun(slots=slots, start=start, prev_slot=prev_slot, salt=salt, seed=seed)
