"""Records of slots for people who look at them.

Knows the records on the device; decides nothing by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kv_canary.evidence import RecordWord
from kv_canary.head_sums import whole_sums
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    KIND_MASK,
    POISON_WORD,
    SERIAL_BITS,
    Record,
    WriterKind,
    unpack_word3,
)
from kv_canary.violation import POOLS
from sglang.srt.mem_cache.groups.kv_group import FULL

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.kv_canary.groups import PoolGroup
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager

_MASK64 = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1


class PageClocks(NamedTuple):
    """Of every page but scratch, by the record of its first slot.

    Fields:
        written: int32 [num_pages], the forward that wrote it, or before which it was
            freed; 0: never used.
        is_poisoned: bool [num_pages], it was used and then freed.
    """

    written: NDArray[np.int32]
    is_poisoned: NDArray[np.bool_]


class PageClockReader:
    """Reads the clocks of all pages without waiting for the device."""

    def __init__(self, state: CanaryState, *, page_size: int) -> None:
        self._words = state.head[page_size::page_size, Record.WORD3]
        self._found: PageClocks | None = None
        self._copy: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def read(self) -> PageClocks | None:
        """The clocks; on a GPU as of an earlier call, None where none has arrived."""
        words = self._words
        if not words.is_cuda:
            return _clocks_of(words.numpy())
        if self._copy is None or self._done is None:
            self._copy = torch.empty(len(words), dtype=torch.int64, pin_memory=True)
            self._done = torch.cuda.Event()
        elif not self._done.query():
            return self._found
        else:
            self._found = _clocks_of(self._copy.numpy())
        self._copy.copy_(words.contiguous(), non_blocking=True)
        self._done.record()
        return self._found


def _clocks_of(words: NDArray[np.int64]) -> PageClocks:
    clock = (words >> CLOCK_SHIFT) & CLOCK_MASK
    kind = (words >> SERIAL_BITS) & KIND_MASK
    return PageClocks(
        written=(clock & _MAX_INT32).astype(np.int32),
        is_poisoned=(kind == WriterKind.POISON) & (clock > 0),
    )


def slot_records(managers: Sequence[CanaryManager], slot: int) -> list[dict[str, Any]]:
    """The records of a slot in all pools, and in their secondary groups; waits for the
    device.

    Args:
        slot: primary, no scratch.
    """
    found = []
    for manager in managers:
        primary, *secondary = manager.target.groups
        found.append(_record(manager, primary, slot, group=FULL))
        for group in secondary:
            (own,) = group.kv.on_host(np.array([slot])).tolist()
            if own:
                found.append(_record(manager, group, own, group=group.name))
    return found


def _record(
    manager: CanaryManager, own: PoolGroup, slot: int, *, group: str
) -> dict[str, Any]:
    """One record as JSON; its token only where reports may hold tokens."""
    state, sums = own.state, own.checks.fingerprint.sums
    head, tail = torch.stack((state.head[slot], state.tail[slot])).tolist()
    writer = unpack_word3(head[Record.WORD3])
    word = RecordWord.of(head[Record.WORD0])
    kind = writer.kind
    fingerprint = tail[Record.FINGERPRINT]
    if sums is not None:
        fingerprint = int(whole_sums(sums[slot]))
    return {
        "pool": POOLS[manager.target.is_draft],
        "group": group,
        "slot": slot,
        "state": _state_name(head, tail),
        "token": word.token if manager.config.report_tokens else None,
        "position": word.position,
        "lineage": _hex(head[Record.LINEAGE]),
        "fingerprint": _hex(fingerprint),
        "writer": {
            "kind": kind.name.lower() if isinstance(kind, WriterKind) else str(kind),
            "forward": writer.clock,
            "rid": manager.serials.rid(writer.serial) if writer.clock else None,
        },
    }


def _state_name(head: Sequence[int], tail: Sequence[int]) -> str:
    if head[Record.WORD0] == POISON_WORD:
        return "freed" if unpack_word3(head[Record.WORD3]).clock else "never written"
    words = (Record.WORD0, Record.LINEAGE, Record.WORD3)
    return "live" if all(head[w] == tail[w] for w in words) else "torn"


def _hex(word: int) -> str:
    return f"0x{word & _MASK64:016x}"
