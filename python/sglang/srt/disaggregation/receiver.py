"""The decode engine's side: asks prefill engines for units, and lets them arrive.

A thread per prefill engine reads from its connection and alone writes to the landing
memory of its transfers. The scheduler looks at them between its rounds.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.link import Link, LinkLost, Pace
from sglang.srt.disaggregation.messages import (
    Ask,
    Cancel,
    End,
    EndReason,
    EngineIdentity,
    Hello,
    Refusal,
    Spoiled,
    Taken,
    ToReceiver,
    Unit,
    Welcome,
    decode_to_receiver,
)
from sglang.srt.disaggregation.transfer import Address, Fault, GroupPlaces, Transfer
from sglang.srt.kv_tiers.damage import DamageKind

if TYPE_CHECKING:
    from sglang.srt.disaggregation.transport import Inlet, Wire
    from sglang.srt.kv_tiers.landing import LandingMemory
    from sglang.srt.kv_tiers.unit import UnitKey, UnitLayout

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0


class Receiver:
    """Asks prefill engines for units.

    Args:
        rank: rank of this process in its engine.
        layouts: of the units of each group.
        on_news: called in other threads when the scheduler should look.

    Attributes:
        received_bytes: bytes of units that have arrived.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        rank: int,
        inlet: Inlet,
        landing: LandingMemory,
        layouts: Sequence[UnitLayout],
        pace: Pace,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.landing = landing
        self.received_bytes = 0
        self._hello = Hello(identity=identity, rank=rank)
        self._inlet = inlet
        self._layouts = list(layouts)
        self._unit_bytes = [layout.bytes_per_unit for layout in layouts]
        self._pace = pace
        self._on_news = on_news
        self._lock = threading.Lock()
        self._peers: dict[Address, _Peer] = {}
        self._created = 0

    def most_units(self, counts: Sequence[int]) -> int:
        """Return how many units of the first group fit the whole landing memory, beside
        `counts` units of the others."""
        others = sum(
            count * size
            for count, size in zip(counts, self._unit_bytes[1:], strict=True)
        )
        return max(self.landing.size - others, 0) // self._unit_bytes[0]

    def begin(
        self,
        address: Address,
        *,
        room: int,
        first: int,
        keys: Sequence[UnitKey],
        counts: Sequence[int],
    ) -> Transfer | None:
        """Ask for the units of a room, or return None if there is no landing memory
        now.

        Args:
            counts: units to expect at most of each group but the first.
        """
        groups, size = [], 0
        for each, count in zip(self._unit_bytes, (len(keys), *counts), strict=True):
            groups.append(GroupPlaces(size, each, count))
            size += each * count
        place = self.landing.take(size)
        if place is None:
            return None
        self._created += 1
        transfer = Transfer(
            number=self._created,
            address=address,
            room=room,
            first=first,
            keys=keys,
            place=place,
            groups=groups,
            landing=self.landing,
        )
        with self._lock:
            peer = self._peers.get(address)
            if peer is None or not peer.add(transfer):
                self._peers = {a: p for a, p in self._peers.items() if p.is_alive()}
                peer = self._peers[address] = _Peer(address, self)
                peer.add(transfer)
                peer.start()
        return transfer

    def give_up(self, transfer: Transfer, why: str) -> None:
        """Expect no more of a transfer."""
        # A sender of which nothing came may just have much to do.
        transfer.end(why, is_broken=bool(transfer.arrived), is_quiet=False)
        with self._lock:
            peer = self._peers.get(transfer.address)
        if peer is not None:
            peer.cancel(transfer)

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()


