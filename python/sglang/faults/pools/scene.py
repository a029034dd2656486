"""Input and output of a fault injector: the scene it works on, the damage it did."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kv_canary.faults.pool import flip_bytes
from sglang.faults.settings import FULL
from sglang.srt.kv_canary.groups import WindowGroup

# Value of the KV elements in a slot whose copy was dropped.
STALE = 0.3125

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode


class When(Enum):
    """The point of a launch at which a fault is planted.

    BEFORE_STEP (a draft step) and ON_MOVE (between a move's bytes and its records)
    exist outside of CUDA graphs only.
    """

    BEFORE_FORWARD = "before"
    AFTER_FORWARD = "after"
    BEFORE_STEP = "step"
    ON_MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One injected fault.

    Fields:
        req_row, serial: the request that will read or write wrongly, or 0. slot,
        position: a place that the report must name, or -1 if only the reader knows it.
        places: every (slot, position) at which the fault itself may be reported; slot
            -1 stands for any slot.
        other: (serial, position) of the second request, where two swap something.
        prompt: tokens of a request that would meet the damage, once request `serial`
            has ended; None if any would.
        undo: repairs what the engine itself relies on, after the forward or draft step;
            None if the damage may stay.
    """

    req_row: int = 0
    serial: int = 0
    slot: int = -1
    position: int = -1
    places: frozenset[tuple[int, int]] = frozenset()
    other: tuple[int, int] | None = None
    prompt: list[int] | None = None
    undo: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A live row of a forward. `slots` is indexed by position; the row reads positions
    from `first_read` up to `prefix_len`."""

    batch_row: int
    req_row: int
    serial: int
    prefix_len: int
    extend_len: int
    slots: list[int]
    first_read: int = 0

    @property
    def read_slots(self) -> list[int]:
        return self.slots[self.first_read : self.prefix_len]

    def read_position(self, rng: random.Random) -> int:
        """A position that the row reads."""
        return rng.randrange(self.first_read, self.prefix_len)

    def damage_at(self, position: int) -> Damage:
        """Damage of the slot that this row has at `position`, and of nothing else."""
        slot = self.slots[position]
        return Damage(
            req_row=self.req_row,
            serial=self.serial,
            slot=slot,
            position=position,
            places=frozenset({(slot, position)}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A move of slots that is complete.

    Fields:
        dst, src: int64 [n].
        head, tail: the records of all slots before it.
    """

    dst: Tensor
    src: Tensor
    head: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The engine at the moment of an injection.

    Fields:
        forward_batch: of the launch, or of the draft step.
        group: the group of slots that is damaged; victims list slots of this group.
        previous: batch of the launch before, if the driver saw it.
        model: the target's, if the driver was given it.
        step, backend: the draft step and its attention backend; -1 and None elsewhere.
        moves: the move that was just made, or None.
    """

    target: CanaryTarget
    forward_batch: ForwardBatch
    cache: BasePrefixCache | None
    previous: ForwardBatch | None = None
    model: nn.Module | None = None
    group: str = FULL
    rng: random.Random = field(default_factory=random.Random)
    step: int = -1
    backend: AttentionBackend | None = None
    moves: Moves | None = None

    @property
    def branches(self) -> int:
        """Rows of each request: the branches of a draft step."""
        rows = self.forward_batch.req_pool_indices
        return int((rows == rows[0]).sum())

    @property
    def windows(self) -> WindowGroup:
        """Of a scene in the group of window slots."""
        group = self.target.group(self.group)
        assert isinstance(group, WindowGroup)
        return group

    @property
    def buffers(self) -> CanaryBuffers:
        return self.target.buffers if self.group == FULL else self.windows.buffers

    @property
    def state(self) -> CanaryState:
        return self.buffers.state

    @property
    def pool(self) -> KVCache:
        """The bytes of the scene's group."""
        primary, *secondary = self.target.kv_pool.groups
        groups = {group.name: group for group in secondary}
        return groups.get(self.group, primary).tensors

    @property
    def table(self) -> torch.Tensor:
        """`req_to_token` on the device; on the CPU also the host's mirror."""
        return self.target.req_to_token_pool.req_to_token

    def victims(self, *, min_prefix: int = 1) -> list[Victim]:
        """Live rows that read at least `min_prefix` slots, in random order."""
        batch, pool = self.forward_batch, self.target.req_to_token_pool
        fields = torch.stack(
            (
                batch.req_pool_indices,
                batch.req_serial,
                batch.prefix_lens,
                batch.extend_lens,
            )
        )
        found = [
            Victim(
                batch_row=i,
                req_row=row,
                serial=serial,
                prefix_len=prefix,
                extend_len=extend,
                slots=self.own_slots(pool.row_slots(row, 0, prefix + extend).numpy()),
                first_read=self._first_read(prefix),
            )
            for i, (row, serial, prefix, extend) in enumerate(fields.t().tolist())
            if row and prefix >= min_prefix
        ]
        self.rng.shuffle(found)
        return found

    def own_slots(self, slots: IntArray) -> list[int]:
        """Slots of the scene's group for slots of the full one, 0: none."""
        if self.group != FULL:
            slots = self.windows.slots.map_slots(slots)
        own: list[int] = slots.tolist()
        return own

    def is_unused(self, node: TreeNode) -> bool:
        """Whether the cache alone holds the slots of a cached run in this group."""
        if self.group == FULL:
            return node.lock_ref == 0
        return node.marks[0].has_slots and not node.marks[0].lock_ref

    def _first_read(self, prefix_len: int) -> int:
        if self.group == FULL:
            return 0
        return max(prefix_len - self.windows.slots.window + 1, 0)

    def flip_kv(self, slot: int) -> None:
        """Change bytes of K or V of `slot`: within the sample where only that is
        fingerprinted, anywhere else otherwise."""
        buffers = self.buffers
        group = buffers.layout.groups[0]
        flip_bytes(buffers.state, buffers.fingerprint, group, slot, self.rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlanter:
    """Plants a fault of the catalogue.

    Fields:
        apply: plants it and returns the damage, or None where the scene offers no
            opportunity.
        when: the point at which it is called.
    """

    apply: Callable[[Scene], Damage | None]
    when: When = When.BEFORE_FORWARD
