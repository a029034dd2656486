"""The listening socket, and the number of connections the process can hold."""

from __future__ import annotations

import errno
import resource
import socket

from sglang.srt.server_args import ServerArgs

# The kernel uses the smaller of this and net.core.somaxconn.
BACKLOG = 4096
MAX_OPEN_FILES = 65536
# Reserved for everything but connections: the scheduler's sockets, files, pipes.
RESERVED_FILES = 128
DEFAULT_MAX_CONNECTIONS = 16384
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)


def listen(server_args: ServerArgs) -> socket.socket:
    """Listen on the address, before anything slow starts.

    Raises:
        ValueError: the address cannot be bound.
    """
    host, port = server_args.host, server_args.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given explicitly;
    # otherwise an answer waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may be bound to one address, but only one can listen.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror}; choose another "
            f"{'--port' if error.errno in _OF_THE_PORT else '--host'}"
        ) from error
    return listener


def max_connections(server_args: ServerArgs) -> int:
    """Raise the limit of open files; returns the maximum number of connections.

    Raises:
        ValueError: --max-connections exceeds the system's limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = server_args.max_connections or DEFAULT_MAX_CONNECTIONS
    wanted = max(MAX_OPEN_FILES, asked + RESERVED_FILES)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    files = max(soft, wanted)
    possible = max(files - RESERVED_FILES, 1)
    if server_args.max_connections is None:
        return min(asked, possible)
    if asked > possible:
        raise ValueError(
            f"--max-connections {asked}: the process may open {files} files and needs "
            f"{RESERVED_FILES} for other things; use at most {possible}, or raise the "
            "limit (ulimit -n)"
        )
    return asked
