"""Who holds which blocks, according to the scheduler. The workers' tables are compared
with this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_canary.engines.chosen import is_chosen
from kv_canary.evidence import Owner
from kv_canary.serials import SerialMap

if TYPE_CHECKING:
    from kv_canary.engines.step import Admission, BlockIds, RowStep


@dataclass(slots=True, kw_only=True)
class LedgerRequest:
    """A request that holds blocks.

    Fields:
        row: its row in the canary's tables.
        tokens: tokens that the host knows. given: how many came with the request.
        blocks: its blocks, by group.
        computed: tokens whose KV is stored after the newest step.
        is_ahead: whether its newest step also stored tokens that were only proposed.
        is_estimated: whether `computed` counts proposals that were rejected, until the
            host hears of it.
        is_verified: whether its reads are verified.
        taken: full blocks that need not be taken by `take_full`: others filled them, or
            they were taken.
        since: the step with which it began, or was turned back last. is_doubtful:
            whether it computed tokens from a block that was not loaded intact, and was
            not turned back yet.
    """

    rid: str
    row: int
    serial: int
    salt: int
    tokens: list[int]
    given: int
    blocks: list[list[int]]
    computed: int
    is_ahead: bool = False
    is_estimated: bool = False
    is_verified: bool = True
    taken: int = 0
    since: int = 0
    is_doubtful: bool = False

    def turn_back(self, computed: int, step: int) -> None:
        """Note that the engine discarded the tokens after `computed`, which lie in what
        came with the request, and all that was sampled before `step`."""
        del self.tokens[self.given :]
        self.computed = computed
        self.since = step
        self.is_doubtful = False

    def sampled_ahead(self, row: RowStep) -> int:
        """Return how many known new tokens a step's first sampled token follows after
        the first one, or -1 if nothing is sampled: more of the prompt is to come."""
        known = row.scheduled - row.drafts
        is_last = row.computed + known >= len(self.tokens)
        return known - 1 if is_last else -1


@dataclass(slots=True)
class Changes:
    """The changes of a step, by group.

    Fields:
        fresh: blocks with a new owner, which has stored nothing yet.
        freed: blocks that left all tables and that no prefix cache can hold.
        rows: (request, group, index of the first changed block).
    """

    fresh: list[list[int]]
    freed: list[list[int]]
    rows: list[tuple[LedgerRequest, int, int]] = field(default_factory=list)


class BlockLedger:
    """Requests and the blocks they hold.

    Args:
        page_sizes: slots per block, by group.
        num_rows: most requests at once.
        is_cached: whether full blocks may stay in a prefix cache.
        sample: the part of the requests whose reads are verified.

    Attributes:
        serials: requests by serial.
        admitted: number of requests so far; verified: of those that are verified.
    """

    def __init__(
        self,
        page_sizes: Sequence[int],
        *,
        num_rows: int,
        is_cached: bool,
        sample: float = 1.0,
    ) -> None:
        self._page_sizes = page_sizes
        self._is_cached = is_cached
        # With several groups a prefix cache may also hold partial blocks.
        self._knows_frees = not is_cached or len(page_sizes) == 1
        self._free_rows = list(range(num_rows, 0, -1))
        self._requests: dict[str, LedgerRequest] = {}
        self._holders: list[dict[int, set[str]]] = [{} for _ in page_sizes]
        self._next_serial = 1
        self._sample = sample
        self.serials = SerialMap()
        self.admitted = 0
        self.verified = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def __getitem__(self, rid: str) -> LedgerRequest:
        return self._requests[rid]

    def get(self, rid: str) -> LedgerRequest | None:
        return self._requests.get(rid)

    @property
    def requests(self) -> Mapping[str, LedgerRequest]:
        """The requests that hold blocks, by id."""
        return self._requests

    def changes(self) -> Changes:
        """Return an empty list of changes."""
        return Changes([[] for _ in self._page_sizes], [[] for _ in self._page_sizes])

    def release(self, rid: str, changes: Changes) -> None:
        """Take back the blocks of a request. Unknown requests are ignored."""
        request = self._requests.pop(rid, None)
        if request is None:
            return
        self._free_rows.append(request.row)
        for group, blocks in enumerate(request.blocks):
            full = request.computed // self._page_sizes[group]
            for index, block in enumerate(blocks):
                holders = self._holders[group].get(block)
                if holders is None or rid not in holders:
                    continue  # belongs to another request by now
                holders.discard(rid)
                if holders:
                    continue
                del self._holders[group][block]
                if self._knows_frees and (not self._is_cached or index >= full):
                    changes.freed[group].append(block)

    def admit(
        self, admission: Admission, changes: Changes, *, step: int = 0
    ) -> LedgerRequest:
        """
        Args:
            step: the step that it begins with.

        Raises:
            RuntimeError: there are more requests than rows.
        """
        old = self._requests.get(admission.rid)
        goes_on = old is not None and admission.goes_on
        serial = old.serial if old is not None and goes_on else 0
        kept = old.blocks if old is not None and goes_on else ()
        if old is not None and not admission.goes_on:
            self.release(old.rid, changes)
        elif old is not None:
            self._drop(old)
        if not self._free_rows:
            raise RuntimeError(
                f"kv_canary: request {admission.rid!r} exceeds the "
                f"{len(self._requests)} that the engine said it would run at once"
            )
        if not serial:
            serial, self._next_serial = self._next_serial, self._next_serial + 1
        request = LedgerRequest(
            rid=admission.rid,
            row=self._free_rows.pop(),
            serial=serial,
            salt=admission.salt,
            tokens=list(admission.tokens),
            given=len(admission.tokens),
            blocks=[[] for _ in self._page_sizes],
            computed=admission.computed,
            since=step,
            is_verified=is_chosen(admission.rid, self._sample),
            taken=admission.computed // self._page_sizes[0],
        )
        if old is None:
            self.admitted += 1
            self.verified += request.is_verified
        self._requests[request.rid] = request
        self.serials.add(serial, request.rid)
        self.extend(request, admission.blocks, changes, kept)
        return request

    def _drop(self, request: LedgerRequest) -> None:
        """Forget a request but not its blocks."""
        del self._requests[request.rid]
        self._free_rows.append(request.row)

    def extend(
        self,
        request: LedgerRequest,
        blocks: BlockIds,
        changes: Changes,
        kept: BlockIds = (),
    ) -> None:
        """Add blocks. Blocks that begin after the computed tokens count as new even for
        the request itself, because one that left its window may come back.

        Args:
            kept: blocks of the previous request, which these may be.
        """
        for group, more in enumerate(blocks):
            if not more:
                continue
            size, held = self._page_sizes[group], request.blocks[group]
            begin = len(held)
            first_fresh = -(-request.computed // size)
            for index, block in enumerate(more, begin):
                held.append(block)
                if block == 0:
                    continue  # left the window
                holders = self._holders[group].setdefault(block, set())
                if index >= first_fresh:
                    if not kept or block not in kept[group]:
                        changes.fresh[group].append(block)
                    holders.clear()
                holders.add(request.rid)
            changes.rows.append((request, group, begin))

    def take_full(self, rid: str, computed: int | None = None) -> list[int]:
        """Return blocks of group 0 that the request has filled since the last call.

        Args:
            computed: its tokens whose KV is stored; by default those that are known.
        """
        request = self._requests.get(rid)
        if request is None:
            return []
        if request.is_doubtful and (computed is None or computed >= request.computed):
            return []
        computed = request.computed if computed is None else computed
        full = computed // self._page_sizes[0]
        begin, request.taken = min(request.taken, full), full
        return [block for block in request.blocks[0][begin:full] if block]

    def give_up(self, request: LedgerRequest, changes: Changes) -> None:
        """Count blocks of group 0 behind a request's computed tokens as new again."""
        first = -(-request.computed // self._page_sizes[0])
        changes.fresh[0] += [block for block in request.blocks[0][first:] if block]

    def doubt(self, blocks: Iterable[int]) -> None:
        """Note for the requests that hold blocks of group 0 that these were not loaded
        intact."""
        for block in blocks:
            for rid in self._holders[0].get(block, ()):
                self._requests[rid].is_doubtful = True

    def serial_of(self, rid: str) -> int:
        """Return the serial of a request that may not have begun."""
        request = self._requests.get(rid)
        if request is not None:
            return request.serial
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        self.serials.add(serial, rid)
        return serial

    def owner(self, group: int, block: int) -> Owner:
        """Return the owner of a block according to the scheduler."""
        rids = sorted(self._holders[group].get(block, ()))
        if not rids:
            text = "nobody" + (", or the prefix cache" if self._is_cached else "")
            return Owner(text, is_shared=self._is_cached, is_allocated=self._is_cached)
        requests = [self._requests[rid] for rid in rids if rid in self._requests]
        is_shared = len(requests) > 1 or (
            self._is_cached and all(self._is_full(r, group, block) for r in requests)
        )
        return Owner(
            "request " + " and ".join(repr(rid) for rid in rids),
            is_shared=is_shared,
            is_allocated=True,
            claims=() if is_shared else tuple(r.serial for r in requests),
            prefix_of=frozenset(r.serial for r in requests if is_shared),
        )

    def _is_full(self, request: LedgerRequest, group: int, block: int) -> bool:
        full = request.computed // self._page_sizes[group]
        return block in request.blocks[group][:full]

    def held(self, group: int) -> set[int]:
        """Return the blocks that are in a request's table."""
        return set(self._holders[group])

    def rids(self) -> list[str]:
        """Return the requests that hold blocks."""
        return list(self._requests)
