"""Units of a group's blocks: noted when blocks are full, compared when they arrive.

A connector fills blocks past the model. What it filled counts as nobody's until its
bytes have the sums that were kept when the same tokens were computed. Nothing here
waits for the device before the result is asked for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kv_canary.checks import Reason
from kv_canary.layer_sums import place_keys
from kv_canary.records import (
    HALF_BITS,
    TOKEN_MASK,
    Record,
    WriterKind,
    pack_word3_tensor,
    prefix_lineages,
)
from kv_canary.runtime.pending import send_counts
from kv_canary.runtime.uploads import upload

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from kv_canary.engines.group_canary import GroupCanary
    from kv_canary.engines.unit_store import UnitStore, Words

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Blocks of a request that a connector is about to fill.

    Fields:
        tokens: int64 [n], all tokens up to the end of what is loaded.
        salt: of its cache namespace.
        start: tokens before what is loaded; a multiple of the block size.
        computed: tokens that are computed when the load has ended. A request's last
            token is computed again, into the slot that was loaded for it.
        blocks: block numbers from there on.
        is_ahead: whether the request only runs when the load has ended.
    """

    rid: str
    tokens: npt.NDArray[np.int64]
    salt: int
    start: int
    computed: int
    blocks: Sequence[int]
    is_ahead: bool


class UnitDamage(NamedTuple):
    """A block that did not arrive as it was computed.

    Fields:
        reason: TIER_BYTES, TIER_IDENTITY or TIER_INCOMPLETE.
        slot, position: the first that differs.
        layer: the first that differs, or -1. key: lineage that the unit was asked for.
        note: what else is known.
    """

    reason: Reason
    block: int
    slot: int
    position: int
    layer: int
    key: int
    note: str


