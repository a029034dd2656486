"""Faults of speculative decoding, in draft steps, moves and the draft's pool.

Each returns its damage, or None where the scene offers no opportunity. Faults of draft
steps and moves work outside of CUDA graphs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_canary.records import unpack_word0, unpack_word3
from sglang.faults.pools.scene import STALE, Damage, Scene, Victim
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.kv_canary.kernels import poison
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """A draft branch about to write its newest element.

    Fields:
        row: of the batch, requests x branches.
        element: the place of that element among those the branch reads.
        table, table_row: where the backend reads its slots: first slots of pages.
        page_size: slots of an entry of the table.
    """

    victim: Victim
    row: int
    element: int
    table: Tensor
    table_row: int
    page_size: int

    @property
    def entry(self) -> tuple[int, int]:
        return self.table_row, self.element // self.page_size

    def damage(
        self,
        *,
        slot: int,
        position: int | None = None,
        undo: Callable[[], None] | None = None,
    ) -> Damage:
        """The damage of reading the page of `slot` in the place of that of a position
        (default: of the newest element)."""
        position = self.element if position is None else position
        begin = position - position % self.page_size
        first = slot - slot % self.page_size
        end = min(begin + self.page_size, self.element + 1)
        return Damage(
            req_row=self.victim.req_row,
            serial=self.victim.serial,
            slot=slot,
            position=position,
            places=frozenset((first + p - begin, p) for p in range(begin, end)),
            undo=undo,
        )


def _branches(scene: Scene) -> list[_Branch]:
    """The branches of a draft step, in random order."""
    backend, target = scene.backend, scene.target
    is_step = target.is_draft and scene.forward_batch.forward_mode.is_decode
    if not is_step or not isinstance(backend, PagedAttnBackend):
        return []
    (view,) = backend.read_view(scene.forward_batch)
    return [
        _Branch(
            victim=victim,
            row=victim.batch_row,
            element=victim.prefix_len,
            table=backend.page_table,
            table_row=victim.batch_row if scene.branches > 1 else victim.req_row,
            page_size=view.page_size,
        )
        for victim in scene.victims()
    ]


def branch_offset(scene: Scene) -> Damage | None:
    """Let a branch write and read where its neighbour does: its offset in the row is
    wrong."""
    if scene.branches == 1:
        return None
    slots = scene.forward_batch.out_cache_loc
    for branch in _branches(scene):
        if branch.row % scene.branches == 0:
            continue
        wrong = int(slots[branch.row - 1])
        slots[branch.row] = wrong
        row, column = branch.entry
        branch.table[row, column] = branch.table[row - 1, column]
        return branch.damage(slot=wrong)
    return None


def wrong_ancestor(scene: Scene) -> Damage | None:
    """Let a branch read what another branch drafted in the step before, and not its
    parent."""
    if scene.branches == 1 or scene.step == 0:
        return None
    for branch in _branches(scene):
        row, position = branch.table_row, branch.element - 1
        column = position // branch.page_size
        first = row - row % scene.branches
        others = branch.table[first : first + scene.branches, column].tolist()
        wrong = next((page for page in others if page != others[row - first]), None)
        if wrong is None:
            continue  # all branches have the same parent
        undo = _restored((branch.table, (row, column)))
        branch.table[row, column] = wrong
        slot = wrong + position % branch.page_size
        return branch.damage(slot=slot, position=position, undo=undo)
    return None


def short_reserve(scene: Scene) -> Damage | None:
    """Take a branch's slot out of the row, as if the reserve were too small: entries
    after its end name the scratch page."""
    for branch in _branches(scene):
        slot = branch.element % branch.page_size
        slots = scene.forward_batch.out_cache_loc
        undo = _restored((slots, branch.row), (branch.table, branch.entry))
        slots[branch.row] = slot
        branch.table[branch.entry] = 0
        return branch.damage(slot=slot, undo=undo)
    return None


def short_branch_table(scene: Scene) -> Damage | None:
    """Take the page that the newest step reads out of a branch's table (27360)."""
    for branch in _branches(scene):
        undo = _restored((branch.table, branch.entry))
        branch.table[branch.entry] = 0
        slot = branch.element % branch.page_size
        return branch.damage(slot=slot, undo=undo)
    return None


def small_index_buffer(scene: Scene) -> Damage | None:
    """Clear the tables of the last branches, as if sized without the factor top-k
    (27338)."""
    topk = scene.branches
    bs = scene.forward_batch.batch_size
    first = bs // topk
    if topk == 1:
        return None
    for branch in _branches(scene):
        if branch.row != first:
            continue  # the first one whose table is empty is the one to be named
        undo = _restored((branch.table, slice(first, bs)))
        branch.table[first:bs] = 0
        return Damage(
            req_row=branch.victim.req_row,
            serial=branch.victim.serial,
            slot=0,
            position=0,
            places=frozenset(
                (p % branch.page_size, p) for p in range(branch.element + 1)
            ),
            undo=undo,
        )
    return None


def idle_row_write(scene: Scene) -> Damage | None:
    """Let a row that has become padding write into a live slot of another request's
    prefix (catalogue 36)."""
    batch, branches = scene.forward_batch, _branches(scene)
    for branch in branches:
        for other in branches:
            if other.victim.req_row == branch.victim.req_row:
                continue
            position = scene.rng.randrange(other.victim.prefix_len - scene.step)
            slot = other.victim.slots[position]
            rows, slots = batch.req_pool_indices, batch.out_cache_loc
            undo = _restored((rows, branch.row), (slots, branch.row))
            rows[branch.row], slots[branch.row] = 0, slot
            return Damage(
                slot=slot,
                position=branch.element,
                places=frozenset({(slot, branch.element), (slot, position)}),
                other=(other.victim.serial, position),
                undo=undo,
            )
    return None


