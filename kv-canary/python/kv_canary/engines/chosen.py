"""Which requests are verified, if not all are: `KV_CANARY_SAMPLE`."""

from __future__ import annotations

from hashlib import blake2b

_KEY = b"kv_canary: chosen requests"
_BITS = 64


def is_chosen(rid: str, probability: float) -> bool:
    """Return whether a request is verified.

    A keyed hash of the id decides, so that all ranks choose the same requests, again
    after a preemption, and no client can tell by the form of its ids.

    Args:
        probability: above 0, at most 1. All requests are chosen at 1.
    """
    digest = blake2b(rid.encode(), key=_KEY, digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "big") < probability * (1 << _BITS)
