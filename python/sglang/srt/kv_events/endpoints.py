"""Binds ZeroMQ sockets to configured endpoints."""

from __future__ import annotations

import logging
import os
import socket as sockets
import stat
from pathlib import Path

import zmq

from sglang.srt.arg_groups.kv_events_hook import FLAG, TcpAddress, tcp_address

logger = logging.getLogger(__name__)

ANY_HOST = ("*", "0.0.0.0", "::")


def attach(
    socket: zmq.Socket[bytes], endpoint: str, *, key: str, may_connect: bool = False
) -> None:
    """Bind a socket to an endpoint of this host, or connect it to another host's.

    Args:
        key: key in the configuration, for messages.
        may_connect: whether to connect to a remote subscriber that listens for many
            engines.

    Raises:
        ValueError: the endpoint is in use or cannot be bound.
    """
    address = tcp_address(endpoint)
    if address is None:
        _bind_file(socket, endpoint, key=key)
    elif address.host in ANY_HOST:
        logger.warning(
            "KV events: anyone who can reach %s can read the tokens of all requests; "
            "there is no key",
            endpoint,
        )
        _bind(socket, endpoint, shown=endpoint, key=key)
    else:
        _attach_to_host(socket, address, endpoint, key=key, may_connect=may_connect)


def _attach_to_host(
    socket: zmq.Socket[bytes],
    address: TcpAddress,
    endpoint: str,
    *,
    key: str,
    may_connect: bool,
) -> None:
    host = _resolve(address.host, endpoint, key=key)
    found = f"tcp://{f'[{host}]' if ':' in host else host}:{address.port}"
    if _is_local(host):
        _bind(socket, found, shown=endpoint, key=key)
        return
    if not may_connect:
        raise ValueError(
            f"{FLAG}: {key} {endpoint} is not an address of this host; use 127.0.0.1, "
            "or * for all of them"
        )
    socket.connect(found)
    logger.info(
        "KV events: %s is not an address of this host: connecting to it", endpoint
    )


def _resolve(host: str, endpoint: str, *, key: str) -> str:
    """Return the first numeric address of a host."""
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"{FLAG}: {key} {endpoint}: {host} has no address ({error.strerror}); "
            "write an address"
        ) from None
    return str(found[0][4][0])


def _is_local(host: str) -> bool:
    """Whether a numeric address belongs to this host."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _bind_file(socket: zmq.Socket[bytes], endpoint: str, *, key: str) -> None:
    """Bind to a unix socket; ZeroMQ alone would take it from a living owner."""
    path = Path(endpoint.removeprefix("ipc://"))
    if path.exists() and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ValueError(
            f"{FLAG}: {key} {endpoint}: {path} is a file and no socket; choose another "
            "path"
        )
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            pass
        else:
            raise _in_use(endpoint, key)
    _bind(socket, endpoint, shown=endpoint, key=key)
    path.chmod(0o600)


def _bind(socket: zmq.Socket[bytes], endpoint: str, *, shown: str, key: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise _in_use(shown, key) from None
        raise ValueError(
            f"{FLAG}: {key} {shown} cannot be bound: {error.strerror}; choose another "
            "one"
        ) from None


def _in_use(endpoint: str, key: str) -> ValueError:
    return ValueError(
        f"{FLAG}: {key} {endpoint} is in use; stop who uses it, or choose another one"
    )
