"""Faults of stores: K and V of a new token go to another slot, or nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.faults.steps.site import Fault, FaultSite
    from sglang.srt.forward.batch import ForwardBatch, ForwardMode
    from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOf:
    """Forwards whose stores are damaged: of a mode, in the target's or draft's pool."""

    mode: ForwardMode
    is_draft: bool = False

    def matches(self, batch: ForwardBatch) -> bool:
        is_draft = isinstance(batch.spec_info, EagleDraftInput)
        return batch.forward_mode is self.mode and is_draft == self.is_draft


def store_further(forward: StoreOf) -> Callable[[FaultSite], None]:
    """Store one new token a slot further, in one layer."""

    def slot_of(slot: int, num_slots: int) -> int:
        return slot + 1 if slot + 1 < num_slots else slot - 1

    return lambda site: _misplace(site, forward, slot_of, layers=1)


def store_nowhere(forward: StoreOf) -> Callable[[FaultSite], None]:
    """Store one new token in the scratch page, in all layers: in no slot of its own."""
    return lambda site: _misplace(site, forward, lambda slot, num: 0, layers=None)


def _misplace(
    site: FaultSite,
    forward: StoreOf,
    slot_of: Callable[[int, int], int],
    *,
    layers: int | None,
) -> None:
    """Store one token of a forward in the slot `slot_of` instead.

    Args:
        layers: the number of layers that are wrong, from the first; None for all.
    """
    damaged: ForwardBatch | None = None
    slots: Tensor | None = None
    stores = 0

    def store(
        original: Fault,
        backend: PagedAttnBackend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> None:
        nonlocal damaged, slots, stores
        if forward.matches(batch) and not site.harmed:
            slots = _one_changed(site, batch, slot_of)
            damaged = batch
        if batch is damaged and slots is not None and stores != layers:
            stores += 1
            batch = dataclasses.replace(batch, out_cache_loc=slots)
        original(backend, q, k, v, layer, batch)

    site.wrap(PagedAttnBackend, "store", store)
    # A kernel that stores elsewhere is called with the right slots all the same.
    for manager in site.scheduler.worker.canary_managers():
        site.wrap(manager.calls, "begin", lambda begin, batch, *reads: None)


def _one_changed(
    site: FaultSite, batch: ForwardBatch, slot_of: Callable[[int, int], int]
) -> Tensor | None:
    """Return the slots of a batch's new tokens with one of them changed."""
    for row in site.candidates()[:1]:
        assert site.batch is not None
        first, end = _places(batch, row, requests=len(site.batch))
        place = site.rng.randrange(first, end)
        slots = batch.out_cache_loc.clone()
        num_slots = site.target.token_to_kv_pool.size
        slots[place] = slot_of(int(slots[place]), num_slots)
        site.harm(row)
        return slots
    return None


def _places(batch: ForwardBatch, row: int, *, requests: int) -> tuple[int, int]:
    """The new tokens of a request, over all of its branches."""
    if batch.qo_indptr is not None:
        return int(batch.qo_indptr[row]), int(batch.qo_indptr[row + 1])
    branches = len(batch.req_pool_indices) // requests
    return row * branches, (row + 1) * branches