class _Sent(NamedTuple):
    """Words on their way to the host, int64 [n]; `event` as in `Pending`."""

    event: torch.cuda.Event | None
    words: Tensor

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    def array(self) -> npt.NDArray[np.int64]:
        """Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        found: npt.NDArray[np.int64] = self.words.numpy()
        return found


class Arrived(NamedTuple):
    """A load that has ended.

    Fields:
        lineages: int64 [n], after each of its tokens.
        sent: the sums of its blocks.
    """

    load: Load
    lineages: npt.NDArray[np.int64]
    sent: _Sent

    def has_arrived(self) -> bool:
        return self.sent.has_arrived()


class BlockUnits:
    """The units of a group.

    Args:
        group: its `bytes` keep sums of all bytes.

    Attributes:
        store: of units.
        compared, damaged: number of blocks so far.
    """

    def __init__(self, group: GroupCanary, store: UnitStore) -> None:
        assert group.bytes is not None
        self._group = group
        self._bytes = group.bytes
        self.store = store
        self._page = group.group.page_size
        device = group.table.device
        # Sums have any value, so that a key must be odd, but need not be large.
        self._layer_keys = place_keys(group.bytes.num_layers).to(device)
        self._slot_keys = place_keys(self._page).to(device)[:, None]
        self._noted: deque[_Sent] = deque()
        self.compared = 0
        self.damaged = 0

    # -- blocks that the model filled ----------------------------------------------

    def note_full(self, blocks: Sequence[int]) -> None:
        """Keep the units of blocks that were filled by forwards up to now."""
        while self._noted and self._noted[0].has_arrived():
            self._take_noted()
        if not blocks:
            return
        slots = self._group.slots_of(blocks)
        last = slots.view(-1, self._page)[:, -1]
        keys = self._group.state.tail[last, Record.LINEAGE]
        words = torch.cat([keys[:, None], self._sums(slots)], dim=1)
        self._noted.append(_Sent(*send_counts(words.flatten())))

    def _take_noted(self) -> None:
        lines = self._noted.popleft().array().reshape(-1, 1 + self.store.shape.words)
        self.store.put([(int(line[0]), line[1:].copy()) for line in lines])

    def _sums(self, slots: Tensor) -> Tensor:
        """Return what is kept of the bytes of whole blocks, int64 [blocks, slots +
        layers]."""
        kept = self._bytes.kept(slots).unflatten(0, (-1, self._page))
        by_slot = (kept * self._layer_keys).sum(dim=2)
        by_layer = (kept * self._slot_keys).sum(dim=1)
        return torch.cat([by_slot, by_layer], dim=1)

    # -- blocks that a connector filled --------------------------------------------

    def expect(self, loads: Sequence[Load]) -> None:
        """Take the blocks of loads that begin from whoever had them: a read before
        `arrive` is one of a freed slot."""
        self._group.free_blocks([block for load in loads for block in load.blocks])
        self._group.settle()

    def arrive(self, load: Load) -> Arrived:
        """Give the slots of a load that has ended the records of the request's tokens,
        and begin to compare their bytes. In stream order with the load.

        Also blocks that turn out damaged get records, of their bytes as they are: a
        forward that vLLM began with them is discarded, and reports nothing more.
        """
        state, tokens = self._group.state, load.tokens
        slots = self._group.slots_of(load.blocks)
        positions = np.arange(load.start, load.computed, dtype=np.int64)
        words = np.empty((len(positions), 2), dtype=np.int64)
        word0 = (tokens[positions] & TOKEN_MASK) | (positions << HALF_BITS)
        words[:, Record.WORD0] = word0
        lineages = prefix_lineages(tokens, salt=load.salt)
        words[:, Record.LINEAGE] = lineages[positions]
        # A block may be loaded in part; the other slots may be written.
        written = slots[: len(words)]
        records = state.tail.new_zeros((len(written), len(Record)))
        records[:, :2] = upload(torch.from_numpy(words), slots.device)
        # The next forward must compare them, so they are older than it.
        records[:, Record.WORD3] = pack_word3_tensor(
            state.clock - 1, WriterKind.TRANSFER, torch.zeros_like(written)
        )
        state.head.index_copy_(0, written, records)
        state.tail.index_copy_(0, written, records)
        self._bytes.keep(slots)
        sent = _Sent(*send_counts(self._sums(slots).flatten()))
        return Arrived(load, lineages, sent)

    def collect(self, arrived: Arrived) -> list[UnitDamage]:
        """Return which blocks are not as they were computed. Waits for the device."""
        load, lineages, page = arrived.load, arrived.lineages, self._page
        lines = arrived.sent.array().reshape(-1, self.store.shape.words)
        damages = []
        for number, (block, words) in enumerate(zip(load.blocks, lines, strict=True)):
            position = load.start + number * page
            end = position + page
            is_whole = end <= len(lineages)
            key = int(lineages[min(end, len(lineages)) - 1])
            revisions = self._revisions(key) if is_whole else ()
            if any(np.array_equal(words, one) for one in revisions):
                continue
            damages.append(self._damage(words, revisions, block, position, key))
        self.compared += len(lines)
        self.damaged += len(damages)
        return damages

    def _revisions(self, key: int) -> Sequence[Words]:
        # A block may have been filled and dropped within few steps.
        while self._noted:
            self._take_noted()
        return self.store.get(key)

    def _damage(
        self,
        words: Words,
        revisions: Sequence[Words],
        block: int,
        position: int,
        key: int,
    ) -> UnitDamage:
        reason, note, offset, layer = Reason.TIER_INCOMPLETE, "", 0, -1
        if not revisions:
            others = self.store.others()
            note = "nothing is recorded of this block"
            if others:
                note += f"; there are {others} files of other models or weights"
        else:
            differs = words != self._nearest(words, revisions)
            slots, layers = differs[: self._page], differs[self._page :]
            # Both sums of a slot and a layer differ if one value does.
            offset, layer = int(slots.argmax()), int(layers.argmax())
            reason, note = Reason.TIER_BYTES, f"{int(slots.sum())} slots differ"
            source = self.store.key_of(words)
            if source is not None:
                reason, layer = Reason.TIER_IDENTITY, -1
                note = f"it has the bytes of unit {source & (1 << 64) - 1:016x}"
        return UnitDamage(
            reason=reason,
            block=block,
            slot=block * self._page + offset,
            position=position + offset,
            layer=layer,
            key=key,
            note=note,
        )

    @staticmethod
    def _nearest(words: Words, revisions: Sequence[Words]) -> Words:
        return min(revisions, key=lambda one: int((one != words).sum()))
