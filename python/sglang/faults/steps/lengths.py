"""Faults of lengths: attention reads less than the forward's tokens need, and prompts
that are not prefilled to their end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang.faults.steps.site import Fault, FaultSite, changed, runs_on
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch, ForwardMode
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import BatchEnvironment

# Given a batch and a row, the fields that are wrong.
Change: TypeAlias = "Callable[[ForwardBatch, int], dict[str, Any]]"


def at_prefix(batch: ForwardBatch, row: int) -> dict[str, Any]:
    """End a row's view at its prefix."""
    missing = int(batch.prefix_lens[row] - batch.seq_lens[row])
    return {"seq_lens": changed(batch.seq_lens, [row], missing)}


def one_short(batch: ForwardBatch, row: int) -> dict[str, Any]:
    """Leave the newest token out of a row's view."""
    return {"seq_lens": changed(batch.seq_lens, [row], -1)}


def short_prefix(batch: ForwardBatch, row: int) -> dict[str, Any]:
    """Leave a row's lengths one token behind."""
    return {
        "prefix_lens": changed(batch.prefix_lens, [row], -1),
        "seq_lens": changed(batch.seq_lens, [row], -1),
    }


def target_lens(mode: ForwardMode, change: Change) -> Callable[[FaultSite], None]:
    """Plant wrong lengths in a forward of the target."""

    def plant(site: FaultSite) -> None:
        def forward(original: Fault, batch: ForwardBatch, **options: Any) -> Any:
            return original(_changed_batch(site, batch, mode, change), **options)

        site.wrap(site.target, "forward", forward)

    return plant


def draft_lens(mode: ForwardMode, change: Change) -> Callable[[FaultSite], None]:
    """Plant wrong lengths in one branch of a draft step, or in a draft extend."""

    def plant(site: FaultSite) -> None:
        def run_model(original: Fault, batch: ForwardBatch, **options: Any) -> Any:
            return original(_changed_batch(site, batch, mode, change), **options)

        site.wrap(site.worker.draft_worker.runners[0], "run_model", run_model)

    return plant


def _changed_batch(
    site: FaultSite, batch: ForwardBatch, mode: ForwardMode, change: Change
) -> ForwardBatch:
    """The batch with a change in one row that makes a difference."""
    if batch.forward_mode is not mode:
        return batch
    for row in site.candidates():
        assert site.batch is not None
        rows_per_request = len(batch.req_pool_indices) // len(site.batch)
        own = row * rows_per_request + site.rng.randrange(rows_per_request)
        if change is short_prefix and int(batch.prefix_lens[own]) < 2:
            continue
        site.harm(row)
        return dataclasses.replace(batch, **change(batch, own))
    return batch


# -- prompts ---------------------------------------------------------------------------


def skip_last_token(site: FaultSite) -> None:
    """Prefill a prompt without its last token."""
    _skip_end(site, lambda length: length - 1)


def skip_last_page(site: FaultSite) -> None:
    """Prefill a prompt up to its last page, whole or begun."""
    page_size = site.scheduler.cache.allocator.page_size
    _skip_end(site, lambda length: (length - 1) // page_size * page_size)


def _skip_end(site: FaultSite, end_of: Callable[[int], int]) -> None:
    def prepare(
        original: Fault,
        reqs: list[Req],
        extend_lens: Sequence[int],
        env: BatchEnvironment,
    ) -> Any:
        lens = list(extend_lens)
        for i, req in enumerate(reqs):
            length = len(req.tokens)
            left = lens[i] - (length - end_of(length))
            if site.harmed or req.is_chunked or left < 1 or not runs_on(req):
                continue
            lens[i] = left
            site.harmed = (req.rid,)
        return original(reqs, lens, env)

    site.wrap(ScheduleBatch, "prepare_for_extend", prepare)
