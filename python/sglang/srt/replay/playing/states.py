"""The complete state that a forward starts from, to find where two runs diverge."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.records import SERIAL_MASK
from kv_canary.violation import POOLS

if TYPE_CHECKING:
    from kv_canary.view import KVReadView
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.kv_canary.state_group import StateGroup
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import KVCache

# Fields of a forward that are kept as numbers.
_INPUTS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "prefix_lens",
    "extend_lens",
)
# In larger pools only the slots that the forward reads are examined.
_WHOLE_POOL_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class State:
    """The state that one forward starts from: lists of numbers or digests, by name."""

    pool: str
    forward: int
    fields: dict[str, list[int] | str]


@dataclass(frozen=True, kw_only=True)
class StateDifference:
    """The first forward whose state differs, with the field and both values."""

    pool: str
    forward: int
    field: str
    ours: str
    others: str


def watch_states(scheduler: Scheduler) -> list[State]:
    """Return a list that receives the state of every forward from now on. It waits for
    the device at each forward and drops graphs, so do not use it on a serving machine.
    """
    states: list[State] = []
    for manager in scheduler.worker.canary_managers():
        manager.probe = _Probe(manager, scheduler.cache, states)
    return states


def first_difference(
    ours: Sequence[State], others: Sequence[State]
) -> StateDifference | None:
    """Return where two runs diverge, or None if they are equal as far as both went."""
    for one, other in zip(ours, others, strict=False):
        names = [name for name in one.fields if one.fields[name] != other.fields[name]]
        if (one.pool, one.forward) != (other.pool, other.forward):
            shown = [f"forward {s.forward} of the {s.pool}" for s in (one, other)]
            return StateDifference(
                pool=one.pool,
                forward=one.forward,
                field="order of forwards",
                ours=shown[0],
                others=shown[1],
            )
        if names:
            mine, theirs = one.fields[names[0]], other.fields[names[0]]
            shown = show_difference(mine, theirs)
            return StateDifference(
                pool=one.pool,
                forward=one.forward,
                field=names[0],
                ours=shown[0],
                others=shown[1],
            )
    return None


def show_difference(
    one: Sequence[object] | str, other: Sequence[object] | str
) -> list[str]:
    """Return both values, or the first differing entry of lists."""
    if isinstance(one, str) or isinstance(other, str):
        return [str(one), str(other)]
    if len(one) != len(other):
        return [f"{len(value)} entries" for value in (one, other)]
    at = next(i for i in range(len(one)) if one[i] != other[i])
    return [f"{value[at]} (entry {at})" for value in (one, other)]


class _Probe:
    """Records the states of one pool's forwards."""

    def __init__(
        self, manager: CanaryManager, cache: BasePrefixCache, states: list[State]
    ) -> None:
        self._target = manager.target
        self._cache = cache
        self._states = states
        # Serial of the first request, which differs between runs.
        self._base = -1

    def __call__(self, batch: ForwardBatch, views: Sequence[KVReadView]) -> None:
        target = self._target
        state = target.buffers.state
        slots = self._slots(batch)
        fields: dict[str, list[int] | str] = {
            name: getattr(batch, name).tolist() for name in _INPUTS
        }
        fields["req_to_token"] = slots.tolist()
        fields["read view"] = _digest(_tensors(views))
        kv = [source.buffer for source in self._pool().canary_sources()]
        is_small = sum(b.numel() * b.element_size() for b in kv) <= _WHOLE_POOL_BYTES
        if is_small:
            # Page 0 is scratch, written by padding.
            first = target.page_size
            slots = torch.arange(first, state.num_slots, device=state.head.device)
        if self._base < 0:
            self._base = int(batch.req_serial.min())
        records = (state.head[slots], state.tail[slots])
        fields["records"] = _digest(self._relative(words) for words in records)
        fields["KV bytes"] = _digest([buffer[:, slots] for buffer in kv])
        if target.states is not None:
            fields |= self._of_states(target.states)
        fields["prefix cache"] = _digest(
            torch.from_numpy(part)
            for run in self._cache.iter_cached_runs()
            for part in (run.tokens, run.slots)
        )
        self._states.append(
            State(
                pool=POOLS[target.is_draft],
                forward=int(state.clock.item()),
                fields=fields,
            )
        )

    def _of_states(self, states: StateGroup) -> dict[str, list[int] | str]:
        """Return records and bytes of recurrent states; slot 0 is scratch."""
        found: dict[str, list[int] | str] = {}
        records = states.state.head[1:], states.state.tail[1:]
        found["records of states"] = _digest(map(self._relative, records))
        tensors = [own[1:] for own in states.pool.bytes()]
        if states.pool.nbytes <= _WHOLE_POOL_BYTES:
            found["bytes of states"] = _digest(tensors)
        return found

    def _relative(self, words: Tensor) -> Tensor:
        """Return records [n, words] with serials relative to the first request."""
        serials = words[:, -1] & SERIAL_MASK
        relative = torch.where(serials > 0, serials - self._base, 0) & SERIAL_MASK
        relative += words[:, -1] & ~SERIAL_MASK
        return torch.cat((words[:, :-1], relative[:, None]), dim=1)

    def _pool(self) -> KVCache:
        return self._target.kv_pool.groups[0].tensors

    def _slots(self, batch: ForwardBatch) -> Tensor:
        """Return the slots in the device's table for the rows of the forward."""
        table = self._target.req_to_token_pool.req_to_token
        ends = (batch.prefix_lens + batch.extend_lens).tolist()
        rows = batch.req_pool_indices.tolist()
        parts = [table[row, :end] for row, end in zip(rows, ends, strict=True)]
        return torch.cat(parts).long() if parts else table[0, :0].long()


def _tensors(views: Sequence[KVReadView]) -> list[Tensor]:
    found = []
    for view in views:
        for field in dataclasses.fields(view):
            value = getattr(view, field.name)
            if isinstance(value, Tensor):
                found.append(value)
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
