"""Plants the catalogue's faults in SGLang, before a decode or a verification."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kv_canary.engines.sglang.batch import read_lengths
from kv_canary.faults.catalogue import by_host_name
from kv_canary.faults.fault import HostEngine

Due = tuple[str, int, int]
"""(request, slot, position) that must be named; slot -1 stands for any slot."""


@dataclass(kw_only=True, slots=True)
class RunnerScene:
    """A decode, or a verification of trees, that is about to run.

    Fields:
        batch: its `ForwardBatch`; pool, table: the runner's; table: int32 [rows,
            columns]. free: free slots.
        used: slots whose damage was reported, or that a forward with a fault wrote, so
            that each is reported once. borrowed: free slots that were read.
    """

    batch: Any
    pool: Any
    table: Tensor
    free: list[int]
    rng: random.Random
    used: set[int] = field(default_factory=set)
    borrowed: set[int] = field(default_factory=set)

    def rows(self, count: int) -> list[int]:
        """Return rows of the batch, in random order."""
        return self.rng.sample(range(self.batch.batch_size), count)

    def line(self, row: int) -> Tensor:
        return self.table[int(self.batch.req_pool_indices[row])]

    def length(self, row: int) -> int:
        """Return the number of tokens before the forward."""
        return int(read_lengths(self.batch).prefix[row])

    def position(self, row: int) -> int:
        """Return a position in the row's prefix whose slot was not used yet."""
        line = self.line(row).tolist()
        free = [p for p in range(self.length(row)) if line[p] not in self.used]
        position = self.rng.choice(free)
        self.used.add(line[position])
        return position

    def readers(self, slot: int) -> list[Due]:
        """Return everyone who reads a slot in this forward."""
        found = []
        for row in range(self.batch.batch_size):
            line = self.line(row)[: self.length(row)].tolist()
            if slot in line:
                found.append((self.batch.rids[row], slot, line.index(slot)))
        return found

    def halves(self) -> list[list[Tensor]]:
        """Return the tensors of all layers: of K and of V, or of the latent."""
        k = getattr(self.pool, "k_buffer", None)
        return [self.pool.kv_buffer] if k is None else [k, self.pool.v_buffer]


Planted = Iterator[list[Due]]


@contextmanager
def _bytes(
    layers: list[Tensor], slot: int, change: Callable[[Tensor], object]
) -> Planted:
    before = [layer[slot].clone() for layer in layers]
    for layer in layers:
        change(layer[slot])
    yield []
    for layer, old in zip(layers, before, strict=True):
        layer[slot].copy_(old)


@contextmanager
def _values(tensor: Tensor, *places: Any) -> Iterator[None]:
    """Restore these places when the block is left."""
    before = [tensor[place].clone() for place in places]
    yield
    for place, old in zip(places, before, strict=True):
        tensor[place] = old


@contextmanager
def overwritten_slot(scene: RunnerScene) -> Planted:
    """Overwrite K of all layers in a slot that is read."""
    (row,) = scene.rows(1)
    slot = int(scene.line(row)[scene.position(row)])
    with _bytes(scene.halves()[0], slot, lambda values: values.fill_(1)):
        yield scene.readers(slot)


@contextmanager
def flipped_byte(scene: RunnerScene) -> Planted:
    """Flip a bit in one byte of V in one layer."""
    (row,) = scene.rows(1)
    slot = int(scene.line(row)[scene.position(row)])
    layer = scene.rng.choice(scene.halves()[-1])

    def flip(values: Tensor) -> None:
        whole = values.view(-1).view(torch.uint8)
        whole[scene.rng.randrange(len(whole))] ^= 1

    with _bytes([layer], slot, flip):
        yield scene.readers(slot)


@contextmanager
def swapped_entries(scene: RunnerScene) -> Planted:
    """Swap two entries of a row of the table."""
    (row,) = scene.rows(1)
    line, a = scene.line(row), scene.position(row)
    b = scene.position(row)
    with _values(line, a, b):
        first, second = int(line[a]), int(line[b])
        line[a], line[b] = second, first
        rid = scene.batch.rids[row]
        yield [(rid, second, a), (rid, first, b)]


@contextmanager
def foreign_entry(scene: RunnerScene) -> Planted:
    """Replace an entry of the table by another request's, for another position."""
    row, other = scene.rows(2)
    line, a = scene.line(row), scene.position(row)
    places = [p for p in range(scene.length(other)) if p != a]
    with _values(line, a):
        slot = int(scene.line(other)[scene.rng.choice(places)])
        line[a] = slot
        yield [(scene.batch.rids[row], slot, a)]