def _restored(
    *parts: tuple[Tensor, int | slice | tuple[int, int]],
) -> Callable[[], None]:
    """Return a function that restores these parts of tensors."""
    kept = [(tensor, index, tensor[index].clone()) for tensor, index in parts]

    def undo() -> None:
        for tensor, index, values in kept:
            tensor[index] = values

    return undo


def skip_draft_extend(scene: Scene) -> Damage | None:
    """Skip the draft extend of a request: its rows in the draft's pool, and their
    records, stay as drafting left them."""
    found = _accepting(scene)
    if found is None:
        return None
    victim, accepted = found
    state, pool = scene.state, scene.target.kv_pool
    slots = torch.tensor(victim.slots[victim.prefix_len :], device=state.head.device)
    kept = [
        (source.buffer, source.buffer[:, slots].clone())
        for source in pool.canary_sources()
    ]
    records = [(part, part[slots].clone()) for part in (state.head, state.tail)]
    lineage = state.expected_lineage[victim.req_row].clone()

    def undo() -> None:
        for buffer, values in kept:
            buffer[:, slots] = values
        for part, words in records:
            part[slots] = words
        state.expected_lineage[victim.req_row] = lineage

    return _stale(victim, accepted, undo=undo)


def drop_draft_extend_rows(scene: Scene) -> Damage | None:
    """Lose K and V of a draft extend's accepted rows after its tail launch."""
    found = _accepting(scene)
    if found is None:
        return None
    victim, accepted = found
    begin = victim.prefix_len
    slots = torch.tensor(victim.slots[begin : begin + accepted])
    _spoil(scene, slots)
    return _stale(victim, accepted)


def _accepting(scene: Scene) -> tuple[Victim, int] | None:
    """A request of a draft extend, and the number of tokens it has gained."""
    batch = scene.forward_batch
    spec = batch.spec_info
    if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2:
        return None
    assert isinstance(spec, EagleDraftInput) and spec.accept_lens is not None
    for victim in scene.victims():
        return victim, int(spec.accept_lens[victim.batch_row])
    return None


def _stale(
    victim: Victim, accepted: int, *, undo: Callable[[], None] | None = None
) -> Damage:
    positions = range(victim.prefix_len, victim.prefix_len + accepted)
    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        slot=victim.slots[positions[-1]],
        position=positions[-1],
        places=frozenset((victim.slots[p], p) for p in positions),
        undo=undo,
    )


def no_draft_prefix(scene: Scene) -> Damage | None:
    """Lose the draft's KV of a prefix that was found in the cache (catalogue 41)."""
    if scene.forward_batch.forward_mode is not ForwardMode.EXTEND:
        return None
    if not scene.target.is_draft:
        return None
    for victim in scene.victims():
        slots = torch.tensor(victim.slots[: victim.prefix_len])
        poison(scene.state, slots.to(scene.state.head.device))
        _spoil(scene, slots)
        return Damage(
            req_row=victim.req_row,
            serial=victim.serial,
            slot=victim.slots[0],
            position=0,
            places=frozenset((victim.slots[p], p) for p in range(victim.prefix_len)),
        )
    return None


def _spoil(scene: Scene, slots: Tensor) -> None:
    for source in scene.target.kv_pool.canary_sources():
        source.buffer[:, slots.to(source.buffer.device)] = STALE


def moved_without_record(scene: Scene) -> Damage | None:
    """Move KV and not its record, of an accepted token or of a copied tail."""
    return _break_move(scene, with_bytes=True, with_record=False)


def record_without_kv(scene: Scene) -> Damage | None:
    """Move a record and not its KV."""
    return _break_move(scene, with_bytes=False, with_record=True)


def skipped_move(scene: Scene) -> Damage | None:
    """Leave a slot out of the copies of a prefix's tail: its old content stays."""
    return _break_move(scene, with_bytes=False, with_record=False)


def _break_move(scene: Scene, *, with_bytes: bool, with_record: bool) -> Damage | None:
    """Break one pair of a move whose target held something else."""
    moves, state, batch = scene.moves, scene.state, scene.forward_batch
    assert moves is not None
    dst, src = moves.dst.tolist(), moves.src.tolist()
    live = {
        serial: row
        for row, serial in zip(
            batch.req_pool_indices.tolist(), batch.req_serial.tolist(), strict=True
        )
        if row
    }
    pairs = [
        i
        for i, (to, of) in enumerate(zip(dst, src, strict=True))
        if to != of and not torch.equal(moves.tail[to, :2], moves.tail[of, :2])
    ]
    scene.rng.shuffle(pairs)
    for i in pairs:
        record = moves.tail[src[i]].tolist()
        _, position = unpack_word0(record[0])
        serial = unpack_word3(record[3]).serial
        if serial not in live or position < 0:
            continue  # a tail that another request wrote
        if not with_bytes:
            _spoil(scene, torch.tensor([dst[i]]))
        if not with_record:
            state.head[dst[i]] = moves.head[dst[i]]
            state.tail[dst[i]] = moves.tail[dst[i]]
        return Damage(
            req_row=live[serial],
            serial=serial,
            slot=dst[i],
            position=position,
            # The record after it has another predecessor then.
            places=frozenset({(dst[i], position), (-1, position + 1)}),
        )
    return None
