"""The tokens that requests have had, and where their n-grams occurred: a ring of tokens
with hash chains, in bounded memory.

Each request writes to an extent of the ring. A new extent takes the place of the oldest
tokens. For every size of n-gram, `head` has the newest place of a hash and `chain` the
place before it:

    head[hash] --> place 900 --> chain[900] = 512 --> chain[512] = 17 --> NONE

Places found are hints. A chain may lead to another n-gram, or to tokens that were
overwritten since, so callers compare tokens. A word of the ring has the token and a tag
of the request's namespace: requests of other namespaces never match.

All operations are vectorised over requests and tokens. Knows no trees and no batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang.srt.utils.salt_chain import FIRST_CONTENT_ID

if TYPE_CHECKING:
    import numpy.typing as npt

    from sglang.srt.mem_cache.page_ledger import IntArray

NONE = 0
"""No place. Also the word of a place that holds no token; others have token + 1."""
NO_TOKEN = -1
SIZES = (4, 2, 1)
"""Sizes of the n-grams whose places are kept, longest first."""
MAX_HEADS = 1 << 22
_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_TAG_MASK = (1 << 31) - 1
# Odd constants of a multiplicative hash.
_MIX = np.int64(-0x61C8864680B583EB)
_STEP = np.int64(0x2545F4914F6CDD1D)


@dataclass(slots=True)
class Extent:
    """Places [begin, limit) of the ring; tokens fill [begin, end)."""

    begin: int
    end: int
    limit: int

    @property
    def room(self) -> int:
        return self.limit - self.end


class Matches(NamedTuple):
    """Earlier places of the ends of R streams, best first, C each.

    Fields:
        places: int64 [R, C], of the last token of each match, or NONE.
        lens: int64 [R, C], tokens that match, going back from there; 0 for NONE.
    """

    places: IntArray
    lens: IntArray


class TokenHistory:
    """The ring.

    Args:
        capacity: tokens.
        max_match: longest match that is told apart from a longer one.
        max_draft: tokens that a draft may read after a match.
    """

    def __init__(self, *, capacity: int, max_match: int, max_draft: int) -> None:
        self.capacity = capacity
        self._max_match = max_match
        self._max_draft = max_draft
        # Reads go back by a match and forth by a draft from any place.
        self._margin = max(max_match, *SIZES) + 1
        size = self._margin + capacity + max_draft + 1
        # Zeros take no memory before they are written.
        self._words = np.zeros(size, np.int64)
        heads = 1 << min(max(capacity // 2, 1).bit_length(), MAX_HEADS.bit_length() - 1)
        self._shift = 65 - heads.bit_length()
        self._heads = [np.zeros(heads, np.int32) for _ in SIZES]
        self._chains = [np.zeros(size, np.int32) for _ in SIZES]
        self._next = self._used = 0

    def clear(self) -> None:
        """Forget everything; all extents are void."""
        self._words[: self._used] = NONE
        for links in (*self._heads, *self._chains):
            links[:] = NONE
        self._next = self._used = 0

    @property
    def nbytes(self) -> int:
        links = sum(array.nbytes for array in (*self._heads, *self._chains))
        return self._words.nbytes + links

    def reserve(self, length: int) -> Extent:
        """Return an empty extent of `length` places, or of the whole ring if that is
        less. The oldest tokens there are forgotten."""
        length = min(length, self.capacity)
        if self._next + length > self.capacity:
            self._next = 0
        begin = self._margin + self._next
        self._next += length
        self._words[begin : begin + length] = NONE
        self._used = max(self._used, begin + length)
        return Extent(begin, begin, begin + length)

    def append(
        self, extents: list[Extent], tokens: list[IntArray], tags: list[int]
    ) -> None:
        """Append tokens, int64, to extents that have room for them, and note the
        n-grams that end there.

        Args:
            tokens: content ids of embeddings take places, but are no tokens.
            tags: of the requests' namespaces.
        """
        lens = [len(new) for new in tokens]
        if not any(lens):
            return
        places = np.concatenate(
            [
                np.arange(extent.end, extent.end + length)
                for extent, length in zip(extents, lens, strict=True)
            ]
        )
        begins = np.repeat([extent.begin for extent in extents], lens)
        marks = np.repeat([(tag & _TAG_MASK) << _TOKEN_BITS for tag in tags], lens)
        new = np.concatenate(tokens)
        self._words[places] = np.where(new < FIRST_CONTENT_ID, (new + 1) | marks, NONE)
        for extent, length in zip(extents, lens, strict=True):
            extent.end += length
        hashes = np.zeros(len(places), np.int64)
        by_size = {}
        for back in range(max(SIZES)):
            hashes = (hashes + self._words[places - back]) * _MIX + _STEP
            by_size[back + 1] = hashes
        for i, size in enumerate(SIZES):
            is_whole = places - begins >= size - 1
            whole = places if is_whole.all() else places[is_whole]
            found = by_size[size] if whole is places else by_size[size][is_whole]
            self._link(i, whole, self._buckets(found))

    def _buckets(self, hashes: IntArray) -> IntArray:
        mixed = (hashes ^ (hashes >> np.int64(29))) * _MIX
        buckets: IntArray = mixed.view(np.uint64) >> np.uint64(self._shift)
        return buckets.view(np.int64)

    def _link(self, index: int, places: IntArray, buckets: IntArray) -> None:
        """Put places, in order, at the front of the chains of their buckets."""
        heads, chain = self._heads[index], self._chains[index]
        if len(places) <= 1:
            chain[places] = heads[buckets]
            heads[buckets] = places
            return
        order = buckets.argsort(kind="stable")
        places, buckets = places[order], buckets[order]
        before = heads[buckets]
        is_same = buckets[1:] == buckets[:-1]
        before[1:] = np.where(is_same, places[:-1], before[1:])
        chain[places] = before
        is_last = np.append(~is_same, True)
        heads[buckets[is_last]] = places[is_last]

    def matches(self, ends: IntArray, *, count: int) -> Matches:
        """Return the `count` best earlier places of what ends at each place of `ends`,
        int64 [R], the last tokens of R extents: the longest match first, then the
        newest."""
        tried = []
        for chain in self._chains:
            place = ends
            for _ in range(count):
                place = chain[place].astype(np.int64)
                tried.append(place)
        places = np.stack(tried, axis=1)
        lens = self._match_lens(ends, places)
        # The same place may be in several chains; it counts once, where it is first.
        order = np.argsort(-lens, axis=1, kind="stable")
        lens = np.take_along_axis(lens, order, axis=1)
        places = np.take_along_axis(places, order, axis=1)
        lens[_seen_before(places)] = 0
        order = np.argsort(lens == 0, axis=1, kind="stable")[:, :count]
        lens = np.take_along_axis(lens, order, axis=1)
        places = np.take_along_axis(places, order, axis=1)
        return Matches(np.where(lens > 0, places, NONE), lens)

    def _match_lens(self, ends: IntArray, places: IntArray) -> IntArray:
        """Return how many tokens up to each place equal those up to the row's end."""
        back = np.arange(self._max_match)
        own = self._words[ends[:, None] - back]
        # A place that does not exist reads the margin, which holds no token.
        there = self._words[np.maximum(places, self._margin - 1)[:, :, None] - back]
        is_equal = (there == own[:, None, :]) & (own != NONE)[:, None, :]
        # The end itself, through a chain that was overwritten.
        is_equal &= (places != ends[:, None])[:, :, None]
        lens: IntArray = np.logical_and.accumulate(is_equal, axis=2).sum(axis=2)
        return lens

    def continuations(self, ends: IntArray, found: Matches, *, length: int) -> IntArray:
        """Return the tokens that followed each match, int64 [R, C, length];
        NO_TOKEN after the last one that is known.

        A match that reaches into the end of its own stream repeats: what follows the
        end is then what follows the match.
        """
        steps = np.arange(length)
        period = ends[:, None] - found.places
        is_near = (period > 0) & (period < length)
        offsets = np.where(
            is_near[:, :, None], steps % np.maximum(period, 1)[:, :, None], steps
        )
        words = self._words[(found.places + 1)[:, :, None] + offsets]
        words[found.lens == 0] = NONE
        # Behind the match's extent there may be tokens of another namespace.
        tags = self._words[ends] >> _TOKEN_BITS
        is_own = (words != NONE) & (words >> _TOKEN_BITS == tags[:, None, None])
        is_known = np.logical_and.accumulate(is_own, axis=2)
        return np.where(is_known, (words & _TOKEN_MASK) - 1, NO_TOKEN)


def _seen_before(places: IntArray) -> npt.NDArray[np.bool_]:
    """Return which places of a row occur earlier in it."""
    count = places.shape[1]
    is_equal = places[:, :, None] == places[:, None, :]
    earlier = np.tri(count, k=-1, dtype=bool)
    seen: npt.NDArray[np.bool_] = (is_equal & earlier).any(axis=2)
    return seen
