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

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kv_canary.hashing import to_signed64

FACTOR = to_signed64(0x9E3779B97F4A7C15)
KEY = to_signed64(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedRows:
    """State of R rows of b requests, `group` = R / b rows each.

    Fields:
        places: int64 [R], places of the rows in `sums`; negative to leave a row out.
        req_rows, serials, positions: int64 [b], as in `ForwardView`; the position of
            the newest token, for reports. Request row 0 is left out.
        hidden: [R, width], a whole number of 32-bit words per row, or None.
        ids, probs: int64 and float32 [R, K], or None.
        sums: int64 [N], recorded or compared.
    """

    places: Tensor
    req_rows: Tensor
    serials: Tensor
    positions: Tensor
    hidden: Tensor | None
    ids: Tensor | None
    probs: Tensor | None
    sums: Tensor

    @property
    def group(self) -> int:
        return len(self.places) // max(len(self.req_rows), 1)

    @property
    def words(self) -> Tensor | None:
        """int32 [R, C]: the memory of `hidden`."""
        return None if self.hidden is None else self.hidden.view(torch.int32)

    @property
    def bits(self) -> Tensor | None:
        """int32 [R, K]: the memory of `probs`."""
        return None if self.probs is None else self.probs.view(torch.int32)

    @property
    def numbers(self) -> list[int]:
        """`group`, K, C, and the elements between rows of `words`."""
        known = 0 if self.ids is None else self.ids.shape[1]
        words = self.words
        if words is None:
            return [self.group, known, 0, 0]
        return [self.group, known, words.shape[1], words.stride(0)]

    def check_layout(self) -> None:
        """Check for kernels that index raw memory and would misread another layout.

        Raises:
            ValueError: a tensor has another shape or layout.
        """
        rows, requests = len(self.places), len(self.req_rows)
        sizes = {"places": rows, "req_rows": requests, "serials": requests}
        sizes["positions"] = requests
        for f in fields(self):
            t = getattr(self, f.name)
            if t is None:
                continue
            is_whole = t.stride(-1) == 1 if f.name == "hidden" else t.is_contiguous()
            due = sizes.get(f.name, len(self.sums) if f.name == "sums" else rows)
            if t.shape[0] != due or not is_whole:
                raise ValueError(
                    f"CarriedRows: {f.name} of shape {list(t.shape)} and strides "
                    f"{list(t.stride())}; expected {due} contiguous rows"
                )
        if requests and rows % requests:
            raise ValueError(f"CarriedRows: {rows} rows of {requests} requests")
