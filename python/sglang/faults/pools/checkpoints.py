"""Faults in checkpoints of recurrent state: when they are taken, their bytes, and the
copy to the slot of a request that goes on from one.

They damage the group `state`. Each returns its damage, or None if the scene offers no
opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.records import (
    KIND_MASK,
    SERIAL_BITS,
    SERIAL_MASK,
    Record,
    WriterKind,
)
from sglang.faults.pools.scene import Damage, Scene, Victim
from sglang.faults.pools.state_scene import (
    at_hit,
    before_forward,
    choose_layer,
    choose_restored,
    find_checkpoints,
    find_movable,
    find_restored,
    find_tracks,
    find_victims,
    first_tokens,
    flip_bit,
    is_replayed,
    path_tokens,
    places_around,
    request_slots,
    states_of,
)
from sglang.faults.pools.states import with_slots
from sglang.faults.wrapping import wrap
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.forward.state_plan import StateCopies
from sglang.srt.layers.ops.state.shared.tracks import CHUNK

if TYPE_CHECKING:
    from sglang.faults.pools.states import Fold
    from sglang.srt.layers.state.forward import StateForward
    from sglang.srt.mem_cache.state_pool import StatePool

Copy = Callable[[StateCopies], None]


# -- when they are taken -------------------------------------------------------------


def short_checkpoint(scene: Scene) -> Damage | None:
    """Tell a layer a length for a checkpoint that is one chunk too short."""
    tracks = find_movable(scene)
    if not tracks:
        return None
    track = tracks[0]

    def short(fold: Fold, packed: Tensor, state: StateForward) -> Tensor:
        assert state.tracks is not None
        lens = state.tracks.lens.clone()
        lens[track.victim.batch_row, track.column] -= CHUNK
        return fold(packed, replace(state, tracks=replace(state.tracks, lens=lens)))

    return Damage(
        req_row=track.victim.req_row,
        serial=track.victim.serial,
        slot=track.slot,
        position=track.position,
        places=frozenset({track.place}),
        undo=wrap(choose_layer(scene), "fold", short),
    )


def misplaced_checkpoint(scene: Scene) -> Damage | None:
    """Take a checkpoint one chunk before the place that the host notes."""
    plan = scene.forward_batch.state_plan
    for track in find_movable(scene):
        assert plan is not None and plan.track_lens is not None
        victim, length = track.victim, track.position + 1
        plan.track_lens[victim.batch_row, track.column] -= CHUNK
        tokens = first_tokens(scene, victim, length + 1)
        return at_hit(scene, tokens, length, victim)
    return None


def late_checkpoint(scene: Scene) -> Damage | None:
    """Take a checkpoint again, one step after the place that the host notes: a token
    later, or where the verification ended whose path reached it."""
    mode = scene.forward_batch.forward_mode
    if mode not in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        return None
    # A verification's own tokens are not folded yet.
    new, step = (1, 1) if mode.is_decode else (0, scene.target.tree_depth + 1)
    states, first = states_of(scene), request_slots(scene).stop
    records = states.state.tail[first:]
    kinds = records[:, Record.WORD3] >> SERIAL_BITS & KIND_MASK
    is_saved = (kinds == WriterKind.MOVE) | (kinds == WriterKind.VERIFY)
    lengths = (records[:, Record.WORD0] >> 32) + 1
    for victim in find_victims(scene):
        is_own = (records[:, Record.WORD3] ^ victim.serial) & SERIAL_MASK == 0
        late_by = victim.prefix_len + new - lengths
        is_late = (late_by > 0) & (late_by <= step)
        found = torch.nonzero(is_own & is_saved & is_late).flatten()
        if len(found):
            length, dst = int(lengths[found[0]]), found[:1] + first
            states.pool.copy(_pair(dst, victim.req_row))
            tokens = first_tokens(scene, victim, length + 1)
            return at_hit(scene, tokens, length, victim)
    return None


def checkpoint_bytes(scene: Scene) -> Damage | None:
    """Change a bit of a checkpoint that only the prefix cache has."""
    found = find_checkpoints(scene)
    if not found:
        return None
    slot, node = scene.rng.choice(found)
    flip_bit(scene, slot)
    # A sweep names the slot, a hit that of the row.
    assert scene.cache is not None
    tokens = path_tokens(node, bigram=scene.cache.bigram)
    return replace(at_hit(scene, tokens, node.end), slot=slot)


# -- copies --------------------------------------------------------------------------


def other_checkpoint(scene: Scene) -> Damage | None:
    """Restore the checkpoint of another prefix."""
    found = choose_restored(scene, [slot for slot, _ in find_checkpoints(scene)])
    if found is None:
        return None
    victim, other = found
    return _restore(scene, victim, lambda copy, pair: copy(_pair(pair.dst, other)))


def skipped_restore(scene: Scene) -> Damage | None:
    """Do not restore a checkpoint."""
    for victim, _ in find_restored(scene):
        return _restore(scene, victim, lambda copy, pair: None)
    return None


def restore_without_conv(scene: Scene) -> Damage | None:
    """Restore a checkpoint without the inputs of the convolutions."""
    pool = states_of(scene).pool
    for victim, _ in find_restored(scene):
        return _restore(scene, victim, partial(_copy_without_conv, pool))
    return None


def torn_restore(scene: Scene) -> Damage | None:
    """Overwrite a checkpoint with a running request's state when the inputs of the
    convolutions have been copied."""
    pool, found = states_of(scene).pool, choose_restored(scene, request_slots(scene))
    if found is None:
        return None
    victim, other = found

    def torn(copy: Copy, pair: StateCopies) -> None:
        pool.conv[pair.dst] = pool.conv[pair.src]
        copy(_pair(pair.src, other))
        _copy_without_conv(pool, copy, pair)

    return _restore(scene, victim, torn)


def resumed_in_old_slot(scene: Scene) -> Damage | None:
    """Restore a row's checkpoint into a slot that belongs to another running request by
    now, and let the layers go on there."""
    rows = scene.forward_batch.req_pool_indices.tolist()
    found = choose_restored(scene, set(request_slots(scene)).difference(rows))
    if found is None or is_replayed(scene):
        return None
    victim, old = found
    rows[victim.batch_row] = old

    def to_old(copy: Copy, pair: StateCopies) -> None:
        copy(replace(pair, dst=torch.full_like(pair.dst, old)))

    restored, damage = _restore(scene, victim, to_old), with_slots(scene, victim, rows)

    def undo() -> None:
        for part in (restored, damage):
            assert part.undo is not None
            part.undo()

    return replace(damage, undo=undo)


def _restore(
    scene: Scene, victim: Victim, change: Callable[[Copy, StateCopies], None]
) -> Damage:
    """Let `change` make the copy from a row's checkpoint, instead of the pool."""

    def changed(copy: Copy, copies: StateCopies) -> None:
        is_own = copies.dst == victim.req_row
        for rows, make in ((~is_own, copy), (is_own, partial(change, copy))):
            if rows.any():
                make(StateCopies(dst=copies.dst[rows], src=copies.src[rows]))

    return replace(
        before_forward(victim),
        # The layers count on from what was restored.
        places=places_around([victim], find_tracks(scene, [victim])),
        undo=wrap(states_of(scene).pool, "copy", changed),
    )


def _copy_without_conv(pool: StatePool, copy: Copy, copies: StateCopies) -> None:
    def others(tensors: Callable[[], list[Tensor]]) -> list[Tensor]:
        return [tensor for tensor in tensors() if tensor is not pool.conv]

    undo = wrap(pool, "_tensors", others)
    copy(copies)
    undo()


def _pair(dst: Tensor, src: int) -> StateCopies:
    return StateCopies(dst=dst, src=torch.full_like(dst, src))
