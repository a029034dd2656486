"""The KV groups of one pool under the canary, and their page maps.

Every token of a group has the same lineage in all of them. The groups differ in slots,
and in where rows begin:

```
positions          0 ............ first_position ......... prefix .... end
full group         | verified                              | written   |
window group       | left the window    | verified         | written   |
```
The host's records (`ReqToTokenPool.record_group`) say which slot a token must have. The
mapping on the device, through which attention finds it, is not trusted.

A new kind of slots is a subclass here and a line in `pool_patcher.api`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.findings import STATUS_WORDS
from kv_canary.pool_checks import PoolChecks
from kv_canary.runtime.group import CanaryGroup
from kv_canary.view import ForwardView, KVReadView
from sglang.srt.kv_canary.runner.swa_divergence import SwaDivergence
from sglang.srt.mem_cache.groups.window_slots import WindowSlots

if TYPE_CHECKING:
    from kv_canary.evidence import Owner
    from kv_canary.reporter import OwnerOf
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.mem_cache.groups.kv_group import KVGroup
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode

LaunchReport = Callable[["ForwardBatch"], None]


class EngineGroup(CanaryGroup):
    """A group of this engine: what the scopes around a forward ask of every kind.

    Attributes:
        branch_checks: `checks` before a step over branches.
        decode_checks: `checks` before a decode step.
    """

    name: str
    branch_checks: PoolChecks
    decode_checks: PoolChecks

    @property
    def nbytes(self) -> int:
        """Bytes of the records, and of sums of KV."""
        sums = self.checks.fingerprint.sums
        return self.state.arena.nbytes + (0 if sums is None else sums.nbytes)

    @abstractmethod
    def view(
        self, view: ForwardView, forwards: Mapping[str, WindowForward]
    ) -> ForwardView:
        """A forward in this group's slots.

        Args:
            view: in the primary slots.
            forwards: what attention reads and writes in secondary groups, by name.
        """

    @abstractmethod
    def primary_slot(self, slot: int) -> int:
        """The primary slot of one of this group's; negative for none, as `slot` is."""

    @abstractmethod
    def owner_of(self, primary: OwnerOf) -> OwnerOf:
        """The owner of a slot of this group, by `primary`, which knows primary ones."""

    def launch_report(self, target: CanaryTarget) -> LaunchReport | None:
        """Gets every launch before it runs. None if this group reports nothing."""
        return None


class PoolGroup(EngineGroup):
    """The primary group of a pool: its slots are the allocator's.

    Args:
        rows: the tables of request rows.
        checks_tokens: whether the tokens of slots are compared when they are read.
        seeds: see `CanaryGroup`; the same tensor in all groups of a pool.

    Attributes:
        kv: the layers, slots and bytes.
        buffers: the canary's side of them.
        branch_checks: `checks` before a step over branches: no table holds their tokens
            after the first step.
        decode_checks: `checks` before a decode step, whose attention may compare the
            bytes that it reads.
    """

    compares_inputs = True
    """Whether the inputs of a forward are compared here: one group does it for all."""

    def __init__(
        self,
        kv: KVGroup,
        buffers: CanaryBuffers,
        *,
        rows: ReqToTokenPool,
        checks_tokens: bool,
        seeds: Tensor | None,
    ) -> None:
        self.kv = kv
        self.name = kv.name
        self.buffers = buffers
        checks = PoolChecks(
            page_size=buffers.layout.page_size,
            fingerprint=buffers.fingerprint,
            req_to_token=self._row_slots(rows),
            tokens=rows.token_table if checks_tokens else None,
            token_offset=buffers.kv_token_id_vs_position_offset,
            published=rows.token_table if self.compares_inputs else None,
        )
        super().__init__(state=buffers.state, checks=checks, seeds=seeds)
        self.branch_checks = dataclasses.replace(checks, tokens=None)
        self.decode_checks = checks
        if checks.fingerprint.sums is not None:
            self.decode_checks = dataclasses.replace(checks, compares_bytes=False)

    def free_primary(self, slots: Tensor) -> None:
        """`free` this group's slots of primary slots, int64 [n] on the host."""
        self.free(torch.from_numpy(self.kv.on_host(slots.numpy())))

    # -- the page map --------------------------------------------------------------

    def _row_slots(self, rows: ReqToTokenPool) -> Tensor:
        """Slots by request row and position, int32 [req_rows, W]."""
        return rows.req_to_token

    def listen(self) -> None:
        """Hear of slots that are freed apart from the primary ones."""

    def view(
        self, view: ForwardView, forwards: Mapping[str, WindowForward]
    ) -> ForwardView:
        return view

    def primary_slot(self, slot: int) -> int:
        return slot

    def owner_of(self, primary: OwnerOf) -> OwnerOf:
        return primary

    def idle_runs(self, cache: RadixCache) -> Callable[[TreeNode], bool]:
        """Whether only the cache holds the slots of a run, so that no forward checks
        them."""
        return _is_unlocked


class WindowGroup(PoolGroup):
    """The window slots of sliding layers."""

    compares_inputs = False

    def __init__(
        self,
        kv: KVGroup,
        buffers: CanaryBuffers,
        *,
        rows: ReqToTokenPool,
        checks_tokens: bool,
        seeds: Tensor | None,
    ) -> None:
        assert isinstance(kv.slots, WindowSlots)
        self.slots = kv.slots
        super().__init__(
            kv, buffers, rows=rows, checks_tokens=checks_tokens, seeds=seeds
        )
        # No slot of the window precedes its first one.
        size = STATUS_WORDS + buffers.capacities.max_rows
        self._no_slots = buffers.state.counters.new_full((size,), -1)

    def _row_slots(self, rows: ReqToTokenPool) -> Tensor:
        return rows.record_group(self.slots)

    def listen(self) -> None:
        self.slots.register_on_free(self.free)

    def view(
        self, view: ForwardView, forwards: Mapping[str, WindowForward]
    ) -> ForwardView:
        forward, read = forwards[self.name], view.reads[0]
        rows = forward.rows
        window = KVReadView(
            read_lens=rows.read_lens,
            page_table=rows.page_table,
            page_size=read.page_size,
            first_position=rows.first_position,
            prev_slots=self._no_slots[: view.num_rows],
            prefix_lens=rows.prefix_lens,
            positions=forward.positions,
            takes_new=read.takes_new,
            reach=self.slots.window - 1,
        )
        return dataclasses.replace(
            view, out_cache_loc=forward.cache_loc, reads=(window,), oracle=None
        )

    def primary_slot(self, slot: int) -> int:
        return self.slots.primary_slot(slot) if slot >= 0 else slot

    def owner_of(self, primary: OwnerOf) -> OwnerOf:
        def owner(slot: int) -> Owner:
            return primary(self.primary_slot(slot))

        return owner

    def idle_runs(self, cache: RadixCache) -> Callable[[TreeNode], bool]:
        (runs,) = (runs for runs in cache.groups if runs.slots is self.slots)
        return runs.is_idle

    def launch_report(self, target: CanaryTarget) -> LaunchReport | None:
        every = target.config.divergence_every
        return SwaDivergence(target, self, every=every).on_launch if every else None


def _is_unlocked(node: TreeNode) -> bool:
    return node.lock_ref <= 0
