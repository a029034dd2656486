"""The digest of a request's output tokens, which both processes compute.

The scheduler computes it from the tokens that it keeps, not from the slices that it
sends; the front from what arrives. A token that is lost, repeated, or another request's
makes them differ from then on.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable

TOKEN_TYPE = "q"


def first_digest(rid: str) -> int:
    """Return the digest of no tokens of this request."""
    return zlib.crc32(rid.encode())


def extend_digest(digest: int, tokens: Iterable[int]) -> int:
    """Return the digest after more tokens; an array of `TOKEN_TYPE` is not copied."""
    if not isinstance(tokens, array) or tokens.typecode != TOKEN_TYPE:
        tokens = array(TOKEN_TYPE, tokens)
    return zlib.crc32(tokens, digest)
