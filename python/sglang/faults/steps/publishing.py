"""Faults of publishing: sampled tokens and lengths reach the next step wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang.faults.steps.site import Fault, FaultSite, changed

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch

# -- without speculation ---------------------------------------------------------------


def publish_early(site: FaultSite) -> None:
    """Publish a token one column too early; its own column stays as it was."""

    def move(cells: _Cells, row: int) -> None:
        at = (cells.indices[row], cells.ends[row])
        cells.table[at[0], at[1] - 1] = cells.table[at]
        cells.table[at] = cells.before[row]

    _after_sampling(site, move)


def publish_nothing(site: FaultSite) -> None:
    """Leave the column of a token as it was."""

    def restore(cells: _Cells, row: int) -> None:
        cells.table[cells.indices[row], cells.ends[row]] = cells.before[row]

    _after_sampling(site, restore)


def publish_swapped(site: FaultSite) -> None:
    """Publish the tokens of two requests in each other's row."""

    def fault(run: Fault, batch: ScheduleBatch, forward_batch: ForwardBatch) -> Any:
        done = run(batch, forward_batch)
        cells = _cells(site, forward_batch)
        for pair in site.pairs():
            if _swap(cells.table, cells.indices, cells.ends, pair):
                site.harm(*pair)
                break
        return done

    site.wrap(site.scheduler.worker, "run", fault)


class _Cells(NamedTuple):
    """The columns [R] that a step publishes to, and what they held before it."""

    table: Tensor
    indices: Tensor
    ends: Tensor
    before: Tensor


def _cells(site: FaultSite, batch: ForwardBatch) -> _Cells:
    table, rows, ends = site.token_table, batch.req_pool_indices, batch.seq_lens
    return _Cells(table, rows, ends, table[rows, ends].clone())


def _after_sampling(site: FaultSite, change: Callable[[_Cells, int], None]) -> None:
    """Change what was published of a row whose column held another token before."""

    def fault(run: Fault, batch: ScheduleBatch, forward_batch: ForwardBatch) -> Any:
        cells = _cells(site, forward_batch)
        done = run(batch, forward_batch)
        for row in site.candidates():
            if int(cells.before[row]) != int(done.token_ids[row]):
                change(cells, row)
                site.harm(row)
                break
        return done

    site.wrap(site.scheduler.worker, "run", fault)


def _swap(
    table: Tensor, indices: Tensor, columns: Tensor, pair: tuple[int, int]
) -> bool:
    """Swap the tokens of two rows, if they differ."""
    (a, b), at = pair, [(indices[row], columns[row]) for row in pair]
    first, second = (int(table[place]) for place in at)
    table[at[0]], table[at[1]] = second, first
    return a != b and first != second


# -- with speculation ------------------------------------------------------------------


class _Gained(NamedTuple):
    """The tokens that a request has gained: `columns` of its row in the token table,
    the last of them the next root; the old root is in the column before."""

    table: Tensor
    req_row: int
    begin: int
    end: int

    def cells(self, *, with_root: bool = False) -> Tensor:
        """The published tokens; a view."""
        return self.table[self.req_row, self.begin - with_root : self.end]

    def put(self, tokens: Tensor, *, with_root: bool = False) -> bool:
        """Publish these instead; returns whether that makes a difference."""
        cells = self.cells(with_root=with_root)
        differs = not torch.equal(cells, tokens)
        cells.copy_(tokens)
        return differs


def accepted_early(site: FaultSite) -> None:
    """Publish accepted tokens one column too early, over the root."""

    def shift(gained: _Gained) -> bool:
        tokens = gained.cells(with_root=True)
        return gained.put(tokens.roll(-1), with_root=True)

    _after_accepting(site, shift)


def accepted_reversed(site: FaultSite) -> None:
    """Publish accepted tokens in the opposite order."""
    _after_accepting(site, lambda gained: gained.put(gained.cells().flip(0)))


def accepted_nothing(site: FaultSite) -> None:
    """Leave the tokens that a request gained unpublished."""
    before: list[Tensor] = []

    def verify(original: Fault, *args: Any, **options: Any) -> Any:
        before[:] = [site.token_table.clone()]
        return original(*args, **options)

    def restore(gained: _Gained) -> bool:
        return gained.put(gained._replace(table=before[0]).cells())

    site.wrap(site.worker, "verify", verify)
    _after_accepting(site, restore)


def accepted_swapped(site: FaultSite) -> None:
    """Publish the last tokens of two requests in each other's row."""

    def fault(publish: Fault, indices: Tensor, seq_lens: Tensor) -> None:
        if site.is_decode:
            for pair in site.pairs():
                if _swap(site.token_table, indices, seq_lens, pair):
                    site.harm(*pair)
                    break
        publish(indices, seq_lens)

    site.wrap(site.worker.draft_worker.relay, "publish", fault)


def relay_stale(site: FaultSite) -> None:
    """Keep a request's old length for the next iteration."""

    def fault(publish: Fault, indices: Tensor, seq_lens: Tensor) -> None:
        old = site.worker.draft_worker.relay.seq_lens[indices]
        rows = site.candidates()[:1] if site.is_decode else []
        for row in rows:
            seq_lens = changed(seq_lens, [row], int(old[row] - seq_lens[row]))
            site.harm(row)
        publish(indices, seq_lens)

    site.wrap(site.worker.draft_worker.relay, "publish", fault)


def relay_ahead(site: FaultSite) -> None:
    """Publish a length that is one too long."""

    def fault(publish: Fault, indices: Tensor, seq_lens: Tensor) -> None:
        rows = site.candidates()[:1] if site.is_decode else []
        for row in rows:
            seq_lens = changed(seq_lens, [row], 1)
            site.harm(row)
        publish(indices, seq_lens)

    site.wrap(site.worker.draft_worker.relay, "publish", fault)


def _after_accepting(site: FaultSite, change: Callable[[_Gained], bool]) -> None:
    """Change the published tokens of a request, where that makes a difference."""
    relay = site.worker.draft_worker.relay

    def fault(publish: Fault, indices: Tensor, seq_lens: Tensor) -> None:
        for row in site.candidates() if site.is_decode else []:
            req_row = int(indices[row])
            begin, end = int(relay.seq_lens[req_row]) + 1, int(seq_lens[row]) + 1
            if change(_Gained(site.token_table, req_row, begin, end)):
                site.harm(row)
                break
        publish(indices, seq_lens)

    site.wrap(relay, "publish", fault)
