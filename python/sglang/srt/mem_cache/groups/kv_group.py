"""A group: layers of one model whose KV lies in the same slots.

```
group      | layers | slots                         | tensors
full       | most   | the allocator's (primary)     | K and V
latent     | most   | the allocator's (primary)     | one latent
swa        | some   | `WindowSlots` (secondary)     | K and V
```
A draft has its own groups over the same slots. Code that moves, checks or shows KV goes
through `KVCache.groups` and does not ask what kind a group is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.slots import PagedSlots
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.page_ledger import IntArray

FULL = "full"
LATENT = "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of a model and their stored KV.

    Fields:
        name: name in reports and errors.
        layers: the model's layers, ascending; layer `layers[i]` is layer i of
            `tensors`.
        slots: slots of a secondary group, or None for the primary slots themselves.
        tensors: the bytes of these layers only, with one row per slot of the group.
    """

    name: str
    layers: tuple[int, ...]
    slots: PagedSlots | None
    tensors: KVCache

    def on_device(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the group's slot for each of these primary slots, int64 on the
        device."""
        return slots if self.slots is None else self.slots.mapping[slots]

    def on_host(self, slots: IntArray) -> IntArray:
        """Return the same from the host's records."""
        return slots if self.slots is None else self.slots.map_slots(slots)


def check_layers(
    groups: Sequence[tuple[str, Sequence[int]]], layers: Sequence[int]
) -> None:
    """Check that every layer is in one group.

    Args:
        groups: (name, its layers) of every group.
        layers: layers of the model that have KV.

    Raises:
        ValueError: a layer is in no group or in two, or a group is empty. The message
            names it.
    """
    owner: dict[int, str] = {}
    every = set(layers)
    for name, own in groups:
        if not own:
            raise ValueError(f"KV group {name} has no layer")
        for layer in own:
            if layer not in every:
                raise ValueError(
                    f"KV group {name} has layer {layer}, which is none of the "
                    f"{len(every)} layers with KV"
                )
            if layer in owner:
                raise ValueError(
                    f"layer {layer} is in two KV groups, {owner[layer]} and {name}"
                )
            owner[layer] = name
    missing = sorted(every - set(owner))
    if missing:
        names = ", ".join(name for name, _ in groups)
        raise ValueError(
            f"layer {missing[0]} is in none of the KV groups ({names}); "
            f"{len(missing)} of {len(every)} layers are in none"
        )
