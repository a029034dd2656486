"""Order of the waiting queue, and admission against the budgets of a prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import usable_size

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.tier_loads import TierLoads
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, RadixKey
    from sglang.srt.mem_cache.groups.runs import GroupRuns

# A request is expected to sample at most this many more tokens: without a bound, one
# large max_new_tokens would keep all others waiting.
CLIP_MAX_NEW_TOKENS = 4096
# A request waits for one that is being prefilled if that gives it this many more tokens
# of cached prefix.
MIN_SHARED_TOKENS = 32
# Sorting a longer queue by match length costs more than it saves.
LPM_MAX_QUEUE = 128


def order_by_longest_match(waiting: list[Req], cache: BasePrefixCache) -> list[Req]:
    """Sort healed requests first, then by longest cached prefix; ties keep arrival
    order.
    """
    if len(waiting) > LPM_MAX_QUEUE:
        return waiting
    lengths = {
        req.serial: cache.match_length(
            cache.key(req.tokens[: req.cacheable_prefix_len()], namespace=req.namespace)
        )
        for req in waiting
    }
    return sorted(waiting, key=lambda req: (not req.heals.count, -lengths[req.serial]))


def order_by_priority(waiting: list[Req], *, low_first: bool) -> list[Req]:
    """Sort healed requests first, then by priority, without a priority last; ties keep
    their order.
    """

    def rank(req: Req) -> tuple[bool, bool, int]:
        priority = req.priority or 0
        return (
            not req.heals.count,
            req.priority is None,
            priority if low_first else -priority,
        )

    return sorted(waiting, key=rank)


SCHEDULE_POLICIES: dict[str, Callable[[list[Req], BasePrefixCache], list[Req]]] = {
    "fcfs": lambda waiting, cache: waiting,
    "lpm": order_by_longest_match,
}


class NewTokenRatio:
    """Share of their remaining tokens that running requests are expected to need.

    Starts careful, decays while memory suffices, and is reset from the actual output
    when a request had to be retracted.
    """

    INITIAL = 0.7
    MIN_FACTOR = 0.14
    DECAY_STEPS = 600
    RETRACT_MARGIN_STEPS = 20

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(self.INITIAL * conservativeness, 1.0)
        self._minimum = self._initial * self.MIN_FACTOR
        self._decay = (self._initial - self._minimum) / self.DECAY_STEPS
        self.value = self._initial

    def on_decode(self) -> None:
        self.value = max(self.value - self._decay, self._minimum)

    def on_retract(self, reqs: Sequence[Req]) -> None:
        """Set the ratio from the still running `reqs`."""
        generated = sum(r.output_len + self.RETRACT_MARGIN_STEPS for r in reqs)
        wanted = sum(r.output_len + r.remaining_new_tokens for r in reqs) + 1
        self.value = min(generated / wanted, 1.0)

    def on_idle(self) -> None:
        self.value = self._initial


class Admission(Enum):
    """Outcome of `PrefillAdder.add`."""

    ADDED = "added"
    DEFERRED = "deferred"  # a shared prefix is being computed or loaded now
    NO_BUDGET = "no budget"
    NO_ADAPTER_SLOT = "no slot for its adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBudget:
    """Bounds of one prefill batch.

    Fields:
        max_prefill_tokens: tokens in the batch; a single longer prompt may exceed it.
        chunk_tokens: longest prefill of one forward, or None without chunking.
        max_new_reqs: number of free rows in `req_to_token`.
        decode_reserve: slots that a request keeps beyond its tokens (speculation).
        max_adapters: adapters that running requests may have.
    """

    max_prefill_tokens: int
    chunk_tokens: int | None
    max_new_reqs: int
    decode_reserve: int = 0
    max_adapters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNeed:
    """The numbers that decide whether a waiting request would be admitted now.

    Fields:
        num_tokens, num_new_tokens: known tokens, and tokens it may still sample.
        cached: tokens in its cached prefix.
        slots: slots it would take until its end, in whole pages.
        reserved: slots that other requests are expected to take.
        usable: free and evictable slots besides its prefix.
    """

    rid: str
    num_tokens: int
    num_new_tokens: int
    cached: int
    slots: int
    reserved: int
    usable: int


class PrefillAdder:
    """Collects the requests of one prefill batch.

    An added request holds a lock on its cached prefix; the caller takes the slots.

    Args:
        loads: KV in other tiers, or None without any.
        adapters: adapters of the requests that hold a row.

    Attributes:
        reqs, extend_lens: added requests, and the number of tokens each prefills now.
        chunked: the added request whose prompt does not fit in this batch, if any.
        adapters: those of the added requests and of all that hold a row.
    """

    def __init__(
        self,
        *,
        cache: BasePrefixCache,
        running: Sequence[Req],
        new_token_ratio: float,
        budget: PrefillBudget,
        loads: TierLoads | None = None,
        adapters: Iterable[str] = (),
    ) -> None:
        self._loads = loads
        self._cache = cache
        self._page_size = cache.page_size
        self._budget = budget
        self._tokens_left = budget.max_prefill_tokens
        self._chunk_left = budget.chunk_tokens
        if budget.chunk_tokens is not None:
            # A chunk need not be larger than a batch, but a page must fit.
            longest = max(budget.max_prefill_tokens, self._page_size)
            self._chunk_left = min(budget.chunk_tokens, longest)
        # Additional slots that running and added requests are expected to need.
        expected = [
            int(_expected_new_tokens(r) * new_token_ratio) + self._page_size
            for r in running
        ]
        self._reserved = sum(expected)
        self._groups = [GroupBudget(group, i) for i, group in enumerate(cache.groups)]
        for req, slots in zip(running, expected, strict=True):
            for group in self._groups:
                group.reserve_running(req, slots)
        self._heads = BatchHeads()
        self.adapters = set(adapters)
        self._waits_for_adapter = False
        self.reqs: list[Req] = []
        self.extend_lens: list[int] = []
        self.chunked: Req | None = None

    def add_chunked(self, req: Req) -> None:
        """Continue a partly prefilled prompt."""
        self._take(req, len(req.tokens) - req.committed_len, self._cost(req))

    def add(self, req: Req) -> Admission:
        """Admit a waiting request if the budgets allow it.

        Once a request waits for its adapter, none behind it with an adapter is
        admitted, so that slots become free.
        """
        if self._is_full():
            return Admission.NO_BUDGET
        if self._loads is not None and self._loads.is_loading(req):
            self._reserve_loading(self._loads, req)
            return Admission.DEFERRED
        if not self._has_adapter_slot(req):
            self._waits_for_adapter = True
            return Admission.NO_ADAPTER_SLOT
        limit = req.cacheable_prefix_len()
        key = self._key(req, limit)
        match = self._cache.match_prefix(key)
        if self._shares_with_batch(req, limit, len(match)):
            return Admission.DEFERRED
        extend_len = len(req.tokens) - len(match)
        fits_tokens = extend_len <= self._tokens_left or not self.reqs
        if self._chunk_left is None and not fits_tokens:
            return Admission.NO_BUDGET
        self._cache.inc_lock_ref(match.last_node)
        self._cache.mark_admitted(req, match)
        cost = self._cost(req)
        has_slots = self._reserved + cost <= usable_size(self._cache)
        chunk = self._chunk(extend_len)
        if not has_slots or not all(g.has_room(chunk, cost) for g in self._groups):
            self._cache.dec_lock_ref(match.last_node)
            self._cache.mark_released(req)
            return Admission.NO_BUDGET
        if self._loads is not None:
            if self._loads.begins(req, key, match, cost):
                self._cache.dec_lock_ref(match.last_node)
                self._cache.mark_released(req)
                self._reserve_loading(self._loads, req)
                return Admission.DEFERRED
            self._loads.on_admitted(req, match)
        if not req.was_admitted:
            # After a retraction it finds its own KV here.
            req.cached_tokens = len(match)
        self._take(req, extend_len, cost)
        return Admission.ADDED

    def _has_adapter_slot(self, req: Req) -> bool:
        if req.adapter is None:
            return True
        if self._waits_for_adapter:
            return False
        return len(self.adapters | {req.adapter}) <= self._budget.max_adapters

    def slot_need(self, req: Req) -> SlotNeed:
        """Return the need that `add` compares for a waiting request; takes nothing."""
        match = self._cache.match_prefix(self._key(req, req.cacheable_prefix_len()))
        self._cache.inc_lock_ref(match.last_node)
        self._cache.mark_admitted(req, match)
        need = SlotNeed(
            rid=req.rid,
            num_tokens=len(req.tokens),
            num_new_tokens=req.remaining_new_tokens,
            cached=len(match),
            slots=self._cost(req),
            reserved=self._reserved,
            usable=usable_size(self._cache),
        )
        self._cache.dec_lock_ref(match.last_node)
        self._cache.mark_released(req)
        return need

    def _key(self, req: Req, limit: int) -> RadixKey:
        """Return the first `limit` tokens as a key of the cache."""
        return self._cache.key(req.tokens[:limit], namespace=req.namespace)

    def _is_full(self) -> bool:
        return (
            self.chunked is not None
            or self._tokens_left <= 0
            or len(self.reqs) >= self._budget.max_new_reqs
            or (self._chunk_left is not None and self._chunk_left < self._page_size)
        )

    def _cost(self, req: Req) -> int:
        """Number of additional slots that `req` will need, in whole pages."""
        have = req.committed_len if req.req_pool_idx else req.cache_protected_len
        # The last sampled token never gets a slot.
        total = len(req.tokens) + max(_expected_new_tokens(req) - 1, 0)
        total += self._budget.decode_reserve
        pages = -(-total // self._page_size) - have // self._page_size
        return pages * self._page_size

    def _shares_with_batch(self, req: Req, limit: int, matched: int) -> bool:
        """Whether waiting one batch would give a much longer cached prefix."""
        enough = matched + MIN_SHARED_TOKENS
        if self._cache.shared_len(limit) < enough:
            return False
        return self._heads.has(req, self._cache.tokens_to_share(enough))

    def _chunk(self, extend_len: int) -> int:
        """Return how many of `extend_len` tokens are prefilled now."""
        if self._chunk_left is None or extend_len <= self._chunk_left:
            return extend_len
        return self._chunk_left - self._chunk_left % self._page_size

    def _reserve(self, extend_len: int, cost: int) -> None:
        self._reserved += cost
        for group in self._groups:
            group.reserve(extend_len, cost)

    def _reserve_loading(self, loads: TierLoads, req: Req) -> None:
        """Keep room for a request whose prefix is coming: otherwise those behind it
        could evict the prefix before it is admitted."""
        due = loads.slots_due(req)
        self._reserve(self._chunk(due), due)

    def _take(self, req: Req, extend_len: int, cost: int) -> None:
        chunk = self._chunk(extend_len)
        if chunk < extend_len:
            extend_len, self.chunked = chunk, req
        req.is_chunked = self.chunked is req
        self._reserve(extend_len, cost)
        self._tokens_left -= extend_len
        if self._chunk_left is not None:
            self._chunk_left -= extend_len
        self.reqs.append(req)
        if req.adapter is not None:
            self.adapters.add(req.adapter)
        self._heads.add(req)
        self.extend_lens.append(extend_len)


class BatchHeads:
    """The first tokens of a batch's requests, to find a request that begins like
    another. Few lengths are looked up per batch, whereas comparing all pairs took most
    of the time of admitting 256 requests.
    """

    def __init__(self) -> None:
        self._reqs: list[Req] = []
        self._heads: dict[int, set[tuple[str | None, bytes]]] = {}

    def add(self, req: Req) -> None:
        """Add a request, unless it leaves nothing in the cache."""
        if req.no_cache:
            return
        self._reqs.append(req)
        for count, heads in self._heads.items():
            heads.update(_iter_heads([req], count))

    def has(self, req: Req, count: int) -> bool:
        """Whether a request of the batch has the same first `count` tokens as `req`, in
        the same namespace. `req` must have at least `count` tokens.
        """
        heads = self._heads.get(count)
        if heads is None:
            heads = self._heads[count] = set(_iter_heads(self._reqs, count))
        return bool(heads) and not heads.isdisjoint(_iter_heads([req], count))


def _iter_heads(reqs: Iterable[Req], count: int) -> Iterator[tuple[str | None, bytes]]:
    for req in reqs:
        if len(req.tokens) >= count:
            yield req.namespace, req.tokens[:count].tobytes()


class GroupBudget:
    """Additional slots of a secondary group that running and added requests will need.

    Args:
        index: index of the group among the cache's groups.
    """

    def __init__(self, group: GroupRuns, index: int) -> None:
        self._group = group
        self._index = index
        self._reserved = 0

    def reserve_running(self, req: Req, slots: int) -> None:
        """Reserve for a running request that is expected to take `slots` more primary
        slots.
        """
        hold = req.holds[self._index]
        self._reserved += self._group.slots.need_of_running(
            hold, req.committed_len, slots
        )

    def has_room(self, extend_len: int, cost: int) -> bool:
        """Whether there is room for a request that prefills `extend_len` tokens now and
        takes `cost` primary slots until its end.
        """
        need = self._group.slots.need_of_new(extend_len, cost)
        return self._reserved + need <= self._group.usable_size()

    def reserve(self, extend_len: int, cost: int) -> None:
        self._reserved += self._group.slots.need_of_new(extend_len, cost)


def _expected_new_tokens(req: Req) -> int:
    return min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS)
