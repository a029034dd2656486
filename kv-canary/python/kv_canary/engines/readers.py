"""Who may read incidents from a host's own port, which hold ids of its requests.

With keys, whoever has one. Without keys, programs on the same machine: the peer's
address and the name that it asked for must be of this machine, so that no page of
another site can ask through a browser.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Sequence
from typing import NamedTuple

_LOCAL_NAMES = ("localhost", "")


class Denial(NamedTuple):
    """Fields: status: of HTTP; why: for the client."""

    status: int
    why: str


class Readers:
    """
    Args:
        keys: keys of the host's clients; empty ones do not count.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def denial(
        self, *, peer: str | None, host: str, authorization: str
    ) -> Denial | None:
        """Return why a client may not read, or None if it may.

        Args:
            peer: its address; None on a socket of this machine.
            host, authorization: headers of its request.
        """
        if not self._digests:
            if _is_local(peer) and _is_local(_without_port(host)):
                return None
            return Denial(403, "without an API key only this machine may read this")
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        is_known = False
        for digest in self._digests:
            # Takes the same time for each key.
            is_known |= secrets.compare_digest(given, digest)
        if is_known and scheme.lower() == "bearer":
            return None
        return Denial(401, "send a key: Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_local(name: str | None) -> bool:
    if name is None or name.lower() in _LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
