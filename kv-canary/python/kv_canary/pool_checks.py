"""The tables of one pool that its launches compare forwards with."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from kv_canary.layout import NO_FINGERPRINT, Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChecks:
    """The tables of a pool, the same for every forward; None leaves a check out.

    Fields:
        page_size: slots below it are scratch, the only ones that padded rows may write.
        fingerprint: the bytes that are hashed.
        compares_bytes: whether verify compares the bytes that are read; not if
            attention does (`attended.py`).
        skips_new: whether bytes of slots that this forward writes are left out: rows
            that were stamped may read them.
        req_to_token: int32 [req_rows, W], slots by request row and position, which
            READ_SET and WRITE_FOREIGN compare with. None for a sweep, whose rows (any
            `req_rows` but 0) belong to no request: columns and `expected_lineage` are
            then not compared, and findings go to verdict 0.
        tokens: int32 [req_rows, W'], tokens by position, negative if unknown. The slot
            of position p holds token p + `token_offset`.
        published: int32 [req_rows, W'], tokens by position that inputs must be (in a
            verification, its roots); negative if unknown.
    """

    page_size: int = 1
    fingerprint: Fingerprint = NO_FINGERPRINT
    compares_bytes: bool = True
    skips_new: bool = False
    req_to_token: Tensor | None = None
    tokens: Tensor | None = None
    token_offset: int = 0
    published: Tensor | None = None


CHECK_NUMBERS = (
    "page_size",
    "token_offset",
    "fingerprint.mode",
    "fingerprint.rotation_period",
)
"""The numbers of `PoolChecks` that the native ops take."""

check_numbers_of = attrgetter(*CHECK_NUMBERS)
