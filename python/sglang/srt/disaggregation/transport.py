"""How the bytes of units travel: over the engines' connection, or by another way.

In either case the receiving process alone writes to its landing memory, so a sender
that dies, or sends late or twice, cannot change what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.disaggregation.link import Link
    from sglang.srt.disaggregation.messages import Unit

_SCRATCH_BYTES = 1 << 20


class Outlet(Protocol):
    """A sender's end.

    Attributes:
        waits_for_taken: whether a unit must stay until the receiver's `Taken`.
    """

    waits_for_taken: bool

    def describe(self) -> bytes:
        """Return what a receiver's `Inlet.connect` needs."""

    def send(
        self, link: Link[Any], unit: Unit, data: Tensor, on_sent: Callable[[], None]
    ) -> None:
        """Announce a unit, uint8 [size], in host memory that stays as it is until
        `on_sent` is called in another thread, or until `Taken`."""


class Inlet(Protocol):
    """A receiver's end."""

    def connect(self, description: bytes) -> Wire:
        """Prepare to read from a sender.

        Raises:
            ValueError: the description is not valid.
        """


class Wire(Protocol):
    """The way of units from one sender. One thread uses it."""

    def fetch(self, link: Link[Any], unit: Unit, target: Tensor) -> None:
        """Copy a unit to `target`, uint8 [size].

        Raises:
            LinkLost: its bytes do not come.
        """

    def skip(self, link: Link[Any], unit: Unit) -> None:
        """Leave a unit out.

        Raises:
            LinkLost: its bytes do not come.
        """

    def close(self) -> bool:
        """End; returns whether nothing can write to a target any more. If something
        can, ask again."""


class TcpOutlet:
    """Sends bytes behind their announcement."""

    waits_for_taken = False

    def describe(self) -> bytes:
        return b""

    def send(
        self, link: Link[Any], unit: Unit, data: Tensor, on_sent: Callable[[], None]
    ) -> None:
        link.send(unit, data.numpy().data, on_sent=on_sent)


class TcpInlet:
    """Reads bytes behind their announcement."""

    def connect(self, description: bytes) -> TcpWire:
        return TcpWire()


class TcpWire:
    """A connection that carries the bytes itself."""

    def fetch(self, link: Link[Any], unit: Unit, target: Tensor) -> None:
        link.receive_into(target.numpy().data)

    def skip(self, link: Link[Any], unit: Unit) -> None:
        scratch = memoryview(bytearray(min(unit.size, _SCRATCH_BYTES)))
        left = unit.size
        while left:
            count = min(left, len(scratch))
            link.receive_into(scratch[:count])
            left -= count

    def close(self) -> bool:
        return True


def create_outlet(backend: str, memories: Sequence[Tensor]) -> Outlet:
    """Create a sender's end.

    Args:
        memories: contiguous host memory in which units lie.

    Raises:
        ValueError: the backend cannot start; names the flag.
    """
    if backend == "tcp":
        return TcpOutlet()
    from sglang.srt.disaggregation.nixl_transport import NixlOutlet

    return NixlOutlet(memories)


def create_inlet(backend: str, memory: Tensor) -> Inlet:
    """Create a receiver's end.

    Args:
        memory: uint8 [n], host memory to which units are copied.

    Raises:
        ValueError: the backend cannot start; names the flag.
    """
    if backend == "tcp":
        return TcpInlet()
    from sglang.srt.disaggregation.nixl_transport import NixlInlet

    return NixlInlet(memory)
