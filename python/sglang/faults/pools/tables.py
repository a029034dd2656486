"""Changed entries of request rows, and the places that a report may name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sglang.faults.pools.scene import Damage, Scene, Victim


def slot_places(slots: Sequence[int], first: int = 0) -> frozenset[tuple[int, int]]:
    """(slot, position) of the positions from `first` on."""
    return frozenset((slot, position) for position, slot in enumerate(slots, first))


def seen_places(row: Sequence[int], page_size: int) -> frozenset[tuple[int, int]]:
    """(slot, position) that paged attention reads of a row with these entries: of each
    page it looks at the first one."""
    firsts = range(0, len(row), page_size)
    return slot_places(
        [row[first] + i for first in firsts for i in range(page_size)][: len(row)]
    )


def repoint(
    scene: Scene, victim: Victim, entries: Mapping[int, int], *, at: int
) -> Damage:
    """Change entries (position -> slot) of the victim's row until the forward is over;
    the host's copy of the row stays. The report must name position `at`."""
    table, row = scene.table, victim.req_row
    page_size = scene.target.page_size
    positions = torch.tensor(list(entries), device=table.device)
    slots = torch.tensor(list(entries.values()), dtype=torch.int32)
    before = table[row, positions].clone()
    table[row, positions] = slots.to(table.device)
    changed = [entries.get(p, slot) for p, slot in enumerate(victim.slots)]
    seen = seen_places(changed, page_size)
    # The record after the last changed one has another predecessor.
    ends = {p - p % page_size + page_size for p in entries}
    touched = {p for end in ends for p in range(end - page_size, end + 1)}

    def undo() -> None:
        table[row, positions] = before

    return Damage(
        req_row=row,
        serial=victim.serial,
        slot=next(slot for slot, position in seen if position == at),
        position=at,
        places=frozenset(place for place in seen if place[1] in touched),
        undo=undo,
    )
