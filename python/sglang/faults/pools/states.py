"""Faults in the recurrent states of running requests: which slot the layers get, its
bytes, and what the layers fold into it.

They damage the group `state`. Each returns its damage, or None if the scene offers no
opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.launches import poison
from sglang.faults.pools.state_scene import (
    after_forward,
    before_forward,
    choose_layer,
    find_continuing,
    find_tracks,
    find_victims,
    find_wrappable,
    flip_bit,
    live_slots,
    parts_of,
    places_around,
    states_of,
)
from sglang.faults.wrapping import wrap
from sglang.srt.layers.state.forward import StateForward

if TYPE_CHECKING:
    from sglang.faults.pools.scene import Damage, Scene, Victim

Fold = Callable[[Tensor, StateForward], Tensor]


# -- slots ---------------------------------------------------------------------------


def other_state_slot(scene: Scene) -> Damage | None:
    """Give the layers another request's slot for one row."""
    used = scene.forward_batch.req_pool_indices.tolist()
    for victim in find_wrappable(scene):
        others = [slot for slot in live_slots(scene) if slot != victim.req_row]
        if others:
            used[victim.batch_row] = scene.rng.choice(others)
            return with_slots(scene, victim, used)
    return None


def stale_state_slots(scene: Scene) -> Damage | None:
    """Give the layers the slots of the forward before, as if a graph's input was not
    filled."""
    if scene.previous is None:
        return None
    rows = scene.forward_batch.req_pool_indices.tolist()
    stale = scene.previous.req_pool_indices.tolist()[: len(rows)]
    used = stale + rows[len(stale) :]
    for victim in find_wrappable(scene):
        if used[victim.batch_row] not in (0, victim.req_row):
            return with_slots(scene, victim, used)
    return None


def early_state_free(scene: Scene) -> Damage | None:
    """Free the state of a running request."""
    for victim in find_continuing(scene):
        slots = torch.tensor([victim.req_row], device=scene.table.device)
        poison(states_of(scene).state, slots)
        return before_forward(victim)
    return None


def state_bytes(scene: Scene) -> Damage | None:
    """Change a bit of the state that a row goes on from."""
    for victim in find_continuing(scene):
        flip_bit(scene, victim.req_row)
        return before_forward(victim)
    return None


def with_slots(scene: Scene, victim: Victim, used: list[int]) -> Damage:
    """Give the layers the slots `used` for the rows of the batch, until the forward is
    over."""
    rows = find_victims(scene, min_prefix=0)
    slots = torch.tensor(used, device=scene.table.device)

    def elsewhere(make: Callable[..., StateForward], *made_of: Any) -> StateForward:
        return replace(make(*made_of), slots=slots)

    return replace(
        before_forward(victim),
        slot=used[victim.batch_row],
        places=places_around(rows, find_tracks(scene, rows), used),
        undo=wrap(StateForward, "of", elsewhere),
    )


# -- layers --------------------------------------------------------------------------


def skipped_fold(scene: Scene) -> Damage | None:
    """Do not call the operation of a layer."""
    rows = find_wrappable(scene, min_prefix=0)
    if not rows:
        return None
    layer = choose_layer(scene)

    def skipped(fold: Fold, packed: Tensor, state: StateForward) -> Tensor:
        return packed.new_zeros(packed.shape[0], layer.out_width)

    undo = wrap(layer, "fold", skipped)
    return after_forward(rows, find_tracks(scene, rows), undo=undo)


def double_fold(scene: Scene) -> Damage | None:
    """Call the operation of a layer twice."""
    # A row without a state begins anew each time.
    rows = find_wrappable(scene)
    if not rows:
        return None

    def twice(fold: Fold, packed: Tensor, state: StateForward) -> Tensor:
        out = fold(packed.clone(), state)
        fold(packed, state)
        return out

    undo = wrap(choose_layer(scene), "fold", twice)
    return after_forward(rows, find_tracks(scene, rows), undo=undo)


def skipped_state_store(scene: Scene) -> Damage | None:
    """Drop what a layer stores in the slot of one row."""
    rows = find_wrappable(scene, min_prefix=0)
    if not rows:
        return None
    victim, layer = rows[0], choose_layer(scene)

    def without_store(fold: Fold, packed: Tensor, state: StateForward) -> Tensor:
        parts = parts_of(state.layer(layer.layer_id))
        before = [part[victim.req_row].clone() for part in parts]
        out = fold(packed, state)
        for part, old in zip(parts, before, strict=True):
            part[victim.req_row] = old
        return out

    return after_forward([victim], undo=wrap(layer, "fold", without_store))
