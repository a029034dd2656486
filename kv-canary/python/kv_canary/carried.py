"""Checksums of state other than KV that one forward leaves for a later one, such as a
draft's hidden states and candidates: recorded where it is made, compared where it is
used.

```
| hidden as 32-bit words | id 0 | bits of prob 0 | id 1 | ...      word w_j of a row
j  0                    C  C      C + 1            C + 2

h(w, j) = (w + (j + 1) * KEY) * FACTOR;  sum = h'(serial, -1) + the sum of h'(w_j, j),
h' = h ^ (h >> 32), modulo 2^64, with the shift of signed numbers
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kv_canary.hashing import to_signed64

FACTOR = to_signed64(0x9E3779B97F4A7C15)
KEY = to_signed64(0xD6E8FEB86659FD93)


class CandidateGroups(NamedTuple):
    """Places of groups of candidates: candidate c of request q belongs to place
    q * num_groups + c // topk."""

    num_groups: int
    topk: int


# Not frozen, like `ForwardView`: they are made many times in a step.
@dataclass(slots=True, kw_only=True)
class CarriedRows:
    """State of R rows: G rows of each of b requests.

    A row belongs to a place in `sums`. Rows that are only compared may belong to a row
    of `source` instead, which they were copied from.

    Fields:
        places: int64 [b, G], rows contiguous; negative to leave a row out.
        hidden: [R, width], a whole number of 32-bit words per row, or None.
        ids, probs: int64 and float32 [R, K], or None.
        sums: int64 [N]; or source: [N, width] like `hidden`.
        lens: int64 [b], moves the places of a request on by its length - 1, to the last
            of so many rows. Or None.
        groups: makes places of candidates, or None. No row is left out then.
        words, bits, source_words: int32, the memory of `hidden`, `probs` and `source`.
    """

    places: Tensor
    hidden: Tensor | None
    ids: Tensor | None = None
    probs: Tensor | None = None
    sums: Tensor | None = None
    source: Tensor | None = None
    lens: Tensor | None = None
    groups: CandidateGroups | None = None
    words: Tensor | None = field(init=False, repr=False)
    bits: Tensor | None = field(init=False, repr=False)
    source_words: Tensor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.words = _as_words(self.hidden)
        self.bits = _as_words(self.probs)
        self.source_words = _as_words(self.source)

    @property
    def group(self) -> int:
        """G, the rows of a request."""
        return self.places.shape[1]

    @property
    def width(self) -> int:
        """C, the words of a hidden state."""
        return 0 if self.words is None else self.words.shape[1]

    @property
    def known(self) -> int:
        """K, the candidates of a row."""
        return 0 if self.ids is None else self.ids.shape[1]

    @property
    def num_places(self) -> int:
        """N, the places that rows may belong to."""
        recorded = self.source if self.sums is None else self.sums
        return 0 if recorded is None else recorded.shape[0]

    def find_places(self) -> Tensor:
        """Return the place that each row belongs to, int64 [R], which may be outside of
        `source`."""
        places, groups = self.places, self.groups
        if groups is not None:
            size = groups.num_groups
            first = torch.arange(0, len(places) * size, size, device=places.device)
            places = first[:, None] + places // groups.topk
        if self.lens is not None:
            places = places + (self.lens - 1)[:, None]
        return places.flatten()

    def check_layout(self, requests: int) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor is missing or has another shape or layout.
        """
        if (self.sums is None) == (self.source is None):
            raise ValueError("CarriedRows: give either sums or source")
        rows = requests * self.group
        _check_rows("places", self.places, requests, has_stride=True)
        for name, due, has_stride in (
            ("hidden", rows, True),
            ("ids", rows, False),
            ("probs", rows, False),
            ("sums", self.num_places, False),
            ("source", self.num_places, True),
            ("lens", requests, False),
        ):
            t = getattr(self, name)
            if t is not None:
                _check_rows(name, t, due, has_stride=has_stride)
        source = self.source_words
        if source is not None and (source.shape[1] != self.width or self.known):
            raise ValueError("CarriedRows: source must hold the words of hidden alone")


@dataclass(slots=True, kw_only=True)
class CarriedState:
    """What one launch compares and records, of the same b requests.

    Fields:
        req_rows, serials, positions: int64 [b], as in `ForwardView`; the position of
            the newest token, for reports. Request row 0 is left out.
        checked: rows to compare.
        noted: rows to record, in distinct places; not those that `checked` belongs to.
        clock_offset: from the clock to the forward of the checked rows: -1 after its
            own tail, which has already advanced the clock.
    """

    req_rows: Tensor
    serials: Tensor
    positions: Tensor
    checked: CarriedRows | None = None
    noted: CarriedRows | None = None
    clock_offset: int = 0

    def check_layout(self) -> None:
        """Check as `CarriedRows.check_layout` does.

        Raises:
            ValueError: a tensor is missing or has another shape or layout.
        """
        requests = self.req_rows.shape[0]
        for name in ("req_rows", "serials", "positions"):
            _check_rows(name, getattr(self, name), requests)
        if self.checked is not None:
            self.checked.check_layout(requests)
        if self.noted is not None:
            self.noted.check_layout(requests)
            if self.noted.sums is None:
                raise ValueError("CarriedRows: noted rows need sums")


def _check_rows(name: str, t: Tensor, due: int, *, has_stride: bool = False) -> None:
    is_whole = t.stride(-1) == 1 if has_stride else t.is_contiguous()
    if t.shape[0] != due or not is_whole:
        raise ValueError(
            f"CarriedRows: {name} of shape {list(t.shape)} and strides "
            f"{list(t.stride())}; expected {due} contiguous rows"
        )


def _as_words(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.view(torch.int32)
