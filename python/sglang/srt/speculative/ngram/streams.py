"""The requests' streams in the token history: which of their tokens it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.batch.req import Req
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.speculative.ngram.history import Extent, TokenHistory

# Places that a growing stream takes at once.
GROWTH = 1024


@dataclass(slots=True)
class _Stream:
    serial: int
    extent: Extent
    num_tokens: int


class Streams:
    """Appends the requests' new tokens to a history.

    Args:
        rows: request rows, including row 0.
        overlap: tokens of its past that a stream takes to a new extent.
    """

    def __init__(self, history: TokenHistory, *, rows: int, overlap: int) -> None:
        self._history = history
        self._overlap = overlap
        self._streams: list[_Stream | None] = [None] * rows

    def update(self, reqs: Sequence[Req]) -> IntArray:
        """Append what the requests have gained; return the place of each one's last
        token, int64 [R]."""
        extents, tokens, tags = [], [], []
        for req in reqs:
            stream = self._streams[req.req_pool_idx]
            if (
                stream is None
                or stream.serial != req.serial
                or stream.num_tokens > len(req.tokens)
            ):
                stream = self._open(req)
            new = req.tokens[stream.num_tokens :]
            if len(new) > stream.extent.room:
                self._extend(stream, req)
                new = req.tokens[stream.num_tokens :]
            stream.num_tokens += len(new)
            extents.append(stream.extent)
            tokens.append(np.array(new, dtype=np.int64))
            tags.append(req.salt)
        self._history.append(extents, tokens, tags)
        return np.array([extent.end - 1 for extent in extents], dtype=np.int64)

    def clear(self) -> None:
        """Begin all streams again."""
        self._streams = [None] * len(self._streams)

    def _open(self, req: Req) -> _Stream:
        stream = _Stream(req.serial, self._reserve(req, len(req.tokens)), 0)
        stream.num_tokens = max(0, len(req.tokens) - self._history.capacity // 2)
        self._streams[req.req_pool_idx] = stream
        return stream

    def _extend(self, stream: _Stream, req: Req) -> None:
        """Go on in a new extent, which begins with the newest tokens of the old one."""
        kept = min(stream.num_tokens, self._overlap)
        missing = len(req.tokens) - stream.num_tokens
        stream.extent = self._reserve(req, kept + missing)
        stream.num_tokens -= kept

    def _reserve(self, req: Req, length: int) -> Extent:
        rest = min(req.remaining_new_tokens, GROWTH)
        return self._history.reserve(length + rest)