@contextmanager
def stale_entry(scene: RunnerScene) -> Planted:
    """Replace an entry of the table by a freed slot."""
    (row,) = scene.rows(1)
    line, a = scene.line(row), scene.position(row)
    slot = scene.rng.choice([s for s in scene.free if s not in scene.borrowed])
    scene.borrowed.add(slot)
    with _values(line, a):
        line[a] = slot
        yield [(scene.batch.rids[row], slot, a)]


@contextmanager
def scratch_entry(scene: RunnerScene) -> Planted:
    """Replace an entry of the table by 0."""
    (row,) = scene.rows(1)
    line, a = scene.line(row), scene.position(row)
    with _values(line, a):
        line[a] = 0
        yield [(scene.batch.rids[row], 0, a)]


@contextmanager
def wrong_slot(scene: RunnerScene) -> Planted:
    """Write a new token to a slot outside its column."""
    (row,) = scene.rows(1)
    slots, place = scene.batch.out_cache_loc, scene.length(row)
    wrong = scene.rng.choice(scene.free)
    with _values(slots, row):
        slots[row] = wrong
        yield [(scene.batch.rids[row], wrong, place)]


@contextmanager
def one_slot_for_two(scene: RunnerScene) -> Planted:
    """Make two rows write to one slot."""
    row, other = scene.rows(2)
    slots = scene.batch.out_cache_loc
    with _values(slots, row):
        slots[row] = slots[other]
        yield [(scene.batch.rids[row], int(slots[other]), scene.length(row))]


@contextmanager
def wrong_token(scene: RunnerScene) -> Planted:
    """Replace the input by a token that was not sampled."""
    (row,) = scene.rows(1)
    ids = scene.batch.input_ids
    with _values(ids, row):
        ids[row] = (ids[row] + 1) % 256
        slot = int(scene.batch.out_cache_loc[row])
        yield [(scene.batch.rids[row], slot, scene.length(row))]


@contextmanager
def wrong_position(scene: RunnerScene) -> Planted:
    """Compute the input at the preceding position."""
    (row,) = scene.rows(1)
    positions = scene.batch.positions
    with _values(positions, row):
        positions[row] -= 1
        slot, place = int(scene.batch.out_cache_loc[row]), scene.length(row)
        yield [(scene.batch.rids[row], slot, p) for p in (place - 1, place)]


@contextmanager
def short_length(scene: RunnerScene) -> Planted:
    """Make a row read one token fewer than it has."""
    (row,) = scene.rows(1)
    lens, place = scene.batch.seq_lens, scene.length(row)
    with _values(lens, row):
        lens[row] -= 1
        yield [(scene.batch.rids[row], -1, p) for p in (place - 2, place - 1, place)]


@contextmanager
def other_row(scene: RunnerScene) -> Planted:
    """Make a row of the batch read another request's row of the table."""
    row, other = scene.rows(2)
    indices, rid = scene.batch.req_pool_indices, scene.batch.rids[row]
    with _values(indices, row):
        place = scene.length(row)
        indices[row] = indices[other]
        yield [(rid, -1, p) for p in range(place + 1)]


@contextmanager
def moved_bytes(scene: RunnerScene) -> Planted:
    """Copy K and V of another slot into a slot, without the record."""
    (row,) = scene.rows(1)
    line, a = scene.line(row), scene.position(row)
    slot, source = int(line[a]), int(line[0 if a else 1])
    everything = [layer for half in scene.halves() for layer in half]
    before = [layer[slot].clone() for layer in everything]
    for layer in everything:
        layer[slot] = layer[source]
    yield scene.readers(slot)
    for layer, old in zip(everything, before, strict=True):
        layer[slot] = old


PLANTERS: Mapping[str, Callable[[RunnerScene], Any]] = {
    name: globals()[name] for name in by_host_name(HostEngine.SGLANG)
}
"""By fault name, which is also the function's name. Each is a context around the
forward that yields what is due."""

IN_TREES = (
    "overwritten_slot",
    "flipped_byte",
    "swapped_entries",
    "foreign_entry",
    "stale_entry",
    "scratch_entry",
    "moved_bytes",
)
"""Faults of a prefix, which a verification reads as a decode does."""
