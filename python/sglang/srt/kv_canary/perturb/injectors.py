"""Faults that can be planted in a running engine, by name.

Each damages what real faults damaged (`docs/kv_canary.md` names the cases) and returns
what it did, or None where the scene offers no opportunity. All of them are memory-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from kv_canary.launches import move_records, poison
from kv_canary.perturb import flip_record as corrupt_record
from kv_canary.records import POISON_WORD, Reason, unpack_word0
from sglang.srt.kv_canary.perturb.damage import Damage, Scene, Victim
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info_v2 import EagleDraftInput

# What lies in a slot whose copy was dropped.
STALE = 0.3125

_READ = (
    Reason.VERIFY_LINEAGE
    | Reason.VERIFY_POSITION
    | Reason.VERIFY_TOKEN
    | Reason.VERIFY_FREED
    | Reason.READ_SET
)


class When(Enum):
    """At which point of a launch an injector runs.

    BEFORE_STEP (a draft step) and ON_MOVE (between a move's bytes and its records) come
    by outside of CUDA graphs only.
    """

    BEFORE_FORWARD = "before"
    AFTER_FORWARD = "after"
    BEFORE_STEP = "step"
    ON_MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injector:
    """Fields:
    apply: plants the fault.
    reasons: at least one of them must be reported.
    when: the point at which it is planted.
    """

    apply: Callable[[Scene], Damage | None]
    reasons: Reason
    when: When = When.BEFORE_FORWARD


def flip_table_entry(scene: Scene) -> Damage | None:
    """One position of a live row points at another slot."""
    for victim in scene.victims():
        page_size = scene.target.page_size
        position = scene.rng.randrange(victim.prefix_len)
        # What paged attention reads is the entry of the page's first position.
        position -= position % page_size
        old = victim.slots[position]
        last = scene.state.num_slots // page_size - 1
        new = scene.rng.randint(1, last) * page_size
        # Where another request begins, position 0 is sound; `alias_row` does that.
        begins = position == unpack_word0(int(scene.state.tail[new, 0]))[1] == 0
        if new != old and not begins:
            return _repoint(scene, victim, {position: new}, at=position)
    return None


def alias_row(scene: Scene) -> Damage | None:
    """A live row points wholly at another request's slots."""
    victims = scene.victims()
    for victim in victims:
        for other in victims:
            length = min(victim.prefix_len, other.prefix_len)
            if other.req_row != victim.req_row and other.slots[0] != victim.slots[0]:
                # Where the other's slots end, or the victim's prefix does.
                at = min(length, victim.prefix_len - 1)
                entries = dict(enumerate(other.slots[:length]))
                return _repoint(scene, victim, entries, at=at)
    return None


def recycle_row(scene: Scene) -> Damage | None:
    """A forward uses the row that belongs to another request."""
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
        places=frozenset(written | _seen(table, scene.target.page_size)),
        undo=undo,
    )


def flip_used_kv(scene: Scene) -> Damage | None:
    """KV bytes of a slot that this forward reads."""
    for victim in scene.victims():
        position = scene.rng.randrange(victim.prefix_len)
        scene.flip_kv(victim.slots[position])
        return _at(victim, position)
    return None


def flip_kv_after_write(scene: Scene) -> Damage | None:
    """KV bytes of a slot that this forward has just written, and that stays."""
    mode, spec = scene.forward_batch.forward_mode, scene.forward_batch.spec_info
    if scene.target.is_draft and mode.is_decode:
        return None  # the extend after verification writes these slots again
    accepted = spec.accept_lens if isinstance(spec, EagleDraftInput) else None
    for victim in scene.victims(min_prefix=0):
        staying = victim.extend_len
        if mode is ForwardMode.TARGET_VERIFY:
            staying = 1  # the root; what else is accepted is not known yet
        elif accepted is not None:
            staying = int(accepted[victim.batch_row])
        position = victim.prefix_len + scene.rng.randrange(staying)
        scene.flip_kv(victim.slots[position])
        return _at(victim, position)
    return None


