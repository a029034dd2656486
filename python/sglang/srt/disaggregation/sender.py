"""The prefill engine's side: sends decode engines the units that they ask for.

What they say waits in the listener's queue. The scheduler empties it between its rounds
and alone decides what is sent.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.messages import (
    Ask,
    Cancel,
    End,
    EndReason,
    Spoiled,
    Taken,
    Unit,
)
from sglang.srt.disaggregation.needs import needed_units
from sglang.srt.managers.messages.tier_snapshot import TransferView

if TYPE_CHECKING:
    from sglang.srt.disaggregation.link import Link
    from sglang.srt.disaggregation.listener import Heard, Listener
    from sglang.srt.disaggregation.messages import ToSender
    from sglang.srt.disaggregation.transport import Outlet
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.kv_tiers.unit import UnitKey

_FINISH_PAUSE_SECONDS = 0.001


@dataclass(kw_only=True, eq=False)
class Room:
    """A request that came with a room.

    Fields:
        keys: of its units.
        is_open: whether it is still computed.
    """

    keys: list[UnitKey]
    is_open: bool = True


class _EndedRoom(NamedTuple):
    at: float
    number: int
    room: Room


class _Due(NamedTuple):
    """A unit in host memory, which may be sent when `mark` copies there have ended, and
    the number of its stay there."""

    mark: int
    group: int
    position: int
    stamp: int


class _Sent(NamedTuple):
    """A unit that is on its way, and the number of its stay in host memory."""

    one: _Delivery
    group: int
    key: UnitKey
    stamp: int


@dataclass(kw_only=True, eq=False)
class _Delivery:
    """What a decode engine has asked for.

    Fields:
        next: number of the first unit that was not seen in host memory.
        due: units to send.
        is_final: whether everything that will be sent is in `due`.
        num_sent: units that are on their way. sent_bytes: of all so far.
        is_cancelled: whether the decode engine wants no more.
    """

    link: Link[ToSender]
    ask: Ask
    since: float
    next: int
    room: Room | None = None
    due: deque[_Due] = field(default_factory=deque)
    is_final: bool = False
    num_sent: int = 0
    sent_bytes: int = 0
    is_cancelled: bool = False

    @property
    def end(self) -> int:
        return self.ask.first + len(self.ask.keys)

    @property
    def state(self) -> str:
        """What it waits for, in words."""
        if self.is_cancelled:
            return "cancelled"
        if self.room is None:
            return "waits for its request"
        if self.num_sent or self.due:
            return "sending"
        return "waits for its prompt" if self.room.is_open else "ends"


class Sender:
    """Sends units from host memory to the decode engines that ask for them.

    It holds nothing there: host memory must be the same on every rank, and questions
    come to each at its own time. A unit that was replaced while it was sent is taken
    back (`Spoiled`).

    Args:
        patience: seconds that an `Ask` waits for its request, and a request that has
            ended for an `Ask`.

    Attributes:
        sent_bytes: bytes of units that were sent.
    """

    def __init__(
        self, tiers: KVTiers, *, listener: Listener, outlet: Outlet, patience: float
    ) -> None:
        self.sent_bytes = 0
        self._tiers = tiers
        self._listener = listener
        self._outlet = outlet
        self._patience = patience
        self._rooms: dict[int, Room] = {}
        self._ended: deque[_EndedRoom] = deque()
        self._deliveries: list[_Delivery] = []
        self._sending: dict[Link[ToSender], dict[int, _Sent]] = {}
        self._gone: queue.SimpleQueue[tuple[Link[ToSender], int]] = queue.SimpleQueue()
        self._numbers = 0

    @property
    def num_deliveries(self) -> int:
        """Transfers that have not ended."""
        return len(self._deliveries)

    @property
    def is_busy(self) -> bool:
        """Whether units wait to be copied or sent."""
        return any(delivery.room is not None for delivery in self._deliveries)

    def views(self) -> list[TransferView]:
        """Return what the inspector shows of transfers that have not ended."""
        unit_bytes = self._tiers.groups[0].layout.bytes_per_unit
        now = time.monotonic()
        return [
            TransferView(
                room=str(one.ask.room),
                peer=one.link.peer,
                is_sent=True,
                state=one.state,
                bytes=one.sent_bytes,
                total_bytes=len(one.ask.keys) * unit_bytes,
                seconds=now - one.since,
            )
            for one in self._deliveries
        ]

    def open(self, number: int, room: Room) -> None:
        """Note that the request of a room has come; a later one takes its place."""
        self._rooms[number] = room

    def close(self, number: int, room: Room) -> None:
        """Note that nothing more is computed for a room."""
        room.is_open = False
        self._ended.append(_EndedRoom(time.monotonic(), number, room))

    def poll(self) -> None:
        """Hear what decode engines want, and send what can be sent."""
        while not self._gone.empty():
            self._confirm(*self._gone.get())
        self._forget_rooms()
        for _ in range(self._listener.heard.qsize()):
            self._hear(self._listener.heard.get())
        self._deliveries = [one for one in self._deliveries if not self._advance(one)]

    def finish(self, seconds: float) -> None:
        """Send what is asked for, for some seconds at most."""
        until = time.monotonic() + seconds
        while self.is_busy and time.monotonic() < until:
            self.poll()
            time.sleep(_FINISH_PAUSE_SECONDS)

    def _forget_rooms(self) -> None:
        oldest = time.monotonic() - self._patience
        while self._ended and self._ended[0].at < oldest:
            _, number, room = self._ended.popleft()
            if self._rooms.get(number) is room:
                del self._rooms[number]

    def _hear(self, heard: Heard) -> None:
        link, message = heard
        if isinstance(message, Ask):
            self._deliveries.append(
                _Delivery(
                    link=link, ask=message, since=time.monotonic(), next=message.first
                )
            )
        elif isinstance(message, Taken):
            if self._outlet.waits_for_taken:
                self._confirm(link, message.number)
        elif isinstance(message, Cancel):
            for one in self._deliveries:
                if one.link is link and one.ask.transfer == message.transfer:
                    one.is_cancelled = True
        else:
            self._sending.pop(link, None)
            self._deliveries = [one for one in self._deliveries if one.link is not link]

    # -- one delivery --------------------------------------------------------------

    def _advance(self, one: _Delivery) -> bool:
        """Send what can be sent; returns whether that was all."""
        if one.is_cancelled:
            return not one.num_sent and self._finish(one, EndReason.CANCELLED)
        room = one.room
        if room is None:
            room = one.room = self._rooms.get(one.ask.room)
            if room is None:
                return time.monotonic() - one.since > self._patience and self._finish(
                    one, EndReason.UNKNOWN_ROOM
                )
            if room.keys[one.ask.first : one.end] != one.ask.keys:
                return self._finish(one, EndReason.OTHER_PROMPT)
        self._see(one)
        if not room.is_open and not one.is_final:
            self._see_others(one)
            one.is_final = True
        done = self._tiers.mover.num_copied()
        while one.due and one.due[0].mark <= done:
            self._send(one, one.due.popleft())
        is_over = one.is_final and not one.due and not one.num_sent
        return is_over and self._finish(one, EndReason.COMPLETE)

    def _see(self, one: _Delivery) -> None:
        """Take the units of the first group that are in host memory now."""
        pool = self._tiers.pools[0]
        while one.next < one.end:
            key = one.ask.keys[one.next - one.ask.first]
            if key not in pool:
                break
            self._add_due(one, 0, one.next)
            one.next += 1

    def _see_others(self, one: _Delivery) -> None:
        """Take the units of the other groups that a request needs which goes on where
        the units of the first group end."""
        room = one.room
        assert room is not None
        keys = room.keys[: one.next]
        for group, position in needed_units(self._tiers, keys, first=one.ask.first):
            self._add_due(one, group, position)

    def _add_due(self, one: _Delivery, group: int, position: int) -> None:
        key = one.ask.keys[position - one.ask.first]
        stamp = self._tiers.pools[group].stamp(key)
        one.due.append(_Due(self._tiers.mover.num_copies, group, position, stamp))

    def _send(self, one: _Delivery, due: _Due) -> None:
        link, key = one.link, one.ask.keys[due.position - one.ask.first]
        pool = self._tiers.pools[due.group]
        stamp = pool.stamp(key)
        if stamp != due.stamp:
            # It had to go. If it has come back, that copy may not have ended.
            if stamp:
                self._add_due(one, due.group, due.position)
            return
        data = pool.memory[pool.place(key)]
        self._numbers += 1
        number = self._numbers
        self._sending.setdefault(link, {})[number] = _Sent(one, due.group, key, stamp)
        one.num_sent += 1
        unit = Unit(
            transfer=one.ask.transfer,
            number=number,
            group=due.group,
            position=due.position,
            key=key,
            size=data.nbytes,
            seal=self._tiers.groups[due.group].layout.seal(data),
        )
        self.sent_bytes += data.nbytes
        one.sent_bytes += data.nbytes
        self._outlet.send(link, unit, data, lambda: self._gone.put((link, number)))

    def _confirm(self, link: Link[ToSender], number: int) -> None:
        """Note that a unit is not read any more; take it back if it was replaced."""
        sent = self._sending.get(link, {}).pop(number, None)
        if sent is None:
            return
        sent.one.num_sent -= 1
        if self._tiers.pools[sent.group].stamp(sent.key) != sent.stamp:
            transfer = sent.one.ask.transfer
            link.send(Spoiled(transfer=transfer, group=sent.group, key=sent.key))

    def _finish(self, one: _Delivery, reason: EndReason) -> bool:
        """Say that no more is sent; returns True."""
        one.link.send(End(transfer=one.ask.transfer, reason=reason))
        self._listener.on_end(one.link, one.ask)
        return True
