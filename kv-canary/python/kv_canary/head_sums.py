"""The definition, in torch, of checksums over a KV head's bytes in a slot and layer.

Attention loads all K and V of the slots that it reads. If it adds up a checksum on the
way and the same checksum was kept when the slot was written, comparing the two checks
every byte for the price of the additions:

```
sum of a head = sum over bytes b of K and V of b * factor(place of b in K or in V)
```

modulo 2^32, with signed bytes. Factors are odd, so that any change of one byte changes
the sum. No two factors, nor one and the negative of another, agree in their low 25
bits, so that flips of two bits never cancel. A factor is four signed bytes, its digits
to the base 256: a matrix unit multiplies the bytes of a head by the digits of all
factors like any other matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kv_canary.hashing import mix64

V_PLACE = 1 << 12
"""Place of the first byte of V; K begins at 0. Heads are smaller than this."""

MASK32 = (1 << 32) - 1
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
SLOT_FACTOR = 0x9E3779B1


def mix32(x: Tensor) -> Tensor:
    """Mix 32 bits, on int64 tensors of values below 2^32."""
    x = ((x ^ (x >> 16)) * MIX_1) & MASK32
    x = ((x ^ (x >> 15)) * MIX_2) & MASK32
    return x ^ (x >> 16)


def byte_factors(places: Tensor) -> Tensor:
    """Return the factors of bytes by place, int64, odd and below 2^32."""
    return mix32(places) | 1


def head_sums(k: Tensor, v: Tensor) -> Tensor:
    """Return the sums of all KV heads, int32 [..., heads].

    Args:
        k, v: int64 [..., heads, words], 64-bit words of K and V of some slots, with all
            heads of a layer.
    """
    return _as_int32(_half_sums(k, 0) + _half_sums(v, V_PLACE))


def cell_factors(cells: Tensor) -> Tensor:
    """Return odd factors, int64, of a slot's heads by number: layer * heads + head."""
    return mix64(cells) | 1


def whole_sums(sums: Tensor) -> Tensor:
    """Combine the sums of a slot, [..., layers, heads], into one word: int64 [...].
    Changing any one sum changes it."""
    flat = sums.flatten(-2).to(torch.int64) & MASK32
    cells = torch.arange(flat.shape[-1], device=sums.device)
    return (flat * cell_factors(cells)).sum(dim=-1)


def _half_sums(words: Tensor, first_place: int) -> Tensor:
    """Return sums of K or of V, int64 [..., heads]; only the low 32 bits count."""
    data = words.contiguous().view(torch.int8)
    places = torch.arange(data.shape[-1], device=words.device) + first_place
    return (data.to(torch.int64) * byte_factors(places)).sum(dim=-1)


def _as_int32(sums: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values, as int32."""
    low = sums & MASK32
    return (low - ((low >> 31) << 32)).to(torch.int32)
