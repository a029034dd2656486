"""Faults in the inputs of a forward: its rows, tokens, slots to write and read tables.

Each returns its damage, or None where the scene offers no opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kv_canary.records import unpack_word0
from sglang.faults.pools.scene import Damage, Scene
from sglang.faults.pools.tables import repoint, seen_places
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend


def req_to_token(scene: Scene) -> Damage | None:
    """Point one position of a live row at another slot."""
    for victim in scene.victims():
        page_size = scene.target.page_size
        position = scene.rng.randrange(victim.prefix_len)
        # Paged attention reads the entry of the page's first position only.
        position -= position % page_size
        old = victim.slots[position]
        new = scene.rng.randint(1, _end_of_slots(scene) // page_size - 1) * page_size
        # Where another request begins, position 0 is sound; `alias_row` does that.
        begins = position == unpack_word0(int(scene.state.tail[new, 0]))[1] == 0
        if new != old and not begins:
            return repoint(scene, victim, {position: new}, at=position)
    return None


def _end_of_slots(scene: Scene) -> int:
    """The first slot that some reader of the table has no bytes for: a target's pool
    has none for the draft region."""
    region = scene.target.req_to_token_pool.region
    return scene.state.num_slots if region is None else region.first_slot


def alias_row(scene: Scene) -> Damage | None:
    """Point a whole live row at another request's slots."""
    victims = scene.victims()
    for victim in victims:
        for other in victims:
            length = min(victim.prefix_len, other.prefix_len)
            if other.req_row != victim.req_row and other.slots[0] != victim.slots[0]:
                # Where the other's slots end, or the victim's prefix does.
                at = min(length, victim.prefix_len - 1)
                entries = dict(enumerate(other.slots[:length]))
                return repoint(scene, victim, entries, at=at)
    return None


def recycle_row(scene: Scene) -> Damage | None:
    """Let a forward use the row of another request."""
    victims = scene.victims()
    if len(victims) < 2:
        return None
    victim, other = victims[:2]
    rows = scene.forward_batch.req_pool_indices
    rows[victim.batch_row] = other.req_row

    def undo() -> None:
        rows[victim.batch_row] = victim.req_row

    end = victim.prefix_len + victim.extend_len
    pool = scene.target.req_to_token_pool
    table = pool.row_slots(other.req_row, 0, end).tolist()
    written = {(victim.slots[p], p) for p in range(victim.prefix_len, end)}
    return Damage(
        req_row=other.req_row,
        serial=victim.serial,
        slot=victim.slots[victim.prefix_len],
        position=victim.prefix_len,
        places=frozenset(written | seen_places(table, scene.target.page_size)),
        undo=undo,
    )


def write_foreign(scene: Scene) -> Damage | None:
    """Let a row write its new token into a slot of another request's prefix."""
    victims = scene.victims()
    for victim in victims:
        for other in victims:
            if other.slots[0] == victim.slots[0] or victim.extend_len != 1:
                continue
            slot = scene.rng.choice(other.slots[: other.prefix_len])
            scene.forward_batch.out_cache_loc[victim.batch_row] = slot
            return Damage(
                req_row=victim.req_row,
                serial=victim.serial,
                slot=slot,
                position=victim.prefix_len,
                places=frozenset({(slot, victim.prefix_len)}),
            )
    return None


def write_own_prefix(scene: Scene) -> Damage | None:
    """Also give a slot that a row reads to the row's new token."""
    for victim in scene.victims(min_prefix=2):
        if victim.extend_len != 1:
            continue
        slot = victim.slots[scene.rng.randrange(victim.prefix_len - 1)]
        scene.forward_batch.out_cache_loc[victim.batch_row] = slot
        cell = scene.table[victim.req_row, victim.prefix_len]
        return Damage(
            req_row=victim.req_row,
            serial=victim.serial,
            slot=slot,
            position=victim.prefix_len,
            places=frozenset({(slot, victim.prefix_len)}),
            undo=_set(cell, slot),
        )
    return None


def input_token(scene: Scene) -> Damage | None:
    """Change the last input token of a row after it was published."""
    batch = scene.forward_batch
    if scene.target.is_draft or batch.parent_index is not None:
        return None
    for victim in scene.victims(min_prefix=0):
        at = victim.batch_row
        if batch.qo_indptr is not None:
            at = int(batch.qo_indptr[victim.batch_row]) + victim.extend_len - 1
        token = batch.input_ids[at]
        other = (int(token) + 1) % scene.target.vocab_size
        changed = victim.damage_at(victim.prefix_len + victim.extend_len - 1)
        return replace(changed, undo=_set(token, other))
    return None


def shift_view(scene: Scene) -> Damage | None:
    """Let attention read a table that is shifted by one page."""
    return _replace_view(scene, lambda table: table.roll(-1, dims=1))


def shorten_view(scene: Scene) -> Damage | None:
    """Let attention read a table whose first page is missing."""

    def shortened(table: torch.Tensor) -> torch.Tensor:
        cut = table.clone()
        cut[:, 0] = 0
        return cut

    return _replace_view(scene, shortened)


def _set(cell: torch.Tensor, value: int) -> Callable[[], None]:
    """Put `value` into a cell; returns a function that restores it."""
    before = cell.clone()
    cell.fill_(value)

    def undo() -> None:
        cell.copy_(before)

    return undo


def _replace_view(
    scene: Scene, change: Callable[[torch.Tensor], torch.Tensor]
) -> Damage | None:
    """Give the attention backend a changed table for one forward."""
    backend = scene.target.attn_backend
    if not isinstance(backend, PagedAttnBackend):
        return None
    if scene.forward_batch.forward_mode.is_decode and scene.table.is_cuda:
        return None  # a graph has captured the table's address
    victims = scene.victims(min_prefix=2 * scene.target.page_size)
    if not victims:
        return None
    before, page_size = backend.page_table, scene.target.page_size
    changed = backend.page_table = change(before)

    def restore() -> None:
        backend.page_table = before

    seen = {
        victim.req_row: seen_places(
            changed[victim.req_row]
            .repeat_interleave(page_size)[: len(victim.slots)]
            .tolist(),
            page_size,
        )
        for victim in scene.victims(min_prefix=0)
    }
    first = victims[0]
    return Damage(
        req_row=first.req_row,
        serial=first.serial,
        slot=next(s for s, position in seen[first.req_row] if position == 0),
        position=0,
        places=frozenset().union(*seen.values()),
        undo=restore,
    )