def flip_cached_kv(scene: Scene) -> Damage | None:
    """KV bytes of a slot that only the prefix cache holds."""
    if not isinstance(scene.cache, RadixCache):
        return None
    nodes = [node for node in scene.cache.iter_nodes() if node.lock_ref == 0]
    if not nodes:
        return None
    node = scene.rng.choice(nodes)
    offset = scene.rng.randrange(len(node.slots))
    slot, position = int(node.slots[offset]), node.start + offset
    scene.flip_kv(slot)
    return Damage(slot=slot, position=position, places=frozenset({(slot, position)}))


def flip_record(scene: Scene) -> Damage | None:
    """A word of a record that this forward reads."""
    for victim in scene.victims():
        position = scene.rng.randrange(victim.prefix_len)
        corrupt_record(scene.state, victim.slots[position], scene.rng)
        return _at(victim, position)
    return None


def free_early(scene: Scene) -> Damage | None:
    """Pages of a live row are freed and owned again while the row still reads them."""
    for victim in scene.victims():
        freed = victim.slots[: victim.prefix_len]
        slots = torch.tensor(freed)
        poison(scene.state, slots.to(scene.state.head.device))
        return replace(_at(victim, 0), places=_places(freed))
    return None


def move_without_records(scene: Scene) -> Damage | None:
    """KV bytes of one page move to a free page; its records stay behind."""
    return _move_page(scene, with_bytes=True, with_record=False)


def move_without_bytes(scene: Scene) -> Damage | None:
    """A page's records move to a free page; the copy of the KV bytes is dropped."""
    return _move_page(scene, with_bytes=False, with_record=True)


def write_into_foreign_prefix(scene: Scene) -> Damage | None:
    """A row writes its new token into a slot of another request's prefix."""
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


def write_into_own_prefix(scene: Scene) -> Damage | None:
    """A slot that a row reads is given to its new token, too."""
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


def change_input(scene: Scene) -> Damage | None:
    """A forward reads another token than was published for its last new one."""
    batch = scene.forward_batch
    if scene.target.is_draft or batch.parent_index is not None:
        return None
    for victim in scene.victims(min_prefix=0):
        at = victim.batch_row
        if batch.qo_indptr is not None:
            at = int(batch.qo_indptr[victim.batch_row]) + victim.extend_len - 1
        token = batch.input_ids[at]
        other = (int(token) + 1) % scene.target.vocab_size
        changed = _at(victim, victim.prefix_len + victim.extend_len - 1)
        return replace(changed, undo=_set(token, other))
    return None


def shift_view(scene: Scene) -> Damage | None:
    """Attention reads a table that is shifted by one page."""
    return _replace_view(scene, lambda table: table.roll(-1, dims=1))


def shorten_view(scene: Scene) -> Damage | None:
    """Attention reads a table whose first page is missing."""

    def shortened(table: torch.Tensor) -> torch.Tensor:
        cut = table.clone()
        cut[:, 0] = 0
        return cut

    return _replace_view(scene, shortened)


def swap_cached_prefixes(scene: Scene) -> Damage | None:
    """Two cached prefixes trade slots: a later hit gets the other one's KV."""
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
    places = _places(head.tolist()) | _places(other.tolist())
    return Damage(prompt=first.elements.tolist(), places=places)


