"""What faults in recurrent states look for in a scene, and the damage they report.

A row's state lies in the slot with the row's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary.records import POISON_WORD, TOKEN_MASK, Record
from sglang.faults.pools.scene import Damage, Scene, Victim
from sglang.faults.settings import FULL
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.ops.state.shared.tracks import CHUNK
from sglang.srt.layers.state.layer import StateLayer
from sglang.srt.mem_cache.base_prefix_cache import element_tokens
from sglang.srt.mem_cache.groups.state_runs import StateMark
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.kv_canary.state_group import StateGroup
    from sglang.srt.mem_cache.state_pool import LayerState
    from sglang.srt.mem_cache.tree_node import TreeNode

Place = tuple[int, int]


class Track(NamedTuple):
    """A checkpoint that a prefill takes.

    Fields:
        victim: whose it is. column: of the plan's tensors.
        slot: of the checkpoint. position: of the last token in it.
    """

    victim: Victim
    column: int
    slot: int
    position: int

    @property
    def place(self) -> Place:
        return self.slot, self.position


# -- what there is -------------------------------------------------------------------


def states_of(scene: Scene) -> StateGroup:
    states = scene.target.states
    assert states is not None, "a fault of recurrent states in a model without any"
    return states


def is_replayed(scene: Scene) -> bool:
    """Whether a CUDA graph runs the layers, past anything that is wrapped."""
    mode = scene.forward_batch.forward_mode
    return scene.table.is_cuda and mode is not ForwardMode.EXTEND


def find_victims(scene: Scene, *, min_prefix: int = 1) -> list[Victim]:
    """Return live rows with at least `min_prefix` tokens in their state, in random
    order. Their `slots` are KV slots."""
    return replace(scene, group=FULL).victims(min_prefix=min_prefix)


def find_wrappable(scene: Scene, *, min_prefix: int = 1) -> list[Victim]:
    """Return `find_victims` of a forward whose layers can be wrapped."""
    return [] if is_replayed(scene) else find_victims(scene, min_prefix=min_prefix)


def find_restored(scene: Scene) -> list[tuple[Victim, int]]:
    """Return the rows that begin from a checkpoint, and its slot."""
    plan = scene.forward_batch.state_plan
    if plan is None or plan.restore is None:
        return []
    copies = plan.restore
    sources = dict(zip(copies.dst.tolist(), copies.src.tolist(), strict=True))
    rows = find_victims(scene)
    return [(row, sources[row.req_row]) for row in rows if row.req_row in sources]


def find_continuing(scene: Scene) -> list[Victim]:
    """Return the rows that go on from the state in their slot."""
    restored = {row.req_row for row, _ in find_restored(scene)}
    return [row for row in find_victims(scene) if row.req_row not in restored]


def find_tracks(scene: Scene, rows: Sequence[Victim]) -> list[Track]:
    """Return the checkpoints that a prefill takes of these rows."""
    plan = scene.forward_batch.state_plan
    if plan is None or plan.track_lens is None or plan.track_slots is None:
        return []
    lens, slots = plan.track_lens.tolist(), plan.track_slots.tolist()
    return [
        Track(row, column, slots[row.batch_row][column], row.prefix_len + length - 1)
        for row in rows
        for column, length in enumerate(lens[row.batch_row])
        if length
    ]


def find_movable(scene: Scene) -> list[Track]:
    """Return the last checkpoint of each row, if it can be taken a chunk earlier."""
    rows = find_victims(scene, min_prefix=0)
    last = {track.victim.batch_row: track for track in find_tracks(scene, rows)}
    return [
        track
        for track in last.values()
        if (track.position + 1 - track.victim.prefix_len) % CHUNK == 0
    ]


def find_checkpoints(scene: Scene) -> list[tuple[int, TreeNode]]:
    """Return the slots of the prefix cache's checkpoints, and the runs they end."""
    if not isinstance(scene.cache, RadixCache):
        return []
    return [
        (mark.slot, node)
        for node in scene.cache.iter_nodes()
        for mark in node.marks
        if isinstance(mark, StateMark) and mark.slot
    ]


def choose_restored(scene: Scene, slots: Iterable[int]) -> tuple[Victim, int] | None:
    """Return a row that begins from a checkpoint, and one of `slots` that holds the
    state of another prefix."""
    tail, slots = states_of(scene).state.tail, list(slots)
    words, lineages = tail[:, Record.WORD0].tolist(), tail[:, Record.LINEAGE].tolist()
    for victim, source in find_restored(scene):
        others = [
            slot
            for slot in slots
            if words[slot] != POISON_WORD and lineages[slot] != lineages[source]
        ]
        if others:
            return victim, scene.rng.choice(others)
    return None


