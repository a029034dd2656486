"""Faults of units that move between tiers.

Each planter damages an engine's tiers once and returns what undoes it. It is given a
scene: the tiers, and two sequences that were stored and are no longer on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.faults.wrapping import wrap

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.kv_tiers.unit import UnitKey

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierScene:
    """What a fault is planted in.

    Fields:
        keys: keys of the sequence that is damaged. others: of another sequence.
        unit: number of the unit to damage.
        group: number of the group to damage.
    """

    tiers: KVTiers
    keys: list[UnitKey]
    others: list[UnitKey]
    unit: int
    group: int
    rng: random.Random

    @property
    def key(self) -> UnitKey:
        return self.keys[self.unit]

    def memory(self, key: UnitKey) -> Tensor:
        """Return a unit of the group in host memory."""
        pool = self.tiers.pools[self.group]
        return pool.memory[pool.place(key)]

    def file(self, key: UnitKey) -> Path:
        """Return a unit's file."""
        storage = self.tiers.storage
        assert storage is not None
        storage.wait_for_writes()
        store = storage.stores[self.group]
        return store.path(key)


def _nothing() -> None:
    """Undo what is over."""


# -- in host memory ----------------------------------------------------------------


def host_bit(scene: TierScene) -> Undo:
    _flip(scene, scene.memory(scene.key))
    return _nothing


def _flip(scene: TierScene, unit: Tensor) -> None:
    """Flip a bit of the last slot, which every request reads that goes on there."""
    layout = scene.tiers.groups[scene.group].layout
    number = scene.rng.randrange(len(layout.tensors))
    part = layout.part(unit[None], number)[0]
    layer, word = (scene.rng.randrange(part.shape[axis]) for axis in (0, 2))
    part[layer, -1, word] ^= 1 << scene.rng.randrange(8)


def never_stored(scene: TierScene) -> Undo:
    scene.memory(scene.key).zero_()
    return _nothing


def stored_over(scene: TierScene) -> Undo:
    scene.memory(scene.key).copy_(scene.memory(scene.others[scene.unit]))
    return _nothing


def swapped_units(scene: TierScene) -> Undo:
    pool = scene.tiers.pools[scene.group]
    kept = [key for key in scene.keys if key in pool and key != scene.key]
    _swap(scene.memory(scene.key), scene.memory(scene.rng.choice(kept)))
    return _nothing


def other_sequence(scene: TierScene) -> Undo:
    _swap(scene.memory(scene.key), scene.memory(scene.others[scene.unit]))
    return _nothing


