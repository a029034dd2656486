"""Faults in whose KV is taken for a request's: its tenant, adapter or contents.

Each is planted once, in one request, from outside of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.faults.wrapping import wrap
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import RadixKey
from sglang.srt.utils.salt_chain import FIRST_CONTENT_ID, Namespace

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.mem_cache.tree_node import TreeNode


@dataclass(kw_only=True)
class IdentityFault:
    """A fault that waits for its opportunity.

    Attributes:
        victim: id of the request that it was done to, or None until then.
        undo: restores the methods that it wraps.
    """

    scheduler: Scheduler
    victim: str | None = None
    undo: ExitStack = field(default_factory=ExitStack)

    def wrap(self, owner: Any, method: str, fault: Callable[..., Any]) -> None:
        """Call `fault` instead of a method until it has done its harm."""
        self.undo.callback(wrap(owner, method, fault))

    @contextmanager
    def instead(self, owner: Any, method: str, value: Any) -> Iterator[None]:
        """Scope in which a method of an object returns `value`."""
        restore = wrap(owner, method, lambda original, *args: value)
        try:
            yield
        finally:
            restore()

    def done(self, victim: Req) -> None:
        self.victim = victim.rid


Differs = Callable[[Namespace, Namespace], bool]


def _other_tenant(own: Namespace, other: Namespace) -> bool:
    return own.tenant != other.tenant and own[1:] == other[1:]


def _other_adapter(own: Namespace, other: Namespace) -> bool:
    return own.tenant == other.tenant and own.adapter != other.adapter


def _other_revision(own: Namespace, other: Namespace) -> bool:
    is_same = own[:2] == other[:2]
    return is_same and own.revision != other.revision


def _wrong_match(fault: IdentityFault, find: Callable[[Req, TreeNode], Any]) -> None:
    """Let one request hit the prefix that `find` returns as a key, if it is longer than
    its own."""

    def key(
        original: Callable[..., RadixKey], adder: PrefillAdder, req: Req, limit: int
    ) -> RadixKey:
        own = original(adder, req, limit)
        if fault.victim is not None or not limit:
            return own
        cache = fault.scheduler.cache
        found = len(cache.match_prefix(own))
        for node in list(cache.root.children.values()):
            parts = find(req, node)
            if parts is None:
                continue
            other = RadixKey(parts[0][:limit], parts[1], cache.bigram)
            if len(cache.match_prefix(other)) > found:
                fault.done(req)
                return other
        return own

    fault.wrap(PrefillAdder, "_key", key)


def _in_namespace(differs: Differs) -> Callable[[IdentityFault], None]:
    """Return what plants a hit in a namespace that differs in one part."""

    def find(req: Req, node: TreeNode) -> tuple[Any, str | None] | None:
        own, other = Namespace.of(req.namespace), Namespace.of(node.namespace)
        return (req.tokens, node.namespace) if differs(own, other) else None

    return lambda fault: _wrong_match(fault, find)


def content_left_out(fault: IdentityFault) -> None:
    """Let a prompt of embeddings hit the KV of other embeddings."""

    def find(req: Req, node: TreeNode) -> tuple[Any, str | None] | None:
        is_content = int(node.elements[0]) >= FIRST_CONTENT_ID
        if req.input_embeds is None or not is_content:
            return None
        if node.namespace != req.namespace or node.elements[0] == req.tokens[0]:
            return None
        return np.array(node.elements), node.namespace

    _wrong_match(fault, find)


def content_of_another(fault: IdentityFault) -> None:
    """Give the embeddings of one row of a prefill to another."""

    def forward_batch(
        original: Callable[..., Any], batch: ScheduleBatch, *args: Any, **options: Any
    ) -> Any:
        rows = [req for req in batch.reqs if req.input_embeds is not None]
        is_prefill = not batch.forward_mode.is_decode
        if fault.victim is not None or not is_prefill or len(rows) < 2:
            return original(batch, *args, **options)
        victim, other = rows[:2]
        own, others = victim.input_embeds, other.input_embeds
        assert own is not None and others is not None
        start = batch.prefix_lens()[batch.reqs.index(victim)]
        spans = (own.ids[start:], others.ids[start:])
        is_same = spans[0].tolist() == spans[1].tolist()
        if is_same or len(others.ids) < len(own.ids):
            return original(batch, *args, **options)
        fault.done(victim)
        count = len(own.ids)
        victim.input_embeds = type(own)(others.ids[:count], others.values[:count])
        try:
            return original(batch, *args, **options)
        finally:
            victim.input_embeds = own

    fault.wrap(ScheduleBatch, "forward_batch", forward_batch)


def adapter_of_another(fault: IdentityFault) -> None:
    """Let one forward multiply a row with the adapter of another row."""
    planted: list[ScheduleBatch] = []

    def forward_batch(
        original: Callable[..., Any], batch: ScheduleBatch, *args: Any, **options: Any
    ) -> Any:
        if planted == [batch]:
            # Only one forward of it was wrong.
            planted.clear()
            batch._rebuild_device_state()
        slots = batch._adapter_slots
        if fault.victim is None and slots is not None and len(set(slots.tolist())) > 1:
            row = int(np.flatnonzero(slots != slots[0])[0])
            fault.done(batch.reqs[row])
            planted.append(batch)
            slots[row] = slots[0]
            with fault.instead(batch, "_find_adapter_slots", slots):
                batch._rebuild_device_state()
        return original(batch, *args, **options)

    fault.wrap(ScheduleBatch, "forward_batch", forward_batch)


PLANTERS: Mapping[str, Callable[[IdentityFault], None]] = {
    "tenant_left_out": _in_namespace(_other_tenant),
    "adapter_left_out": _in_namespace(_other_adapter),
    "revision_left_out": _in_namespace(_other_revision),
    "content_left_out": content_left_out,
    "content_of_another": content_of_another,
    "adapter_of_another": adapter_of_another,
}


@contextmanager
def planted_identity(scheduler: Scheduler, name: str) -> Iterator[IdentityFault]:
    """Scope in which fault `name` is planted at its first opportunity."""
    fault = IdentityFault(scheduler=scheduler)
    with fault.undo:
        PLANTERS[name](fault)
        yield fault