INJECTORS: Mapping[str, Injector] = {
    "req_to_token": Injector(
        apply=flip_table_entry, reasons=_READ | Reason.READ_SCRATCH
    ),
    "alias_row": Injector(apply=alias_row, reasons=_READ),
    "recycle_row": Injector(apply=recycle_row, reasons=_READ | Reason.WRITE_FOREIGN),
    "real_kv_used": Injector(apply=flip_used_kv, reasons=Reason.VERIFY_REAL_KV),
    "real_kv_post_forward": Injector(
        apply=flip_kv_after_write,
        reasons=Reason.VERIFY_REAL_KV,
        when=When.AFTER_FORWARD,
    ),
    "real_kv_unused_cache": Injector(
        apply=flip_cached_kv, reasons=Reason.VERIFY_REAL_KV
    ),
    "record": Injector(apply=flip_record, reasons=Reason.VERIFY_TORN),
    "early_free": Injector(apply=free_early, reasons=Reason.VERIFY_FREED),
    "move_without_records": Injector(
        apply=move_without_records, reasons=Reason.VERIFY_FREED
    ),
    "move_without_bytes": Injector(
        apply=move_without_bytes, reasons=Reason.VERIFY_REAL_KV
    ),
    "write_foreign": Injector(
        apply=write_into_foreign_prefix, reasons=Reason.WRITE_FOREIGN
    ),
    "write_own_prefix": Injector(
        apply=write_into_own_prefix, reasons=Reason.WRITE_FOREIGN
    ),
    "input_token": Injector(apply=change_input, reasons=Reason.WRITE_TOKEN),
    "shift_view": Injector(
        apply=shift_view, reasons=Reason.READ_SET | Reason.READ_SCRATCH
    ),
    "shorten_view": Injector(apply=shorten_view, reasons=Reason.READ_SCRATCH),
    "phantom_prefix": Injector(
        apply=swap_cached_prefixes,
        reasons=Reason.VERIFY_TOKEN | Reason.VERIFY_LINEAGE,
    ),
}


def _at(victim: Victim, position: int) -> Damage:
    slot = victim.slots[position]
    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        slot=slot,
        position=position,
        places=frozenset({(slot, position)}),
    )


def _set(cell: torch.Tensor, value: int) -> Callable[[], None]:
    """Put `value` into a cell; returns what takes it back."""
    before = cell.clone()
    cell.fill_(value)

    def undo() -> None:
        cell.copy_(before)

    return undo


def _places(slots: Sequence[int]) -> frozenset[tuple[int, int]]:
    """(slot, position) of positions 0, 1, ..."""
    return frozenset((slot, position) for position, slot in enumerate(slots))


def _seen(row: Sequence[int], page_size: int) -> frozenset[tuple[int, int]]:
    """(slot, position) that paged attention reads of a row with these entries: of each
    page it looks at the first one."""
    firsts = range(0, len(row), page_size)
    return _places(
        [row[first] + i for first in firsts for i in range(page_size)][: len(row)]
    )


def _repoint(
    scene: Scene, victim: Victim, entries: Mapping[int, int], *, at: int
) -> Damage:
    """Change entries (position -> slot) of the victim's row until the forward is over;
    the host goes on with its own books. The report must name position `at`."""
    table, row = scene.table, victim.req_row
    page_size = scene.target.page_size
    positions = torch.tensor(list(entries), device=table.device)
    slots = torch.tensor(list(entries.values()), dtype=torch.int32)
    before = table[row, positions].clone()
    table[row, positions] = slots.to(table.device)
    changed = [entries.get(p, slot) for p, slot in enumerate(victim.slots)]
    seen = _seen(changed, page_size)
    # The record behind the last changed one has another predecessor.
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


def _move_page(scene: Scene, *, with_bytes: bool, with_record: bool) -> Damage | None:
    """Move a page of a prefix to one that nobody owns, and point the row there."""
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
        for canary_source in scene.target.kv_pool.canary_sources():
            buffer = canary_source.buffer
            buffer[:, dst] = buffer[:, src] if with_bytes else STALE
        if with_record:
            move_records(state, dst=dst, src=src)
        entries = {first + i: target + i for i in range(page_size)}
        damage = _repoint(scene, victim, entries, at=position)
        undo = damage.undo
        assert undo is not None

        def repair(undo: Callable[[], None] = undo, dst: torch.Tensor = dst) -> None:
            undo()
            poison(state, dst)

        return replace(damage, undo=repair)
    return None


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
        victim.req_row: _seen(
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
