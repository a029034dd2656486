"""The decode engine's side: requests with a room wait for units of their prompt.

What has come when the sender ends, fails or takes too long is used as far as it is
whole and intact. The rest is computed here, so no request depends on a sender.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.disaggregation.needs import most_needed
from sglang.srt.disaggregation.transfer import Address
from sglang.srt.kv_tiers.damage import Damage, DamageKind
from sglang.srt.kv_tiers.source import GivenUnits
from sglang.srt.managers.messages.tier_snapshot import TransferView
from sglang.srt.managers.scheduler.handover import Handover

if TYPE_CHECKING:
    from sglang.srt.disaggregation.receiver import Receiver
    from sglang.srt.disaggregation.transfer import Transfer
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_tiers.source import UnitSource
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.kv_tiers.unit import UnitKey
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats

logger = logging.getLogger(__name__)


class _RankState(msgspec.Struct):
    """What a rank has of a transfer: whether it has ended, and units by group and
    number."""

    is_ended: bool
    units: list[tuple[int, int]]


@dataclass(kw_only=True, eq=False)
class _Receipt:
    """A request and the units that it waits for.

    Fields:
        first, keys: number of the first unit, and the keys from there.
        counts: units to expect at most of each group but the first.
        transfer: None until there is landing memory.
        source: what has come, once it is settled.
        is_taken: whether it is being loaded.
    """

    req: Req
    address: Address
    room: int
    first: int
    keys: list[UnitKey]
    counts: list[int]
    since: float = field(default_factory=time.monotonic)
    transfer: Transfer | None = None
    source: UnitSource | None = None
    is_settled: bool = False
    is_taken: bool = False

    @property
    def state(self) -> str:
        """What it waits for, in words."""
        if self.is_taken:
            return "is loaded"
        if self.is_settled:
            return "arrived" if self.source is not None else "goes on alone"
        if self.transfer is None:
            return "waits for landing memory"
        return "arriving" if self.transfer.arrived else "asked"

    @property
    def received_bytes(self) -> int:
        """Bytes that have come, of all groups."""
        arrived = {} if self.transfer is None else dict(self.transfer.arrived)
        return sum(unit.nbytes for unit in arrived.values())


class DecodeSide(Handover):
    """Asks for the units of requests with a room.

    Args:
        patience: seconds without a new unit after which a request goes on alone.
        report: called with a request's id and number, and the units that were damaged.
    """

    def __init__(
        self,
        tiers: KVTiers,
        *,
        receiver: Receiver,
        group: TensorParallelGroup,
        patience: float,
        report: Callable[[str, int, Sequence[Damage]], None],
    ) -> None:
        self._tiers = tiers
        self._receiver = receiver
        self._group = group
        self._patience = patience
        self._report = report
        self._receipts: dict[int, _Receipt] = {}
        self._num_failed = 0

    # -- requests ------------------------------------------------------------------

    def on_request(self, req: Req) -> None:
        if req.bootstrap is None:
            return
        prefix = req.tokens[: req.cacheable_prefix_len()]
        cache, tiers = self._tiers.cache, self._tiers
        key = cache.key(prefix, namespace=req.namespace)
        units = tiers.named_units(key, cache.match_length(key))
        if not units:
            return
        first = units[0].position // tiers.unit
        counts = most_needed(tiers, first, first + len(units))
        most = self._receiver.most_units(counts)
        receipt = _Receipt(
            req=req,
            address=Address(req.bootstrap.host, req.bootstrap.port),
            room=req.bootstrap.room,
            first=first,
            keys=[unit.key for unit in units[:most]],
            counts=counts,
        )
        if receipt.keys:
            self._receipts[req.serial] = receipt
            self._begin(receipt)

    def on_end(self, req: Req) -> None:
        receipt = self._receipts.get(req.serial)
        if receipt is not None and not receipt.is_taken:
            self.release(req)

    def release(self, req: Req) -> None:
        receipt = self._receipts.pop(req.serial, None)
        if receipt is None or receipt.transfer is None:
            return
        if receipt.transfer.ended is None:
            self._receiver.give_up(receipt.transfer, "the request has ended")
        receipt.transfer.release()

    @property
    def num_coming(self) -> int:  # type: ignore[override]
        return sum(not receipt.is_settled for receipt in self._receipts.values())

    def is_coming(self, req: Req) -> bool:
        receipt = self._receipts.get(req.serial)
        return receipt is not None and not receipt.is_settled

    def take_source(self, req: Req) -> UnitSource | None:
        receipt = self._receipts.get(req.serial)
        if receipt is None:
            return None
        receipt.is_taken = True
        return receipt.source

    def _begin(self, receipt: _Receipt) -> None:
        receipt.transfer = self._receiver.begin(
            receipt.address,
            room=receipt.room,
            first=receipt.first,
            keys=receipt.keys,
            counts=receipt.counts,
        )

    # -- rounds --------------------------------------------------------------------

    def after_round(self) -> None:
        for receipt in self._receipts.values():
            if receipt.transfer is None and not receipt.is_settled:
                self._begin(receipt)
                if receipt.transfer is None:
                    return  # nor is there memory for those behind it

    def decide(self) -> list[int]:
        now = time.monotonic()
        return [
            serial
            for serial, receipt in self._receipts.items()
            if not receipt.is_settled and self._has_ended(receipt, now)
        ]

    def _has_ended(self, receipt: _Receipt, now: float) -> bool:
        transfer = receipt.transfer
        if transfer is None:
            return now - receipt.since > self._patience
        if transfer.ended is None and now - transfer.changed > self._patience:
            why = f"nothing came for {self._patience:g} s"
            self._receiver.give_up(transfer, why)
        return transfer.ended is not None

    def apply(self, received: Sequence[int]) -> None:
        for serial in received:
            receipt = self._receipts.get(serial)
            if receipt is not None and not receipt.is_settled:
                self._settle(receipt)

    def _settle(self, receipt: _Receipt) -> None:
        """Use what every rank has, unless another one still waits."""
        transfer = receipt.transfer
        arrived = {} if transfer is None else dict(transfer.arrived)
        numbers = {key: receipt.first + i for i, key in enumerate(receipt.keys)}
        units = {(group, numbers[key]): (group, key) for group, key in arrived}
        if self._group.size > 1:
            is_ended = transfer is None or self._has_ended(receipt, time.monotonic())
            state = _RankState(is_ended, list(units))
            every = [
                msgspec.msgpack.decode(of_rank, type=_RankState)
                for of_rank in self._group.all_gather_bytes(
                    msgspec.msgpack.encode(state)
                )
            ]
            if not all(of_rank.is_ended for of_rank in every):
                return
            common = set.intersection(*(set(of_rank.units) for of_rank in every))
            units = {at: unit for at, unit in units.items() if at in common}
        receipt.is_settled = True
        if transfer is not None:
            self._report_faults(receipt, transfer)
        if units:
            given = {unit: arrived[unit] for unit in units.values()}
            receipt.source = GivenUnits(
                given, tier="engine", sender=str(receipt.address)
            )
        else:
            self.release(receipt.req)

    def _report_faults(self, receipt: _Receipt, transfer: Transfer) -> None:
        faults = [(fault.kind, fault.group, fault.key) for fault in transfer.faults]
        missing = [key for key in receipt.keys if (0, key) not in transfer.arrived]
        if missing:
            self._num_failed += 1
        if transfer.is_broken and missing and not faults:
            faults = [(DamageKind.INCOMPLETE, 0, missing[0])]
        if not faults:
            return
        logger.warning(
            "KV transfer from %s: %s; request %s goes on alone",
            receipt.address,
            transfer.ended,
            receipt.req.rid,
        )
        groups, unit = self._tiers.groups, self._tiers.unit
        damages = [
            Damage(
                kind=kind,
                tier="engine",
                sender=str(receipt.address),
                group=groups[group].name,
                key=key,
                position=(receipt.first + receipt.keys.index(key)) * unit,
                slot=-1,
            )
            for kind, group, key in dict.fromkeys(faults)
        ]
        self._report(receipt.req.rid, receipt.req.serial, damages)

    # -- the process ---------------------------------------------------------------

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.num_decode_transfer_queue_reqs = self.num_coming
        stats.kv_transfer_received_bytes_total = self._receiver.received_bytes
        stats.num_transfer_failed_reqs_total = self._num_failed

    def transfers(self) -> list[TransferView]:
        unit_bytes = self._tiers.groups[0].layout.bytes_per_unit
        now = time.monotonic()
        return [
            TransferView(
                room=str(receipt.room),
                peer=str(receipt.address),
                is_sent=False,
                state=receipt.state,
                bytes=receipt.received_bytes,
                total_bytes=len(receipt.keys) * unit_bytes,
                seconds=now - receipt.since,
            )
            for receipt in self._receipts.values()
        ]

    def close(self) -> None:
        self._receiver.close()
