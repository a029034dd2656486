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

import torch
from torch import Tensor

from kv_canary.hashing import to_signed64

FACTOR = to_signed64(0x9E3779B97F4A7C15)
KEY = to_signed64(0xD6E8FEB86659FD93)


# Not frozen, like `ForwardView`: they are made many times in a step.
@dataclass(slots=True, kw_only=True)
class CarriedRows:
    """State of R rows of b requests, `group` = R / b rows each.

    Fields:
        places: int64 [R], places of the rows in `sums`; negative to leave a row out.
        req_rows, serials, positions: int64 [b], as in `ForwardView`; the position of
            the newest token, for reports. Request row 0 is left out.
        hidden: [R, width], a whole number of 32-bit words per row, or None.
        ids, probs: int64 and float32 [R, K], or None.
        sums: int64 [N], recorded or compared.
        clock_offset: from the clock to the forward of these rows: -1 after its own
            tail, which has already advanced the clock.
        words, bits: int32 [R, C] and [R, K], the memory of `hidden` and of `probs`.
        numbers: `group`, K, C, the elements between rows of `words`, `clock_offset`.
    """

    places: Tensor
    req_rows: Tensor
    serials: Tensor
    positions: Tensor
    hidden: Tensor | None
    ids: Tensor | None
    probs: Tensor | None
    sums: Tensor
    clock_offset: int = 0
    words: Tensor | None = field(init=False, repr=False)
    bits: Tensor | None = field(init=False, repr=False)
    numbers: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hidden, probs, ids = self.hidden, self.probs, self.ids
        self.words = words = None if hidden is None else hidden.view(torch.int32)
        self.bits = None if probs is None else probs.view(torch.int32)
        known = 0 if ids is None else ids.shape[1]
        width, stride = 0, 0
        if words is not None:
            width, stride = words.shape[1], words.stride(0)
        self.numbers = [self.group, known, width, stride, self.clock_offset]

    @property
    def group(self) -> int:
        return self.places.shape[0] // max(self.req_rows.shape[0], 1)

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor has another shape or layout.
        """
        rows, requests = self.places.shape[0], self.req_rows.shape[0]
        for name, t, due in (
            ("places", self.places, rows),
            ("req_rows", self.req_rows, requests),
            ("serials", self.serials, requests),
            ("positions", self.positions, requests),
            ("hidden", self.hidden, rows),
            ("ids", self.ids, rows),
            ("probs", self.probs, rows),
            ("sums", self.sums, self.sums.shape[0]),
        ):
            if t is None:
                continue
            is_whole = t.stride(-1) == 1 if name == "hidden" else t.is_contiguous()
            if t.shape[0] != due or not is_whole:
                raise ValueError(
                    f"CarriedRows: {name} of shape {list(t.shape)} and strides "
                    f"{list(t.stride())}; expected {due} contiguous rows"
                )
        if requests and rows % requests:
            raise ValueError(f"CarriedRows: {rows} rows of {requests} requests")
