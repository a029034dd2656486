"""The namespace of a request's KV, as a salt of its lineage."""

from __future__ import annotations

import hashlib


def namespace_salt(*, adapter: str | None, tenant: str | None) -> int:
    """Return the salt, signed 64 bits; 0 without adapter and tenant. With another
    adapter equal tokens have other KV; another tenant must not get the KV, although it
    is the same.

    Args:
        adapter: name of the LoRA adapter.
        tenant: key that the request gave to keep its cached prefix to itself.
    """
    if not adapter and not tenant:
        return 0
    names = repr((adapter, tenant)).encode()
    digest = hashlib.blake2b(names, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
