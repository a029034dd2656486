"""Messages of `forked_process` and `fork_server`, over one socket per child."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

READ_BY_IMPORTS = {"SGLANG_NATIVE_KERNELS"}
"""The product's variables that are read at import rather than on use."""

MAX_FDS = 8


class Request(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """Attributes:
    command: `["-m", module, ...]`, `["-c", program, ...]` or `[file, ...]`.
    targets: descriptors in the child for the ones sent along, in order.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    targets: list[int]
    is_session_leader: bool


class ChildrenOf(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """Asks for the processes that live and were forked for process `pid`."""

    pid: int


def send(connection: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    data = msgspec.json.encode(message)
    socket.send_fds(connection, [len(data).to_bytes(4, "big")], list(fds))
    connection.sendall(data)


def receive(connection: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """Return the next message and the descriptors sent with it.

    Raises:
        EOFError: the other side is gone.
    """
    size, fds, _, _ = socket.recv_fds(connection, 4, MAX_FDS)
    length = int.from_bytes(size + _read(connection, 4 - len(size)), "big")
    return msgspec.json.decode(_read(connection, length), type=kind), fds


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
