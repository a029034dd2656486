"""Verifies slots that no forward reads, such as slots held only by a prefix cache.

The engine chooses the slots and the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.launches import verify
from kv_canary.layout import Fingerprint, FingerprintMode
from kv_canary.pool_checks import PoolChecks
from kv_canary.view import ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.state import CanaryState

# Any row but 0, because a sweep's rows belong to no request.
_SWEEP_ROW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """Consecutive positions [start, start + len(slots)) of one history.

    Fields:
        slots: int64 [n], on the host.
        prev_slot: slot of position start - 1, or -1.
        salt: salt of the namespace.
        seed: lineage before position 0.
    """

    slots: npt.NDArray[np.int64]
    start: int
    prev_slot: int
    salt: int
    seed: int = 0


class SweepLauncher:
    """Launches passes over the slots of one pool.

    Args:
        fingerprint: fingerprint of the pool. A pass does not take turns: where forwards
            hash a share of the slots, it hashes every slot that it reaches.
    """

    def __init__(self, state: CanaryState, fingerprint: Fingerprint) -> None:
        if fingerprint.mode is FingerprintMode.ROTATE:
            fingerprint = dataclasses.replace(fingerprint, mode=FingerprintMode.ALL)
        self._state = state
        self._checks = PoolChecks(fingerprint=fingerprint)

    def launch(self, runs: Sequence[SweepRun]) -> None:
        """Verify the slots of `runs` (at least one) on the current stream."""
        n = len(runs)
        lens = np.array([len(run.slots) for run in runs], dtype=np.int64)
        starts = np.array([run.start for run in runs], dtype=np.int64)
        indptr = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(lens, out=indptr[1:])
        # One upload: [per-row fields | indptr | slots], each from a multiple of 16
        # bytes, because a kernel is compiled anew for other addresses.
        width, begin = n + n % 2, n + 1 + (n + 1) % 2
        fields = np.zeros(8 * width + begin + int(indptr[-1]), dtype=np.int64)
        fields[: 8 * width].reshape(8, width)[:, :n] = [
            starts,
            starts + lens,
            lens,
            np.array([run.prev_slot for run in runs], dtype=np.int64),
            np.array([run.salt for run in runs], dtype=np.int64),
            np.full(n, _SWEEP_ROW, dtype=np.int64),
            np.zeros(n, dtype=np.int64),
            np.array([run.seed for run in runs], dtype=np.int64),
        ]
        lists = fields[8 * width :]
        lists[: n + 1] = indptr
        np.concatenate([run.slots for run in runs], out=lists[begin:])
        host = torch.from_numpy(fields)
        device = self._state.head.device
        if device.type != "cpu":
            host = host.pin_memory()
        uploaded = host.to(device, non_blocking=True)
        first, ends, read_lens, prev_slots, salts, rows, zeros, seeds = (
            uploaded[: 8 * width].view(8, width)[:, :n].unbind()
        )
        empty = uploaded[:0]
        table = KVReadView(
            read_lens=read_lens,
            indptr=uploaded[8 * width : 8 * width + n + 1],
            slot_indices=uploaded[8 * width + begin :],
            first_position=first,
            prev_slots=prev_slots,
        )
        view = ForwardView(
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
        )
        verify(self._state, view, self._checks, table)