class _Peer(threading.Thread):
    """The connection to one prefill engine, and the transfers over it."""

    def __init__(self, address: Address, receiver: Receiver) -> None:
        super().__init__(daemon=True, name=f"kv from {address}")
        self._address = address
        self._receiver = receiver
        self._lock = threading.Lock()
        self._transfers: dict[int, Transfer] = {}
        self._link: Link[ToReceiver] | None = None
        self._is_welcome = self._is_lost = False

    # -- of the scheduler ----------------------------------------------------------

    def add(self, transfer: Transfer) -> bool:
        """Ask for a transfer now or when connected; returns whether it may come."""
        with self._lock:
            if self._is_lost:
                return False
            self._transfers[transfer.number] = transfer
            if self._is_welcome:
                self._ask(transfer)
            return True

    def cancel(self, transfer: Transfer) -> None:
        with self._lock:
            if self._is_welcome and self._link is not None:
                self._link.send(Cancel(transfer=transfer.number))

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()

    def _ask(self, transfer: Transfer) -> None:
        assert self._link is not None
        self._link.send(
            Ask(
                transfer=transfer.number,
                room=transfer.room,
                first=transfer.first,
                keys=list(transfer.keys),
            )
        )

    # -- in its thread -------------------------------------------------------------

    def run(self) -> None:
        wire, why = None, "an error of this engine"
        try:
            wire = self._connect()
            self._serve(wire)
        except LinkLost as error:
            why = str(error)
        except Exception:
            logger.exception("KV transfer from %s", self._address)
        is_quiet = wire is None or wire.close()
        with self._lock:
            self._is_lost = True
            left, self._transfers = self._transfers, {}
            link, self._link = self._link, None
        if link is not None:
            link.dispose()
        level = logging.WARNING if left else logging.INFO
        logger.log(level, "KV transfer: %s; %d requests go on alone", why, len(left))
        for transfer in left.values():
            transfer.end(why, is_broken=self._is_welcome, is_quiet=is_quiet)
        self._receiver._on_news()
        if wire is not None and not is_quiet:
            self._outlast(wire, list(left.values()))

    def _outlast(self, wire: Wire, transfers: Sequence[Transfer]) -> None:
        """Keep landing memory out of use as long as it may still be written."""
        logger.warning(
            "KV transfer: a read from %s has not ended; its memory is out of use until "
            "then",
            self._address,
        )
        while not wire.close():
            time.sleep(self._receiver._pace.beat)
        for transfer in transfers:
            transfer.end("", is_broken=False, is_quiet=True)
        logger.info("KV transfer: the read from %s has ended", self._address)

    def _connect(self) -> Wire:
        """Connect to this rank of the prefill engine.

        Raises:
            LinkLost: it does not answer, or its KV is of another kind.
        """
        port = self._address.port
        for _ in range(2):
            link = self._open(port)
            with self._lock:
                self._link = link
            link.send(self._receiver._hello)
            answer = link.receive()
            if isinstance(answer, Refusal):
                raise LinkLost(f"{self._address} refuses: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise LinkLost(f"{self._address} did not greet")
            if answer.port:
                link.dispose()
                port = answer.port
                continue
            try:
                wire = self._receiver._inlet.connect(answer.transport)
            except ValueError as error:
                raise LinkLost(f"{self._address}: {error}") from error
            with self._lock:
                self._is_welcome = True
                for transfer in self._transfers.values():
                    self._ask(transfer)
            return wire
        raise LinkLost(f"{self._address} does not know where its ranks listen")

    def _open(self, port: int) -> Link[ToReceiver]:
        try:
            connection = socket.create_connection(
                (self._address.host, port), timeout=_CONNECT_SECONDS
            )
        except (OSError, UnicodeError) as error:
            raise LinkLost(f"{self._address} does not answer: {error}") from error
        return Link(
            connection,
            decode=decode_to_receiver,
            peer=str(self._address),
            pace=self._receiver._pace,
        )

    def _serve(self, wire: Wire) -> None:
        assert self._link is not None
        link = self._link
        while True:
            message = link.receive()
            if isinstance(message, Unit):
                self._take(link, wire, message)
                link.send(Taken(number=message.number))
            elif isinstance(message, Spoiled):
                self._forget(message)
            elif isinstance(message, End):
                with self._lock:
                    transfer = self._transfers.pop(message.transfer, None)
                if transfer is not None:
                    reason = message.reason
                    is_broken = reason is EndReason.OTHER_PROMPT
                    transfer.end(reason.value, is_broken=is_broken, is_quiet=True)
            else:
                raise LinkLost(f"{self._address} sent {type(message).__name__}")
            self._receiver._on_news()

    def _forget(self, spoiled: Spoiled) -> None:
        """Expect a unit no more that has come."""
        with self._lock:
            transfer = self._transfers.get(spoiled.transfer)
        if transfer is not None:
            transfer.arrived.pop((spoiled.group, spoiled.key), None)
            transfer.faults[:] = [
                fault
                for fault in transfer.faults
                if (fault.group, fault.key) != (spoiled.group, spoiled.key)
            ]

    def _take(self, link: Link[ToReceiver], wire: Wire, unit: Unit) -> None:
        """Copy a unit to its place, or leave it out."""
        with self._lock:
            transfer = self._transfers.get(unit.transfer)
        target = None if transfer is None else transfer.target(unit)
        if transfer is None or target is None:
            wire.skip(link, unit)
            return
        wire.fetch(link, unit, target)
        if self._receiver._layouts[unit.group].seal(target) != unit.seal:
            fault = Fault(DamageKind.BYTES, unit.group, unit.key)
            transfer.faults.append(fault)
            return
        transfer.arrived[unit.group, unit.key] = target
        transfer.changed = time.monotonic()
        self._receiver.received_bytes += unit.size