def _swap(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


# -- while units are stored --------------------------------------------------------


def _store_again(scene: TierScene, slots: Tensor) -> Undo:
    """Store the unit from other slots than its own."""
    group = scene.tiers.groups[scene.group]
    scene.tiers.mover.store(group, slots, [scene.memory(scene.key)])
    scene.tiers.mover.wait_for_stores()
    return _nothing


def stored_early(scene: TierScene) -> Undo:
    allocator = scene.tiers.cache.allocator
    slots = allocator.alloc(scene.tiers.unit)
    assert slots is not None
    undo = _store_again(scene, _slots_of(scene, slots.numpy()))
    allocator.free(slots)
    return undo


def stored_late(scene: TierScene) -> Undo:
    cache = scene.tiers.cache
    runs = [run.slots for run in cache.iter_cached_runs()]
    every = np.concatenate(runs)
    return _store_again(scene, _slots_of(scene, every[: scene.tiers.unit]))


def _slots_of(scene: TierScene, primary: Any) -> Tensor:
    """Return the group's slots of primary ones, as many as a unit has."""
    group = scene.tiers.groups[scene.group]
    if group.places.index is None:
        return torch.from_numpy(primary)
    # Nothing is computed for slots that no run of the group holds.
    return torch.zeros(group.layout.slots, dtype=torch.int64)


def skipped_group(scene: TierScene) -> Undo:
    layout = scene.tiers.groups[scene.group].layout
    number = scene.rng.randrange(len(layout.tensors))
    layout.part(scene.memory(scene.key)[None], number).zero_()
    return _nothing


def key_collision(scene: TierScene) -> Undo:
    """Let the sequence find the other one's units."""
    every = list(zip(scene.keys, scene.others, strict=False))
    for pool in scene.tiers.pools:
        for key, other in every:
            if key in pool and other in pool:
                unit, twin = (pool.memory[pool.place(k)] for k in (key, other))
                unit.copy_(twin)
    return _nothing


# -- while units are loaded --------------------------------------------------------


def short_rows(scene: TierScene) -> Undo:
    return _spoil_copies(scene, lambda part: part[..., -1:].bitwise_not_())


def skipped_layer(scene: TierScene) -> Undo:
    return _spoil_copies(
        scene, lambda part: part[:, scene.rng.randrange(part.shape[1])].bitwise_not_()
    )


def _spoil_copies(scene: TierScene, spoil: Callable[[Tensor], object]) -> Undo:
    """Spoil a part of one unit on its way to the device."""
    layout = scene.tiers.groups[scene.group].layout
    source = scene.memory(scene.key)
    number = scene.rng.randrange(len(layout.tensors))

    def copy(original: Callable[..., None], target: Tensor, unit: Tensor) -> None:
        original(target, unit)
        if unit.data_ptr() == source.data_ptr():
            spoil(layout.part(target[None], number))

    return wrap(scene.tiers.mover, "_copy", copy)


def read_early(scene: TierScene) -> Undo:
    """Take back what a load has brought, after it was compared."""
    mover = scene.tiers.mover
    group = scene.tiers.groups[scene.group]

    def load(original: Callable[..., Any], shipments: Any) -> Any:
        slots = next(s.slots for s in shipments if s.group is group)
        before = [t.words[:, slots].clone() for t in group.layout.tensors]
        result = original(shipments)
        result.wait()
        for tensor, words in zip(group.layout.tensors, before, strict=True):
            tensor.words[:, slots] = words
        return result

    return wrap(mover, "load", load)


def double_load(scene: TierScene) -> Undo:
    """Write into the slots of a cached run with the load."""
    tiers = scene.tiers
    runs = [run.slots for run in tiers.cache.iter_cached_runs()]
    held = np.concatenate(runs)

    def take(original: Callable[[int], Any], count: int) -> Any:
        slots = original(count)
        if slots is None or len(held) < count:
            return slots
        for tensor in tiers.groups[0].layout.tensors:
            tensor.words[:, held[:count]] = tensor.words[:, held[:count]].flip(1)
        return slots

    return wrap(tiers.loads, "_take_slots", take)


# -- in files ----------------------------------------------------------------------


def _forget_host(scene: TierScene) -> None:
    for pool in scene.tiers.pools:
        pool.clear()


def file_bit(scene: TierScene) -> Undo:
    path = scene.file(scene.key)
    data = bytearray(path.read_bytes())
    layout = scene.tiers.groups[scene.group].layout
    begin = len(data) - layout.bytes_per_unit
    _flip(scene, torch.frombuffer(data, dtype=torch.uint8)[begin:])
    path.write_bytes(data)
    _forget_host(scene)
    return _nothing


def cut_file(scene: TierScene) -> Undo:
    path = scene.file(scene.key)
    data = path.read_bytes()
    path.write_bytes(data[: scene.rng.randrange(len(data))])
    _forget_host(scene)
    return _nothing


def other_file(scene: TierScene) -> Undo:
    path, other = scene.file(scene.key), scene.file(scene.others[scene.unit])
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    _forget_host(scene)
    return _nothing


def foreign_file(scene: TierScene) -> Undo:
    path = scene.file(scene.key)
    data = bytearray(path.read_bytes())
    # The identity follows the eight bytes that name the format.
    data[8] ^= 0xFF
    path.write_bytes(data)
    _forget_host(scene)
    return _nothing


PLANTERS: Mapping[str, Callable[[TierScene], Undo]] = {
    planter.__name__: planter
    for planter in (
        *(host_bit, never_stored, stored_over, swapped_units, other_sequence),
        *(stored_early, stored_late, skipped_group, key_collision),
        *(short_rows, skipped_layer, read_early, double_load),
        *(file_bit, cut_file, other_file, foreign_file),
    )
}
IN_FILES = ("file_bit", "cut_file", "other_file", "foreign_file")
"""Faults of the tier of files; the others are in host memory."""