def request_slots(scene: Scene) -> range:
    """Return the state slots of request rows."""
    return range(1, scene.target.req_to_token_pool.size + 1)


def live_slots(scene: Scene) -> list[int]:
    """Return the slots of request rows that hold a state."""
    words = states_of(scene).state.tail[:, Record.WORD0].tolist()
    return [slot for slot in request_slots(scene) if words[slot] != POISON_WORD]


def choose_layer(scene: Scene) -> StateLayer:
    """Return a layer that has a state."""
    assert scene.model is not None, "this fault needs the model"
    layers = [part for part in scene.model.modules() if isinstance(part, StateLayer)]
    return scene.rng.choice(layers)


def parts_of(layer: LayerState) -> list[Tensor]:
    matrix = [] if layer.matrix is None else [layer.matrix]
    sums = [of.kept for of in (layer.conv_sums, layer.matrix_sums) if of is not None]
    return [layer.conv, *matrix, layer.conv_folded, layer.matrix_folded, *sums]


def flip_bit(scene: Scene, slot: int) -> None:
    """Change a bit in a slot of state."""
    pool = states_of(scene).pool
    parts = [pool.conv] if pool.matrix is None else [pool.conv, pool.matrix]
    cells = scene.rng.choice(parts)[slot].view(-1).view(torch.uint8)
    cells[scene.rng.randrange(len(cells))] ^= 1 << scene.rng.randrange(8)


# -- tokens --------------------------------------------------------------------------


def first_tokens(scene: Scene, victim: Victim, length: int) -> list[int]:
    """Return the first tokens of a row, new ones included."""
    batch = scene.forward_batch
    table = scene.target.req_to_token_pool.token_table
    known: list[int] = table[victim.req_row, : victim.prefix_len].tolist()
    if batch.qo_indptr is not None:
        begin, end = batch.qo_indptr[victim.batch_row :][:2].tolist()
        known += batch.input_ids[begin:end].tolist()
    return known[:length]


def path_tokens(node: TreeNode, *, bigram: bool) -> list[int]:
    """Return the tokens of a cached prefix, from the root on, and in a cache of pairs
    the one after them."""
    last, elements = node, [node.elements]
    while last.start:
        assert last.parent is not None
        last = last.parent
        elements.insert(0, last.elements)
    tokens = [
        token
        for part in elements
        for token in element_tokens(part, bigram=bigram).tolist()
    ]
    return [*tokens, int(node.elements[-1]) & TOKEN_MASK] if bigram else tokens


# -- damage --------------------------------------------------------------------------


def places_around(
    rows: Sequence[Victim],
    checkpoints: Iterable[Track],
    used: Sequence[int] | None = None,
) -> frozenset[Place]:
    """Return the places of these rows before and after a forward, and of checkpoints.

    Args:
        used: slots by batch row; defaults to the rows' own.
    """
    places = {track.place for track in checkpoints}
    for row in rows:
        slot = row.req_row if used is None else used[row.batch_row]
        places.add((slot, row.prefix_len - 1))
        places.add((slot, row.prefix_len + row.extend_len - 1))
    return frozenset(places)


def before_forward(victim: Victim) -> Damage:
    """Damage of the state that a row goes on from."""
    slot, position = victim.req_row, victim.prefix_len - 1
    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        slot=slot,
        position=position,
        places=frozenset({(slot, position)}),
    )


def after_forward(
    rows: Sequence[Victim],
    checkpoints: Iterable[Track] = (),
    *,
    undo: Callable[[], None],
) -> Damage:
    """Damage of the states that a forward leaves."""
    victim = rows[0]
    return Damage(
        req_row=victim.req_row,
        serial=victim.serial,
        slot=victim.req_row,
        position=victim.prefix_len + victim.extend_len - 1,
        places=places_around(rows, checkpoints),
        undo=undo,
    )


def at_hit(
    scene: Scene, tokens: list[int], length: int, victim: Victim | None = None
) -> Damage:
    """Damage of the checkpoint after `length` of `tokens`, of `victim` if the cache
    does not have it yet. The next request that begins with them meets it, in its own
    slot. A cache of pairs is only hit with the token after them."""
    cache, position = scene.cache, length - 1
    assert cache is not None
    tokens = tokens[: length + cache.bigram]
    return Damage(
        serial=0 if victim is None else victim.serial,
        position=position,
        places=frozenset({(-1, position)}),
        prompt=[*tokens, scene.rng.randrange(scene.target.vocab_size)],
    )
