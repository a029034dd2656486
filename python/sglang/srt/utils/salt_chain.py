"""What a request's KV depends on besides its tokens: the salt chain.

    tenant     digest of what keeps the request apart from other tenants
    namespace  tenant and adapter, as one name
               |-> keys of the prefix cache and of tiers (the name itself)
               |-> salt of its lineages      (`lineage_salt`)
               '-> seed of its KV events     (`event_seed`)

All of these are derived here and nowhere else, so requests share cached KV exactly if
the KV canary expects the same KV of them.

Where a prompt has embeddings in place of tokens, `content_ids` stand for its tokens.
"""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import NamedTuple

from sglang.srt.utils.hashing import digest, hash_string

SEED_BYTES = 8
TOKEN_MASK = (1 << 31) - 1
"""The part of a content id that the device and the records of the KV canary keep."""

FIRST_CONTENT_ID = 1 << 30
"""Above every vocabulary, so that no content is taken for a token."""

_DIGEST_MASK = ((1 << 63) - 1) & ~(1 << 31)
_SEED = b"kv-events namespace\0"
# Neither a digest nor a revision contains them.
_BEFORE_ADAPTER = "+"
_BEFORE_NAME = ":"


def tenant_of(
    *, salt: str | None = None, key: str | None = None, owner: str = ""
) -> str | None:
    """Return the tenant of a request, or None if it shares with everybody. It is a
    digest, because keys may be large and every cached prefix stores it.

    Two requests have the same tenant only if all three arguments are equal.
    """
    parts = (salt or "", key or "", owner)
    if not any(parts):
        return None
    # The length before each part makes the text of each triple unique.
    return digest("".join(f"{len(part)}:{part}" for part in parts))


class Namespace(NamedTuple):
    """The parts of a namespace.

    Fields:
        tenant: a `tenant_of`, or None.
        adapter: the adapter's name, or None for the base model.
        revision: digest of the adapter's content, in hexadecimal.
    """

    tenant: str | None = None
    adapter: str | None = None
    revision: str = ""

    @classmethod
    def of(cls, name: str | None) -> Namespace:
        """Return the parts of a name that `name` of this class has built."""
        tenant, _, adapter = (name or "").partition(_BEFORE_ADAPTER)
        revision, _, called = adapter.partition(_BEFORE_NAME)
        return cls(tenant or None, called or None, revision)

    @property
    def name(self) -> str | None:
        """The namespace as one name, or None for the one that everybody shares."""
        if self.adapter is None:
            return self.tenant
        adapter = f"{self.revision}{_BEFORE_NAME}{self.adapter}"
        return f"{self.tenant or ''}{_BEFORE_ADAPTER}{adapter}"

    def difference(self, other: Namespace) -> str:
        """Say which parts differ from `other`, as "adapter fr, not en"."""
        said = []
        if self.tenant != other.tenant:
            said.append(f"tenant {_short(self.tenant)}, not {_short(other.tenant)}")
        if self.adapter != other.adapter:
            said.append(
                f"adapter {self.adapter or 'none'}, not {other.adapter or 'none'}"
            )
        elif self.revision != other.revision:
            said.append(
                f"revision {_short(self.revision)} of adapter {self.adapter}, not "
                f"{_short(other.revision)}"
            )
        return "; ".join(said)


def lineage_salt(namespace: str | None) -> int:
    """Return the salt of the lineages in a namespace; 0 for the shared one."""
    return hash_string(namespace) if namespace else 0


def event_seed(namespace: str | None) -> bytes:
    """Return what the hash of a sequence's first block begins with: `SEED_BYTES` bytes,
    or none in the shared namespace."""
    if namespace is None:
        return b""
    return sha256(_SEED + namespace.encode()).digest()[:SEED_BYTES]


def content_ids(data: bytes, count: int) -> list[int]:
    """Return ids that stand for `count` embeddings of equal size in the key of the
    prefix cache and in lineages.

    An id is 61 bits of the hash of its embedding and all before it, so prompts have
    common ids as far as their embeddings are equal, bit by bit.
    """
    if count < 1 or len(data) % count:
        raise ValueError(f"{len(data)} bytes are not {count} embeddings of equal size")
    size = len(data) // count
    hashed = blake2b(digest_size=8)
    ids = []
    for begin in range(0, len(data), size):
        hashed.update(data[begin : begin + size])
        word = int.from_bytes(hashed.copy().digest(), "little")
        ids.append((word & _DIGEST_MASK) | FIRST_CONTENT_ID)
    return ids


def _short(text: str | None) -> str:
    return "none" if text is None else text[:8]
