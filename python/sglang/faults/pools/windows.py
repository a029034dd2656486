"""Faults in window slots: the mapping to them, their tables, bytes, records, frees.

They damage the group `swa`. Each returns its damage, or None if the scene offers no
opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sglang.faults.pools.scene import Damage, Scene, Victim
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.mem_cache.page_ledger import IntArray

EXTEND = ForwardMode.EXTEND


def stale_mapping(scene: Scene) -> Damage | None:
    """Leave the entry of a token that had the page before: it points to the window page
    of an older token of the same request."""
    for victim in scene.victims(min_prefix=2 * scene.target.page_size):
        pages = _window_pages(scene, victim)
        if len(pages) > 1:
            first, second = sorted(scene.rng.sample(range(len(pages)), 2))
            return _remap(scene, victim, pages[second], to=pages[first])
    return None


def req_to_token(scene: Scene) -> Damage | None:
    """Map a token to the window page of another request's."""
    victims = scene.victims()
    for victim in victims:
        pages = _window_pages(scene, victim)
        others = [
            page
            for other in victims
            if other.serial != victim.serial
            for page in _window_pages(scene, other)
            if page not in pages
        ]
        if pages and others:
            page, other_page = scene.rng.choice(pages), scene.rng.choice(others)
            return _remap(scene, victim, page, to=other_page)
    return None


def early_window_free(scene: Scene) -> Damage | None:
    """Free a window page one token too early: the next token reads it still."""
    for victim in scene.victims():
        pages = _window_pages(scene, victim)
        if not pages:
            continue
        positions = _positions(scene, victim, pages[0])
        windows = scene.windows.slots
        windows.drop(np.array(pages[:1]))
        windows.sync()
        return Damage(
            req_row=victim.req_row,
            serial=victim.serial,
            slot=positions[0] % scene.target.page_size,
            position=positions[0],
            places=_places(scene, positions, 0),
        )
    return None


def late_window(scene: Scene) -> Damage | None:
    """Let sliding layers read a table without the first page of the window."""
    size = scene.target.page_size
    found = [v for v in scene.victims() if len(_window_pages(scene, v)) > 1]
    if not found:
        return None

    def begin_late(made: WindowForward, i: int) -> None:
        rows = made.rows
        rows.page_table[i] = rows.page_table[i].roll(-1)
        rows.first_position[i] += size
        rows.prefix_lens[i] -= size
        rows.read_lens[i] -= size
        if made.positions is not None:
            made.positions.view(len(rows.prefix_lens), -1)[i] -= size

    return _change_forward(scene, found[0], begin_late, position=found[0].first_read)


def window_prefix_short(scene: Scene) -> Damage | None:
    """Tell sliding layers that a row's prefix is one token shorter."""
    if scene.forward_batch.forward_mode.is_decode:
        return None  # attention of one new token reads no prefix length
    found = scene.victims()
    if not found:
        return None
    victim = found[0]

    def shorten(made: WindowForward, i: int) -> None:
        made.rows.prefix_lens[i] -= 1

    return _change_forward(scene, victim, shorten, position=victim.prefix_len)


def window_node_positions(scene: Scene) -> Damage | None:
    """Give the nodes of a tree their positions in the whole request where sliding
    layers count from the window's first page."""
    size, window = scene.target.page_size, scene.windows.slots.window
    if scene.forward_batch.tree_mask is None:
        return None
    # The window begins after the first page.
    found = scene.victims(min_prefix=window - 1 + size)
    if not found:
        return None
    victim = found[0]

    def count_from_zero(made: WindowForward, i: int) -> None:
        assert made.positions is not None
        of_rows = made.positions.view(len(made.rows.prefix_lens), -1)
        of_rows[i] += made.rows.first_position[i]

    return _change_forward(scene, victim, count_from_zero, position=victim.prefix_len)


def _change_forward(
    scene: Scene,
    victim: Victim,
    change: Callable[[WindowForward, int], None],
    *,
    position: int,
) -> Damage | None:
    """Change what sliding layers are given for a row of the batch, until the forward is
    over. The report must name `position` and no slot."""
    backend = scene.target.attn_backend
    if not isinstance(backend, PagedAttnBackend):
        return None
    if scene.table.is_cuda and scene.forward_batch.forward_mode is not EXTEND:
        return None  # a graph makes it
    make = backend.group_forwards

    def changed(batch: ForwardBatch) -> dict[str, WindowForward]:
        made = make(batch)
        change(made[scene.group], victim.batch_row)
        return made

    vars(backend)["group_forwards"] = changed
    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        position=position,
        places=frozenset({(-1, position)}),
        undo=lambda: vars(backend).pop("group_forwards"),
    )


def _window_pages(scene: Scene, victim: Victim) -> list[int]:
    """Pages of the full group whose window pages the victim reads, oldest first."""
    pages, first = np.unique(_read_pages(scene, victim), return_index=True)
    return [int(page) for page in pages[np.argsort(first)]]


def _positions(scene: Scene, victim: Victim, page: int) -> list[int]:
    """The positions in a page of the full group that the victim reads."""
    places = np.flatnonzero(_read_pages(scene, victim) == page)
    return [victim.first_read + int(place) for place in places]


def _read_pages(scene: Scene, victim: Victim) -> IntArray:
    rows, size = scene.target.req_to_token_pool, scene.target.page_size
    slots = rows.row_slots(victim.req_row, victim.first_read, victim.prefix_len)
    pages: IntArray = slots.numpy() // size
    return pages


def _remap(scene: Scene, victim: Victim, page: int, *, to: int) -> Damage:
    """Give a page the entry of another one, on the device alone, until the forward is
    over."""
    size = scene.target.page_size
    entries = scene.windows.slots.mapping.view(-1, size)
    before = entries[page].clone()
    entries[page] = entries[to]
    positions = _positions(scene, victim, page)
    places = _places(scene, positions, int(entries[to, 0]))

    def undo() -> None:
        entries[page] = before

    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        slot=next(slot for slot, position in places if position == positions[0]),
        position=positions[0],
        places=places,
        undo=undo,
    )


def _places(
    scene: Scene, positions: list[int], first_slot: int
) -> frozenset[tuple[int, int]]:
    """Return the places of a page's positions as read in the page that begins with
    `first_slot`, and the position after the page."""
    size = scene.target.page_size
    begin = positions[0] - positions[0] % size
    # The token after the page has another predecessor; -1: whichever slot it has.
    after = (-1, begin + size)
    return frozenset((first_slot + i, begin + i) for i in range(size)) | {after}
