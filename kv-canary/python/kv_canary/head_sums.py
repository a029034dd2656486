"""Sums over the bytes of a KV head in a slot and layer, in torch: the one definition.

Attention loads all K and V of the slots that it reads. A sum of their 32-bit words that
it can add up on the way, and the same sum kept since the slot was written, make a check
of every byte at the price of the additions:

```
sum of a head = sum over words of K and V of low(word * factor) + high(word * factor)
```

modulo 2^32, `low` and `high` the halves of the product's 64 bits. A factor belongs to a
word's place in the slot's K or V of a layer. It is odd and no power of two, so that any
change of one bit changes the sum; and because the high half counts, changes of several
top bits do not cancel, as they do in a plain product modulo 2^32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kv_canary.hashing import mix64

V_PLACE = 1 << 20
"""Place of the first word of V; those of K begin at 0."""

MASK32 = (1 << 32) - 1
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
SLOT_FACTOR = 0x9E3779B1


def mix32(x: Tensor) -> Tensor:
    """A mixer of 32 bits, on int64 tensors of values below 2^32."""
    x = ((x ^ (x >> 16)) * MIX_1) & MASK32
    x = ((x ^ (x >> 15)) * MIX_2) & MASK32
    return x ^ (x >> 16)


def word_factors(places: Tensor) -> Tensor:
    """Factors of words by their places, int64, below 2^32: bits 0 and 31 are set."""
    return mix32(places) | (1 << 31) | 1


def fold_products(words: Tensor, factors: Tensor) -> Tensor:
    """low(word * factor) + high(word * factor) of int64 tensors below 2^32; low 32 bits
    count."""
    # A product of 64 bits, of which int64 keeps all but the sign's meaning.
    product = words * factors
    return (product & MASK32) + ((product >> 32) & MASK32)


def head_sums(k: Tensor, v: Tensor) -> Tensor:
    """Sums of all KV heads, int32 [..., heads].

    Args:
        k, v: int64 [..., heads, words], 64-bit words of K and of V of some slots; all
            heads of a layer.
    """
    return _as_int32(_half_sums(k, 0) + _half_sums(v, V_PLACE))


def cell_factors(cells: Tensor) -> Tensor:
    """Odd factors, int64, of heads of a slot by their number: layer * heads + head."""
    return mix64(cells) | 1


def whole_sums(sums: Tensor) -> Tensor:
    """One word for the sums of a slot, [..., layers, heads]: int64 [...]. Any sum that
    changes alone changes it."""
    flat = sums.flatten(-2).to(torch.int64) & MASK32
    cells = torch.arange(flat.shape[-1], device=sums.device)
    return (flat * cell_factors(cells)).sum(dim=-1)


def _half_sums(words: Tensor, first_place: int) -> Tensor:
    """Sums of K or of V, int64 [..., heads]; low 32 bits count."""
    *_, heads, count = words.shape
    places = torch.arange(2 * heads * count, device=words.device) + first_place
    factors = word_factors(places).view(heads, count, 2)
    halves = torch.stack((words & MASK32, (words >> 32) & MASK32), dim=-1)
    return fold_products(halves, factors).sum(dim=(-2, -1))


def _as_int32(sums: Tensor) -> Tensor:
    """The low 32 bits of int64 values, as int32."""
    low = sums & MASK32
    return (low - ((low >> 31) << 32)).to(torch.int32)
