"""KV bytes of a model whose layers are in several groups.

A token is named by its primary slot everywhere; each group finds its own slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.groups.kv_group import KVGroup, check_layers
from sglang.srt.mem_cache.memory_pool import (
    CanarySource,
    KVCache,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_dtype import KVScales
    from sglang.srt.mem_cache.memory_pool import KVPlace


class GroupedKVPool(KVCache):
    """The groups of one model, with the primary one first.

    Args:
        groups: groups of layers.
        layers: layers of the model that have KV, ascending; each is in exactly one
            group.

    Raises:
        ValueError: the groups do not fit each other. The message names the group.
    """

    def __init__(self, groups: Sequence[KVGroup], *, layers: Sequence[int]) -> None:
        primary = groups[0].tensors
        check_layers([(g.name, g.layers) for g in groups], layers)
        for group in groups:
            if group.tensors.page_size != primary.page_size:
                raise ValueError(
                    f"KV group {group.name} has pages of {group.tensors.page_size} "
                    f"slots, group {groups[0].name} has {primary.page_size}"
                )
            if (group.slots is None) != (group is groups[0]):
                raise ValueError(
                    f"KV group {group.name}: the first group must have the primary "
                    "slots, and every other group slots of its own"
                )
        super().__init__(
            size=primary.size,
            page_size=primary.page_size,
            dtype=primary.dtype,
            layer_num=len(layers),
            device=primary.device,
        )
        self._groups = tuple(groups)
        self._places: dict[int, KVPlace] = {
            layer: (group, index)
            for group in groups
            for index, layer in enumerate(group.layers)
        }

    @property
    def layers(self) -> Sequence[int]:
        return sorted(self._places)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self._groups

    def layer_place(self, layer_id: int) -> KVPlace:
        return self._places[layer_id]

    def set_scales(self, scales: Mapping[int, KVScales]) -> None:
        super().set_scales(scales)
        for group in self._groups:
            of_group = {
                number: scales[layer]
                for number, layer in enumerate(group.layers)
                if layer in scales
            }
            group.tensors.set_scales(of_group)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        group, layer = self._places[layer_id]
        return group.tensors.get_kv_buffer(layer)

    def set_kv_buffer(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        group, layer = self._places[layer_id]
        group.tensors.set_kv_buffer(layer, group.on_device(slots), k, v)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        for group in self._groups:
            group.tensors.move_kv_cache(group.on_device(dst), group.on_device(src))

    def canary_sources(self) -> tuple[CanarySource, ...]:
        return tuple(
            source
            for group in self._groups
            for source in group.tensors.canary_sources()
        )
