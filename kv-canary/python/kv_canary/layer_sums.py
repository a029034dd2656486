"""Sums over all bytes of a slot, one per layer: what `rotate` and `all` compare.

```
sum of a slot in a layer = sum over the values of K and V of value * key(its place)
```

modulo 2^64. A value's bits count as a signed integer of at most 32 bits. Keys are odd,
so that any change of one value changes the sum. The differences of several values
cancel only if their combination of keys is divisible by 2^33 or more, which no two keys
are, whether added or subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.hashing import mix64
from kv_canary.records import HALF_BITS, NO_HEAD, TOKEN_MASK, pack_place

if TYPE_CHECKING:
    from kv_canary.slot_places import SlotPlaces

_KEY_SEED = 0x51075C0DE


def place_keys(count: int) -> Tensor:
    """Return the keys of a slot's values by place, int64 [count], odd."""
    return mix64(torch.arange(count) + _KEY_SEED) | 1


class LayerSums:
    """The sums of a group's slots since their records were written.

    Args:
        num_slots: slots of the group, including the scratch page.
        numbers: names of the layers in reports; 0, 1, ... by default.

    Raises:
        ValueError: the slots do not lie in the memory of the layers.

    Attributes:
        kept: int64 [slots, layers].
    """

    def __init__(
        self, places: SlotPlaces, *, num_slots: int, numbers: Sequence[int] = ()
    ) -> None:
        self._numbers = numbers or range(places.num_layers)
        device = places.flat.device
        self._places = places
        self._offsets = torch.cat(places.halves, dim=1).contiguous()
        # Copies, because Triton compiles again for a slice that is not aligned.
        self._bases = [
            places.bases[i : i + 1].clone() for i in range(places.num_layers)
        ]
        self._keys = place_keys(self._offsets.shape[1]).to(device)
        self.kept = torch.zeros(
            (num_slots, places.num_layers), dtype=torch.int64, device=device
        )
        last = (num_slots - 1) // places.page_size * places.page_stride
        end = int(places.bases.max()) + last + int(self._offsets.max()) + 1
        if end > len(places.flat):
            raise ValueError(
                f"LayerSums: {num_slots} slots end at value {end} of {len(places.flat)}"
            )

    def compute(self, slots: Tensor, layer: int | None = None) -> Tensor:
        """Return the sums of slots [n] int64 now, [n, layers], or [n, 1] of a layer."""
        bases = self._places.bases if layer is None else self._bases[layer]
        sums = slots.new_empty((len(slots), len(bases)))
        launches.sum_slots(
            self._places.flat,
            bases,
            self._offsets,
            self._keys,
            slots,
            self._places.page_stride,
            sums,
        )
        return sums

    def keep(self, slots: Tensor) -> None:
        """Keep the sums of slots [n], whose values were just stored."""
        self.kept.index_copy_(0, slots, self.compute(slots))

    def move(self, dst: Tensor, src: Tensor) -> None:
        """Set the sums of slots `dst` to those of `src`, [n] each."""
        self.kept.index_copy_(0, dst, self.kept.index_select(0, src))

    def named(self, sums: Tensor, layer: int) -> Tensor:
        """Return sums of a layer as fingerprints that name it."""
        low = (sums ^ (sums >> HALF_BITS)) & TOKEN_MASK
        return low | pack_place(self._numbers[layer], NO_HEAD)

    def find_sources(self, slots: Tensor) -> Tensor:
        """Return for each of slots [n] another slot whose kept sums its bytes have in
        every layer, or -1. Costs a pass over all sums."""
        factors = place_keys(self.kept.shape[1]).to(slots.device)
        every, order = (self.kept * factors).sum(dim=1).sort()
        wanted = (self.compute(slots) * factors).sum(dim=1)
        at = torch.searchsorted(every, wanted).clamp(max=len(every) - 1)
        # Bytes that are all 0 look like those of any slot that was never written.
        is_found = (every[at] == wanted) & (wanted != 0) & (order[at] != slots)
        return torch.where(is_found, order[at], -1)
