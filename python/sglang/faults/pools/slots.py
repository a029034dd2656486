"""Faults in slots: their KV bytes, their records, their owners.

Each returns its damage, or None where the scene offers no opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kv_canary.faults import pool
from kv_canary.launches import move_records, poison
from kv_canary.records import POISON_WORD
from sglang.faults.pools.scene import STALE, Damage, Scene
from sglang.faults.pools.tables import repoint, slot_places
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.mem_cache.radix_cache import RadixCache


def real_kv_used(scene: Scene) -> Damage | None:
    """Change KV bytes of a slot that this forward reads."""
    for victim in scene.victims():
        position = victim.read_position(scene.rng)
        scene.flip_kv(victim.slots[position])
        return victim.damage_at(position)
    return None


def real_kv_post_forward(scene: Scene) -> Damage | None:
    """Change KV bytes of a slot that this forward wrote and that stays in use."""
    mode, spec = scene.forward_batch.forward_mode, scene.forward_batch.spec_info
    if scene.target.is_draft and mode.is_decode:
        return None  # the extend after verification writes these slots again
    accepted = spec.accept_lens if isinstance(spec, EagleDraftInput) else None
    for victim in scene.victims(min_prefix=0):
        staying = victim.extend_len
        if mode is ForwardMode.TARGET_VERIFY:
            staying = 1  # the root; the other accepted nodes are not known yet
        elif accepted is not None:
            staying = int(accepted[victim.batch_row])
        position = victim.prefix_len + scene.rng.randrange(staying)
        scene.flip_kv(victim.slots[position])
        return victim.damage_at(position)
    return None


def real_kv_unused_cache(scene: Scene) -> Damage | None:
    """Change KV bytes of a slot that only the prefix cache holds."""
    if not isinstance(scene.cache, RadixCache):
        return None
    nodes = [node for node in scene.cache.iter_nodes() if scene.is_unused(node)]
    if not nodes:
        return None
    node = scene.rng.choice(nodes)
    offset = scene.rng.randrange(len(node.slots))
    slot, position = scene.own_slots(node.slots)[offset], node.start + offset
    scene.flip_kv(slot)
    return Damage(slot=slot, position=position, places=frozenset({(slot, position)}))


def record(scene: Scene) -> Damage | None:
    """Change a word of a record that this forward reads."""
    for victim in scene.victims():
        position = victim.read_position(scene.rng)
        pool.flip_record(scene.state, victim.slots[position], scene.rng)
        return victim.damage_at(position)
    return None


def early_free(scene: Scene) -> Damage | None:
    """Free the pages of a live row, which goes on reading them."""
    for victim in scene.victims():
        freed, first = victim.read_slots, victim.first_read
        slots = torch.tensor(freed)
        poison(scene.state, slots.to(scene.state.head.device))
        return replace(victim.damage_at(first), places=slot_places(freed, first))
    return None


def move_without_records(scene: Scene) -> Damage | None:
    """Move KV bytes of one page to a free page, and not its records."""
    return _move_page(scene, with_bytes=True, with_record=False)


def move_without_bytes(scene: Scene) -> Damage | None:
    """Move a page's records to a free page; the copy of its KV bytes is dropped."""
    return _move_page(scene, with_bytes=False, with_record=True)


def phantom_prefix(scene: Scene) -> Damage | None:
    """Swap the slots of two cached prefixes: a later hit gets the other one's KV."""
    if not isinstance(scene.cache, RadixCache):
        return None
    roots = [node for node in scene.cache.root.children.values() if node.lock_ref == 0]
    if len(roots) < 2:
        return None
    first, second = scene.rng.sample(roots, 2)
    common = min(len(first.slots), len(second.slots))
    head, other = first.slots[:common], second.slots[:common]
    first.slots = np.concatenate((other, first.slots[common:]))
    second.slots = np.concatenate((head, second.slots[common:]))
    places = slot_places(head.tolist()) | slot_places(other.tolist())
    return Damage(prompt=first.elements.tolist(), places=places)


def _move_page(scene: Scene, *, with_bytes: bool, with_record: bool) -> Damage | None:
    """Move a page of a prefix to a free page, and point the row there."""
    page_size, state = scene.target.page_size, scene.state
    is_free = (state.head[:, 0] == POISON_WORD).view(-1, page_size).all(dim=1)
    is_free[0] = False
    # Owned by now, and about to be written.
    is_free[scene.forward_batch.out_cache_loc // page_size] = False
    free = torch.nonzero(is_free).flatten().tolist()
    for victim in scene.victims(min_prefix=page_size):
        if not free:
            return None
        first = scene.rng.randrange(victim.prefix_len // page_size) * page_size
        position = first + scene.rng.randrange(page_size)
        target = scene.rng.choice(free) * page_size
        offsets = torch.arange(page_size, device=state.head.device)
        dst, src = target + offsets, victim.slots[first] + offsets
        for canary_source in scene.pool.canary_sources():
            buffer = canary_source.buffer
            buffer[:, dst] = buffer[:, src] if with_bytes else STALE
        if with_record:
            move_records(state, dst=dst, src=src)
        entries = {first + i: target + i for i in range(page_size)}
        damage = repoint(scene, victim, entries, at=position)
        undo = damage.undo
        assert undo is not None

        def repair(undo: Callable[[], None] = undo, dst: torch.Tensor = dst) -> None:
            undo()
            poison(state, dst)

        return replace(damage, undo=repair)
    return None
